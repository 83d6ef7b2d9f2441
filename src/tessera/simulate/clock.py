"""simulate: the executor's own schedule under a virtual clock.

Uses the programs and the queue that the workers use; only time is replaced. A launch takes its modelled
time on its device, one at a time. A transfer occupies its link for its wire time, first come first served,
and arrives a latency later. Receives and frees cost nothing. Without detail, launches that follow each other
are one busy stretch: the same times with far fewer events.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.execute.lower import lower
from tessera.execute.schedule import Job, LaneTable, Queue
from tessera.ir import Clock, Free, Instruction, Plan, Program, Run, Send, Span, Timeline, verify


@dataclass(frozen=True, slots=True)
class Busy:
    """Several launches in a row, as one stretch of time."""

    us: float


@dataclass(slots=True)
class _Request:
    number: int
    lane: int
    slot: int
    arrival_us: float
    # Runs of the lane's programs that are left, last first.
    left: list[Program]
    # Devices that have not finished the current run.
    waiting: int = 0


@dataclass(slots=True)
class _Device:
    queue: Queue = field(default_factory=Queue)
    free_us: float = 0.0


class _Simulation:
    """One run; events are (time, order, action)."""

    def __init__(self, plan: Plan, num_requests: int, is_detailed: bool) -> None:
        self._plan, self._is_detailed = plan, is_detailed
        self._programs = lower(plan)
        # columns[id of program][device]: what the device's jobs go through
        self._columns = {id(p): self._column(p) for lane in self._programs for p in lane}
        self._table = LaneTable(plan.lanes, plan.slots)
        self._devices = [_Device() for _ in plan.cluster.devices]
        place = {name: index for index, name in enumerate(plan.cluster.names)}
        self._links = {(place[x.src], place[x.dst]): x for x in plan.cluster.links}
        self._link_free = dict.fromkeys(self._links, 0.0)
        self._events: list[tuple[float, int, tuple[str, int, int, int]]] = []
        self._tickets = 0
        self._running: dict[int, tuple[_Request, Program]] = {}
        self._pending = list(range(num_requests - 1, -1, -1))
        self._spans: list[Span] = []
        self._done: list[tuple[int, float, float]] = []

    def run(self) -> Timeline:
        for slot in range(min(self._plan.slots, len(self._pending))):
            self._admit(slot, 0.0)
        while self._events:
            now, _, (what, device, ticket, transfer) = heapq.heappop(self._events)
            if what == "arrive":
                self._devices[device].queue.deliver(ticket, transfer)
            elif what == "finish":
                self._finish(ticket, now)
            self._pump(device, now)
        spans = tuple(sorted(self._spans, key=lambda s: (s.start_us, s.stop_us, s.track)))
        timeline = Timeline(Clock.SIMULATED, spans, tuple(sorted(self._done)))
        verify(timeline)
        return timeline

    def _column(self, program: Program) -> list[Sequence[Instruction | Busy]]:
        if self._is_detailed:
            return list(program.instructions)
        costs = self._plan.costs[program.step].costs
        return [
            _compressed(column, [row[device].us for row in costs])
            for device, column in enumerate(program.instructions)
        ]

    def _post(self, time_us: float, what: str, device: int, ticket: int, transfer: int = -1) -> None:
        self._tickets += 1
        heapq.heappush(self._events, (time_us, self._tickets, (what, device, ticket, transfer)))

    def _admit(self, slot: int, now: float) -> None:
        if not self._pending:
            return
        lane = self._table.take()
        runs = [p for p in self._programs[lane] for _ in range(p.count)]
        self._begin(_Request(self._pending.pop(), lane, slot, 0.0, runs[::-1]), now)

    def _begin(self, request: _Request, now: float) -> None:
        program = request.left.pop()
        ticket = self._tickets = self._tickets + 1
        self._running[ticket] = (request, program)
        busy = [d for d, column in enumerate(program.instructions) if column]
        request.waiting = len(busy)
        for device in busy:
            self._devices[device].queue.add(Job(request.slot, ticket, self._columns[id(program)][device]))
            self._post(max(now, self._devices[device].free_us), "look", device, ticket)

    def _pump(self, device: int, now: float) -> None:
        """Starts the next stretch on a device, if it is idle and a job can go on."""
        state = self._devices[device]
        job = state.queue.pick() if state.free_us <= now else None
        if job is None:
            return
        request, program = self._running[job.ticket]
        clock = now
        while job.is_ready:
            instruction = job.issue()
            if isinstance(instruction, Busy):
                clock += instruction.us
            elif isinstance(instruction, Run):
                clock = self._launch(request, program, device, instruction.launch, clock)
            elif isinstance(instruction, Send):
                self._send(request, program, job.ticket, instruction.transfer, clock)
        state.free_us = clock
        if not self._is_detailed and clock > now:
            track = self._plan.cluster.devices[device].name
            label = self._plan.unit.graphs[program.step].trace.step.kind
            self._spans.append(Span(track, label, request.number, request.slot, now, clock))
        if job.is_done:
            state.queue.drop(job.ticket)
            self._post(clock, "finish", device, job.ticket)
        else:
            self._post(clock, "look", device, job.ticket)

    def _launch(self, request: _Request, program: Program, device: int, launch: int, clock: float) -> float:
        stop = clock + self._plan.costs[program.step].us(launch, device)
        label = self._plan.unit.graphs[program.step].trace.kernel_of(launch).name
        track = self._plan.cluster.devices[device].name
        self._spans.append(Span(track, label, request.number, request.slot, clock, stop))
        return stop

    def _send(self, request: _Request, program: Program, ticket: int, number: int, clock: float) -> None:
        transfer = program.transfers[number]
        key = (transfer.src, transfer.dst)
        link = self._links[key]
        start = max(clock, self._link_free[key])
        stop = start + link.wire_us(transfer.num_bytes)
        self._link_free[key] = stop
        track, label = f"{link.src} -> {link.dst}", f"{transfer.num_bytes} bytes"
        self._spans.append(Span(track, label, request.number, request.slot, start, stop, True))
        self._post(stop + link.latency_us, "arrive", transfer.dst, ticket, number)

    def _finish(self, ticket: int, now: float) -> None:
        request, _ = self._running[ticket]
        request.waiting -= 1
        if request.waiting:
            return
        del self._running[ticket]
        if request.left:
            self._begin(request, now)
            return
        self._done.append((request.number, request.arrival_us, now))
        self._table.give_back(request.lane)
        self._admit(request.slot, now)


def _compressed(column: Sequence[Instruction], us: Sequence[float]) -> list[Instruction | Busy]:
    """A device's instructions with launches that follow each other merged, and frees left out."""
    short: list[Instruction | Busy] = []
    for instruction in column:
        if isinstance(instruction, Run):
            if short and isinstance(last := short[-1], Busy):
                short[-1] = Busy(last.us + us[instruction.launch])
            else:
                short.append(Busy(us[instruction.launch]))
        elif not isinstance(instruction, Free):
            short.append(instruction)
    return short


def simulate(plan: Plan, num_requests: int, is_detailed: bool = True) -> Timeline:
    """Runs requests that all wait at time zero through a plan; with detail, one span per launch."""
    return _Simulation(plan, num_requests, is_detailed).run()
