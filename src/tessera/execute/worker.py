"""worker: one process, one device.

The loop takes news from its inbox (orders from the engine, arrivals from other workers), asks the queue
what can go on, and runs it until it must wait. It ends when the engine hangs up, so no worker outlives its
engine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from tessera.errors import TesseraError
from tessera.execute.inbox import Hangup, Inbox
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, Storage, allocate, bytes_of, constant, tensor_of
from tessera.execute.packing import Packed, pack, unpack
from tessera.execute.schedule import Job, Queue
from tessera.execute.transport import Wire
from tessera.ir import BufferKind, Free, Instruction, Program, Recv, Run, Send, Trace


@dataclass(frozen=True)
class Begin:
    """The engine's order: run one program of one lane in one slot."""

    ticket: int
    slot: int
    lane: int
    index: int
    inputs: dict[str, Packed]
    # State by name that lives here and that no run of the request has used before.
    state: dict[str, Packed]
    # True to hand the state back when the run is done.
    wants_state: bool


class Ready:
    """The worker's first answer: it has loaded everything and waits for orders."""


@dataclass(frozen=True)
class Done:
    """The worker's answer."""

    ticket: int
    outputs: dict[str, Packed]
    state: dict[str, Packed]
    # (launch, start, stop) by the machine's monotonic clock, in seconds.
    spans: list[tuple[int, float, float]]


@dataclass
class Setup:
    """What a worker is born with."""

    device: int
    traces: tuple[Trace, ...]
    # programs[lane][index]
    programs: Sequence[Sequence[Program]]
    # Weight name -> shared tensor; only those that some lane reads on this device.
    weights: dict[str, torch.Tensor]
    sends: dict[int, Wire]
    recvs: dict[int, Wire]
    # From the engine, and to it.
    orders: Connection
    answers: Connection
    num_threads: int


@dataclass
class _Active:
    """A run in progress."""

    order: Begin
    program: Program
    memory: Memory
    spans: list[tuple[int, float, float]] = field(default_factory=list)


class Worker:
    """The device's state and its loop."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._queue = Queue()
        self._active: dict[int, _Active] = {}
        # state[slot][name]: survives from one run of a request to the next.
        self._state: dict[int, dict[str, Storage]] = {}
        self._launchers = [Launcher(t, torch.device("cpu")) for t in setup.traces]
        self._weights = [self._bind_weights(t) for t in setup.traces]
        self._inbox = Inbox([setup.orders, *(wire.pipe for wire in setup.recvs.values())])

    def loop(self) -> None:
        """Until the engine hangs up."""
        self._setup.answers.send(Ready())
        while True:
            job = self._queue.pick()
            news = self._inbox.take(block=job is None)
            if news is not None:
                if not self._handle(*news):
                    return
            elif job is not None:
                self._stretch(job)

    def _handle(self, source: int, news: Any) -> bool:
        """Takes in one message; False when the engine is gone."""
        if isinstance(news, Hangup):
            return source != 0  # a lost peer is the engine's to report
        if source == 0:
            self._begin(news)
        else:
            self._queue.deliver(*news)
        return True

    def _stretch(self, job: Job) -> None:
        """Runs a job until it must wait or is done."""
        active = self._active[job.ticket]
        while job.is_ready:
            self._issue(job.issue(), active)
        if job.is_done:
            self._queue.drop(job.ticket)
            self._setup.answers.send(self._done(self._active.pop(job.ticket)))

    def _issue(self, instruction: Instruction, active: _Active) -> None:
        match instruction:
            case Run(launch):
                start = time.monotonic()
                self._launchers[active.program.step].run(launch, active.memory)
                active.spans.append((launch, start, time.monotonic()))
            case Send(number):
                transfer = active.program.transfers[number]
                contents = bytes_of(active.memory.get(transfer.buffer), transfer.start, transfer.stop)
                wire = self._setup.sends[transfer.dst]
                wire.send(active.program, active.order.slot, active.order.ticket, number, contents)
            case Recv(number):
                self._receive(number, active)
            case Free(buffer):
                active.memory.free(buffer)

    def _receive(self, number: int, active: _Active) -> None:
        """Copies a transfer out of the arena, so that the arena's place is free for the next run."""
        transfer = active.program.transfers[number]
        buffer = self._trace(active).buffers[transfer.buffer]
        storage = allocate(buffer.size_bytes)
        source = self._setup.recvs[transfer.src].place(active.program, active.order.slot, number)
        bytes_of(storage, transfer.start, transfer.stop).copy_(source)
        active.memory.put(transfer.buffer, storage)
        if buffer.kind is BufferKind.STATE:
            self._state[active.order.slot][buffer.name] = storage

    def _trace(self, active: _Active) -> Trace:
        return self._setup.traces[active.program.step]

    def _begin(self, order: Begin) -> None:
        program = self._setup.programs[order.lane][order.index]
        trace = self._setup.traces[program.step]
        memory = Memory(self._weights[program.step])
        held = self._state.setdefault(order.slot, {})
        held |= {name: unpack(packed).untyped_storage() for name, packed in order.state.items()}
        for index, buffer in enumerate(trace.buffers):
            if buffer.kind is BufferKind.INPUT and buffer.name in order.inputs:
                memory.put(index, unpack(order.inputs[buffer.name]).untyped_storage())
            elif buffer.kind is BufferKind.STATE and buffer.name in held:
                memory.put(index, held[buffer.name])
            elif buffer.size_bytes == 0:  # nobody sends it, and everybody may name it
                memory.put(index, allocate(0))
        self._active[order.ticket] = _Active(order, program, memory)
        self._queue.add(Job(order.slot, order.ticket, program.instructions[self._setup.device]))
        if not program.instructions[self._setup.device]:  # holds an output and runs nothing
            self._queue.drop(order.ticket)
            self._setup.answers.send(self._done(self._active.pop(order.ticket)))

    def _done(self, active: _Active) -> Done:
        trace = self._trace(active)
        here = {name for name, device in active.program.outputs if device == self._setup.device}
        outputs = {
            name: pack(tensor_of(active.memory.get(view.buffer), view))
            for name, view in trace.outputs
            if name in here
        }
        state = {}
        if active.order.wants_state:
            for buffer, device in active.program.homes:
                if device == self._setup.device:
                    storage = active.memory.get(buffer)
                    state[trace.buffers[buffer].name] = pack(bytes_of(storage, 0, storage.nbytes()))
        return Done(active.order.ticket, outputs, state, active.spans)

    def _bind_weights(self, trace: Trace) -> dict[int, Storage]:
        held = {}
        for index in trace.buffers_of(BufferKind.WEIGHT):
            buffer = trace.buffers[index]
            if buffer.constant_hex:
                held[index] = constant(buffer)
            elif buffer.name in self._setup.weights:
                held[index] = self._setup.weights[buffer.name].untyped_storage()
        return held


def main(setup: Setup) -> None:
    """The process's entry; an error goes to the engine, which tells the user."""
    torch.set_num_threads(setup.num_threads)
    torch.set_grad_enabled(False)
    try:
        Worker(setup).loop()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone, or a peer died and the engine is about to say so
    except TesseraError as error:
        _tell(setup.answers, error)
    except Exception as error:  # noqa: BLE001 - a process boundary: the engine must hear of anything
        _tell(setup.answers, error)


def _tell(answers: Connection, error: Any) -> None:
    try:
        answers.send(error if isinstance(error, TesseraError) else f"{type(error).__name__}: {error}")
    except OSError:
        return
