"""worker: one process, one device.

The loop takes news from its inbox (orders from the engine, arrivals from other workers), asks the queue
what can go on, and runs it until it must wait. The plain loop beside it does one instruction at a time, in
the order of the runs, and waits for each: slow, and simple enough to compare with. A worker ends when the
engine hangs up, so no worker outlives its engine.

Memory is taken when a program first runs in a microbatch, and kept; see `stand`.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from tessera.errors import TesseraError
from tessera.execute import messages
from tessera.execute.inbox import Hangup, Inbox
from tessera.execute.kernel_launch import Interpret, handed_in
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Storage, bytes_of, constant, tensor_of
from tessera.execute.messages import Begin, Cancel, Clear, Done, Failed, PeerLost, Ready
from tessera.execute.packing import pack, unpack
from tessera.execute.schedule import Job, Queue
from tessera.execute.stand import Ground, Stand
from tessera.execute.transport import Arrived, Gone, Left, Parcel, Transport
from tessera.ir import BufferKind, Free, Instruction, Program, Recv, Run, Send, Trace

ENGINE, PEERS = 0, 1


@dataclass
class Setup:
    """What a worker is born with."""

    device: int
    traces: tuple[Trace, ...]
    # programs[lane][index], the lanes of all plans one after another.
    programs: Sequence[Sequence[Program]]
    # Weight name -> shared tensor; only those that some lane reads on this device.
    weights: dict[str, torch.Tensor]
    slots: int
    # Bytes of one slot's arena.
    slot_bytes: int
    num_threads: int = 1
    is_plain: bool = False
    # progress[slot] = (ticket, position): where this worker is, in memory that the engine sees.
    progress: torch.Tensor | None = None
    # Runs kernels with PTX on the CPU; see `kernel_launch`.
    interpret: Interpret | None = field(default_factory=handed_in)
    # us[step][launch]: modelled time on this device, which decides who goes first; see `schedule`.
    us: tuple[tuple[float, ...], ...] = ()


@dataclass
class _Active:
    """A run in progress."""

    order: Begin
    stand: Stand
    spans: list[list[float]] = field(default_factory=list)
    busy_s: float = 0.0


class Worker:
    """The device's memory and its loop."""

    def __init__(self, setup: Setup, transport: Transport, orders: Connection, answers: Connection) -> None:
        self._setup, self._transport, self._answers = setup, transport, answers
        self._queue = Queue()
        self._active: dict[int, _Active] = {}
        self._cancelled: set[int] = set()
        # Ticket -> [transfer, start, arrival] of what has come; a run's transfers may come before its order.
        self._arrivals: dict[int, list[list[float]]] = {}
        self._launchers = [Launcher(t, torch.device("cpu"), setup.interpret) for t in setup.traces]
        weights = [self._bind_weights(t) for t in setup.traces]
        self._ground = Ground(setup.traces, setup.device, weights)
        # (slot, lane, index)
        self._stands: dict[tuple[int, int, int], Stand] = {}
        self._progress = None if setup.progress is None else setup.progress.numpy().reshape(-1).data
        # Where the worker is: (slot, ticket, position), for the message of an error.
        self.at = (-1, -1, -1)
        self._inbox = Inbox()
        self._inbox.listen({ENGINE: orders}, messages.decode)
        transport.start(lambda news: self._inbox.post(PEERS, news))

    def loop(self) -> None:
        """Until the engine hangs up."""
        self._tell(Ready(time.monotonic()))
        while True:
            job = self._pick()
            news = self._inbox.take(block=job is None)
            if news is not None:
                if not self._handle(*news):
                    return
            elif job is not None:
                self._go_on(job)

    def _tell(self, message: messages.Message) -> None:
        self._answers.send_bytes(messages.encode(message))

    def _pick(self) -> Job | None:
        """What can go on; in the plain loop only the oldest run may."""
        if not self._setup.is_plain:
            return self._queue.pick()
        oldest = next(iter(self._active), None)
        job = None if oldest is None else self._queue[oldest]
        return job if job is not None and job.is_ready else None

    def _handle(self, source: int, news: Any) -> bool:
        """Takes in one message; False when the engine is gone."""
        match news:
            case Hangup():
                return False
            case Begin():
                self._begin(news)
            case Cancel(ticket):
                self._cancel(ticket)
            case Clear(slot, lane):
                self._clear(slot, lane)
            case Arrived(ticket, number, start, stop):
                if ticket not in self._cancelled:
                    self._queue.deliver(ticket, number)
                    self._arrivals.setdefault(ticket, []).append([number, start, stop])
            case Left(ticket, number):
                if ticket in self._active:
                    self._queue.deliver(ticket, number)
            case Gone(device, message):
                self._tell(PeerLost(device, message))
            case _:
                raise TesseraError(f"a worker was sent {type(news).__name__} by {source}")
        return True

    def _go_on(self, job: Job) -> None:
        """Runs one launch of a job and what goes with it, and more while nothing else could be picked.

        In the plain loop, one instruction.
        """
        active = self._active[job.ticket]
        while True:
            for instruction in job.turn():
                if not isinstance(instruction, Free):  # what is here stays; see `stand`
                    self._note(active.order, job.position - 1)
                    self._issue(instruction, active)
                if self._setup.is_plain:
                    break
            if self._setup.is_plain or not self._is_alone(job):
                break
        if job.is_done:
            self._queue.drop(job.ticket)
            self._finish(self._active.pop(job.ticket))
        else:  # what it waits for is behind this
            self._note(active.order, job.position - 1)

    def _is_alone(self, job: Job) -> bool:
        """True if this job can go on, and there is no other and no news."""
        return len(self._queue) == 1 and self._inbox.is_empty and job.is_ready

    def _note(self, order: Begin, position: int) -> None:
        self.at = (order.slot, order.ticket, position)
        if self._progress is not None:
            self._progress[2 * order.slot] = order.ticket
            self._progress[2 * order.slot + 1] = position

    def _issue(self, instruction: Instruction, active: _Active) -> None:
        match instruction:
            case Run(launch):
                self._launch(launch, active)
            case Send(number):
                transfer = active.stand.program.transfers[number]
                contents = bytes_of(active.stand.memory.get(transfer.buffer), transfer.start, transfer.stop)
                self._transport.send(self._parcel(active, number), contents)
            case Recv(number):
                transfer = active.stand.program.transfers[number]
                place = bytes_of(active.stand.memory.get(transfer.buffer), transfer.start, transfer.stop)
                place.copy_(self._transport.fetch(self._parcel(active, number)))
            case Free():
                pass

    def _launch(self, launch: int, active: _Active) -> None:
        wants_spans = active.order.wants_spans
        start, cpu = time.monotonic(), time.thread_time() if wants_spans else 0.0
        self._launchers[active.stand.program.step].run(launch, active.stand.memory)
        stop = time.monotonic()
        active.busy_s += stop - start
        if wants_spans:
            active.spans.append([launch, start, stop, time.thread_time() - cpu])

    def _parcel(self, active: _Active, number: int) -> Parcel:
        return Parcel(active.stand.program, active.order.slot, active.order.ticket, number)

    def _begin(self, order: Begin) -> None:
        stand = self._stand(order.slot, order.lane, order.index)
        for name, packed in (*order.inputs.items(), *order.state.items()):
            if name in stand.given:
                stand.memory.put(stand.given[name], unpack(packed).untyped_storage())
        self._active[order.ticket] = _Active(order, stand)
        instructions = stand.program.instructions[self._setup.device]
        job = Job(order.slot, order.ticket, instructions, until_wait_us=stand.until_wait_us)
        self._queue.add(job)
        if job.is_done:  # holds an output or takes state in, and runs nothing
            self._queue.drop(order.ticket)
            self._finish(self._active.pop(order.ticket))

    def _stand(self, slot: int, lane: int, index: int) -> Stand:
        key = (slot, lane, index)
        if key not in self._stands:
            program = self._setup.programs[lane][index]
            us = self._setup.us[program.step] if self._setup.us else ()
            self._stands[key] = self._ground.stand(slot, program, us)
        return self._stands[key]

    def _clear(self, slot: int, lane: int) -> None:
        for index in range(len(self._setup.programs[lane])):
            for contents in self._stand(slot, lane, index).state.values():
                contents.zero_()

    def _cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)
        self._arrivals.pop(ticket, None)
        self._transport.forget(ticket)
        if self._active.pop(ticket, None) is not None:
            self._queue.drop(ticket)

    def _finish(self, active: _Active) -> None:
        order, stand = active.order, active.stand
        self._note(order, -1)
        skips = order.skips.split(",")
        outputs = {
            name: pack(tensor_of(stand.memory.get(view.buffer), view))
            for name, view in stand.outputs.items()
            if name not in skips
        }
        state = {name: pack(contents) for name, contents in stand.state.items()} if order.wants_state else {}
        moved = self._arrivals.pop(order.ticket, [])
        told = moved if order.wants_spans else []
        self._tell(Done(order.ticket, outputs, state, active.spans, told, active.busy_s))

    def _bind_weights(self, trace: Trace) -> dict[int, Storage]:
        held = {}
        for index in trace.buffers_of(BufferKind.WEIGHT):
            buffer = trace.buffers[index]
            if buffer.constant_hex:
                held[index] = constant(buffer)
            elif buffer.name in self._setup.weights:
                held[index] = self._setup.weights[buffer.name].untyped_storage()
        return held


def main(setup: Setup, opener: Any, orders: Connection, answers: Connection) -> None:
    """The process's entry; an error goes to the engine, which tells the user."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the engine acts on it
    serve(setup, opener, orders, answers)
    os._exit(0)  # threads of torch.distributed may still wait for peers that are gone


def serve(setup: Setup, opener: Any, orders: Connection, answers: Connection) -> None:
    """One worker until its engine hangs up."""
    torch.set_num_threads(setup.num_threads)
    torch.set_grad_enabled(False)
    worker: Worker | None = None
    transport: Transport | None = None
    try:
        transport = opener(orders, answers)
        worker = Worker(setup, transport, orders, answers)
        worker.loop()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone
    except TesseraError as error:
        _tell_failure(answers, worker, error.message, error.remedy)
    except Exception as error:  # noqa: BLE001 - a process boundary: the engine must hear of anything
        text = f"{type(error).__name__}: {error}"
        if worker is None and isinstance(error, (RuntimeError, MemoryError)):
            text = f"could not take {setup.slots * setup.slot_bytes:,} bytes for its slots: {text}"
        _tell_failure(answers, worker, text, "")
    finally:
        if transport is not None:
            transport.close()


def _tell_failure(answers: Connection, worker: Worker | None, message: str, remedy: str) -> None:
    at = worker.at if worker is not None else (-1, -1, -1)
    try:
        answers.send_bytes(messages.encode(Failed(message, remedy, *at)))
    except OSError:
        return
