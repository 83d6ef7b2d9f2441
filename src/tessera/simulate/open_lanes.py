"""OpenLanes: which lane a slot takes that opens, where slots stay open and requests come and go in them.

The lane that holds least of its share of the slots open now, counting the newcomer; of equals the one with
the larger share. Without a table `execute.LaneTable` counts requests that were begun, which is right where a
slot is one request. Here a slot of a busy lane hardly ever closes and one of a quiet lane often does, so that
counting openings would send every newcomer to the busy lane and leave the other's devices idle.
"""

from collections.abc import Sequence
from typing import Protocol

from tessera.ir import Lane


class Table(Protocol):
    """Says who goes where: indices of lanes."""

    def take(self) -> int:
        """Chooses a lane."""
        ...

    def give_back(self, lane: int) -> None:
        """One that had this lane is done."""


class OpenLanes:
    """A table by what is open now; shares are those of a plan's table, or of its lanes' rates."""

    def __init__(self, lanes: Sequence[Lane], table: Sequence[int] = ()) -> None:
        counts = [float(table.count(i)) for i in range(len(lanes))] if table else []
        self._shares = counts or [lane.rate_per_s for lane in lanes]
        self._open = [0] * len(lanes)

    def take(self) -> int:
        """Chooses a lane for one slot."""
        shares = self._shares
        lane = min(range(len(shares)), key=lambda i: ((self._open[i] + 1) / shares[i], i))
        self._open[lane] += 1
        return lane

    def hold(self, lane: int) -> None:
        """A slot is in this lane already."""
        self._open[lane] += 1

    def give_back(self, lane: int) -> None:
        """A slot of this lane has closed."""
        self._open[lane] -= 1
