"""Engine: runs requests through a plan on one worker process per device.

The engine keeps `slots` requests in flight. A request takes a lane when it is admitted and follows that
lane's programs; between two runs the request itself says what the next inputs are, so that a language
model can feed its own tokens back.

A worker that dies or reports an error ends the run with one message that names its device; the other
workers are ended too, and nothing is left behind.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Protocol, TypeVar

import torch
import torch.multiprocessing  # teaches pickle to pass tensors through shared memory

from tessera.errors import TesseraError, WorkerError
from tessera.execute import worker
from tessera.execute.inbox import Hangup, Inbox
from tessera.execute.lower import lower
from tessera.execute.packing import Packed, pack, pack_all, unpack_all
from tessera.execute.schedule import LaneTable
from tessera.execute.transport import Wire, slot_bytes
from tessera.ir import Clock, Plan, Program, Run, Span, Timeline

# A worker that was told to leave has this long before it is ended.
STOP_TIMEOUT_S = 5.0

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


class Request(Protocol):
    """One unit of work, as the engine sees it."""

    def state(self) -> Tensors:
        """The state of all its steps, as each is before the first run that uses it."""

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """The inputs of the run-th run of a step, given the outputs of the run before it."""


@dataclass
class RunResult:
    """What one request gave."""

    lane: int
    # Outputs of every run in order.
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    # State after the last run, as flat bytes by name.
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    start_s: float = 0.0
    stop_s: float = 0.0


@dataclass
class _Flight:
    """A request in a slot."""

    number: int
    request: Request
    result: RunResult
    # (index of the program in its lane, run) still to do, last first.
    left: list[tuple[int, int]]
    # State that no run has used yet, by name.
    state: dict[str, torch.Tensor]
    # Devices that have not answered for the current run.
    missing: int = 0
    step: int = 0
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class Engine:
    """A plan with its workers; use it in a `with` statement."""

    def __init__(self, plan: Plan, weights: Tensors, num_threads: int = 1) -> None:
        self._plan = plan
        self._programs = lower(plan)
        self._weights = {name: tensor.detach().share_memory_() for name, tensor in weights.items()}
        self._num_threads = num_threads
        self._orders: list[Connection] = []
        self._inbox: Inbox | None = None
        self._processes: list[BaseProcess] = []
        self._tickets = 0
        self._spans: list[Span] = []
        self._origin_s = 0.0

    def __enter__(self) -> "Engine":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self, requests: Sequence[Request], on_done: Callable[[int], None] = lambda number: None
    ) -> list[RunResult]:
        """Runs all requests, `slots` at a time; results in the order of the requests."""
        self._origin_s, self._spans = time.monotonic(), []
        table = LaneTable(self._plan.lanes, self._plan.slots)
        pending = list(enumerate(requests))[::-1]
        results: dict[int, RunResult] = {}
        flights: dict[int, tuple[int, _Flight]] = {}  # ticket -> (slot, flight)
        for slot in range(min(self._plan.slots, len(pending))):
            self._admit(slot, *pending.pop(), table, flights)
        while flights:
            device, done = self._next_answer(worker.Done)
            slot, flight = flights[done.ticket]
            self._collect(flight, slot, device, done)
            if flight.missing:
                continue
            del flights[done.ticket]
            if flight.outputs:
                flight.result.outputs.append(flight.outputs)
            if flight.left:
                self._send_run(slot, flight, flights)
                continue
            flight.result.stop_s = time.monotonic() - self._origin_s
            results[flight.number] = flight.result
            table.give_back(flight.result.lane)
            on_done(flight.number)
            if pending:
                self._admit(slot, *pending.pop(), table, flights)
        return [results[number] for number in range(len(requests))]

    def timeline(self) -> Timeline:
        """What the last `run` did, by this machine's clock: one span per launch."""
        spans = tuple(sorted(self._spans, key=lambda s: (s.start_us, s.stop_us)))
        ends: dict[int, float] = {}
        for span in spans:
            ends[span.request] = max(ends.get(span.request, 0.0), span.stop_us)
        return Timeline(Clock.MEASURED, spans, tuple((r, 0.0, stop) for r, stop in sorted(ends.items())))

    def _admit(
        self,
        slot: int,
        number: int,
        request: Request,
        table: LaneTable,
        flights: dict[int, tuple[int, _Flight]],
    ) -> None:
        lane = table.take()
        left = [(i, run) for i, p in enumerate(self._programs[lane]) for run in range(p.count)]
        result = RunResult(lane, start_s=time.monotonic() - self._origin_s)
        self._send_run(slot, _Flight(number, request, result, left[::-1], dict(request.state())), flights)

    def _send_run(self, slot: int, flight: _Flight, flights: dict[int, tuple[int, _Flight]]) -> None:
        """Starts the next run of a request on every device that takes part in it."""
        index, run = flight.left.pop()
        program = self._programs[flight.result.lane][index]
        last = flight.result.outputs[-1] if flight.result.outputs else {}
        inputs = pack_all(flight.request.inputs(program.step, run, last)) if _computes(program) else {}
        fresh = self._take_state(flight, program)
        devices = _participants(program, set(fresh))
        self._tickets += 1
        flight.step, flight.missing, flight.outputs = program.step, len(devices), {}
        flights[self._tickets] = (slot, flight)
        for device in devices:
            order = worker.Begin(
                self._tickets, slot, flight.result.lane, index, inputs, fresh.get(device, {}), not flight.left
            )
            self._order(device, order)

    def _take_state(self, flight: _Flight, program: Program) -> dict[int, dict[str, Packed]]:
        """Device -> the state that lives there and that this run is the first to use."""
        buffers = self._plan.unit.graphs[program.step].trace.buffers
        found: dict[int, dict[str, Packed]] = {}
        for buffer, device in program.homes:
            name = buffers[buffer].name
            if name in flight.state:
                found.setdefault(device, {})[name] = pack(flight.state.pop(name))
        return found

    def _order(self, device: int, order: worker.Begin) -> None:
        try:
            self._orders[device].send(order)
        except OSError as error:
            raise self._lost(device) from error

    def _collect(self, flight: _Flight, slot: int, device: int, done: worker.Done) -> None:
        flight.missing -= 1
        flight.outputs |= unpack_all(done.outputs)
        flight.result.state |= unpack_all(done.state)
        name = self._plan.cluster.devices[device].name
        trace = self._plan.unit.graphs[flight.step].trace
        for launch, start, stop in done.spans:
            begin, end = ((t - self._origin_s) * 1e6 for t in (start, stop))
            label = trace.kernel_of(launch).name
            self._spans.append(Span(name, label, flight.number, slot, begin, end))

    def _next_answer(self, kind: type[T]) -> tuple[int, T]:
        """The next message of any worker, which must be of the expected kind."""
        assert self._inbox is not None, "an engine runs inside its with statement"
        news = self._inbox.take(block=True)
        assert news is not None, "a blocking take has a message"
        device, answer = news
        if isinstance(answer, kind):
            return device, answer
        raise self._lost(device) if isinstance(answer, Hangup) else self._failed(device, answer)

    def _failed(self, device: int, answer: object) -> WorkerError:
        place = f"device {self._plan.cluster.devices[device].name}"
        if isinstance(answer, TesseraError):
            return WorkerError(answer.message, answer.remedy, place)
        return WorkerError(str(answer), "The other workers were ended; nothing was left running.", place)

    def _lost(self, device: int) -> WorkerError:
        self._processes[device].join(STOP_TIMEOUT_S)
        code = self._processes[device].exitcode
        return WorkerError(
            f"the worker process ended before its work was done (exit code {code})",
            "Check the memory of this machine, then run again.",
            f"device {self._plan.cluster.devices[device].name}",
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        setups, answers, theirs = self._setups(context)
        with _children_ignore_interrupts():
            for device, setup in enumerate(setups):
                name = f"tessera-{self._plan.cluster.devices[device].name}"
                process = context.Process(target=worker.main, args=(setup,), name=name, daemon=True)
                process.start()
                self._processes.append(process)
        for pipe in theirs:  # so that a pipe is closed when the worker that holds its end is gone
            pipe.close()
        self._inbox = Inbox(answers)
        for _ in self._processes:
            self._next_answer(worker.Ready)

    def _setups(
        self, context: multiprocessing.context.SpawnContext
    ) -> tuple[list[worker.Setup], list[Connection], list[Connection]]:
        """What each worker is born with, the pipes it answers through, and its ends of all pipes."""
        num = len(self._plan.cluster.devices)
        traces = tuple(g.trace for g in self._plan.unit.graphs)
        sends, recvs, theirs = self._wires(context, num)
        setups, answers = [], []
        for device in range(num):
            orders_in, orders_out = context.Pipe(duplex=False)
            answers_in, answers_out = context.Pipe(duplex=False)
            self._orders.append(orders_out)
            answers.append(answers_in)
            theirs += [orders_in, answers_out]
            setups.append(
                worker.Setup(
                    device, traces, self._programs, self._weights_of(device), sends[device],
                    recvs[device], orders_in, answers_out, self._num_threads,
                )
            )  # fmt: skip
        return setups, answers, theirs

    def _wires(
        self, context: multiprocessing.context.SpawnContext, num: int
    ) -> tuple[list[dict[int, Wire]], list[dict[int, Wire]], list[Connection]]:
        """An arena and a pipe for every two devices that some program joins."""
        sends: list[dict[int, Wire]] = [{} for _ in range(num)]
        recvs: list[dict[int, Wire]] = [{} for _ in range(num)]
        theirs: list[Connection] = []
        for src in range(num):
            for dst in range(num):
                size = slot_bytes(self._programs, src, dst)
                if size:
                    arena = torch.zeros(size * self._plan.slots, dtype=torch.uint8).share_memory_()
                    receive, send = context.Pipe(duplex=False)
                    sends[src][dst] = Wire(src, dst, arena, size, send)
                    recvs[dst][src] = Wire(src, dst, arena, size, receive)
                    theirs += [receive, send]
        return sends, recvs, theirs

    def _weights_of(self, device: int) -> dict[str, torch.Tensor]:
        """Weights that some lane reads on this device."""
        names = {
            self._plan.unit.graphs[p.step].trace.buffers[b].name
            for lane in self._programs
            for p in lane
            for b in p.weights[device]
        }
        return {name: tensor for name, tensor in self._weights.items() if name in names}

    def _stop(self) -> None:
        """Hangs up; a worker that does not leave by itself is ended."""
        for pipe in self._orders:
            pipe.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        if self._inbox is not None:
            self._inbox.join(STOP_TIMEOUT_S)
        self._orders, self._processes, self._inbox = [], [], None


def _computes(program: Program) -> bool:
    """False for a program that only moves state."""
    return any(isinstance(i, Run) for column in program.instructions for i in column)


def _participants(program: Program, taking: set[int]) -> list[int]:
    """Devices with something to do: instructions, an output to hand over, or state to take in."""
    holding = {device for _, device in program.outputs} | taking
    return [d for d, column in enumerate(program.instructions) if column or d in holding]


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; only the engine should act on it."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread: the caller's interrupts are not ours to touch
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
