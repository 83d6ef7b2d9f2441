"""Which slot takes the next request.

A step costs about the same however many of a slot's rows have a request, so requests are packed: a slot is
opened when those that are open are full. But a policy keeps all of its devices busy only with some number of
slots at work, its width; up to that number requests are spread evenly, since the devices would else wait. A
request gets a slot only when it can begin there at once; until then it waits in the queue, for whichever slot
is ready first.

After a switch of policy the slots of the old one are renewed one after another: the emptiest takes nothing
more and is opened anew when its last request has left, while the others go on taking requests. So a switch
costs the room of one slot at a time, and no request moves.
"""

from collections.abc import Iterable, Sequence

from tessera.ir import Plan
from tessera.serve.rows import Slot

# Share of the best simulated rate at which more slots in flight are no gain.
ENOUGH = 0.95


def width_of(plan: Plan) -> int:
    """The fewest slots with which a plan reaches nearly its best simulated rate."""
    there = [(slots, rate) for slots, rate in plan.by_slots if slots <= plan.slots]
    best = max((rate for _, rate in there), default=0.0)
    return min((slots for slots, rate in there if rate >= ENOUGH * best), default=1)


def renewed(slots: Iterable[Slot], policy: int) -> Slot | None:
    """The slot of another policy that takes nothing more, if there is one."""
    old = [slot for slot in slots if slot.policy != policy]
    return min(old, key=lambda slot: (slot.num_used, slot.number), default=None)


def choose_slot(slots: Sequence[Slot], policy: int, width: int, can_open: bool) -> Slot | bool:
    """The open slot that takes the next request; True: one must be opened for it; False: it waits.

    `slots` in the order in which they were opened.
    """
    old = renewed(slots, policy)
    taking = [slot for slot in slots if slot is not old]
    first, others = taking[:width], taking[width:]
    if can_open and len(first) < width:
        # As long as a slot is missing, one is opened before another gets a second request.
        return next((slot for slot in first if not slot.num_used), True)
    ready = [slot for slot in first if slot.takes]
    if ready:
        return min(ready, key=lambda slot: slot.num_used)
    # One that is open runs its steps anyway, so a request there costs nothing; waiting leaves a row empty.
    ready = [slot for slot in others if slot.takes]
    if ready:
        return max(ready, key=lambda slot: slot.num_used)
    return can_open and not any(slot.num_free for slot in taking)
