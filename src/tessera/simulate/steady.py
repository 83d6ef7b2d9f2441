"""SteadyRates: the rate of a plan with all microbatches full, from a short simulation.

Microbatches start at spread phases, so a short window sees every phase. Work is counted as a segment's share
of its request's busy time, times the request's work units.

Repeated runs of a long request (a thousand decodes) are simulated as fewer, longer ones, with the same work
and the same share of waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.lanes import LaneShares, shares_of
from tessera.ir import Plan
from tessera.simulate.columns import LaunchSegment, Script, Scripts
from tessera.simulate.core import Core, Flight, Work

# Per microbatch.
MIN_WARM_UP_RUNS, MIN_WINDOW_RUNS = 2, 6
# With fewer, less work is simulated.
MANY_MICROBATCHES = 4
# Items of a request that are simulated at most: in quick checks, otherwise.
FEW_ITEMS, MANY_ITEMS = 500, 3000

Lanes = list[tuple[Script, ...]]


@dataclass(frozen=True, slots=True)
class WindowExtent:
    """Requests' worth of work."""

    warm_up: float
    window: float


# In the long run microbatches fall into step.
FULL_WINDOW, SHORT_WINDOW, LONG_WINDOW = WindowExtent(4, 10), WindowExtent(2, 4), WindowExtent(56, 28)


def extent_of(plan: Plan, wanted: WindowExtent) -> WindowExtent:
    few, num_runs = min(1.0, plan.microbatches / MANY_MICROBATCHES), sum(plan.unit.counts)
    return WindowExtent(
        max(few * wanted.warm_up, plan.microbatches * MIN_WARM_UP_RUNS / num_runs),
        max(few * wanted.window, plan.microbatches * MIN_WINDOW_RUNS / num_runs),
    )


def runs_of(scripts: Sequence[Script], max_items: int, skipped: float = 0.0) -> tuple[list[Work], float]:
    """Remaining runs, last first, of about `max_items` at most; work units per microsecond of busy time."""
    items = sum(script.count * script.num_items for script in scripts)
    share = min(1.0, max_items / max(1, items))
    kept = [(script, math.ceil(share * script.count)) for script in scripts]
    runs = [(script, script.count / num) for script, num in kept for _ in range(num)]
    total = sum(scale * script.busy_us for script, scale in runs)
    first, spent = 0, 0.0
    while first < len(runs) - 1:
        spent += runs[first][1] * runs[first][0].busy_us
        if spent > skipped * total:
            break
        first += 1
    return runs[first:][::-1], 1.0 / total if total else 0.0


class Window(Core):
    def __init__(
        self, plan: Plan, scripts: Scripts, lanes: Lanes, extent: WindowExtent, max_items: int = MANY_ITEMS
    ) -> None:
        super().__init__(len(plan.cluster.devices), len(scripts.wires.buses))
        self._table = LaneShares(shares_of(plan.lanes, plan.lane_table))
        self._lanes, self._microbatches, self._extent = lanes, plan.microbatches, extent
        self._max_items, self._done = max_items, 0.0

    def rate_per_us(self) -> float:
        for microbatch in range(self._microbatches):
            self._admit(microbatch, 0.0, microbatch / self._microbatches)
        since_us, since = self._until(self._extent.warm_up)
        until_us, until = self._until(since + self._extent.window)
        return (until - since) / (until_us - since_us) if until_us > since_us else 0.0

    def _until(self, work: float) -> tuple[float, float]:
        """(time, work done), with running segments in part: those of a prefill are long."""
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
        at, done = now or 0.0, self._done
        for device in self.devices:
            if device.job is not None:
                done += (at - device.since_us) * self._running[device.job.ticket][0].per_us
        return at, done

    def _admit(self, microbatch: int, now: float, skipped: float = 0.0) -> None:
        lane = self._table.take()
        runs, per_us = runs_of(self._lanes[lane], self._max_items, skipped)
        self.begin(Flight(0, microbatch, lane, runs, per_us=per_us), now)

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        self._done += (stop_us - self.devices[device].since_us) * flight.per_us

    def on_end(self, flight: Flight, now: float) -> None:
        self._table.give_back(flight.lane)
        self._admit(flight.microbatch, now)


class SteadyRates:
    """Plans of one unit share results."""

    def __init__(self, long_window: tuple[float, float] | None = None) -> None:
        self._long_window = LONG_WINDOW if long_window is None else WindowExtent(*long_window)
        self._scripts: Scripts | None = None
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        return 1e6 * self._rate(plan, MANY_ITEMS, FULL_WINDOW)

    def quick(self, plan: Plan) -> float:
        """For plans that are far apart."""
        return 1e6 * self._rate(plan, FEW_ITEMS, SHORT_WINDOW)

    def settled(self, plan: Plan) -> float:
        """Microbatches that started spread may have synchronised."""
        return 1e6 * self._rate(plan, MANY_ITEMS, self._long_window)

    def _rate(self, plan: Plan, max_items: int, wanted: WindowExtent) -> float:
        if self._scripts is None or not _shares(self._scripts, plan):
            self._scripts = Scripts(plan.unit, plan.costs, plan.cluster)
            self._known.clear()
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        followed = tuple(lane.placement for lane in plan.lanes)
        key = (followed, shares, plan.microbatches, max_items, wanted)
        rate = self._known.get(key)
        if rate is None:
            lanes = [self._scripts.of(lane.placement) for lane in plan.lanes]
            window = Window(plan, self._scripts, lanes, extent_of(plan, wanted), max_items)
            rate = self._known[key] = window.rate_per_us()
        return rate


def _shares(scripts: Scripts, plan: Plan) -> bool:
    return scripts.unit is plan.unit and scripts.costs is plan.costs and scripts.cluster is plan.cluster
