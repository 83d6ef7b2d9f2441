"""SteadyRates: the rate of a plan with all microbatches full, from a short simulation.

Microbatches start at spread phases, so a short window sees every phase. Work is counted as a segment's share
of its request's busy time, times the request's work units.

Quick checks of long programs, and any check of very long ones, use samples (`Fluid`): while every microbatch
stays in its step, its pace is steady; after settling it is measured, then all microbatches skip ahead to just
before the first end of a step, which is always simulated. Not handled: variation along a program beyond the
samples.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.execute.lanes import LaneShares, shares_of
from tessera.execute.schedule import Job
from tessera.ir import Plan, Recv
from tessera.simulate.columns import LaunchSegment, Script, Scripts
from tessera.simulate.core import Core, Flight, Work

# Per microbatch.
MIN_WARM_UP_RUNS, MIN_WINDOW_RUNS = 2, 6
# With fewer, less work is simulated.
MANY_MICROBATCHES = 4
# Items of a request from which: fewer requests, samples only, samples in quick checks.
LONG_REQUESTS, VERY_LONG_REQUESTS, QUICK_LISTS = 3000, 10_000, 60
# Segments per microbatch that settle, and that are measured.
SETTLE, SAMPLE = 10, 30
MIN_SKIP = 1.0

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


def runs_of(scripts: Sequence[Script], skipped: float = 0.0) -> tuple[list[Work], float]:
    """Remaining runs, last first; work units per microsecond of busy time."""
    runs = [(script, 1.0) for script in scripts for _ in range(script.count)]
    total = sum(script.busy_us for script, _ in runs)
    first, spent = 0, 0.0
    while first < len(runs) - 1:
        spent += runs[first][0].busy_us
        if spent > skipped * total:
            break
        first += 1
    return runs[first:][::-1], 1.0 / total if total else 0.0


class Window(Core):
    def __init__(
        self, plan: Plan, scripts: Scripts, lanes: list[tuple[Script, ...]], extent: WindowExtent
    ) -> None:
        super().__init__(len(plan.cluster.devices), len(scripts.wires.buses))
        self._table = LaneShares(shares_of(plan.lanes, plan.lane_table))
        self._lanes, self._microbatches, self._extent = lanes, plan.microbatches, extent
        self._done = self._target = self._skipped_us = 0.0
        self._count = 0
        self._due = math.inf  # segments until the next `_watch`
        self._flights: dict[int, Flight] = {}
        self._script: dict[int, Script] = {}
        self._ticket: dict[int, int] = {}
        self._run_us: dict[int, float] = {}

    def rate_per_us(self) -> float:
        for microbatch in range(self._microbatches):
            self._admit(microbatch, 0.0, microbatch / self._microbatches)
        since_us, since = self._until(self._extent.warm_up)
        until_us, until = self._until(since + self._extent.window)
        return (until - since) / (until_us - since_us) if until_us > since_us else 0.0

    def _until(self, work: float) -> tuple[float, float]:
        self._target = work
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
            if self._count >= self._due and now is not None:
                self._watch(now)
        return self._stand(now)

    def _watch(self, now: float) -> None:
        """The awaited number of segments has passed."""

    def _stand(self, now: float | None) -> tuple[float, float]:
        """(time, work done), with running segments in part: those of a prefill are long."""
        at = now or 0.0
        return at + self._skipped_us, self._so_far(at)[0]

    def _admit(self, microbatch: int, now: float, skipped: float = 0.0) -> None:
        lane = self._table.take()
        runs, per_us = runs_of(self._lanes[lane], skipped)
        flight = Flight(0, microbatch, lane, runs, per_us=per_us)
        self._flights[microbatch] = flight
        self.begin(flight, now)

    def begin(self, flight: Flight, now: float) -> None:
        microbatch = flight.microbatch
        self._script[microbatch], self._ticket[microbatch] = flight.left[-1][0], self._order + 1
        self._run_us[microbatch] = 0.0
        super().begin(flight, now)

    def _so_far(self, now: float) -> tuple[float, dict[int, float]]:
        """(work done, microbatch -> busy time of its run)."""
        done, run_us = self._done, dict(self._run_us)
        for device in self.devices:
            if device.job is not None:
                flight = self._running[device.job.ticket][0]
                done += (now - device.since_us) * flight.per_us
                run_us[flight.microbatch] += now - device.since_us
        return done, run_us

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        us = stop_us - self.devices[device].since_us
        self._count += 1
        self._done += us * flight.per_us
        self._run_us[flight.microbatch] += us

    def on_end(self, flight: Flight, now: float) -> None:
        self._table.give_back(flight.lane)
        self._admit(flight.microbatch, now)


@dataclass(eq=False)
class Cuts:
    """Positions where a run of one script can be resumed.

    A cut is a number of launches in trace order. Launches before it have run and their sends have arrived;
    transfers in flight count as arrived, which is the only loss.
    """

    script: Script

    @cached_property
    def done_us(self) -> list[float]:
        lists = [
            next((x.ends_us for x in c.items if isinstance(x, LaunchSegment)), None)
            for c in self.script.columns
        ]
        return np.sum([x for x in lists if x is not None], axis=0).tolist() if any(lists) else [0.0]

    @cached_property
    def _sent(self) -> tuple[list[int], list[int]]:
        """(launches done before, transfer), sorted."""
        segments = [x for c in self.script.columns for x in c.items if isinstance(x, LaunchSegment)]
        found = sorted((x.stop, wire.number) for x in segments for wire in x.sends)
        return [stop for stop, _ in found], [number for _, number in found]

    @cached_property
    def _segments(self) -> list[tuple[list[int], list[int]]]:
        """By device: ends of its segments, and their positions in its column."""
        found = []
        for column in self.script.columns:
            listed = [(x.stop, n) for n, x in enumerate(column.items) if isinstance(x, LaunchSegment)]
            found.append(([stop for stop, _ in listed], [n for _, n in listed]))
        return found

    def at(self, busy_us: float) -> int:
        return max(0, bisect_right(self.done_us, busy_us) - 1)

    def job(self, device: int, cut: int, microbatch: int, ticket: int) -> Job | None:
        column = self.script.columns[device]
        stops, places = self._segments[device]
        first = bisect_right(stops, cut)
        if first == len(places):
            return None
        at = places[first]
        item = column.items[at]
        assert isinstance(item, LaunchSegment), "only segments are listed"
        spent = item.ends_us[cut] - item.ends_us[item.start] if item.start < cut else 0.0
        while item.start >= cut and at and isinstance(column.items[at - 1], Recv):
            at -= 1  # may wait for the next receive
        left_at, numbers = self._sent
        arrived = set(numbers[: bisect_right(left_at, cut)])
        return Job(microbatch, ticket, column.items, at, arrived, column.until_wait_us, spent)


class Fluid(Window):
    def __init__(
        self, plan: Plan, scripts: Scripts, lanes: list[tuple[Script, ...]], extent: WindowExtent
    ) -> None:
        super().__init__(plan, scripts, lanes, extent)
        few = min(plan.microbatches, MANY_MICROBATCHES)
        self._settled, self._sampled = SETTLE * few, (SETTLE + SAMPLE) * few
        self._due = self._settled
        self._begun: dict[int, int] = dict.fromkeys(range(self._microbatches), 0)
        self._mark: tuple[float, float, dict[int, float]] | None = None
        self._cuts: dict[Script, Cuts] = {}

    def begin(self, flight: Flight, now: float) -> None:
        """A new step ends the sample."""
        microbatch = flight.microbatch
        if self._script.get(microbatch) is flight.left[-1][0]:
            self._begun[microbatch] += 1
        else:
            self._start_again()
        super().begin(flight, now)

    def _start_again(self) -> None:
        self._count, self._mark, self._due = 0, None, self._settled

    def _watch(self, now: float) -> None:
        if self._mark is None:
            done, run_us = self._so_far(now)
            self._mark, self._due = (now, done, run_us), self._sampled
            self._begun = dict.fromkeys(self._begun, 0)
        else:
            self._skip(self._mark, now)
            self._start_again()

    def _skip(self, mark: tuple[float, float, dict[int, float]], now: float) -> None:
        """By as many samples as fit before a step ends or the work is done."""
        if not all(script.busy_us for script in self._script.values()):
            return  # state is moving: no pace to measure
        done, run_us = self._so_far(now)
        moved = {
            microbatch: run_us[microbatch]
            - mark[2][microbatch]
            + self._begun[microbatch] * self._script[microbatch].busy_us
            for microbatch in self._flights
        }
        if done <= mark[1]:
            return
        most = (self._target - done) / (done - mark[1])
        times = min((self._left_us(x) - run_us[x]) / us - 1.0 for x, us in moved.items() if us > 0.0)
        if times < min(most, MIN_SKIP):
            return
        times = min(times, most)
        self._skipped_us += times * (now - mark[0])
        self._done = done + times * (done - mark[1])
        self._clear(now)
        for microbatch, us in moved.items():
            self._take_up(microbatch, run_us[microbatch] + times * us)
        for device in range(len(self.devices)):
            self._look(device, now)

    def _left_us(self, microbatch: int) -> float:
        script = self._script[microbatch]
        same = 0
        for other, _ in reversed(self._flights[microbatch].left):
            if other is not script:
                break
            same += 1
        return (1 + same) * script.busy_us

    def _clear(self, now: float) -> None:
        self._events.clear()
        self._bus_free = [now] * len(self._bus_free)
        for device in self.devices:
            device.job, device.epoch = None, device.epoch + 1
            for job in list(device.queue):
                device.queue.drop(job.ticket)

    def _take_up(self, microbatch: int, busy_us: float) -> None:
        """With this much done, perhaps in a later run."""
        flight, ticket, script = self._flights[microbatch], self._ticket[microbatch], self._script[microbatch]
        cuts = self._cuts.setdefault(script, Cuts(script))
        runs, rest = divmod(busy_us, script.busy_us)
        if runs:
            del flight.left[len(flight.left) - int(runs) :]
        cut = cuts.at(rest)
        flight.waiting = 0
        for index, device in enumerate(self.devices):
            job = cuts.job(index, cut, microbatch, ticket)
            if job is not None:
                device.queue.add(job)
                flight.waiting += 1
        self._run_us[microbatch] = cuts.done_us[cut]


Effort = Callable[[Lanes], tuple[type[Window], WindowExtent]]


class SteadyRates:
    """Plans of one unit share results."""

    def __init__(self, long_window: tuple[float, float] | None = None) -> None:
        self._long_window = LONG_WINDOW if long_window is None else WindowExtent(*long_window)
        self._scripts: Scripts | None = None
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        return 1e6 * self._rate(plan, self._full)

    def quick(self, plan: Plan) -> float:
        """For plans that are far apart."""
        return 1e6 * self._rate(plan, self._short)

    def settled(self, plan: Plan) -> float:
        """Microbatches that started spread may have synchronised."""
        return 1e6 * self._rate(plan, self._long)

    def _rate(self, plan: Plan, effort: Effort) -> float:
        if self._scripts is None or not _shares(self._scripts, plan):
            self._scripts = Scripts(plan.unit, plan.costs, plan.cluster)
            self._known.clear()
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        followed = tuple(lane.placement for lane in plan.lanes)
        key = (followed, shares, plan.microbatches, effort)
        rate = self._known.get(key)
        if rate is None:
            lanes = [self._scripts.of(lane.placement) for lane in plan.lanes]
            kind, wanted = effort(lanes)
            extent = extent_of(plan, wanted)
            rate = self._known[key] = kind(plan, self._scripts, lanes, extent).rate_per_us()
        return rate

    def _short(self, lanes: Lanes) -> tuple[type[Window], WindowExtent]:
        longest = max(sum(script.num_items for script in lane) for lane in lanes)
        return Fluid if longest > QUICK_LISTS else Window, SHORT_WINDOW

    def _full(self, lanes: Lanes) -> tuple[type[Window], WindowExtent]:
        each = max(sum(script.count * script.num_items for script in lane) for lane in lanes)
        if each > VERY_LONG_REQUESTS:
            return Fluid, FULL_WINDOW
        return Window, SHORT_WINDOW if each > LONG_REQUESTS else FULL_WINDOW

    def _long(self, lanes: Lanes) -> tuple[type[Window], WindowExtent]:
        return self._full(lanes)[0], self._long_window


def _shares(scripts: Scripts, plan: Plan) -> bool:
    return scripts.unit is plan.unit and scripts.costs is plan.costs and scripts.cluster is plan.cluster
