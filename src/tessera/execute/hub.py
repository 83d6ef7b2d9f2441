"""Hub: the workers of a stepper, the ways to them, and how lost ones come back.

A hub starts one worker per device, each in a thread of its own that nobody waits for, carries messages, and
sees to it that none is left: a worker ends when its connection closes, and one that does not is killed. A
worker that is lost, also one that has not started yet, is started again: at once, and from the third time in
a row on after pauses that grow. What it cannot do is judge who is lost; that is the stepper's.

A device's workers are counted (epoch). What an earlier one still says is not heard.

Workers are processes of this machine; what a hub of other machines (`remote`) does differently is `_open`.
"""

import contextlib
import fcntl
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
import torch.multiprocessing  # teaches pickle to pass tensors through shared memory

from tessera.errors import TesseraError
from tessera.execute import messages, worker
from tessera.execute.messages import Failed, LoadLanes, Message, Relink, StoreGet, StoreSet, WorkerReady
from tessera.execute.orders import Board
from tessera.execute.pipes import (
    FORKSERVER,
    NOBODY,
    Hangup,
    Inbox,
    Outbox,
    Wake,
    framed,
    hand_over,
    socket_of,
    warm_up,
)
from tessera.execute.setups import Setup
from tessera.execute.stepper import DeviceState, DeviceStatus
from tessera.execute.transport import HOST, RESTART_TOGETHER
from tessera.ir import BufferKind, Program, Trace

# A worker that was told to leave has this long before it is ended.
STOP_TIMEOUT_S = 5.0
# Workers that have not loaded everything after this long never will.
START_TIMEOUT_S = 300.0
# A worker whose connection has closed is given this long to say how it ended.
LEAVE_S = 0.2
# A device that has worked this long is healthy again, as is one that has finished a step.
HEALTHY_S = 60.0
# The first failures in a row cost no pause; those behind wait so long, doubling.
QUICK_FAILURES, FIRST_PAUSE_S, MAX_PAUSE_S = 2, 10.0, 300.0
# Bytes of a worker's message beside its tensors: reports of launches and transfers, names.
SLACK_BYTES = 64 << 20
KEY_BYTES = 32
LOOPBACK = "127.0.0.1"

_hiding = threading.Lock()
# The program itself first; one entry for everybody who hides it.
_hidden: list[types.ModuleType] = []


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keeps workers from importing the program that starts them: it takes time, and may run it again."""
    with _hiding:
        _hidden.append(sys.modules["__main__"])
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        with _hiding:
            last = _hidden.pop()
            if not _hidden:
                sys.modules["__main__"] = last


@dataclass(frozen=True, slots=True)
class Up:
    """News: the worker of a device is ready."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LostWorker:
    """What became of a worker that was given up, and what is done about its device."""

    # How it went, in words.
    how: str
    # In a row, this one included.
    failures: int
    # Seconds until another worker is started; None: none is.
    retry_s: float | None


class Line(Protocol):
    """The way to one worker, and the hold on it."""

    # For orders and answers.
    pipe: Connection
    # None until the worker says.
    pid: int | None

    def end(self, timeout_s: float) -> str:
        """Makes sure that the worker is gone; it may leave by itself for so long. How it went, in words."""


@dataclass(slots=True)
class _Member:
    state: DeviceState = "lost"
    # Counts the workers of this device; of the one that is there, or of the next.
    epoch: int = 0
    line: Line | None = None
    outbox: Outbox | None = None
    pid: int | None = None
    # What the others were, and how many lanes there were, when it was started.
    epochs: tuple[int, ...] = ()
    num_lanes: int = 0
    failures: int = 0
    started_s: float = 0.0
    ready_s: float | None = None
    # When another is to be started; None: there is one, or there will be none.
    due_s: float | None = 0.0
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Opened:
    """News to itself: a worker can be talked to."""

    line: Line


@dataclass
class _Process:
    process: BaseProcess
    pipe: Connection
    pid: int | None

    def end(self, timeout_s: float) -> str:
        self.process.join(timeout_s)
        if not self.process.is_alive():
            return f"exit code {self.process.exitcode}"
        self.process.kill()
        self.process.join(STOP_TIMEOUT_S)
        return "killed by the engine"


def _hand_over(pipe: Connection, setup: Setup) -> None:
    """In a thread of its own: a worker that is stopped does not read."""
    with pipe, contextlib.suppress(OSError):  # one that is gone is heard of as a hang-up
        hand_over(pipe, setup)


class Hub:
    """Used by one thread, but for `wake`.

    setups  what each worker is born with; the hub adds key, epochs and where links listen
    method  how processes are started: by themselves (spawn), or, for programs of Tessera's own, FORKSERVER
    """

    # After so many failures in a row a device is given up for good; None: never.
    max_failures: int | None = None

    def __init__(self, names: Sequence[str], setups: Sequence[Setup], method: str = FORKSERVER) -> None:
        self.names, self._method = names, method
        key = secrets.token_bytes(KEY_BYTES)
        self.setups = [replace(setup, key=key) for setup in setups]
        self._folder, self._lock = "", -1
        self._members = [_Member() for _ in names]
        self._inbox = Inbox()
        # True while a Wake is in the inbox: more of them would only delay what workers say.
        self._is_woken = False
        self._store = Board(self._tell)
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()

    @property
    def restarts_together(self) -> bool:
        """True if the loss of one worker takes all of them down."""
        return self.setups[0].transport in RESTART_TOGETHER

    def start(self) -> None:
        """Begins to start all workers; returns at once. `take` tells of each when it is up."""
        home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix=f"tessera-{os.getpid()}-", dir=home)
        self._lock = os.open(os.path.join(self._folder, worker.LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for device, setup in enumerate(self.setups):
            progress = torch.full((setup.microbatches, 2), -1, dtype=torch.int64).share_memory_()
            host = setup.host or (LOOPBACK if setup.transport == HOST else "")
            self.setups[device] = replace(setup, folder=self._folder, host=host, progress=progress)
        if self._method == FORKSERVER:
            warm_up()
        self._start_due()

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next message of any worker, or an Up, or a Hangup if it is gone; None after the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._start_due()
            starting = [(d, m) for d, m in enumerate(self._members) if m.state == "starting" and m.line]
            late = [(m.started_s + START_TIMEOUT_S, d) for d, m in starting]
            if late and min(late)[0] <= time.monotonic():
                return min(late)[1], Hangup(f"it was not ready after {START_TIMEOUT_S:.0f} s")
            times = [t for t in (deadline, *(m.due_s for m in self._members)) if t is not None]
            times += [at_s for at_s, _ in late]
            wait_s = max(0.0, min(times) - time.monotonic()) if times else None
            news = self._inbox.take(True, wait_s)
            if news is not None:
                found = self._hear(*news)
                if found is not None:
                    return found
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    def order(self, device: int, message: Message) -> bool:
        """Sends to a worker, without waiting for it; False if it is not there."""
        return self.send(device, messages.encode(message))

    def send(self, device: int, data: bytes) -> bool:
        """Likewise, what is encoded already."""
        outbox = self._members[device].outbox
        return outbox is not None and outbox.post(*framed(data))

    def wake(self) -> None:
        """Makes `take` return a Wake of nobody; from any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._inbox.post(NOBODY, Wake())

    def lose(self, device: int, *, counts: bool = True) -> LostWorker:
        """Ends a worker and has another started; not counted if it was no fault of this device."""
        member, now = self._members[device], time.monotonic()
        if member.ready_s is not None and now - member.ready_s >= HEALTHY_S:
            member.failures = 0
        member.failures += counts
        how = self._end(member, LEAVE_S)
        self._store.forget(device, member.epoch)
        member.epoch += 1
        member.state, member.ready_s, member.pid = "lost", None, None
        is_given_up = self.max_failures is not None and member.failures >= self.max_failures
        retry_s = None if is_given_up else pause_s(member.failures)
        member.due_s = None if retry_s is None else now + retry_s
        self._start_due()
        return LostWorker(how, member.failures, retry_s)

    def healthy(self, device: int) -> None:
        self._members[device].failures = 0

    def load(self, first_lane: int, programs: Sequence[Sequence[Program]]) -> None:
        """More lanes, for workers that are there and for those to come."""
        packed = messages.pack_programs(programs)
        for device, setup in enumerate(self.setups):
            self.setups[device] = replace(setup, programs=(*setup.programs, *map(tuple, programs)))
            if self._members[device].state == "ready":
                self._members[device].num_lanes = first_lane + len(programs)
                self.order(device, LoadLanes(first_lane, packed))

    def relink(self, device: int, other: int) -> None:
        for one, two in ((device, other), (other, device)):
            self.order(one, Relink(two, self._members[two].epoch))

    def status(self, device: int) -> DeviceStatus:
        member = self._members[device]
        # A worker that is lost has an epoch's successor, which has not started.
        return DeviceStatus(member.state, member.pid, max(0, member.epoch - (member.state == "lost")))

    def epoch(self, device: int) -> int:
        """Which worker of the device it is, counted from 0."""
        return self._members[device].epoch

    def is_ready(self, device: int) -> bool:
        return self._members[device].state == "ready"

    def progress(self, device: int) -> dict[int, tuple[int, int]]:
        """Microbatch -> (run, position), also of a dead worker; nothing where no memory is shared."""
        shared = self.setups[device].progress
        if shared is None:
            return {}
        return {m: (run, position) for m, (run, position) in enumerate(shared.tolist()) if run >= 0}

    def clock_offset_s(self, device: int) -> float:
        """What to add to a worker's clock to have this one's; 0 on one machine."""
        return self._members[device].offset_s

    def stop(self) -> None:
        """Ends all workers, also those that are being started."""
        self._is_over.set()
        for member in self._members:
            if member.outbox is not None:
                member.outbox.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for member in self._members:
            member.due_s = None
            self._end(member, max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        while (news := self._inbox.take(False)) is not None:
            if isinstance(news[1], _Opened):
                news[1].line.end(0.0)
        self._close()

    def max_bytes(self) -> int:
        """How long a worker's message may be: what its steps can hand over, and some."""
        return SLACK_BYTES + sum(map(_handed_over_bytes, self.setups[0].traces))

    def _open(self, device: int, setup: Setup, is_over: Callable[[], bool]) -> Line:
        """Starts one worker or waits for it to call; in a thread of its own, as long as it takes.

        Raises TesseraError with the reason. `is_over` says that nobody waits for it any more.
        """
        context = multiprocessing.get_context(self._method)
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(  # type: ignore[attr-defined]
            target=worker.main,
            args=(theirs, self._folder),
            name=f"tessera-{self.names[device]}",
            daemon=True,
        )
        # Its end is closed here, so that the connection is when the worker that holds it is gone.
        with theirs, hidden_main():
            process.start()
        own = Connection(os.dup(ours.fileno()))
        threading.Thread(target=_hand_over, args=(own, setup), daemon=True).start()
        return _Process(process, ours, process.pid)

    def _close(self) -> None:
        """After all workers are gone."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = ""

    def _setup(self, device: int) -> Setup:
        """What the next worker of a device is born with."""
        shared = self.setups[device].progress
        if shared is not None:
            shared.fill_(-1)
        epochs = tuple(m.epoch for m in self._members)
        return replace(self.setups[device], epoch=epochs[device], epochs=epochs)

    def _start_due(self) -> None:
        now = time.monotonic()
        for device, member in enumerate(self._members):
            if member.due_s is None or member.due_s > now or self._is_over.is_set():
                continue
            setup = self._setup(device)
            member.state, member.due_s, member.started_s = "starting", None, now
            member.epochs, member.num_lanes = setup.epochs, len(setup.programs)
            self._threads = [t for t in self._threads if t.is_alive()]
            thread = threading.Thread(target=self._try_open, args=(device, setup), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _try_open(self, device: int, setup: Setup) -> None:
        """One start, in its own thread."""

        def is_over() -> bool:
            return self._is_over.is_set() or self._members[device].epoch != setup.epoch

        news: _Opened | Failed | Hangup
        try:
            news = _Opened(self._open(device, setup, is_over))
        except TesseraError as error:
            news = Failed(error.message, error.remedy)
        except (OSError, EOFError) as error:  # it died at once, or there is no room for a process
            news = Hangup(f"it could not be started ({error})")
        self._inbox.post((device, setup.epoch), news)

    def _hear(self, source: Any, message: Any) -> tuple[int, Any] | None:
        """What is news to the stepper."""
        if isinstance(message, Wake):
            self._is_woken = False
            return NOBODY, message
        device, epoch = source
        member = self._members[device]
        if epoch != member.epoch:  # an earlier worker, or its last words
            if isinstance(message, _Opened):
                message.line.end(0.0)
            return None
        if isinstance(message, _Opened):
            self._take_in(device, message.line)
            return None
        if isinstance(message, WorkerReady) and member.state == "starting":
            return device, self._welcome(device, message)
        return device, message

    def _take_in(self, device: int, line: Line) -> None:
        member = self._members[device]
        member.line, member.pid, member.outbox = line, line.pid, Outbox(socket_of(line.pipe))
        member.started_s = time.monotonic()
        self._inbox.listen((device, member.epoch), line.pipe, messages.decode, self._answer, self.max_bytes)

    def _welcome(self, device: int, ready: WorkerReady) -> Up:
        """Tells a worker that is ready, and the others, what changed while it started."""
        member = self._members[device]
        member.state, member.ready_s = "ready", time.monotonic()
        member.pid = ready.pid if member.pid is None else member.pid
        if lanes := self.setups[device].programs[member.num_lanes :]:
            self.order(device, LoadLanes(member.num_lanes, messages.pack_programs(lanes)))
        for peer, other in enumerate(self._members):
            if peer == device:
                continue
            if other.state == "ready" and other.epochs[device] != member.epoch:
                self.order(peer, Relink(device, member.epoch))
            if other.epoch != member.epochs[peer]:
                self.order(device, Relink(peer, other.epoch))
        return Up(member.epoch)

    def _answer(self, source: Any, message: Any) -> bool:
        """In the reading threads: what workers ask of one another is answered at any time."""
        match message:
            case StoreSet(key, value):
                self._store.set(key, value)
            case StoreGet(key):
                self._store.get(source, key)
            case _:
                return False
        return True

    def _tell(self, source: tuple[int, int], message: Message) -> None:
        device, epoch = source
        if self._members[device].epoch == epoch:
            self.order(device, message)

    def _end(self, member: _Member, timeout_s: float) -> str:
        """How the worker went that was there."""
        line, outbox = member.line, member.outbox
        member.line = member.outbox = None
        if outbox is not None:
            outbox.close()
        return line.end(timeout_s) if line is not None else "it had not started"


def pause_s(failures: int) -> float:
    """How long a device is left alone after so many failures in a row."""
    if failures <= QUICK_FAILURES:
        return 0.0
    return float(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - QUICK_FAILURES - 1, 16)))


def _handed_over_bytes(trace: Trace) -> int:
    state = sum(trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.STATE))
    return state + sum(trace.buffers[view.buffer].size_bytes for _, view in trace.outputs)
