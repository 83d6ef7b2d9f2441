"""EngineConnection: a worker's connection to its engine, and how a remote worker opens it.

The mailbox's thread answers questions about progress and the store; the worker's loop takes all other news.
"""

import functools
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import DISTRIBUTION, MismatchError, TesseraError, WorkerError, version_of
from tessera.execute import messages
from tessera.execute.mailbox import HANDSHAKE_MS, MAX_HANDSHAKES, Hangup, Mailbox, PeerConnection
from tessera.ir.files import FORMAT_VERSION

# Only this machine reaches loopback addresses.
LOOPBACK_SECRET = b"tessera on loopback"
PROBE_S, PROBE_AGAIN_S, RETRY_S, LOOK_S = 5.0, 1.0, 0.2, 0.01
LINGER_S = 2.0


class OwnerGone(WorkerError):
    """The worker that would have set the value is gone."""


def key_of(kind: str, device: int, epoch: int) -> str:
    """A value expires with its worker."""
    return f"{kind}/{device}/{epoch}"


@functools.cache
def own_version() -> str:
    return f"{version_of(DISTRIBUTION) or 'source'} (format {FORMAT_VERSION})"


def check_secret(host: str, secret: bytes | None) -> bytes:
    """Raises TesseraError without a secret if other machines can reach the host."""
    if secret:
        return secret
    try:
        is_local = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError as error:
        raise TesseraError(f"cannot find the host {host}: {error.strerror}", place="--rendezvous") from error
    if not is_local:
        message = f"other machines can reach {host}"
        raise TesseraError(message, "Give all processes the same --secret-file.", "--rendezvous")
    return LOOPBACK_SECRET


@dataclass(frozen=True)
class EngineAddress:
    host: str
    port: int
    secret: bytes = field(repr=False)
    digest: str = ""

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def own_host(self) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


class EngineConnection:
    """For any thread of the worker; opened in the background."""

    def __init__(self, address: str, secret: bytes = b"", name: bytes = b"") -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._is_over = False
        self._waiting = 0
        self.where: Callable[[], list[tuple[int, int, int]]] = list
        self.ended: Callable[[], object] = lambda: None
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.mailbox = Mailbox()
        self._connection = self.mailbox.connect(address, self._hear, secret, name)
        self.mailbox.start()

    def wait_until_open(self, until_s: float) -> bool:
        """False after the time, or if the secret is not the engine's."""
        while not (self._connection.is_open or self.is_refused or time.monotonic() > until_s):
            time.sleep(LOOK_S)
        return self._connection.is_open

    @property
    def is_refused(self) -> bool:
        return self._connection.num_failed >= MAX_HANDSHAKES

    def tell(self, message: messages.Message) -> None:
        """Raises OSError if the engine is gone."""
        if not self._connection.send(message):
            raise BrokenPipeError("the engine is gone")

    def set(self, key: str, value: bytes) -> None:
        self.tell(messages.StoreValue(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """WorkerError after the time, OwnerGone if it will not be set."""
        if key not in self._values:
            self.tell(messages.StoreGet(key))
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._is_over, timeout_s)
            if key not in self._values:
                raise WorkerError(f"nobody has set {key} within {timeout_s:.0f} s")
            if not self._values[key]:
                raise OwnerGone(f"nobody will set {key}")
            return self._values[key]

    def take(self, block: bool) -> Any:
        """Reads messages itself; the mailbox's thread does while its caller computes."""
        if self._news.empty() and not self._is_over:
            self._waiting = threading.get_ident() if block else 0
            while self._news.empty() and self.mailbox.lead(None if block else 0.0) and block:
                pass
            self._waiting = 0
        # Usually there is none, and no exception either.
        return None if not block and self._news.empty() else self._news.get()

    def post(self, news: Any) -> None:
        self._news.put(news)
        if self._waiting not in (0, threading.get_ident()):
            self.mailbox.wake()

    @property
    def is_empty(self) -> bool:
        return self._news.empty() and not self.mailbox.has_news

    def end(self) -> None:
        """The loop sees a Hangup, and threads that wait for values give up."""
        with self._changed:
            is_first, self._is_over = not self._is_over, True
            self._changed.notify_all()
        if is_first:
            self.post(Hangup())
            self.ended()

    def close(self) -> None:
        self.mailbox.close(LINGER_S if not self._is_over else 0.0)
        self.end()

    def _hear(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        match message:
            case messages.Where():
                self._connection.send(messages.Progress(self.where()))
            case messages.StoreValue(key, value):
                with self._changed:
                    self._values[key] = value
                    self._changed.notify_all()
            case Hangup() | messages.Leave():
                self.end()
            case _:
                self.post(message)


def connect_engine(
    address: EngineAddress, patience_s: float, again_s: float | None = None
) -> EngineConnection:
    """Retries for `again_s` if nobody listens there, for `patience_s` otherwise.

    Probes go on until the connection is open: an engine may close before its handshake.
    WorkerError if nobody answers, MismatchError if the secret is not the engine's.
    """
    refused_s = patience_s if again_s is None else min(again_s, patience_s)
    _probe(address, time.monotonic(), patience_s, refused_s)
    engine, start_s = EngineConnection(f"tcp://{address.place}", address.secret), time.monotonic()
    until_s = start_s + max(patience_s, MAX_HANDSHAKES * HANDSHAKE_MS * 1e-3)
    try:
        while not engine.wait_until_open(min(until_s, time.monotonic() + PROBE_AGAIN_S)):
            if engine.is_refused or time.monotonic() > until_s:
                message = "no engine answers there, or one with another secret"
                raise MismatchError(message, "Use one --secret-file, and check --rendezvous.", address.place)
            _probe(address, start_s, patience_s, refused_s)
    except TesseraError:
        engine.mailbox.close()
        raise
    return engine


def _probe(address: EngineAddress, start_s: float, patience_s: float, refused_s: float) -> None:
    while True:
        try:
            return socket.create_connection((address.host, address.port), timeout=PROBE_S).close()
        except OSError as error:
            limit_s = refused_s if isinstance(error, ConnectionRefusedError) else patience_s
            if time.monotonic() > start_s + limit_s:
                message = f"no engine answers: {error.strerror or error}"
                raise WorkerError(message, "Start rank 0 first.", address.place) from error
        time.sleep(RETRY_S)
