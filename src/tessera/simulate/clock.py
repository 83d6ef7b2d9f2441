"""simulate: requests that all wait at time zero, run through a plan under a virtual clock.

Times what the workers would run by `core`. With detail there is one span per launch; without,
one per segment of launches: the same times with fewer records.
"""

from tessera.execute.lanes import LaneShares, shares_of
from tessera.ir import Clock, Plan, Span, Timeline, verify
from tessera.simulate.columns import LaunchSegment, Script, Scripts, TransferWire
from tessera.simulate.core import Core, Flight


class _Simulation(Core):
    def __init__(self, plan: Plan, num_requests: int, is_detailed: bool) -> None:
        scripts = [Scripts(variant.unit, variant.costs, plan.cluster) for variant in plan.every_variant]
        super().__init__(len(plan.cluster.devices), len(scripts[0].wires.buses))
        self._table = LaneShares(shares_of(plan.lanes, plan.lane_table))
        self._plan, self._is_detailed = plan, is_detailed
        self._lanes = [scripts[lane.variant].of(lane.placement) for lane in plan.lanes]
        self._pending = list(range(num_requests - 1, -1, -1))
        self._spans: list[Span] = []
        self._done: list[tuple[int, float, float]] = []
        # Work units in every request, by number; empty where all are of one batch.
        self._weights: dict[int, float] = {}

    def run(self) -> Timeline:
        for microbatch in range(min(self._plan.microbatches, len(self._pending))):
            self._admit(microbatch, 0.0)
        while self.advance() is not None:
            pass
        spans = tuple(sorted(self._spans, key=lambda s: (s.start_us, s.stop_us, s.track)))
        done = tuple(sorted(self._done))
        weights = tuple(self._weights[number] for number, _, _ in done) if self._weights else ()
        timeline = Timeline(Clock.SIMULATED, spans, done, weights)
        verify(timeline)
        return timeline

    def _admit(self, microbatch: int, now: float) -> None:
        if self._pending:
            lane = self._table.take()
            runs = [(script, 1.0) for script in self._lanes[lane] for _ in range(script.count)]
            number = self._pending.pop()
            if self._plan.variants:
                self._weights[number] = self._plan.weight_of(self._plan.lanes[lane])
            self.begin(Flight(number, microbatch, lane, runs[::-1]), now)

    def on_end(self, flight: Flight, now: float) -> None:
        """Writes the request down; its place takes the next."""
        self._table.give_back(flight.lane)
        self._done.append((flight.number, 0.0, now))
        self._admit(flight.microbatch, now)

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        """A span per launch, or one for all of them."""
        state = self.devices[device]
        track = self._plan.cluster.devices[device].name
        lane = self._plan.lanes[flight.lane]
        trace = self._plan.unit_of(lane).graphs[script.step].trace
        if not self._is_detailed:
            if stop_us > state.since_us:
                self._span(track, trace.step.kind, flight, state.since_us, stop_us)
            return
        place = lane.placement.devices[script.step]
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
    """Runs requests that all wait at time zero through a plan; with detail, one span per launch."""
    return _Simulation(plan, num_requests, is_detailed).run()


def throughput_per_s(timeline: Timeline) -> float:
    """Work units per second while the system was full; of a run too short for that, over the whole run.

    Counting completions misleads on short runs: requests that start together finish together, in bursts. So
    work is counted instead, as fractions of a request: a span's share of its request's busy time. The window
    is the time in which the system was full: from the first completion to the start of the last request. A
    request of a larger batch counts as the work units it holds.
    """
    numbers = [number for number, _, _ in timeline.requests]
    weights = dict(zip(numbers, timeline.weights or [1.0] * len(numbers), strict=True))
    total: dict[int, float] = {}
    begun: dict[int, float] = {}
    work = [span for span in timeline.spans if not span.is_transfer]
    for span in work:
        total[span.request] = total.get(span.request, 0.0) + span.stop_us - span.start_us
        begun.setdefault(span.request, span.start_us)
    start = min((stop for _, _, stop in timeline.requests), default=0.0)
    stop = max(begun.values(), default=0.0)
    if stop <= start:
        return sum(weights.values()) / (timeline.makespan_us * 1e-6) if timeline.makespan_us else 0.0
    done = 0.0
    for span in work:
        inside = min(span.stop_us, stop) - max(span.start_us, start)
        if inside > 0.0:
            done += weights[span.request] * inside / total[span.request]
    return done / ((stop - start) * 1e-6)
