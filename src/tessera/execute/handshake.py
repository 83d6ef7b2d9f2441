"""Handshakes: processes prove to each other that they know a key, before anything else of them is read.

Who is called greets with 32 random bytes. The caller answers with words about itself, 32 random bytes of its
own and the HMAC-SHA-256 of its role, its words and both ends' bytes; who is called does likewise. The roles
keep an answer from being sent back to whom it came from. All of it has a deadline, however slowly the other
side drips. What is sent afterwards is neither encrypted nor signed: use a private network.

A `Door` answers calls: of workers to their engine (`call_engine`, `remote.Gate`), and of workers to one
another (`links`). Every call has a thread, so that a caller that hangs or sends garbage holds up nobody.
There is room for so many handshakes, and for fewer from one address; who comes when there is none left takes
the place of the one that is at it longest, of the address with the most. So a crowd pushes itself out, not
others.
"""

import functools
import hmac
import importlib.metadata
import ipaddress
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tessera.errors import DISTRIBUTION, MismatchError, TesseraError, WorkerError
from tessera.execute import messages
from tessera.execute.messages import Hello
from tessera.execute.pipes import end, read_into
from tessera.ir.files import FORMAT_VERSION

Address = tuple[str, int]
# What stands for a secret on the loopback address, where only this machine can call.
LOOPBACK_SECRET = b"tessera on loopback"
# Opens every call, so that something else at the port is found out at once.
ENGINE, LINK = b"tessera 2\n", b"tessera link 2\n"
NONCE_BYTES = PROOF_BYTES = 32
MAX_WORDS_BYTES = 4096
_SIZE = struct.Struct("!H")
# From a call to the end of its handshake; who has not begun to answer the greeting by then is hung up on.
HANDSHAKE_S, FIRST_BYTE_S = 10.0, 3.0
# Calls in their handshake at one time, and of one address. Who is pushed out may call again.
MAX_HANDSHAKES, MAX_OF_ADDRESS = 64, 32
RETRY_S = 0.2
# What makes a machine that vanished without a word be noticed: after some seconds of silence it is asked, and
# bytes that it does not acknowledge end the connection. Shorter cuts are sat out.
VANISHED = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class Unproved(TesseraError):
    """The other end does not know the key, or (without a greeting) is something else altogether."""

    def __init__(self, message: str, is_greeted: bool = True) -> None:
        super().__init__(message, "Use one --secret-file." if is_greeted else "Look at --rendezvous.")


def prove(link: socket.socket, key: bytes, greeting: bytes, words: bytes) -> None:
    """The caller's half."""
    deadline = time.monotonic() + HANDSHAKE_S
    if _read(link, len(greeting), deadline) != greeting:
        raise Unproved("what answers there is no engine and no worker", is_greeted=False)
    theirs, own = _read(link, NONCE_BYTES, deadline), os.urandom(NONCE_BYTES)
    proof = _proof(key, b"caller", words, theirs, own)
    link.sendall(_SIZE.pack(len(words)) + words + own + proof)
    answer = _read(link, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(key, b"called", words, theirs, own)):
        raise Unproved("what answers there has another secret")
    link.settimeout(None)


def admit(link: socket.socket, key: bytes, greeting: bytes, check: Callable[[bytes], object]) -> bytes:
    """The other half: the words of who calls. `check` raises TesseraError for those that are not wanted."""
    begun, own = time.monotonic(), os.urandom(NONCE_BYTES)
    link.settimeout(HANDSHAKE_S)
    link.sendall(greeting + own)
    deadline = begun + HANDSHAKE_S
    (size,) = _SIZE.unpack(_read(link, _SIZE.size, min(deadline, begun + FIRST_BYTE_S)))
    if size > MAX_WORDS_BYTES:
        raise Unproved("it does not know the handshake")
    words, theirs = _read(link, size, deadline), _read(link, NONCE_BYTES, deadline)
    proof = _read(link, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"caller", words, own, theirs)):
        link.sendall(bytes(PROOF_BYTES))
        raise Unproved("it has another secret")
    check(words)
    link.sendall(_proof(key, b"called", words, own, theirs))
    link.settimeout(None)
    return words


def _proof(key: bytes, role: bytes, words: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, role + words + b"".join(nonces), "sha256")


class Door:
    """Answers calls at a listening socket, from the moment it is made until it is closed.

    check    raises TesseraError for words that are not wanted
    answer   what becomes of a caller that has proved itself: (its socket, its words, its host); in its thread
    refused  hears of every other: (host, why)
    """

    def __init__(
        self,
        server: socket.socket,
        key: bytes,
        greeting: bytes,
        check: Callable[[bytes], object],
        answer: Callable[[socket.socket, bytes, str], None],
        refused: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        self._server, self._key, self._greeting = server, key, greeting
        self._check, self._answer, self._refused = check, answer, refused
        # Calls in their handshake, the oldest first, by a number of their own: (host, its socket).
        self.answering: dict[int, tuple[str, socket.socket]] = {}
        self._num_calls = 0
        self._is_closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="tessera-door", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        end(self._server)  # wakes the thread that accepts, which closes it

    def _listen(self) -> None:
        while True:
            try:
                link, peer = self._server.accept()
            except ConnectionError:
                continue  # hung up before it was answered
            except OSError as error:
                if self._is_closed:
                    self._server.close()
                    return
                self._refused("the gate", f"cannot answer a call: {error.strerror}")
                time.sleep(RETRY_S)  # too many open files, perhaps; others will be closed
                continue
            host = str(peer[0]) if peer else ""
            number = self._make_room(link, host)
            threading.Thread(target=self._shake, args=(number, link, host), daemon=True).start()

    def _make_room(self, link: socket.socket, host: str) -> int:
        """A place for a call, another's if need be; returns the number of the call."""
        with self._lock:
            crowd = Counter(address for address, _ in self.answering.values())
            if crowd[host] >= MAX_OF_ADDRESS:
                self._push_out(host)
            elif len(self.answering) >= MAX_HANDSHAKES:
                self._push_out(crowd.most_common(1)[0][0])
            self._num_calls += 1
            self.answering[self._num_calls] = host, link
            return self._num_calls

    def _push_out(self, host: str) -> None:
        number = next(n for n, (address, _) in self.answering.items() if address == host)
        end(self.answering.pop(number)[1])

    def _shake(self, number: int, link: socket.socket, host: str) -> None:
        """One call, in a thread of its own."""
        words, why = b"", "did not know the secret, or was silent"
        try:
            tune(link)
            words = admit(link, self._key, self._greeting, self._check)
            why = ""
        except TesseraError as error:
            why = str(error)
        except (OSError, EOFError):
            pass
        with self._lock:
            is_in = self.answering.pop(number, None) is not None and not why
        if is_in:
            self._answer(link, words, host)
        else:
            link.close()
            self._refused(host, why or "was pushed out by others")


def tune(link: socket.socket) -> None:
    """Small messages go at once, and a machine that vanished is noticed."""
    if link.family == socket.AF_UNIX:
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in VANISHED.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(link: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray(size)
    read_into(link, memoryview(data), deadline)
    return bytes(data)


def has_hung_up(link: socket.socket) -> bool:
    """True once the other end is gone; what it has said meanwhile is left to be read."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# A worker calls its engine.


@functools.cache
def own_version() -> str:
    """Of this Tessera and its artifacts; workers with another one are sent away."""
    try:
        return f"{importlib.metadata.version(DISTRIBUTION)} (format {FORMAT_VERSION})"
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
        message = f"{host} can be called by other machines"
        raise TesseraError(message, "Give all processes the same --secret-file.", "--rendezvous")
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
        return f"{self.address[0]}:{self.address[1]}"


def call_engine(call: EngineCall, rank: int, patience_s: float, again_s: float | None = None) -> Connection:
    """A connection to the engine, which now knows who calls; calls again while nobody answers.

    For `again_s` where the engine's machine says that nobody listens there, for `patience_s` otherwise.
    """
    start_s, hello = time.monotonic(), messages.encode(Hello(rank, call.digest, own_version()))
    while True:
        limit_s = patience_s
        try:
            link = socket.create_connection(call.address, timeout=HANDSHAKE_S)
        except OSError as error:
            said = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError) and again_s is not None:
                limit_s = min(again_s, patience_s)
        else:
            try:
                tune(link)
                prove(link, call.secret, ENGINE, hello)
                return Connection(link.detach())
            except (EOFError, OSError):
                link.close()
                said = "it hung up during the handshake"
            except Unproved as error:
                link.close()
                raise MismatchError(error.message, error.remedy, call.place) from None
        if time.monotonic() > start_s + limit_s:
            raise WorkerError(f"no engine answers: {said}", "Start rank 0 first.", call.place)
        time.sleep(RETRY_S)


def link_key(secret: bytes, session: bytes) -> bytes:
    """What the workers of one session prove to each other that they know; it crosses no network."""
    return _proof(secret, b"link", session)
