"""Window: the simulator's loop with all slots full, watched for a stretch of work instead of to an end.

Slots start spread over their requests instead of all at the beginning, so the system is full at once and a
quarter of a request's time with four slots sees every phase of a request once. Work is counted as fractions
of a request: a stretch's share of its request's busy time, times the work units in the request. What is
skipped in between is up to subclasses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.lanes import LaneShares, shares_of
from tessera.ir import Plan
from tessera.simulate.columns import LaunchStretch, Script, Scripts
from tessera.simulate.core import Core, Flight, Work

# Runs of each slot, at least: before the clock counts, and while it does.
MIN_WARM_UP_RUNS, MIN_WINDOW_RUNS = 2, 6
# With fewer slots than this, less work is looked at.
MANY_SLOTS = 4


@dataclass(frozen=True, slots=True)
class WindowExtent:
    """Requests' worth of work before the clock counts, and while it does."""

    warm_up: float
    window: float


def extent_of(plan: Plan, wanted: WindowExtent) -> WindowExtent:
    """How much of a plan is looked at: less with few slots, but some runs of each."""
    few, num_runs = min(1.0, plan.slots / MANY_SLOTS), sum(plan.unit.counts)
    each = mean_weight(plan)
    return WindowExtent(
        each * max(few * wanted.warm_up, plan.slots * MIN_WARM_UP_RUNS / num_runs),
        each * max(few * wanted.window, plan.slots * MIN_WINDOW_RUNS / num_runs),
    )


def weights_of(plan: Plan) -> list[float]:
    """Work units in a request of each lane; 1 where all are of one batch."""
    return [plan.weight_of(lane) if plan.variants else 1.0 for lane in plan.lanes]


def mean_weight(plan: Plan) -> float:
    """Work units in an average request."""
    rates = [lane.rate_per_s for lane in plan.lanes]
    return sum(r * weight for r, weight in zip(rates, weights_of(plan), strict=True)) / sum(rates)


def runs_of(scripts: Sequence[Script], weight: float, skipped: float = 0.0) -> tuple[list[Work], float]:
    """What a request runs, last first, but for a share of it; and work units a microsecond of busy time."""
    runs = [(script, 1.0) for script in scripts for _ in range(script.count)]
    total = sum(script.busy_us for script, _ in runs)
    first, spent = 0, 0.0
    while first < len(runs) - 1:
        spent += runs[first][0].busy_us
        if spent > skipped * total:
            break
        first += 1
    return runs[first:][::-1], weight / total if total else 0.0


class Window(Core):
    """All slots full; `rate_per_us` says how fast work is done."""

    def __init__(
        self, plan: Plan, scripts: Scripts, lanes: list[tuple[Script, ...]], extent: WindowExtent
    ) -> None:
        super().__init__(len(plan.cluster.devices), scripts.wires.num_buses)
        self._table = LaneShares(shares_of(plan.lanes, plan.lane_table))
        self._lanes, self._slots, self._extent = lanes, plan.slots, extent
        self._weights = weights_of(plan)
        self._done = self._target = self._skipped_us = 0.0
        self._count = 0  # stretches so far; a subclass may start again
        self._flights: dict[int, Flight] = {}
        # Slot -> the run that it is in: its script, its ticket and its busy time so far.
        self._script: dict[int, Script] = {}
        self._ticket: dict[int, int] = {}
        self._run_us: dict[int, float] = {}

    def rate_per_us(self) -> float:
        """Work units per microsecond."""
        for slot in range(self._slots):
            self._admit(slot, 0.0, slot / self._slots)
        since_us, since = self._until(self._extent.warm_up)
        until_us, until = self._until(since + self._extent.window)
        return (until - since) / (until_us - since_us) if until_us > since_us else 0.0

    def _until(self, work: float) -> tuple[float, float]:
        """Runs on until so much work is done: (time, work done)."""
        self._target = work
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
        return self._stand(now)

    def _stand(self, now: float | None) -> tuple[float, float]:
        """(time, work done), stretches that run counted as far as they are: those of a prefill are long."""
        at = now or 0.0
        return at + self._skipped_us, self._so_far(at)[0]

    def _admit(self, slot: int, now: float, skipped: float = 0.0) -> None:
        """A request begins; of the first ones, the runs that make up the skipped share are left out."""
        lane = self._table.take()
        runs, per_us = runs_of(self._lanes[lane], self._weights[lane], skipped)
        flight = Flight(0, slot, lane, runs, per_us=per_us)
        self._flights[slot] = flight
        self.begin(flight, now)

    def begin(self, flight: Flight, now: float) -> None:
        """Starts a run."""
        slot = flight.microbatch
        self._script[slot], self._ticket[slot] = flight.left[-1][0], self._order + 1
        self._run_us[slot] = 0.0
        super().begin(flight, now)

    def _so_far(self, now: float) -> tuple[float, dict[int, float]]:
        """(work done, slot -> busy time of its run), with what the devices are at."""
        done, run_us = self._done, dict(self._run_us)
        for device in self.devices:
            if device.job is not None:
                flight = self._running[device.job.ticket][0]
                done += (now - device.since_us) * flight.per_us
                run_us[flight.microbatch] += now - device.since_us
        return done, run_us

    def on_stretch(
        self, device: int, flight: Flight, script: Script, stretch: LaunchStretch, stop_us: float
    ) -> None:
        """Counts the work."""
        us = stop_us - self.devices[device].since_us
        self._count += 1
        self._done += us * flight.per_us
        self._run_us[flight.microbatch] += us

    def on_end(self, flight: Flight, now: float) -> None:
        """The slot takes the next request."""
        self._table.give_back(flight.lane)
        self._admit(flight.microbatch, now)
