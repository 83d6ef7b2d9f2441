"""Turns: no head waits for other slots' decodes for longer than it takes itself.

A device prefers the shortest stretch that can go on. A decode is shorter than the head of a prompt, and a
slot that is never empty begins one decode after the other: left alone, they would keep a head on the same
device waiting until that slot is empty, with everybody who sits in the head's slot. So a head has a time by
which it should be done, twice what it takes alone. Past it, slots that share a device with it begin no decode
until it is. What runs is never stopped.

A rule for whoever begins runs; devices know nothing of it. Where a slot is one request it is not needed:
each slot's decodes end.
"""

from dataclasses import dataclass, field

from tessera.simulate.columns import Script, Stretch
from tessera.simulate.machine import Work
from tessera.simulate.seats import Slot

# A head may take as many times as long as it would alone: it waits for others at most as long as it works.
PATIENCE = 2.0


@dataclass(eq=False)
class Turns:
    """Heads under way, and slots that let one go first."""

    # Slot -> (time by which its head should be done, devices that it needs).
    _heads: dict[int, tuple[float, frozenset[int]]] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)

    def begin(self, slot: int, work: Work, now_us: float) -> None:
        """A slot begins a head."""
        devices, alone_us = _needs(work.script)
        self._heads[slot] = (now_us + PATIENCE * alone_us * work.scale, devices)

    def end(self, slot: int) -> list[int]:
        """A slot's run is over, or the slot is lost; the slots that may go on then."""
        if slot in self._held:
            self._held.remove(slot)
        if self._heads.pop(slot, None) is None:
            return []
        held, self._held = self._held, []
        return held

    def holds(self, number: int, slot: Slot, now_us: float) -> bool:
        """Must a slot wait with a decode? Then `end` will name it."""
        if not self._heads:
            return False
        late = [devices for due_us, devices in self._heads.values() if due_us < now_us]
        if not late:
            return False
        devices = _needs(slot.policy.body(slot.lane).script)[0]
        is_held = any(devices & others for others in late)
        if is_held:
            self._held.append(number)
        return is_held


def _needs(script: Script) -> tuple[frozenset[int], float]:
    """The devices of a script, and the time of the busiest one."""
    busy_us = {
        device: sum(item.us for item in column.items if isinstance(item, Stretch))
        for device, column in enumerate(script.columns)
        if column.items
    }
    return frozenset(busy_us), max(busy_us.values(), default=0.0)
