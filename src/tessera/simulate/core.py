"""The executor's schedule under a virtual clock: devices, links and requests as events.

Jobs are picked by the workers' queue. A launch takes its modelled time, one at a time. A transfer occupies
its bus, first come first served, and arrives a latency later. Receives cost nothing. A segment of launches is
one event, unless a preferred job arrives: it then ends at the current launch, as with checks after every
launch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tessera.execute.schedule import Job, Queue
from tessera.ir import Recv
from tessera.simulate.columns import LaunchSegment, Script, TransferWire

# Marks the end of a segment; other events are arrivals of transfers.
END = -1
SAME_US = 1e-9
# An end so close after a limit is at the limit: sums of times differ by their rounding.
SAME_END_US = 1e-5

# Script, factor on its times.
Work = tuple[Script, float]


@dataclass(slots=True)
class Flight:
    number: int
    microbatch: int
    lane: int
    # Last first; the present one is the last here.
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
        self._running: dict[int, Flight] = {}

    @abstractmethod
    def on_end(self, flight: Flight, now: float) -> None:
        """A flight has no runs left."""

    @abstractmethod
    def on_segment(self, device: int, flight: Flight, segment: LaunchSegment, stop_us: float) -> None:
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
        script, _ = flight.left[-1]
        self._order += 1
        ticket = self._order
        self._running[ticket] = flight
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
        segment = current.instructions[current.position]
        ends = segment.ends_us
        reached = ends[state.start] + (now - state.since_us - SAME_US) / self._scale(current)
        at = bisect_left(ends, reached, state.start, state.stop)
        left = current.until_wait_us[current.position] - (ends[at] - ends[segment.start])
        if at < state.stop and (job.left_us, job.ticket) < (left, current.ticket):
            state.stop = at
            self._plan_end(state, device, ends, self._scale(current))

    def _scale(self, job: Job) -> float:
        return self._running[job.ticket].left[-1][1]

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
                self._plan_end(state, device, item.ends_us, self._scale(job))

    def _end(self, device: int, now: float) -> None:
        state = self.devices[device]
        job = state.job
        assert job is not None, "only a busy device ends a segment"
        flight, segment = self._running[job.ticket], job.instructions[job.position]
        self.on_segment(device, flight, segment, now)
        state.job = None
        if state.stop < segment.stop:
            job.spent_us = segment.ends_us[state.stop] - segment.ends_us[segment.start]
        else:
            job.spent_us = 0.0
            job.position += 1
            if segment.sends:
                self._send(flight, job.ticket, segment.sends, now)
            if job.position == len(job.instructions):
                self._end_job(device, job, now)
        if state.job is None:
            self._look(device, now)

    def _send(self, flight: Flight, ticket: int, wires: Sequence[TransferWire], now: float) -> None:
        free, events, scale = self._bus_free, self._events, flight.left[-1][1]
        for wire in wires:
            start = max(free[wire.bus], now)
            stop = free[wire.bus] = start + wire.wire_us * scale
            self.on_send(flight, wire, start, stop)
            self._order += 1
            heappush(events, (stop + wire.latency_us * scale, self._order, wire.dst, ticket, wire.number))

    def _end_job(self, device: int, job: Job, now: float) -> None:
        self.devices[device].queue.drop(job.ticket)
        flight = self._running[job.ticket]
        flight.waiting -= 1
        if not flight.waiting:
            self._end_run(job.ticket, now)

    def _end_run(self, ticket: int, now: float) -> None:
        flight = self._running.pop(ticket)
        flight.left.pop()
        if flight.left:
            self.begin(flight, now)
        else:
            self.on_end(flight, now)


def _after(segment: LaunchSegment, spent_us: float) -> int:
    reached = segment.ends_us[segment.start] + spent_us - SAME_US
    return bisect_left(segment.ends_us, reached, segment.start, segment.stop)


class VirtualMachine(Core):
    """The loop for a caller that starts runs and takes their ends."""

    def __init__(self, num_devices: int, num_buses: int) -> None:
        super().__init__(num_devices, num_buses)
        self.now_us = 0.0
        # Per device, then per bus.
        self.busy_us = [0.0] * (num_devices + num_buses)
        self._ended: deque[int] = deque()

    def start(self, microbatch: int, works: Sequence[Work]) -> None:
        self.begin(Flight(microbatch, microbatch, 0, list(reversed(works))), self.now_us)

    def take(self, limit_us: float) -> int | None:
        """To the next end of a microbatch's last run, or to the limit (None)."""
        while not self._ended and self._events and self._events[0][0] <= limit_us + SAME_END_US:
            self.now_us = max(self.now_us, self.advance() or 0.0)
        if self._ended:
            return self._ended.popleft()
        if limit_us < float("inf"):
            self.now_us = max(self.now_us, limit_us)
        return None

    def drop(self, microbatches: Collection[int]) -> None:
        """Their transfers still occupy buses."""
        self._ended = deque(number for number in self._ended if number not in microbatches)
        for ticket in [t for t, flight in self._running.items() if flight.number in microbatches]:
            del self._running[ticket]
            for device in self.devices:
                if any(job.ticket == ticket for job in device.queue):
                    device.queue.drop(ticket)
                if device.job is not None and device.job.ticket == ticket:
                    device.job, device.epoch = None, device.epoch + 1
            self._events = [e for e in self._events if e[4] == END or e[3] != ticket]
        heapify(self._events)
        for index in range(len(self.devices)):
            self._look(index, self.now_us)

    def on_end(self, flight: Flight, now: float) -> None:
        self._ended.append(flight.number)

    def on_segment(self, device: int, flight: Flight, segment: LaunchSegment, stop_us: float) -> None:
        self.busy_us[device] += stop_us - self.devices[device].since_us

    def on_send(self, flight: Flight, wire: TransferWire, start_us: float, stop_us: float) -> None:
        self.busy_us[len(self.devices) + wire.bus] += stop_us - start_us
