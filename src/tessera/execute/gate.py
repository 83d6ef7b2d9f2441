"""Gate: where workers of other machines call; who does not know the secret is sent away.

Caller and gate prove to each other that they know the secret before anything else is read: each sends 32
random bytes, each answers with the HMAC-SHA-256 of its own role and both. The roles keep an answer from
being sent back to whom it came from. Then the caller says who it is (`Hello`) and waits until a hub takes
it.

Every call has a thread and a deadline of its own, so that a caller that hangs or sends garbage holds up
nobody. What is sent after the handshake is neither encrypted nor signed: use a private network.
"""

import contextlib
import functools
import hmac
import importlib.metadata
import ipaddress
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import messages
from tessera.execute.messages import Hello, Refused
from tessera.ir.files import FORMAT_VERSION

Address = tuple[str, int]
# What stands for a secret on the loopback address, where only this machine can call.
LOOPBACK_SECRET = b"tessera on loopback"
# Opens every call, so that something else at the port is found out at once.
GREETING = b"tessera 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
# From the call to the hello; also how long a caller waits for the gate.
HANDSHAKE_S = 10.0
MAX_HELLO_BYTES = 4096
# Calls in their handshake at one time; the next are hung up on and may call again.
MAX_HANDSHAKES = 64
RETRY_S = 0.2
# Complaints that are kept.
NUM_COMPLAINTS = 16


@functools.cache
def own_version() -> str:
    """Of this Tessera and its artifacts; workers with another one are sent away."""
    try:
        return f"{importlib.metadata.version('tessera')} (format {FORMAT_VERSION})"
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return f"source (format {FORMAT_VERSION})"


def check_secret(host: str, secret: bytes | None) -> bytes:
    """The secret to use; refuses to meet without one where others could call."""
    if secret:
        return secret
    try:
        is_local = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError as error:
        raise TesseraError(f"cannot find the host {host}: {error.strerror}", place="--rendezvous") from error
    if not is_local:
        raise TesseraError(
            f"{host} can be called by other machines",
            "Give all processes the same --secret-file.",
            "--rendezvous",
        )
    return LOOPBACK_SECRET


@dataclass(frozen=True, slots=True)
class Caller:
    """A worker that knows the secret and waits to be taken."""

    pipe: Connection
    hello: Hello
    # Where it called from.
    host: str

    def is_there(self) -> bool:
        """False once it has hung up; what it has said meanwhile is left to be read."""
        try:
            with socket.socket(fileno=os.dup(self.pipe.fileno())) as looked:
                return looked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def refuse(self, message: str, remedy: str) -> None:
        """Tells it why, and hangs up."""
        messages.post(self.pipe, Refused(message, remedy))
        self.pipe.close()


class Gate:
    """Listens from the moment it is made until it is closed."""

    def __init__(
        self, host: str, port: int, secret: bytes, complain: Callable[[str], None] = lambda line: None
    ) -> None:
        self._secret, self._complain = secret, complain
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            place = f"{host}:{port}"
            remedy = "Use this machine's address and a free port."
            raise TesseraError(f"cannot listen: {error.strerror}", remedy, place) from error
        self.address: Address = (host, int(self._socket.getsockname()[1]))
        # One line for every caller that was sent away, the last ones.
        self.complaints: deque[str] = deque(maxlen=NUM_COMPLAINTS)
        self._callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(MAX_HANDSHAKES)
        threading.Thread(target=self._listen, name="tessera-gate", daemon=True).start()

    def take(self, timeout_s: float) -> Caller | None:
        """The next caller that is still there; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                caller = self._callers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if caller.is_there():
                return caller
            caller.pipe.close()

    def put_back(self, caller: Caller) -> None:
        """A caller whom nobody needs yet waits again."""
        self._callers.put(caller)

    def send_away(self, caller: Caller, message: str, remedy: str) -> None:
        """Tells a caller why it cannot be had, and keeps the complaint."""
        caller.refuse(message, remedy)
        self._note(caller.host, f"{message}. {remedy}" if remedy else message)

    def close(self) -> None:
        """Nobody can call any more; who still waits is hung up on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        while (caller := self.take(0.0)) is not None:
            caller.pipe.close()

    def _note(self, host: str, what: str) -> None:
        self.complaints.append(f"{host}: {what}")
        self._complain(f"{host}: {what}")

    def _listen(self) -> None:
        while True:
            try:
                calling, (host, *_) = self._socket.accept()
            except ConnectionError:
                continue  # hung up before it was answered
            except OSError:
                return  # the gate was closed
            if not self._room.acquire(blocking=False):
                calling.close()
                continue
            threading.Thread(target=self._answer, args=(calling, host), daemon=True).start()

    def _answer(self, calling: socket.socket, host: str) -> None:
        """One call, in a thread of its own."""
        pipe = _pipe_of(calling)
        is_in = False
        try:
            with _deadline(pipe):
                _admit(pipe, self._secret)
                is_in = True
                hello = messages.decode(pipe.recv_bytes(MAX_HELLO_BYTES))
            if not isinstance(hello, Hello):
                raise TesseraError("it did not say who it is")
        except (EOFError, OSError):
            # A hang-up or an end of patience: of somebody with the secret it is worth a word.
            pipe.close()
            self._note(host, "hung up or was silent" if is_in else "did not know the secret, or was silent")
        except TesseraError as error:
            pipe.close()
            self._note(host, str(error))
        else:
            self._welcome(Caller(pipe, hello, host))
        finally:
            self._room.release()

    def _welcome(self, caller: Caller) -> None:
        version = caller.hello.version
        if version != own_version():
            remedy = "Install the same version everywhere."
            self.send_away(caller, f"it has Tessera {version}, the engine {own_version()}", remedy)
        else:
            self._callers.put(caller)


@dataclass(frozen=True)
class Call:
    """How a worker reaches its engine."""

    address: Address
    secret: bytes = field(repr=False)
    # Names the plans that the worker has; see `Hello`.
    digest: str = ""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.address[0]}:{self.address[1]}"


def call_engine(call: Call, rank: int, patience_s: float) -> Connection:
    """A connection to the engine, which now knows who calls; calls again while nobody answers."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            pipe = _pipe_of(socket.create_connection(call.address, timeout=HANDSHAKE_S))
        except OSError as error:
            said = error.strerror or str(error)
        else:
            try:
                with _deadline(pipe):
                    _enter(pipe, call)
                    pipe.send_bytes(messages.encode(Hello(rank, call.digest, own_version())))
                return pipe
            except (EOFError, OSError):
                pipe.close()
                said = "it hung up during the handshake"
            except MismatchError:
                pipe.close()
                raise
        if time.monotonic() > deadline:
            raise WorkerError(f"no engine answers: {said}", "Start rank 0 first.", call.place)
        time.sleep(RETRY_S)


def _pipe_of(calling: socket.socket) -> Connection:
    calling.settimeout(None)
    calling.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that vanished without a word is noticed within minutes, not hours.
    calling.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            calling.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(calling.detach())


@contextlib.contextmanager
def _deadline(pipe: Connection) -> Iterator[None]:
    """Hangs up if what follows is not over in time, however slowly the other side drips."""
    timer = threading.Timer(HANDSHAKE_S, hang_up, (pipe,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def hang_up(pipe: Connection) -> bool:
    """Ends a connection for both sides; False if it had ended."""
    try:
        with socket.socket(fileno=os.dup(pipe.fileno())) as ended:
            ended.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(nonces), "sha256")


def _admit(pipe: Connection, secret: bytes) -> None:
    """The gate's half of the handshake; raises TesseraError for a caller that cannot prove itself."""
    own = os.urandom(NONCE_BYTES)
    pipe.send_bytes(GREETING + own)
    answer = pipe.recv_bytes(NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", own, theirs)):
        pipe.send_bytes(b"")
        raise TesseraError("it has another secret", "Use one --secret-file.")
    pipe.send_bytes(_proof(secret, b"engine", own, theirs))


def _enter(pipe: Connection, call: Call) -> None:
    """The caller's half; raises MismatchError where the other side is no engine with the same secret."""
    challenge = pipe.recv_bytes(256)
    if len(challenge) != len(GREETING) + NONCE_BYTES or not challenge.startswith(GREETING):
        raise MismatchError("what answers there is no engine", "Look at --rendezvous.", call.place)
    theirs, own = challenge[len(GREETING) :], os.urandom(NONCE_BYTES)
    pipe.send_bytes(own + _proof(call.secret, b"worker", theirs, own))
    if not hmac.compare_digest(pipe.recv_bytes(256), _proof(call.secret, b"engine", theirs, own)):
        raise MismatchError("the engine has another secret", "Use one --secret-file.", call.place)
