"""The handshake of a worker with its engine, and the call that begins with it.

Caller and gate prove to each other that they know the secret before anything else is read: each sends 32
random bytes, each answers with the HMAC-SHA-256 of its own role and both. The roles keep an answer from
being sent back to whom it came from. What is sent after the handshake is neither encrypted nor signed: use a
private network.
"""

import contextlib
import functools
import hmac
import importlib.metadata
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import messages
from tessera.execute.link_sockets import tune
from tessera.execute.messages import Hello
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
# Who has not begun to answer the greeting by now is hung up on.
FIRST_BYTE_S = 3.0
RETRY_S = 0.2


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


@dataclass(frozen=True)
class EngineCall:
    """How a worker reaches its engine."""

    address: Address
    secret: bytes = field(repr=False)
    # Names the plans that the worker has; see `Hello`.
    digest: str = ""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.address[0]}:{self.address[1]}"


def call_engine(call: EngineCall, rank: int, patience_s: float, again_s: float | None = None) -> Connection:
    """A connection to the engine, which now knows who calls; calls again while nobody answers.

    For `again_s` where the engine's machine says that nobody listens there, for `patience_s` otherwise.
    """
    start_s = time.monotonic()
    while True:
        limit_s = patience_s
        try:
            pipe = pipe_of(socket.create_connection(call.address, timeout=HANDSHAKE_S))
        except OSError as error:
            said = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError) and again_s is not None:
                limit_s = min(again_s, patience_s)
        else:
            try:
                with deadline_of(pipe):
                    enter(pipe, call)
                    pipe.send_bytes(messages.encode(Hello(rank, call.digest, own_version())))
                return pipe
            except (EOFError, OSError):
                pipe.close()
                said = "it hung up during the handshake"
            except MismatchError:
                pipe.close()
                raise
        if time.monotonic() > start_s + limit_s:
            raise WorkerError(f"no engine answers: {said}", "Start rank 0 first.", call.place)
        time.sleep(RETRY_S)


def pipe_of(calling: socket.socket) -> Connection:
    """A connection that carries messages over a socket."""
    calling.settimeout(None)
    tune(calling)
    return Connection(calling.detach())


@contextlib.contextmanager
def deadline_of(pipe: Connection) -> Iterator[None]:
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


def link_key(secret: bytes, session: bytes) -> bytes:
    """What the workers of one session prove to each other that they know; it crosses no network."""
    return _proof(secret, b"link", session)


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(nonces), "sha256")


def admit(pipe: Connection, secret: bytes) -> None:
    """The gate's half of the handshake; raises TesseraError for a caller that cannot prove itself."""
    own = os.urandom(NONCE_BYTES)
    pipe.send_bytes(GREETING + own)
    if not pipe.poll(FIRST_BYTE_S):
        raise EOFError("silent")
    answer = pipe.recv_bytes(NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", own, theirs)):
        pipe.send_bytes(b"")
        raise TesseraError("it has another secret", "Use one --secret-file.")
    pipe.send_bytes(_proof(secret, b"engine", own, theirs))


def enter(pipe: Connection, call: EngineCall) -> None:
    """The caller's half; raises MismatchError where the other side is no engine with the same secret."""
    challenge = pipe.recv_bytes(256)
    if len(challenge) != len(GREETING) + NONCE_BYTES or not challenge.startswith(GREETING):
        raise MismatchError("what answers there is no engine", "Look at --rendezvous.", call.place)
    theirs, own = challenge[len(GREETING) :], os.urandom(NONCE_BYTES)
    pipe.send_bytes(own + _proof(call.secret, b"worker", theirs, own))
    if not hmac.compare_digest(pipe.recv_bytes(256), _proof(call.secret, b"engine", theirs, own)):
        raise MismatchError("the engine has another secret", "Use one --secret-file.", call.place)
