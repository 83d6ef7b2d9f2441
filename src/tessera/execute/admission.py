"""Which microbatch takes the next request.

A step costs about the same however many of a microbatch's rows have a request, so requests are packed: a
microbatch is opened when those that are open are full. But a policy keeps all of its devices busy only with
some number of microbatches at work, its width; up to that number requests are spread evenly, since devices
would else wait. A request gets a place only where it can begin at once; until then it waits in the queue, for
whichever microbatch is ready first.

After a switch of policy the microbatches of the old one are renewed one after another: the emptiest takes
nothing more and is opened anew when its last request has left, while the others go on taking requests. So a
switch costs the room of one microbatch at a time, and no request moves.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tessera.ir import Plan

# Share of the best simulated rate at which more microbatches in flight are no gain.
ENOUGH = 0.95


class Room(Protocol):
    """What admission looks at in a microbatch."""

    @property
    def num_used(self) -> int:
        """Requests in it."""

    @property
    def num_free(self) -> int:
        """Places for more."""

    @property
    def takes(self) -> bool:
        """True if a request can begin in it now."""


class Place(Protocol):
    """An open microbatch."""

    @property
    def number(self) -> int:
        """Of equals the first is meant."""

    @property
    def content(self) -> Room:
        """Who is in it."""

    @property
    def is_old(self) -> bool:
        """True if it is to be opened anew: another policy or other plans are in force since."""


P = TypeVar("P", bound=Place)


def width_of(plan: Plan) -> int:
    """The fewest microbatches with which a plan reaches nearly its best simulated rate."""
    there = [(num, rate) for num, rate in plan.by_slots if num <= plan.slots]
    best = max((rate for _, rate in there), default=0.0)
    return min((num for num, rate in there if rate >= ENOUGH * best), default=1)


def renewed(places: Iterable[P]) -> P | None:
    """The old microbatch that takes nothing more, if there is one."""
    old = [place for place in places if place.is_old]
    return min(old, key=lambda place: (place.content.num_used, place.number), default=None)


def choose(places: Sequence[P], width: int, can_open: bool) -> P | bool:
    """The open microbatch that takes the next request; True: one must be opened for it; False: it waits.

    `places` in the order in which they were opened.
    """
    old = renewed(places)
    taking = [place for place in places if place is not old]
    first, others = taking[:width], taking[width:]
    if can_open and len(first) < width:
        # As long as a microbatch is missing, one is opened before another gets a second request.
        return next((place for place in first if not place.content.num_used), True)
    ready = [place for place in first if place.content.takes]
    if ready:
        return min(ready, key=lambda place: place.content.num_used)
    # One that is open runs its steps anyway, so a request there costs nothing; waiting leaves a row empty.
    ready = [place for place in others if place.content.takes]
    if ready:
        return max(ready, key=lambda place: place.content.num_used)
    return can_open and not any(place.content.num_free for place in taking)
