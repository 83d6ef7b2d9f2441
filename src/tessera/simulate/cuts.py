"""Cuts: a run of a script taken up in its middle, as if the launches before some launch were done.

A cut is a number of launches in trace order. Behind it every launch has run and every transfer it sent has
arrived, so devices can go on from there: what a skip needs that jumps over a part of a long run. Transfers
that would be under way at that moment count as arrived; that is all that is lost.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.execute.schedule import Job
from tessera.ir import Recv
from tessera.simulate.columns import Script, Stretch


@dataclass(eq=False)
class Cuts:
    """The places where one script can be taken up."""

    script: Script

    @cached_property
    def done_us(self) -> list[float]:
        """[launches done]: busy time of the run so far, over all devices."""
        lists = [
            next((x.ends_us for x in c.items if isinstance(x, Stretch)), None) for c in self.script.columns
        ]
        return np.sum([x for x in lists if x is not None], axis=0).tolist() if any(lists) else [0.0]

    @cached_property
    def _sent(self) -> tuple[list[int], list[int]]:
        """(launches done when it leaves, transfer), in that order."""
        stretches = [x for c in self.script.columns for x in c.items if isinstance(x, Stretch)]
        found = sorted((x.stop, wire.number) for x in stretches for wire in x.sends)
        return [stop for stop, _ in found], [number for _, number in found]

    @cached_property
    def _stretches(self) -> list[tuple[list[int], list[int]]]:
        """[device]: (where its stretches stop, their places in its list)."""
        found = []
        for column in self.script.columns:
            listed = [(x.stop, n) for n, x in enumerate(column.items) if isinstance(x, Stretch)]
            found.append(([stop for stop, _ in listed], [n for _, n in listed]))
        return found

    def at(self, busy_us: float) -> int:
        """The last cut with no more busy time behind it."""
        return max(0, bisect_right(self.done_us, busy_us) - 1)

    def job(self, device: int, cut: int, slot: int, ticket: int) -> Job | None:
        """What a device still has to do behind the cut; None if nothing."""
        column = self.script.columns[device]
        stops, places = self._stretches[device]
        first = bisect_right(stops, cut)
        if first == len(places):
            return None
        at = places[first]
        item = column.items[at]
        assert isinstance(item, Stretch), "only stretches are listed"
        spent = item.ends_us[cut] - item.ends_us[item.start] if item.start < cut else 0.0
        while item.start >= cut and at and isinstance(column.items[at - 1], Recv):
            at -= 1  # it may have to wait for what is read next
        left_at, numbers = self._sent
        arrived = set(numbers[: bisect_right(left_at, cut)])
        return Job(slot, ticket, column.items, at, arrived, column.until_wait_us, spent)
