"""The executor's schedule under a virtual clock: devices, links and requests as events.

Only time is replaced in the workers' queue. A launch takes its modelled time, one at a time; after each the
device takes the job that the queue picks. A transfer occupies its bus, first come first served, and arrives a
latency later. Receives cost nothing. A segment of launches is one event, unless a preferred job arrives: then
it ends at the current launch, with the same times as checks after every launch.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tessera.execute.lanes import LaneShares, shares_of
from tessera.execute.schedule import Job, Queue
from tessera.ir import Clock, Plan, Recv, Span, Timeline, verify
from tessera.simulate.columns import LaunchSegment, Script, Scripts, TransferWire

# Marks the end of a segment; other events are arrivals of transfers.
END = -1
SAME_US = 1e-9

# Script, factor on its times.
Work = tuple[Script, float]


@dataclass(slots=True)
class Flight:
    number: int
    microbatch: int
    lane: int
    # Last first.
    left: list[Work]
    # Devices that have not finished the run.
    waiting: int = 0
    # Work units per microsecond of busy time.
    per_us: float = 0.0


@dataclass(slots=True)
class SimulatedDevice:
    queue: Queue = field(default_factory=Queue)
    job: Job | None = None
    start: int = 0
    stop: int = 0
    since_us: float = 0.0
    # End events of earlier epochs are stale.
    epoch: int = 0


class Core(ABC):
    def __init__(self, num_devices: int, num_buses: int) -> None:
        self.devices = [SimulatedDevice() for _ in range(num_devices)]
        self._bus_free = [0.0] * num_buses
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        self._running: dict[int, tuple[Flight, Script, float]] = {}

    @abstractmethod
    def on_end(self, flight: Flight, now: float) -> None:
        """A flight has no runs left."""

    @abstractmethod
    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        """A device has run launches [device.start, device.stop) of a segment."""

    def on_send(self, flight: Flight, wire: TransferWire, start_us: float, stop_us: float) -> None:
        """A transfer occupies its bus."""

    def advance(self) -> float | None:
        """None without an event."""
        if not self._events:
            return None
        now, _, device, ticket, what = heappop(self._events)
        if what == END:
            if ticket == self.devices[device].epoch:
                self._end(device, now)
        else:
            self._consider(device, self.devices[device].queue.deliver(ticket, what), now)
        return now

    def begin(self, flight: Flight, now: float) -> None:
        script, scale = flight.left.pop()
        self._order += 1
        ticket = self._order
        self._running[ticket] = (flight, script, scale)
        devices = [d for d, column in enumerate(script.columns) if column.items]
        flight.waiting = len(devices)
        for d in devices:
            column = script.columns[d]
            job = Job(flight.microbatch, ticket, column.items, until_wait_us=column.until_wait_us)
            self.devices[d].queue.add(job)
            self._consider(d, job, now)
        if not devices:
            self._end_run(ticket, now)

    def _consider(self, device: int, job: Job | None, now: float) -> None:
        """An idle device takes the job, a busy one if the queue prefers it."""
        state = self.devices[device]
        if state.job is None:
            self._look(device, now)
        elif job is not None and job is not state.job and job.is_ready:
            self._cut(state, device, job, now)

    def _cut(self, state: SimulatedDevice, device: int, job: Job, now: float) -> None:
        current = state.job
        assert current is not None, "only a busy device is interrupted"
        segment, scale = current.instructions[current.position], self._running[current.ticket][2]
        ends = segment.ends_us
        reached = ends[state.start] + (now - state.since_us - SAME_US) / scale
        at = bisect_left(ends, reached, state.start, state.stop)
        left = current.until_wait_us[current.position] - (ends[at] - ends[segment.start])
        if at < state.stop and (job.left_us, job.ticket) < (left, current.ticket):
            state.stop = at
            self._plan_end(state, device, ends, scale)

    def _plan_end(self, state: SimulatedDevice, device: int, ends: list[float], scale: float) -> None:
        state.epoch += 1
        stop_us = state.since_us + (ends[state.stop] - ends[state.start]) * scale
        self._order += 1
        heappush(self._events, (stop_us, self._order, device, state.epoch, END))

    def _look(self, device: int, now: float) -> None:
        state = self.devices[device]
        pick = state.queue.pick
        while state.job is None and (job := pick()) is not None:
            items, at, arrived = job.instructions, job.position, job.arrived
            num = len(items)
            # The queue would pick the same job after each arrived receive.
            while at < num and type(item := items[at]) is Recv and item.transfer in arrived:
                at += 1
            job.position = at
            if at == num:
                self._end_job(device, job, now)
            elif type(item) is LaunchSegment:
                state.job, state.since_us, state.stop = job, now, item.stop
                state.start = item.start if not job.spent_us else _after(item, job.spent_us)
                self._plan_end(state, device, item.ends_us, self._running[job.ticket][2])

    def _end(self, device: int, now: float) -> None:
        state = self.devices[device]
        job = state.job
        assert job is not None, "only a busy device ends a segment"
        flight, script, scale = self._running[job.ticket]
        segment = job.instructions[job.position]
        self.on_segment(device, flight, script, segment, now)
        state.job = None
        if state.stop < segment.stop:
            job.spent_us = segment.ends_us[state.stop] - segment.ends_us[segment.start]
        else:
            job.spent_us = 0.0
            job.position += 1
            if segment.sends:
                self._send(flight, job.ticket, segment.sends, scale, now)
            if job.position == len(job.instructions):
                self._end_job(device, job, now)
        if state.job is None:
            self._look(device, now)

    def _send(
        self, flight: Flight, ticket: int, wires: Sequence[TransferWire], scale: float, now: float
    ) -> None:
        free, events = self._bus_free, self._events
        for wire in wires:
            start = free[wire.bus]
            start = max(start, now)
            stop = free[wire.bus] = start + wire.wire_us * scale
            self.on_send(flight, wire, start, stop)
            self._order += 1
            heappush(events, (stop + wire.latency_us * scale, self._order, wire.dst, ticket, wire.number))

    def _end_job(self, device: int, job: Job, now: float) -> None:
        self.devices[device].queue.drop(job.ticket)
        flight = self._running[job.ticket][0]
        flight.waiting -= 1
        if not flight.waiting:
            self._end_run(job.ticket, now)

    def _end_run(self, ticket: int, now: float) -> None:
        flight = self._running.pop(ticket)[0]
        if flight.left:
            self.begin(flight, now)
        else:
            self.on_end(flight, now)


def _after(segment: LaunchSegment, spent_us: float) -> int:
    reached = segment.ends_us[segment.start] + spent_us - SAME_US
    return bisect_left(segment.ends_us, reached, segment.start, segment.stop)


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

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        state = self.devices[device]
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

    Completions come in bursts, so work is counted: a span's share of its request's busy time.
    """
    total: dict[int, float] = {}
    start_us: dict[int, float] = {}
    work = [span for span in timeline.spans if not span.is_transfer]
    for span in work:
        total[span.request] = total.get(span.request, 0.0) + span.stop_us - span.start_us
        start_us.setdefault(span.request, span.start_us)
    start = min((stop for _, _, stop in timeline.requests), default=0.0)
    stop = max(start_us.values(), default=0.0)
    if stop <= start:
        return len(timeline.requests) / (timeline.makespan_us * 1e-6) if timeline.makespan_us else 0.0
    done = 0.0
    for span in work:
        inside = min(span.stop_us, stop) - max(span.start_us, start)
        if inside > 0.0:
            done += inside / total[span.request]
    return done / ((stop - start) * 1e-6)
