"""Places: which lane each slot has, by tables that follow the policies.

When a policy comes into force, slots that are in it already keep their lanes. Of the others, as many as the
requests need get a lane in it, the fullest first, and go there at their next boundary; requests of the rest
find seats in these. So a switch does not bring more slots onto a device than the policy would have opened
itself: each one there slows the others down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.simulate.open_lanes import OpenLanes, Table
from tessera.simulate.policy import Lane, Policy
from tessera.simulate.seats import Slot


@dataclass(eq=False)
class Places:
    """Tables by the names of policies; `None` where every lane needs a lost device."""

    # True if a slot has several seats.
    is_shared: bool
    # Devices that are gone.
    lost: frozenset[str] = frozenset()
    _tables: dict[str, tuple[Table, tuple[Lane, ...]] | None] = field(default_factory=dict)

    def can_serve(self, policy: Policy) -> bool:
        """True if some lane avoids all lost devices."""
        return self._usable(policy) is not None

    def _usable(self, policy: Policy) -> tuple[Table, tuple[Lane, ...]] | None:
        if policy.name not in self._tables:
            self._tables[policy.name] = policy.table(self.lost, self.is_shared)
        return self._tables[policy.name]

    def _known(self, policy: Policy) -> tuple[Table, tuple[Lane, ...]]:
        usable = self._usable(policy)
        assert usable is not None, "asked only for policies that can serve"
        return usable

    def open(self, policy: Policy) -> Slot:
        """A slot in the lane that is next."""
        table, lanes = self._known(policy)
        taken = table.take()
        return Slot(policy, lanes[taken], taken)

    def give_back(self, slot: Slot, policy: Policy) -> None:
        """A slot leaves its lane, and does not go where it was to go under the policy in force."""
        self._leave(slot)
        if slot.target >= 0:
            self._known(policy)[0].give_back(slot.target)
            slot.target = -1

    def _leave(self, slot: Slot) -> None:
        usable = self._tables.get(slot.policy.name)
        if usable is not None and slot.taken >= 0 and usable[1][slot.taken] is slot.lane:
            usable[0].give_back(slot.taken)
        slot.taken = -1

    def go_over(self, slot: Slot, policy: Policy) -> None:
        """A slot takes its lane under the policy in force: where it was to go, else the next."""
        self._leave(slot)
        table, lanes = self._known(policy)
        slot.taken = slot.target if slot.target >= 0 else table.take()
        slot.policy, slot.lane, slot.target = policy, lanes[slot.taken], -1

    def forget(self) -> None:
        """Policies are others than they were, or devices fewer."""
        self._tables.clear()

    def share_out(self, policy: Policy, slots: Sequence[Slot], num: int) -> None:
        """A policy comes into force: a new table of its lanes, and `num` slots in it at least."""
        self._tables.pop(policy.name, None)
        for slot in slots:
            slot.target = -1
            if slot.policy.name == policy.name:
                slot.taken = -1  # of a table that is no more
        usable = self._usable(policy)
        if usable is None:
            return
        table, lanes = usable
        there = [slot for slot in slots if slot.policy is policy and slot.lane in lanes]
        if isinstance(table, OpenLanes):
            for slot in there:
                slot.taken = lanes.index(slot.lane)
                table.hold(slot.taken)
        others = sorted((s for s in slots if s not in there), key=lambda slot: -len(slot.requests))
        self._aim(others[: max(0, num - len(there))], table, lanes)

    def _aim(self, slots: Sequence[Slot], table: Table, lanes: tuple[Lane, ...]) -> None:
        """Gives slots places to go to; where lanes are alike, the one that costs no move."""
        places, left = [table.take() for _ in slots], []
        for slot in slots:
            alike = [place for place in places if lanes[place].placement == slot.lane.placement]
            if alike:
                slot.target = alike[0]
                places.remove(alike[0])
            else:
                left.append(slot)
        for slot, place in zip(left, places, strict=True):
            slot.target = place
