"""Hub: the workers of a stepper. Starts them, carries messages, restarts lost ones.

A worker is a process that the hub starts, or a remote one that connects to the rendezvous, waits for a device
(`WorkerGroup`), gets its configuration and works until told to leave; then it connects again.

The stepper decides who is lost. A local worker that does not end with its connection is killed. Its device
restarts at once, and from the third failure in a row after growing pauses. Messages of a device's earlier
worker (epoch) are ignored. Clocks of machines are compared once, when a worker is ready.
"""

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.multiprocessing  # teaches pickle to pass tensors through shared memory

from tessera.errors import TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.mailbox import Hangup, Mailbox, PeerConnection
from tessera.execute.memory import sharing
from tessera.execute.processes import FORKSERVER, LocalProcess, warm_up
from tessera.execute.rendezvous import MAX_ASKED_BYTES, Board, Rendezvous, WorkerGroup
from tessera.execute.stepper import DeviceStatus, WorkerState
from tessera.execute.transport import RESTART_TOGETHER

# Time to leave before a worker is killed: when the hub stops, and when it is lost.
STOP_TIMEOUT_S, LEAVE_S = 5.0, 0.2
START_TIMEOUT_S = 300.0
# Work after which failures are forgotten.
HEALTHY_S = 60.0
# The first failures in a row cost no pause; the pause then doubles.
QUICK_FAILURES, FIRST_PAUSE_S, MAX_PAUSE_S = 2, 10.0, 300.0
# Bytes of a worker's message beside its tensors.
SLACK_BYTES = 64 << 20
# Time for a lost device's next remote worker to connect.
ABSENT_S = 20.0
# Remote workers lost during configuration before that counts as a failure.
MAX_CONFIGURED = 3
# Source of messages about no device.
NOBODY = -1
# Hardware queues of a worker, and of all on one card under CUDA MPS.
QUEUES, QUEUES_OF_CARD = 32, 64
NAME_BYTES = 16


class Wake:
    """`Hub.wake` was called."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    how: str
    failures: int
    retry_s: float | None


@dataclass(slots=True)
class WorkerMember:
    is_local: bool
    state: WorkerState = "lost"
    # The present worker's, or the next one's.
    epoch: int = 0
    setup: messages.Setup | None = None
    process: LocalProcess | None = None
    connection: PeerConnection | None = None
    pieces: messages.Pieces | None = None
    num_configured: int = 0
    pid: int | None = None
    address: str = ""
    failures: int = 0
    started_s: float = 0.0
    ready_s: float | None = None
    # When another worker is started; None: one exists, or none will.
    due_s: float | None = 0.0
    ask_s: float = float("inf")
    # From the worker's clock to this one; 0 on one machine.
    offset_s: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """True until a remote worker has connected."""
        return not self.is_local and self.state == "starting" and self.connection is None


class Hub:
    """Used by one thread, except `wake`.

    method  "spawn", or FORKSERVER for programs of Tessera itself
    local   devices whose workers are local; without a rendezvous all, with one by default none
    about   called now and then for a device without a worker; returns the reason, if any
    """

    # Failures in a row after which a device is given up; None: never.
    max_failures: int | None = None

    def __init__(
        self,
        names: Sequence[str],
        setups: Sequence[messages.Setup],
        method: str = FORKSERVER,
        *,
        rendezvous: Rendezvous | None = None,
        local: frozenset[int] = frozenset(),
        digest: str = "",
        about: Callable[[int], str] = lambda device: "",
    ) -> None:
        self.names, self._method, self._about = names, method, about
        self.setups = list(setups)
        self._rendezvous = rendezvous
        self._folder = ""
        self.members = [WorkerMember(rendezvous is None or device in local) for device in range(len(names))]
        self._mailbox: Mailbox | None = None
        # (source, message) of workers, and of this process's own threads.
        self._inbox: deque[tuple[Any, Any]] = deque()
        # PeerConnection -> (device, epoch); names of local workers that will connect; remote ones that wait.
        self._sources: dict[PeerConnection, tuple[int, int]] = {}
        self._expected: dict[bytes, tuple[int, int]] = {}
        self._waiting: dict[PeerConnection, messages.Hello] = {}
        self._group = WorkerGroup(len(names), digest)
        self._is_woken = False
        self._store = Board(self._send)
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()

    @property
    def restarts_together(self) -> bool:
        return self.setups[0].transport in RESTART_TOGETHER

    def start(self) -> None:
        if self._method == FORKSERVER and any(member.is_local for member in self.members):
            warm_up()
        home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with sharing("the workers"):
            self._folder = tempfile.mkdtemp(prefix=f"tessera-{os.getpid()}-", dir=home)
            sizes = [(setup.microbatches, 2) for setup in self.setups]
            progress = [torch.full(size, -1, dtype=torch.int64).share_memory_() for size in sizes]
        host, secret = "", b""
        if self._rendezvous is not None:
            host, secret, address = self._rendezvous.host, self._rendezvous.secret, self._rendezvous.address
            self._mailbox = self._rendezvous.mailbox
            self._rendezvous.hear, self._rendezvous.max_bytes = self._hear, self._max_bytes
        else:
            self._mailbox = Mailbox()
            address = self._mailbox.listen(f"ipc://{self._folder}/engine", self._hear, b"", self._max_bytes)
        session = {"engine": address, "secret": secret, "host": host, "folder": self._folder}
        for device, setup in enumerate(self.setups):
            self.setups[device] = replace(setup, progress=progress[device], **session)  # type: ignore[arg-type]
        self._start_due()

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """A worker's message, or a Hangup; None after the timeout."""
        assert self._mailbox is not None, "started"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._start_due()
            while self._inbox:
                news = self._sort(*self._inbox.popleft())
                if news is not None:
                    return news
            if (late := self._late()) is not None:
                return late
            now = time.monotonic()
            times = [t for t in (deadline, *self._times()) if t is not None]
            self._mailbox.pump(max(0.0, min(times) - now) if times else None)
            if deadline is not None and deadline <= now and not self._inbox:
                return None

    def order(self, device: int, message: messages.Message | bytes) -> bool:
        """Does not wait; False if the worker is not there. `message`: also an encoded one."""
        connection = self.members[device].connection
        return connection is not None and connection.send(message)

    def wake(self) -> None:
        """Makes `take` return a Wake of NOBODY; from any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._post(NOBODY, Wake())

    def lose(self, device: int, *, counts: bool = True) -> LostWorker:
        """Ends a worker and starts another; `counts`: as a failure of this device."""
        member, now = self.members[device], time.monotonic()
        if member.ready_s is not None and now - member.ready_s >= HEALTHY_S:
            member.failures = 0
        member.failures += counts
        how = self._end(member, LEAVE_S)
        self._store.forget(device, member.epoch)
        member.epoch += 1
        member.state, member.ready_s, member.pid, member.num_configured = "lost", None, None, 0
        is_given_up = self.max_failures is not None and member.failures >= self.max_failures
        retry_s = None if is_given_up else pause_s(member.failures)
        is_absent = member.started_s == float("inf")  # its worker is welcome whenever it connects
        due_s = now if is_absent else now + pause_s(member.failures)
        member.due_s = None if is_given_up else due_s
        self._start_due()
        return LostWorker(how, member.failures, retry_s)

    def load(self, lanes: Sequence[messages.LoadLanes], dropped: Sequence[int] = ()) -> None:
        for device, then in enumerate(self.setups):
            now = then.extended(lanes[device]) if lanes else then
            self.setups[device] = replace(now, dropped=(*then.dropped, *dropped))
            if self.members[device].state == "ready":
                self._send_lanes(device, then)

    def _send_lanes(self, device: int, then: messages.Setup) -> None:
        """Frees before it allocates."""
        now, num_lanes, num_steps = self.setups[device], len(then.programs), len(then.traces)
        if dropped := now.dropped[len(then.dropped) :]:
            homes = {program.home for lane in dropped for program in now.programs[lane]}
            self.order(device, messages.DropLanes(list(dropped), sorted(homes - now.homes - {-1})))
        if programs := now.programs[num_lanes:]:
            steps = (now.traces[num_steps:], now.us[num_steps:])
            self.order(device, messages.LoadLanes(programs, *steps, now.lane_microbatches[num_lanes:]))

    def relink(self, device: int, other: int) -> None:
        for one, two in ((device, other), (other, device)):
            peer = self.members[two]
            self.order(one, messages.Relink(two, peer.epoch, peer.address))

    def status(self, device: int) -> DeviceStatus:
        member = self.members[device]
        # The epoch of a lost worker is its successor's, which has not started.
        return DeviceStatus(member.state, member.pid, max(0, member.epoch - (member.state == "lost")))

    def progress(self, device: int) -> dict[int, int]:
        """Run -> position, also of a dead worker; empty if no memory is shared."""
        shared = self.setups[device].progress
        rows = [] if shared is None else shared.tolist()
        return {run: position for run, position in rows if run >= 0}

    def stop(self) -> None:
        self._is_over.set()
        for member in self.members:
            if member.connection is not None:
                member.connection.send(messages.Leave())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for member in self.members:
            member.due_s = None
            # One that has not connected cannot be told to leave.
            self._end(member, max(0.0, deadline - time.monotonic()) if member.connection is not None else 0.0)
        self._end_started()  # else their threads wait for them
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        self._end_started()
        if self._mailbox is not None:
            self._mailbox.close(LEAVE_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def max_bytes(self) -> int:
        return SLACK_BYTES + sum(trace.handed_over_bytes for trace in self.setups[0].traces)

    def _max_bytes(self, connection: PeerConnection) -> int:
        source = self._sources.get(connection)
        is_known = connection.name in self._expected or (
            source is not None and self.members[source[0]].pieces is None
        )
        return self.max_bytes() if is_known else MAX_ASKED_BYTES

    def _launch(self, device: int, setup: messages.Setup) -> LocalProcess:
        name, devices = f"tessera-{self.names[device]}", setup.cluster.devices
        num = sum((d.kind, d.ordinal) == (devices[device].kind, devices[device].ordinal) for d in devices)
        queues = min(QUEUES, QUEUES_OF_CARD // num or 1)
        return LocalProcess(worker.main, (self._folder, queues), name, self._method)

    def _post(self, source: Any, message: Any) -> None:
        self._inbox.append((source, message))
        if self._mailbox is not None and not self._is_over.is_set():
            self._mailbox.wake()

    def _start_due(self) -> None:
        now = time.monotonic()
        for device, member in enumerate(self.members):
            if member.due_s is None or member.due_s > now or self._is_over.is_set():
                continue
            shared = self.setups[device].progress
            if shared is not None:
                shared.fill_(-1)
            epochs = tuple(m.epoch for m in self.members)
            # A routing id must not begin with a zero byte.
            name = b"w" + secrets.token_bytes(NAME_BYTES)
            setup = replace(self.setups[device], epoch=member.epoch, epochs=epochs, name=name)
            member.state, member.due_s, member.started_s = "starting", None, now
            member.setup, member.ask_s = setup, now + ABSENT_S
            if member.is_local:
                self._expected[setup.name] = (device, member.epoch)
                self._thread(self._try_start, device, setup)
        self._assign()

    def _thread(self, target: Callable[..., object], *arguments: Any) -> None:
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _try_start(self, device: int, setup: messages.Setup) -> None:
        source, what, reason = (device, setup.epoch), "it could not be started", ""
        try:
            process = self._launch(device, setup)
            self._post(source, process)
            what = "its setup could not be sent"
            reason = process.run(setup)
        except TesseraError as error:
            self._post(source, messages.Failed(error.message, error.remedy))
            return
        except Exception as error:  # noqa: BLE001 - any reason is told; else the start waits for its limit
            reason = f"{what} ({type(error).__name__}: {error})"
        time.sleep(LEAVE_S)  # its last message may be on the way
        self._post(source, Hangup(reason))

    def _times(self) -> list[float | None]:
        times = [m.due_s for m in self.members]
        for device, member in enumerate(self.members):
            if member.state == "starting":
                times += [member.started_s + self._patience_s(device)]
                times += [member.ask_s] if member.is_awaited else []
        return [t for t in times if t != float("inf")]

    def _patience_s(self, device: int) -> float:
        member = self.members[device]
        if not member.is_awaited or member.epoch == 0:
            return START_TIMEOUT_S
        is_planned_around = member.failures > QUICK_FAILURES and self.max_failures is None
        return float("inf") if is_planned_around else ABSENT_S

    def _late(self) -> tuple[int, Any] | None:
        now = time.monotonic()
        for device, member in enumerate(self.members):
            if member.state != "starting":
                continue
            limit_s = self._patience_s(device)
            if member.started_s + limit_s <= now:
                if not member.is_awaited:
                    return device, Hangup(f"it was not ready after {START_TIMEOUT_S:.0f} s")
                member.started_s, member.ask_s = float("inf"), float("inf")
                self._thread(self._report_absence, device, member.epoch, limit_s)
            elif member.is_awaited and member.ask_s <= now:
                member.ask_s = now + ABSENT_S
                self._thread(self._about, device)
        return None

    def _report_absence(self, device: int, epoch: int, limit_s: float) -> None:
        reason = self._about(device)
        complaints = self._rendezvous.complaints if self._rendezvous is not None else ()
        if not reason and complaints:
            reason = f"refused: {complaints[-1]}"
        what = f"nobody connected within {limit_s:.0f} s{f'; {reason}' if reason else ''}"
        self._post((device, epoch), messages.Failed(what, "Start one process per device."))

    def _hear(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        source = self._sources.get(connection) or self._expected.pop(connection.name, None)
        if source is not None:
            if connection not in self._sources:
                self._sources[connection] = source
                if self.members[source[0]].epoch == source[1]:
                    self.members[source[0]].connection = connection
            self._inbox.append((source, message))
            if isinstance(message, Hangup):
                del self._sources[connection]
        elif isinstance(message, messages.Hello):
            refusal = self._group.refusal(message)
            if refusal is None:
                self._waiting[connection] = message
                self._assign()
            else:
                self._refuse(connection, refusal)
        else:
            self._waiting.pop(connection, None)
            if not isinstance(message, Hangup):
                self._refuse(connection, messages.Failed("it did not say who it is", ""))

    def _refuse(self, connection: PeerConnection, refusal: messages.Failed) -> None:
        connection.send(refusal)
        connection.close()
        if self._rendezvous is not None:
            self._rendezvous.note(connection.host, f"{refusal.message}. {refusal.remedy}".strip())

    def _assign(self) -> None:
        if not self._waiting:
            return
        awaited = {device for device, member in enumerate(self.members) if member.is_awaited}
        for device in sorted(awaited):
            connection = self._group.choose(device, self._waiting, awaited)
            member = self.members[device]
            if connection is None or member.setup is None:
                continue
            awaited = awaited - {device}
            del self._waiting[connection]
            member.connection, member.started_s = connection, time.monotonic()
            member.pieces = messages.Pieces(member.setup.weights)
            self._sources[connection] = (device, member.epoch)
            connection.send(messages.Welcome(messages.pack_config(member.setup)))

    def _sort(self, source: Any, message: Any) -> tuple[int, Any] | None:
        if isinstance(message, Wake):
            self._is_woken = False
            return NOBODY, message
        device, epoch = source
        member = self.members[device]
        if epoch != member.epoch or member.state == "lost":  # an earlier worker
            if isinstance(message, LocalProcess):
                message.end(0.0)
            return None
        if isinstance(message, LocalProcess):
            member.process, member.pid = message, message.pid
            member.started_s = time.monotonic()
            return None
        if member.pieces is not None:
            return self._configure(device, member, message)
        match message:
            case messages.StoreValue(key, value):
                self._store.set(key, value)
            case messages.StoreGet(key):
                self._store.get(source, key)
            case messages.WorkerReady() if member.state == "starting":
                self._start_work(device, message)
                return device, message
            case _:
                return device, message
        return None

    def _configure(self, device: int, member: WorkerMember, message: Any) -> tuple[int, Any] | None:
        assert member.pieces is not None
        try:
            match message:
                case messages.Want(name, start):
                    piece = member.pieces.piece(name, start)
                    if member.connection is not None:
                        member.connection.send(piece)
                    member.started_s = time.monotonic()
                    return None
                case messages.Configured():
                    member.pieces, member.started_s = None, time.monotonic()
                    return None
                case Hangup():  # another may connect
                    member.num_configured += 1
                    member.connection = member.pieces = None
                    if member.num_configured < MAX_CONFIGURED and not message.reason:
                        member.started_s = time.monotonic()
                        self._assign()
                        return None
                    return device, message
                case messages.Failed(text, remedy):
                    raise WorkerError(f"could not start: {text}", remedy)
                case _:
                    raise WorkerError(f"it sent {type(message).__name__} while it was configured")
        except WorkerError as error:
            return device, messages.Failed(error.message, error.remedy)

    def _start_work(self, device: int, ready: messages.WorkerReady) -> None:
        member = self.members[device]
        assert member.setup is not None
        member.state, member.ready_s, member.address = "ready", time.monotonic(), ready.address
        member.pid = ready.pid if member.pid is None else member.pid
        if not member.is_local:
            member.offset_s = time.monotonic() - ready.clock_s
        self._send_lanes(device, member.setup)
        for peer, other in enumerate(self.members):
            if peer != device and other.state == "ready":
                self.relink(device, peer)
            elif peer != device and other.epoch != member.setup.epochs[peer]:
                self.order(device, messages.Relink(peer, other.epoch))

    def _send(self, source: tuple[int, int], message: messages.Message) -> None:
        device, epoch = source
        if self.members[device].epoch == epoch:
            self.order(device, message)

    def _end_started(self) -> None:
        """Workers that `take` has not seen."""
        while self._inbox:
            _, message = self._inbox.popleft()
            if isinstance(message, LocalProcess):
                message.end(0.0)

    def _end(self, member: WorkerMember, timeout_s: float) -> str:
        process, connection = member.process, member.connection
        member.process = member.connection = member.pieces = None
        if connection is not None:
            connection.send(messages.Leave())
            connection.close()
            self._sources.pop(connection, None)
        if process is not None:
            return process.end(timeout_s)
        return "its connection was closed" if connection is not None else "it had not started"


def pause_s(failures: int) -> float:
    if failures <= QUICK_FAILURES:
        return 0.0
    return float(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - QUICK_FAILURES - 1, 16)))
