"""Workers of several machines: the engine has a gate, each worker calls there and says who it is.

The call is authenticated both ways by a shared secret (see `handshake`); after that only `messages` travel,
of bounded length. Without a secret, only the loopback address is served. A caller waits until a device needs
it, is told what to do (see `setups`) and works until the engine hangs up; then it calls again. So a worker
that comes late, one that was lost and one on another machine are the same: a caller, taken in as soon as a
device needs it, while the others go on.

Devices of the engine's own machine may have workers that it starts itself, as `Hub` does.

Clocks of machines are compared once, when a worker is ready, to the time that one message takes.
"""

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from tessera.errors import TesseraError, WorkerError
from tessera.execute import messages
from tessera.execute.handshake import (
    ENGINE,
    Address,
    Door,
    has_hung_up,
    link_key,
    own_version,
)
from tessera.execute.hub import QUICK_FAILURES, START_TIMEOUT_S, Hub, Line, LostWorker, Up
from tessera.execute.messages import (
    ANY_RANK,
    Briefed,
    Failed,
    Hello,
    Refused,
    Want,
    Welcome,
    WorkerReady,
)
from tessera.execute.pipes import FORKSERVER, socket_of
from tessera.execute.setups import Pieces, Setup, briefing_of, pack_briefing

# How often a thread that waits looks whether anybody still waits for it.
LOOK_S = 0.5
# A device whose worker was lost and whose next does not call within this counts as lost again.
ABSENT_S = 20.0
# Complaints that are kept.
NUM_COMPLAINTS = 16
# Of what a worker says before it has started.
MAX_ASKED_BYTES = 1 << 16
SESSION_BYTES = 16
# Workers that are lost while they are briefed, before this counts as a failure.
MAX_BRIEFINGS = 3


@dataclass(frozen=True, slots=True)
class Caller:
    """A worker that knows the secret and waits to be taken."""

    pipe: Connection
    hello: Hello
    # Where it called from.
    host: str

    def is_there(self) -> bool:
        with socket_of(self.pipe) as looked:
            return not has_hung_up(looked)


def _hello(words: bytes) -> Hello:
    found = messages.decode(words)
    if not isinstance(found, Hello):
        raise TesseraError("it did not say who it is")
    return found


class Gate:
    """Where workers call, from the moment it is made until it is closed."""

    def __init__(
        self, host: str, port: int, secret: bytes, complain: Callable[[str], None] = lambda line: None
    ) -> None:
        self._complain = complain
        try:
            server = socket.create_server((host, port), backlog=512)
        except OSError as error:
            place = f"{host}:{port}"
            remedy = "Use this machine's address and a free port."
            raise TesseraError(f"cannot listen: {error.strerror}", remedy, place) from error
        self.address: Address = (host, int(server.getsockname()[1]))
        # One line for every caller that was sent away, the last ones.
        self.complaints: deque[str] = deque(maxlen=NUM_COMPLAINTS)
        self._callers: list[Caller] = []
        self._is_closed = False
        self._lock = threading.Condition()
        self.door = Door(server, secret, ENGINE, _hello, self._welcome, self._note)

    def take(self, choose: Callable[[Sequence[Caller]], Caller | None], timeout_s: float) -> Caller | None:
        """The caller that is chosen of those that wait, as soon as there is one; None after the timeout."""
        with self._lock:
            found = self._lock.wait_for(lambda: choose(self._waiting()), timeout_s)
            if found is not None:
                self._callers.remove(found)
            return found

    def _waiting(self) -> Sequence[Caller]:
        for caller in [c for c in self._callers if not c.is_there()]:
            caller.pipe.close()
            self._callers.remove(caller)
        return self._callers

    def send_away(self, caller: Caller, message: str, remedy: str) -> None:
        """Tells a caller why it cannot be had, hangs up, and keeps the complaint."""
        messages.post(caller.pipe, Refused(message, remedy))
        caller.pipe.close()
        self._note(caller.host, f"{message}. {remedy}" if remedy else message)

    def close(self) -> None:
        """Nobody can call any more; who still waits is hung up on."""
        self.door.close()
        with self._lock:
            self._is_closed = True
            for caller in self._callers:
                caller.pipe.close()
            self._callers.clear()

    def _note(self, host: str, what: str) -> None:
        line = f"{host}: {what}"
        is_new = not self.complaints or self.complaints[-1] != line
        self.complaints.append(line)
        if is_new:  # a crowd is one line
            self._complain(line)

    def _welcome(self, link: socket.socket, words: bytes, host: str) -> None:
        caller = Caller(Connection(link.detach()), _hello(words), host)
        version = caller.hello.version
        if version != own_version():
            remedy = "Install the same version everywhere."
            self.send_away(caller, f"it has Tessera {version}, the engine {own_version()}", remedy)
            return
        with self._lock:
            if self._is_closed:
                caller.pipe.close()
            else:
                self._callers.append(caller)
                self._lock.notify_all()


@dataclass
class Called:
    pipe: Connection
    pid: int | None = None
    _socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._socket = socket_of(self.pipe)
        # When the engine hangs up it forgets the connection at once: a worker behind a link that was cut then
        # hears of it as soon as the link is whole.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def end(self, timeout_s: float) -> str:
        """Hangs up; a worker that still lives leaves when it notices."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return "its connection is closed"
        finally:
            self._socket.close()
        return "its connection was closed"


@dataclass
class WorkerGroup:
    """Which of the callers that wait at the gate becomes the worker of a device; asked under the gate's lock.

    A caller that says its rank gets that device and no other. One that says none gets a device that is left,
    once there are enough of them for all such devices: before, a caller that says its rank may still come.
    Who is not needed waits; it is there when a device needs it. Who cannot be needed is told why.
    """

    num_devices: int
    # Of the plans; what a worker that has plans must say.
    digest: str = ""
    # Devices that have no worker now.
    awaited: set[int] = field(default_factory=set)

    def refusal(self, hello: Hello) -> Refused | None:
        """Why a caller can never be needed; None if it can."""
        if hello.digest not in ("", self.digest):
            return Refused("it has other plans", "Copy the same plan files everywhere.")
        if not ANY_RANK <= hello.rank < self.num_devices:
            return Refused(f"there is no rank {hello.rank}", f"There are {self.num_devices}, from 0.")
        return None

    def choose(self, device: int, callers: Sequence[Caller]) -> Caller | None:
        """The worker for a device; or one that is to be refused, whoever looks first."""
        for caller in callers:
            if caller.hello.rank == device or self.refusal(caller.hello) is not None:
                return caller
        said = {caller.hello.rank for caller in callers}
        anyone = [caller for caller in callers if caller.hello.rank == ANY_RANK]
        if anyone and len(anyone) >= len(self.awaited - said):
            return anyone[0]
        return None


class RemoteHub(Hub):
    """The engine's side: workers of devices that are `here` are started, the others call.

    gate    where they call; closed with the hub
    secret  what they know
    digest  of the plans; what a worker that has plans must say
    about   asked now and then about a device whose worker has not called: what is known of it, in words
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        *,
        gate: Gate,
        secret: bytes,
        here: frozenset[int] = frozenset(),
        digest: str = "",
        about: Callable[[int], str] = lambda device: "",
    ) -> None:
        names = [device.name for device in setups[0].cluster.devices]
        super().__init__(names, setups, FORKSERVER)
        self._gate, self._here, self._about = gate, here, about
        self._session = os.urandom(SESSION_BYTES)
        key = link_key(secret, self._session)
        self.setups = [replace(setup, key=key, host=gate.address[0]) for setup in self.setups]
        self._group = WorkerGroup(len(names), digest, set(range(len(names))) - here)
        # Devices that were lost because nobody called.
        self._absent: set[int] = set()

    def lose(self, device: int, *, counts: bool = True) -> LostWorker:
        """A device that nobody calls for needs no pause: its worker is welcome whenever it comes."""
        lost = super().lose(device, counts=counts)
        if device in self._absent and lost.retry_s is not None:
            self._absent.discard(device)
            self._members[device].due_s = time.monotonic()
        return lost

    def _open(self, device: int, setup: Setup, is_over: Callable[[], bool]) -> Line:
        if device in self._here:
            return super()._open(device, setup, is_over)
        for _ in range(MAX_BRIEFINGS):
            self._group.awaited.add(device)
            caller = self._await(device, is_over)
            self._group.awaited.discard(device)
            line = Called(caller.pipe)
            try:
                self._brief(caller, setup, is_over)
                return line
            except (EOFError, OSError, WorkerError) as error:
                line.end(0.0)
                caller.pipe.close()
                if isinstance(error, WorkerError):
                    raise
                # It was lost meanwhile; another may come.
        raise WorkerError(f"{MAX_BRIEFINGS} workers hung up while they were briefed")

    def _await(self, device: int, is_over: Callable[[], bool]) -> Caller:
        limit_s, start_s = self._patience_s(device), time.monotonic()
        asked_s, said = start_s, ""
        while not is_over():
            caller = self._gate.take(lambda callers: self._group.choose(device, callers), LOOK_S)
            now = time.monotonic()
            if caller is not None:
                refusal = self._group.refusal(caller.hello)
                if refusal is None:
                    return caller
                self._gate.send_away(caller, refusal.message, refusal.remedy)
                continue
            if now >= min(asked_s + ABSENT_S, start_s + limit_s):
                asked_s, said = now, self._about(device)
            if now >= start_s + limit_s:
                self._absent.add(device)
                if not said and self._gate.complaints:
                    said = f"sent away: {self._gate.complaints[-1]}"
                what = f"nobody called within {limit_s:.0f} s{f'; {said}' if said else ''}"
                raise WorkerError(what, "Start one process per device.")
        raise WorkerError("nobody waits for it any more")

    def _patience_s(self, device: int) -> float:
        """How long a worker has to call: at first long; of a device that is planned around, as it likes."""
        member = self._members[device]
        if member.epoch == 0:
            return START_TIMEOUT_S
        is_planned_around = member.failures > QUICK_FAILURES and self.max_failures is None
        return float("inf") if is_planned_around else ABSENT_S

    def _brief(self, caller: Caller, setup: Setup, is_over: Callable[[], bool]) -> None:
        """Tells a worker what to do, and sends the weights that it asks for, until it begins to start."""
        pipe, pieces = caller.pipe, Pieces(setup.weights)
        pipe.send_bytes(messages.encode(Welcome(pack_briefing(briefing_of(setup, self._session)))))
        heard_s = time.monotonic()
        while True:
            if not pipe.poll(LOOK_S):
                if is_over() or time.monotonic() > heard_s + START_TIMEOUT_S:
                    raise WorkerError("it was silent while it was briefed")
                continue
            message, heard_s = messages.decode(pipe.recv_bytes(MAX_ASKED_BYTES)), time.monotonic()
            match message:
                case Want(name, start):
                    pipe.send_bytes(messages.encode(pieces.piece(name, start)))
                case Briefed():
                    return
                case Failed(text, remedy):
                    raise WorkerError(f"could not start: {text}", remedy)
                case _:
                    raise WorkerError(f"it said {type(message).__name__} while it was briefed")

    def _welcome(self, device: int, ready: WorkerReady) -> Up:
        up = super()._welcome(device, ready)
        if device not in self._here:
            self._members[device].offset_s = time.monotonic() - ready.clock_s
        return up

    def _close(self) -> None:
        self._gate.close()
        super()._close()
