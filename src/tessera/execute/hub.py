"""Hub: the worker processes of an engine on this machine, and the pipes to them.

A hub starts the workers, carries messages, and sees to it that none is left: a worker ends when its pipe
closes, and one that does not is killed. What it cannot do is judge; that is the engine's.
"""

import multiprocessing
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
import torch.multiprocessing  # teaches pickle to pass tensors through shared memory

from tessera.errors import WorkerError
from tessera.execute import messages, worker
from tessera.execute.collective import meetings
from tessera.execute.footprint import Programs, landing_bytes
from tessera.execute.inbox import NOBODY, Hangup, Inbox, Wake
from tessera.execute.messages import Failed, Message, Ready, StoreGet, StoreSet, StoreValue
from tessera.execute.transport import SharedMemory, Wire

# A worker that was told to leave has this long before it is ended.
STOP_TIMEOUT_S = 5.0
# Workers that have not loaded everything after this long never will.
START_TIMEOUT_S = 300.0
LOOPBACK = "127.0.0.1"


FORKSERVER = "forkserver"
# What a worker imports: done once, by the process that workers are forked from.
PRELOADED = ["tessera.execute.worker"]


def warm_up() -> None:
    """Starts the process that workers are forked from, if there is none; it imports what they need."""
    multiprocessing.get_context(FORKSERVER).set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keeps workers from importing the program that starts them: it takes time, and may run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Hub(Protocol):
    """The engine's way to its workers, wherever they are."""

    def start(self) -> None:
        """Returns when every worker is ready; raises WorkerError otherwise."""

    def order(self, device: int, message: Message) -> bool:
        """Sends to a worker; False if it is gone."""

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next message of any worker (a Hangup if it is gone); None after the timeout."""

    def wake(self) -> None:
        """Makes `take` return a Wake of no worker; from any thread."""

    def progress(self, device: int, slot: int) -> tuple[int, int] | None:
        """(ticket, position) of a worker in a slot, as far as it can be known from here."""

    def end(self, device: int) -> str:
        """Makes sure that a worker is gone; returns how it went, in words."""

    def stop(self) -> None:
        """Ends all workers."""

    def clock_offset_s(self, device: int) -> float:
        """What to add to a worker's clock to have the engine's."""


class Reception:
    """Workers that start: answers what they ask for until all are ready."""

    def __init__(self, names: Sequence[str], send: Callable[[int, Message], bool]) -> None:
        self._names, self._send = names, send
        self._values: dict[str, str] = {}
        self._asking: list[tuple[int, str]] = []
        self.offsets = [0.0] * len(names)

    def run(self, inbox: Inbox) -> None:
        """Until all are ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting = set(range(len(self._names)))
        while waiting:
            news = inbox.take(True, max(0.0, deadline - time.monotonic()))
            if news is None:
                late = ", ".join(self._names[d] for d in sorted(waiting))
                raise WorkerError(
                    f"not ready after {START_TIMEOUT_S:.0f} s", "Look at that machine.", f"device {late}"
                )
            device, message = news
            self._answer(device, message)
            if isinstance(message, Ready):
                self.offsets[device] = time.monotonic() - message.clock_s
                waiting.discard(device)

    def _answer(self, device: int, message: Any) -> None:
        place = f"device {self._names[device]}"
        match message:
            case StoreSet(key, value):
                self._values[key] = value
            case StoreGet(key):
                self._asking.append((device, key))
            case Failed(text, remedy):
                raise WorkerError(
                    f"could not start: {text}", remedy or "Lower --slots, or free memory.", place
                )
            case Hangup(reason):
                what = reason or "the worker ended while it started"
                raise WorkerError(what, "Check this machine's memory.", place)
        left = []
        for who, key in self._asking:
            if key in self._values:
                self._send(who, StoreValue(self._values[key]))
            else:
                left.append((who, key))
        self._asking = left


@dataclass(frozen=True)
class Shared:
    """Opens the shared-memory transport in the worker; made by the engine's side."""

    sends: Mapping[int, Wire]
    recvs: Mapping[int, Wire]

    def __call__(self, orders: Connection, answers: Connection) -> SharedMemory:
        return SharedMemory(self.sends, self.recvs)


@dataclass
class LocalHub:
    """One worker process a device, on this machine."""

    names: Sequence[str]
    setups: Sequence[worker.Setup]
    programs: Programs
    transport: str = "shm"
    # How processes are started: by themselves (spawn), or from one process that imports torch for all of them
    # (forkserver); that one stays until the program ends, so it is for programs that are Tessera's own.
    method: str = "spawn"
    _orders: list[Connection] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)
    _inbox: Inbox = field(default_factory=Inbox)
    _offsets: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Starts the processes and waits until all are ready."""
        context = multiprocessing.get_context(self.method)
        if self.method == FORKSERVER:
            warm_up()
        theirs: list[Connection] = []
        answers: dict[int, Connection] = {}
        openers = self._openers(context, theirs)
        for device, setup in enumerate(self.setups):
            orders_in, orders_out = context.Pipe(duplex=False)
            answers[device], answers_out = context.Pipe(duplex=False)
            self._orders.append(orders_out)
            theirs += [orders_in, answers_out]
            setup.progress = torch.full((setup.slots, 2), -1, dtype=torch.int64).share_memory_()
            process = context.Process(  # type: ignore[attr-defined]
                target=worker.main,
                args=(setup, openers[device], orders_in, answers_out),
                name=f"tessera-{self.names[device]}",
                daemon=True,
            )
            self._processes.append(process)
        with ThreadPoolExecutor(len(self._processes)) as pool:  # each start waits for its process to read
            list(pool.map(lambda process: process.start(), self._processes))
        for pipe in theirs:  # so that a pipe is closed when the worker that holds its end is gone
            pipe.close()
        self._inbox.listen(answers, messages.decode)
        reception = Reception(self.names, self.order)
        reception.run(self._inbox)
        self._offsets = reception.offsets

    def order(self, device: int, message: Message) -> bool:
        """Sends to a worker; False if it is gone."""
        return messages.post(self._orders[device], message)

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next message of any worker."""
        return self._inbox.take(True, timeout_s)

    def wake(self) -> None:
        """Makes `take` return."""
        self._inbox.post(NOBODY, Wake())

    def progress(self, device: int, slot: int) -> tuple[int, int] | None:
        """Read from memory that the worker writes, so it is known of a dead worker too."""
        shared = self.setups[device].progress
        if shared is None:
            return None
        ticket, position = shared[slot].tolist()
        return ticket, position

    def end(self, device: int) -> str:
        """Kills what still runs."""
        process = self._processes[device]
        process.join(0.2)
        if process.is_alive():
            process.kill()
            process.join(STOP_TIMEOUT_S)
            return "killed by the engine"
        return f"exit code {process.exitcode}"

    def clock_offset_s(self, device: int) -> float:
        """Processes of one machine share its monotonic clock."""
        return 0.0

    def stop(self) -> None:
        """Hangs up; a worker that does not leave by itself is ended."""
        for pipe in self._orders:
            pipe.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._inbox.join(STOP_TIMEOUT_S)
        self._orders, self._processes = [], []

    def _openers(self, context: BaseContext, theirs: list[Connection]) -> list[Any]:
        num = len(self.names)
        sizes = {
            (src, dst): landing_bytes(self.programs, src, dst)
            for src in range(num)
            for dst in range(num)
            if src != dst
        }
        joined = {ends: size for ends, size in sizes.items() if size}
        if self.transport != "shm":
            return list(meetings(self.transport, num, joined, [LOOPBACK] * num))
        return self._wires(context, joined, theirs)

    def _wires(
        self, context: BaseContext, joined: Mapping[tuple[int, int], int], theirs: list[Connection]
    ) -> list[Any]:
        """Shared memory and a pipe for every two devices that some program joins."""
        sends: list[dict[int, Wire]] = [{} for _ in self.names]
        recvs: list[dict[int, Wire]] = [{} for _ in self.names]
        for (src, dst), size in joined.items():
            arena = torch.zeros(size * self.setups[src].slots, dtype=torch.uint8).share_memory_()
            receive, send = context.Pipe(duplex=False)
            sends[src][dst] = Wire(src, dst, arena, size, send)
            recvs[dst][src] = Wire(src, dst, arena, size, receive)
            theirs += [receive, send]
        return [Shared(s, r) for s, r in zip(sends, recvs, strict=True)]
