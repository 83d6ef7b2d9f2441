"""Plans with all microbatches full: the timeline of some requests, and the steady rate.

A steady rate (`SteadyRates`) is from a short simulation. Microbatches start at spread phases, so a short
window sees every phase. Work is counted as a segment's share of its request's busy time, times the request's
work units.

Repeated runs of a long request (a thousand decodes) are simulated as fewer, longer ones, with the same work
and share of waits.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from tessera.execute.lanes import LaneShares, shares_of
from tessera.ir import Clock, Plan, Span, Timeline, verify
from tessera.simulate.columns import LaunchSegment, Script, Scripts, TransferWire
from tessera.simulate.core import Core, Flight, Work

# Per microbatch.
MIN_WARM_UP_RUNS, MIN_WINDOW_RUNS = 2, 6
# With fewer, less work is simulated.
MANY_MICROBATCHES = 4
# Items of a request that are simulated at most: in quick checks, otherwise.
FEW_ITEMS, MANY_ITEMS = 500, 3000


class ClosedLoop(Core):
    """All microbatches are full: where one request ends, the next begins."""

    def __init__(
        self, plan: Plan, scripts: Scripts, numbers: Iterator[int], max_items: float = math.inf
    ) -> None:
        super().__init__(len(plan.cluster.devices), len(scripts.wires.buses))
        self._table = LaneShares(shares_of(plan.lanes, plan.lane_table))
        self._lanes = [scripts.of(lane.placement) for lane in plan.lanes]
        self._numbers, self._max_items = numbers, max_items

    def admit(self, microbatch: int, now: float, skipped: float = 0.0) -> None:
        """Begins the next request, if any, after a share `skipped` of its work."""
        number = next(self._numbers, None)
        if number is not None:
            lane = self._table.take()
            runs, per_us = runs_of(self._lanes[lane], self._max_items, skipped)
            self.begin(Flight(number, microbatch, lane, runs, per_us=per_us), now)

    def on_end(self, flight: Flight, now: float) -> None:
        self._table.give_back(flight.lane)
        self.admit(flight.microbatch, now)


def runs_of(scripts: Sequence[Script], max_items: float, skipped: float = 0.0) -> tuple[list[Work], float]:
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


class _Simulation(ClosedLoop):
    def __init__(self, plan: Plan, num_requests: int, is_detailed: bool) -> None:
        scripts = Scripts(plan.unit, plan.costs, plan.cluster)
        super().__init__(plan, scripts, iter(range(num_requests)))
        self._plan, self._is_detailed = plan, is_detailed
        self._spans: list[Span] = []
        self._done: list[tuple[int, float, float]] = []

    def run(self) -> Timeline:
        for microbatch in range(self._plan.microbatches):
            self.admit(microbatch, 0.0)
        while self.advance() is not None:
            pass
        spans = tuple(sorted(self._spans, key=lambda s: (s.start_us, s.stop_us, s.track)))
        timeline = Timeline(Clock.SIMULATED, spans, tuple(sorted(self._done)))
        verify(timeline)
        return timeline

    def on_end(self, flight: Flight, now: float) -> None:
        self._done.append((flight.number, 0.0, now))
        super().on_end(flight, now)

    def on_segment(self, device: int, flight: Flight, segment: LaunchSegment, stop_us: float) -> None:
        state, (script, _) = self.devices[device], flight.left[-1]
        track = self._plan.cluster.devices[device].name
        trace = self._plan.graphs[script.step].trace
        if not self._is_detailed:
            if stop_us > state.since_us:
                self._span(track, trace.step.kind, flight, state.since_us, stop_us)
            return
        place = self._plan.lanes[flight.lane].placement.devices[script.step]
        ends, first = segment.ends_us, segment.ends_us[state.start]
        for launch in range(state.start, state.stop):
            if place[launch] == device:
                start, stop = (state.since_us + ends[i] - first for i in (launch, launch + 1))
                self._span(track, trace.kernel_of(launch).name, flight, start, stop)

    def on_send(self, flight: Flight, wire: TransferWire, start_us: float, stop_us: float) -> None:
        names = self._plan.cluster.names
        track = f"{names[wire.src]} -> {names[wire.dst]}"
        self._span(track, f"{wire.num_bytes} bytes", flight, start_us, stop_us, True)

    def _span(
        self, track: str, label: str, flight: Flight, start: float, stop: float, is_transfer: bool = False
    ) -> None:
        self._spans.append(Span(track, label, flight.number, flight.microbatch, start, stop, is_transfer))


def simulate(plan: Plan, num_requests: int, is_detailed: bool = True) -> Timeline:
    """All requests wait at time zero; with detail, one span per launch, else per segment."""
    return _Simulation(plan, num_requests, is_detailed).run()


def throughput_per_s(timeline: Timeline) -> float:
    """From the first completion to the start of the last request, or over a short run.

    Completions come in bursts, so work is counted.
    """
    work = [span for span in timeline.spans if not span.is_transfer and span.stop_us > span.start_us]
    total_us: defaultdict[int, float] = defaultdict(float)
    start_us: dict[int, float] = {}
    for span in work:
        total_us[span.request] += span.stop_us - span.start_us
        start_us.setdefault(span.request, span.start_us)
    start = min((stop for _, _, stop in timeline.requests), default=0.0)
    stop = max(start_us.values(), default=0.0)
    if stop <= start:
        return 1e6 * len(timeline.requests) / timeline.makespan_us if timeline.makespan_us else 0.0
    inside_us = ((x.request, min(x.stop_us, stop) - max(x.start_us, start)) for x in work)
    return 1e6 * sum(max(0.0, us) / total_us[request] for request, us in inside_us) / (stop - start)


# Requests' worth of work: to warm up, and in the window.
WindowExtent = tuple[float, float]
# In the long run microbatches fall into step.
FULL_WINDOW, SHORT_WINDOW, LONG_WINDOW = (4.0, 10.0), (2.0, 4.0), (56.0, 28.0)


def extent_of(plan: Plan, extent: WindowExtent) -> WindowExtent:
    few, num_runs = min(1.0, plan.microbatches / MANY_MICROBATCHES), sum(plan.unit.counts)
    return (
        max(few * extent[0], plan.microbatches * MIN_WARM_UP_RUNS / num_runs),
        max(few * extent[1], plan.microbatches * MIN_WINDOW_RUNS / num_runs),
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
        since_us, since = self._until(self._extent[0])
        until_us, until = self._until(since + self._extent[1])
        return (until - since) / (until_us - since_us) if until_us > since_us else 0.0

    def _until(self, work: float) -> tuple[float, float]:
        """(time, work done), with running segments in part: those of a prefill are long."""
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
        at, done = now or 0.0, self._done
        for device in self.devices:
            if device.job is not None:
                done += (at - device.since_us) * self._running[device.job.ticket].per_us
        return at, done

    def on_segment(self, device: int, flight: Flight, segment: LaunchSegment, stop_us: float) -> None:
        self._done += (stop_us - self.devices[device].since_us) * flight.per_us


class SteadyRates:
    """Plans of one unit share scripts."""

    def __init__(self, long_window: WindowExtent | None = None) -> None:
        self._long_window = long_window or LONG_WINDOW
        self._scripts: Scripts | None = None

    def __call__(self, plan: Plan) -> float:
        return self._rate(plan, MANY_ITEMS, FULL_WINDOW)

    def quick(self, plan: Plan) -> float:
        """For plans that are far apart."""
        return self._rate(plan, FEW_ITEMS, SHORT_WINDOW)

    def settled(self, plan: Plan) -> float:
        return self._rate(plan, MANY_ITEMS, self._long_window)

    def _rate(self, plan: Plan, max_items: int, extent: WindowExtent) -> float:
        old, new = self._scripts, (plan.unit, plan.costs, plan.cluster)
        if old is None or not (old.unit is new[0] and old.costs is new[1] and old.cluster is new[2]):
            self._scripts = old = Scripts(*new)
        return 1e6 * Window(plan, old, extent_of(plan, extent), max_items).rate_per_us()
