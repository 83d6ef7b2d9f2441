"""SteadyRates: the rate of a plan with all microbatches full, from a short simulation.

Microbatches start at spread phases, so a short window sees every phase. Work is counted as a segment's share
of its request's busy time, times the request's work units.

Repeated runs of a long request (a thousand decodes) are simulated as fewer, longer ones, with the same work
and the same share of waits.
"""

from dataclasses import dataclass
from itertools import count

from tessera.ir import Plan
from tessera.simulate.columns import LaunchSegment, Script, Scripts
from tessera.simulate.core import ClosedLoop, Flight

# Per microbatch.
MIN_WARM_UP_RUNS, MIN_WINDOW_RUNS = 2, 6
# With fewer, less work is simulated.
MANY_MICROBATCHES = 4
# Items of a request that are simulated at most: in quick checks, otherwise.
FEW_ITEMS, MANY_ITEMS = 500, 3000


@dataclass(frozen=True, slots=True)
class WindowExtent:
    """Requests' worth of work."""

    warm_up: float
    window: float


# In the long run microbatches fall into step.
FULL_WINDOW, SHORT_WINDOW, LONG_WINDOW = WindowExtent(4, 10), WindowExtent(2, 4), WindowExtent(56, 28)


def extent_of(plan: Plan, extent: WindowExtent) -> WindowExtent:
    few, num_runs = min(1.0, plan.microbatches / MANY_MICROBATCHES), sum(plan.unit.counts)
    return WindowExtent(
        max(few * extent.warm_up, plan.microbatches * MIN_WARM_UP_RUNS / num_runs),
        max(few * extent.window, plan.microbatches * MIN_WINDOW_RUNS / num_runs),
    )


class Window(ClosedLoop):
    def __init__(
        self, plan: Plan, scripts: Scripts, extent: WindowExtent, max_items: int = MANY_ITEMS
    ) -> None:
        super().__init__(plan, scripts, count(), max_items)
        self._microbatches, self._extent, self._done = plan.microbatches, extent, 0.0

    def rate_per_us(self) -> float:
        for microbatch in range(self._microbatches):
            self.admit(microbatch, 0.0, microbatch / self._microbatches)
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

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        self._done += (stop_us - self.devices[device].since_us) * flight.per_us


class SteadyRates:
    """Plans of one unit share results."""

    def __init__(self, long_window: tuple[float, float] | None = None) -> None:
        self._long_window = LONG_WINDOW if long_window is None else WindowExtent(*long_window)
        self._scripts: Scripts | None = None
        self._rates: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        return 1e6 * self._rate(plan, MANY_ITEMS, FULL_WINDOW)

    def quick(self, plan: Plan) -> float:
        """For plans that are far apart."""
        return 1e6 * self._rate(plan, FEW_ITEMS, SHORT_WINDOW)

    def settled(self, plan: Plan) -> float:
        """Microbatches that started spread may have synchronised."""
        return 1e6 * self._rate(plan, MANY_ITEMS, self._long_window)

    def _rate(self, plan: Plan, max_items: int, extent: WindowExtent) -> float:
        if self._scripts is None or not _shares(self._scripts, plan):
            self._scripts = Scripts(plan.unit, plan.costs, plan.cluster)
            self._rates.clear()
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        followed = tuple(lane.placement for lane in plan.lanes)
        key = (followed, shares, plan.microbatches, max_items, extent)
        rate = self._rates.get(key)
        if rate is None:
            window = Window(plan, self._scripts, extent_of(plan, extent), max_items)
            rate = self._rates[key] = window.rate_per_us()
        return rate


def _shares(scripts: Scripts, plan: Plan) -> bool:
    return scripts.unit is plan.unit and scripts.costs is plan.costs and scripts.cluster is plan.cluster
