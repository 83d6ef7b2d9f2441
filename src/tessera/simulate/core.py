"""The executor's own schedule under a virtual clock: devices, links and requests as events.

Uses the queue that the workers use; only time is replaced. A launch takes its modelled
time on its device, one at a time; after each one the device takes the job that the queue picks. A transfer
occupies its bus for its wire time, first come first served, and arrives a latency later. Receives cost
nothing. A segment of launches is one event unless a job comes that the queue would rather have: then it ends
at the launch that runs just then, which gives the same times as looking after every launch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tessera.execute.schedule import Job, Queue
from tessera.ir import Recv
from tessera.simulate.columns import LaunchSegment, Script, TransferWire

# What an event says, where it is not the number of a transfer that arrives.
END = -1
# Two times closer than this are one, in microseconds.
SAME_US = 1e-9

# One run: a script and the factor on its times.
Work = tuple[Script, float]


@dataclass(slots=True)
class Flight:
    number: int
    microbatch: int
    lane: int
    # What it still has to run, last first.
    left: list[Work]
    # Devices that have not finished the current run.
    waiting: int = 0
    # Work units in the request over its busy time.
    per_us: float = 0.0


@dataclass(slots=True)
class SimulatedDevice:
    """What a device does now: launches [start, stop) of the job's next segment, since `since_us`."""

    queue: Queue = field(default_factory=Queue)
    job: Job | None = None
    start: int = 0
    stop: int = 0
    since_us: float = 0.0
    # Counts the plans made for the end of a segment; only the last of them counts.
    epoch: int = 0


class Core(ABC):
    """The loop; subclasses say where requests come from and what is written down."""

    def __init__(self, num_devices: int, num_buses: int) -> None:
        self.devices = [SimulatedDevice() for _ in range(num_devices)]
        self._bus_free = [0.0] * num_buses
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        # Ticket -> the request, what it runs, the factor on its times.
        self._running: dict[int, tuple[Flight, Script, float]] = {}

    @abstractmethod
    def on_end(self, flight: Flight, now: float) -> None:
        """A flight has nothing left to run."""

    @abstractmethod
    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        """A device has been busy with launches [device.start, device.stop) of a segment."""

    def on_send(self, flight: Flight, wire: TransferWire, start_us: float, stop_us: float) -> None:
        """A transfer occupies its bus."""

    def advance(self) -> float | None:
        """Handles the next event and gives its time; None when nothing is left to happen."""
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
        """Starts the next run of a request on every device that takes part in it."""
        script, scale = flight.left.pop()
        self._order += 1
        ticket = self._order
        self._running[ticket] = (flight, script, scale)
        taking = [d for d, column in enumerate(script.columns) if column.items]
        flight.waiting = len(taking)
        for d in taking:
            column = script.columns[d]
            job = Job(flight.microbatch, ticket, column.items, until_wait_us=column.until_wait_us)
            self.devices[d].queue.add(job)
            self._consider(d, job, now)
        if not taking:
            self._end_run(ticket, now)

    def _consider(self, device: int, job: Job | None, now: float) -> None:
        """A job may have become ready: an idle device takes it, a busy one if the queue would."""
        state = self.devices[device]
        if state.job is None:
            self._look(device, now)
        elif job is not None and job is not state.job and job.is_ready:
            self._cut(state, device, job, now)

    def _cut(self, state: SimulatedDevice, device: int, job: Job, now: float) -> None:
        """Ends the segment at the launch that runs now, if the newcomer has less to do than what is left."""
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
        """An idle device takes what the queue picks."""
        state = self.devices[device]
        pick = state.queue.pick
        while state.job is None and (job := pick()) is not None:
            items, at, arrived = job.instructions, job.position, job.arrived
            num = len(items)
            # Receives whose transfers have arrived; the queue would pick the same job after each of them.
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
        """A segment, or the part of it that was let run, has ended."""
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
