"""Mailbox: the sockets of one process, for messages between the engine, its workers, and worker pairs.

A ROUTER listens, a DEALER connects (pyzmq). A message is one record of `messages`, optionally with a raw
frame.

Security: ipc:// addresses lie in a folder with mode 0700. A tcp:// address needs a secret, from which both
ends derive CURVE keys: bytes are encrypted, and only the client key of the same secret is admitted.

A socket's monitor reports closed connections.

Any thread may send or wake. One thread at a time calls `pump`: the engine while it waits; a worker's idle
loop (`lead`), or the mailbox's own thread while the loop computes.
"""

import contextlib
import errno
import hmac
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tessera.errors import TesseraError
from tessera.execute import messages
from tessera.execute.messages import Message

# The library refuses to allocate more.
MAX_MESSAGE_BYTES = 4 << 30
# Messages queued for one peer; one that does not read that many is lost.
HIGH_WATER = 10_000
HANDSHAKE_MS, CONNECT_MS, RETRY_MS, BACKLOG = 5_000, 5_000, 100, 512
# After this a peer counts as having another secret.
MAX_HANDSHAKES = 3
# Notices a vanished machine after 15 s.
KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 5,
    zmq.TCP_MAXRT: 15_000,
}
# Operations on the library's enums take microseconds.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
SEND_MORE = int(zmq.SNDMORE) | NOBLOCK
# A loop that has not pumped for this long computes: the mailbox's thread pumps instead.
TAKE_OVER_S = 0.02
ZAP = "inproc://zeromq.zap.01"
TOO_LONG = "it sent a message that is too long"
REFUSALS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it has another secret, or is no worker",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it has another secret",
}


@dataclass(frozen=True, slots=True)
class Hangup:
    """In place of a message: the connection is closed, or sent something unreadable."""

    reason: str = ""


def derive_keys(secret: bytes, role: str) -> tuple[bytes, bytes]:
    """(public, private); role: `server` or `client`."""
    private = z85.encode(hmac.digest(secret, f"tessera curve {role}".encode(), "sha256"))
    return zmq.curve_public(private), private


class PeerConnection:
    def __init__(
        self,
        mailbox: "Mailbox",
        end: "_End",
        name: bytes = b"",
        host: str = "",
        patience_s: float = float("inf"),
    ) -> None:
        self._mailbox, self.end, self.name, self.host = mailbox, end, name, host
        self.is_open, self.num_failed = False, 0
        self.until_s = time.monotonic() + patience_s
        self.is_closed = False

    def send(self, message: Message | bytes, contents: memoryview | None = None) -> bool:
        """Does not wait; False if the peer is gone. `contents` is copied."""
        data = message if isinstance(message, bytes) else messages.encode(message)
        parts: list[Any] = [data] if contents is None else [data, contents]
        return self._mailbox.send(self, parts)

    def close(self, linger_s: float = 0.0) -> None:
        self.is_closed = True
        if self.end.connection is self:
            self._mailbox.drop(self.end, linger_s)


# Called with every message, or a Hangup, and its raw frame.
Hear = Callable[[PeerConnection, Any, memoryview | None], None]


@dataclass(eq=False)
class _End:
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    hear: Hear
    max_bytes: Callable[[PeerConnection], int]
    connection: PeerConnection | None = None
    # Listener: peers by routing id and by file descriptor.
    by_name: dict[bytes, PeerConnection] = field(default_factory=dict)
    by_fd: dict[int, PeerConnection] = field(default_factory=dict)
    # Hosts of open descriptors.
    hosts: dict[int, str] = field(default_factory=dict)
    closing: deque[tuple[PeerConnection, Hangup]] = field(default_factory=deque)
    # Why the handshake failed of the connection that is reported as closed next; empty: the peer left.
    refusal: str | None = None


class Mailbox:
    """`refused` is called with (host, reason) of every failed handshake."""

    def __init__(self, refused: Callable[[str, str], None] = lambda host, reason: None) -> None:
        self._refused = refused
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        # By the file descriptors of its socket and its monitor.
        self._by_fd: dict[int, _End] = {}
        self._ends: list[_End] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_over = False
        # Held by the thread that pumps; calls of `lead` so far.
        self._pumping = threading.Lock()
        self._num_led = 0

    def listen(
        self,
        address: str,
        hear: Hear,
        secret: bytes = b"",
        max_bytes: Callable[[PeerConnection], int] = lambda connection: MAX_MESSAGE_BYTES,
    ) -> str:
        """Returns the address with the chosen port. Raises TesseraError."""
        end = self._end(zmq.ROUTER, hear, max_bytes)
        end.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if secret:
            end.socket.curve_server = True
            end.socket.curve_publickey, end.socket.curve_secretkey = derive_keys(secret, "server")
            end.socket.setsockopt(zmq.ZAP_DOMAIN, b"tessera")
            self._admit(derive_keys(secret, "client")[0])
        try:
            end.socket.bind(address)
        except zmq.ZMQError as error:
            self._ends.append(end)
            self.close()
            place, remedy = address.partition("://")[2], "Use this machine's address and a free port."
            raise TesseraError(f"cannot listen: {error.strerror}", remedy, place) from error
        self._add(end)
        return bytes(end.socket.last_endpoint).decode()  # type: ignore[arg-type]

    def connect(
        self,
        address: str,
        hear: Hear,
        secret: bytes = b"",
        name: bytes = b"",
        patience_s: float = float("inf"),
    ) -> PeerConnection:
        """In the background, within `patience_s`; `name` is the routing id."""
        end = self._end(zmq.DEALER, hear, lambda connection: MAX_MESSAGE_BYTES)
        if name:
            end.socket.setsockopt(zmq.ROUTING_ID, name)
        if secret:
            end.socket.curve_serverkey = derive_keys(secret, "server")[0]
            end.socket.curve_publickey, end.socket.curve_secretkey = derive_keys(secret, "client")
        end.connection = PeerConnection(self, end, name, address, patience_s)
        end.socket.connect(address)
        self._add(end)
        return end.connection

    def start(self) -> None:
        """Pumps in a thread until `close`, unless another thread does (`lead`)."""

        def run() -> None:
            num_led = 0
            while not self._is_over:
                if num_led != self._num_led or not self._pumping.acquire(blocking=False):
                    num_led = self._num_led
                    time.sleep(TAKE_OVER_S)
                    continue
                try:
                    self.pump(None)
                finally:
                    self._pumping.release()

        self._thread = threading.Thread(target=run, name="tessera-mailbox", daemon=True)
        self._thread.start()

    def pump(self, timeout_s: float | None) -> None:
        ready: dict[_End, None] = {}  # in order
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                ready |= dict.fromkeys(list(self._ends))
            elif (end := self._by_fd.get(fd)) is not None:  # else another thread has closed it
                ready[end] = None
        for end in ready:
            self._drain(end)

    def lead(self, timeout_s: float | None) -> bool:
        """Pumps in place of the mailbox's thread; False while that one does."""
        self._num_led += 1
        if self._is_over or not self._pumping.acquire(blocking=False):
            return False
        try:
            self.pump(timeout_s)
        finally:
            self._pumping.release()
        return True

    @property
    def has_news(self) -> bool:
        return not self._is_over and bool(self._epoll.poll(0)) and not self._pumping.locked()

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def send(self, connection: PeerConnection, parts: list[Any]) -> bool:
        end = connection.end
        if end.connection is None:
            parts = [connection.name, *parts]
        with self._lock:
            if connection.is_closed:
                return False
            try:
                for part in parts[:-1]:
                    end.socket.send(part, SEND_MORE)
                end.socket.send(parts[-1], NOBLOCK)
                # Sending may consume the signal that something came.
                if _has_message(end.socket):
                    self.wake()
                return True
            except zmq.ZMQError:
                end.closing.append((connection, Hangup()))
        self.wake()
        return False

    def drop(self, end: _End, linger_s: float) -> None:
        with self._lock:
            if end in self._ends:
                self._ends.remove(end)
                self._close_end(end, linger_s)

    def close(self, linger_s: float = 0.0) -> None:
        if self._is_over:
            return
        self._is_over = True
        with self._lock:
            for end in self._ends:
                self._close_end(end, linger_s)
            self._ends = []
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._context.term()
        if self._thread is None:
            self._epoll.close()
            os.close(self._wake_fd)

    def _end(self, kind: int, hear: Hear, max_bytes: Callable[[PeerConnection], int]) -> _End:
        zmq_socket = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: HIGH_WATER,
            zmq.RCVHWM: HIGH_WATER,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.CONNECT_TIMEOUT: CONNECT_MS,
            zmq.RECONNECT_IVL: RETRY_MS,
            zmq.BACKLOG: BACKLOG,
            **KEEP_ALIVE,
        }
        for option, value in options.items():
            zmq_socket.setsockopt(option, value)
        monitor = zmq_socket.get_monitor_socket(addr=f"inproc://monitor-{next(self._numbers)}")
        return _End(zmq_socket, monitor, hear, max_bytes)

    def _add(self, end: _End) -> None:
        with self._lock:
            self._ends.append(end)
            for each in (end.socket, end.monitor):
                fd: Any = each.getsockopt(zmq.FD)
                self._by_fd[fd] = end
                self._epoll.register(fd, select.EPOLLIN)
        self.wake()

    def _close_end(self, end: _End, linger_s: float) -> None:
        for each in (end.socket, end.monitor):
            with contextlib.suppress(OSError, zmq.ZMQError):
                fd: Any = each.getsockopt(zmq.FD)
                self._by_fd.pop(fd, None)
                self._epoll.unregister(fd)
        with contextlib.suppress(zmq.ZMQError):
            end.socket.disable_monitor()
        end.monitor.close(0)
        end.socket.close(round(linger_s * 1000))

    def _admit(self, public: bytes) -> None:
        """Answers the library's questions about client keys."""
        key = z85.decode(public)
        server = self._context.socket(zmq.REP)
        server.linger = 0
        server.bind(ZAP)

        def answer() -> None:
            with contextlib.suppress(zmq.ZMQError):  # the context has ended
                while True:
                    _, request, _, _, _, mechanism, *credentials = server.recv_multipart()
                    is_known = mechanism == b"CURVE" and credentials == [key]
                    server.send_multipart([b"1.0", request, b"200" if is_known else b"400", b"", b"", b""])
            server.close(0)

        threading.Thread(target=answer, name="tessera-keys", daemon=True).start()

    def _drain(self, end: _End) -> None:
        """Reports closed connections after the messages that came over them."""
        self._read_monitor(end)
        while (frames := self._receive(end)) is not None:
            self._deliver(end, frames)
        while end.closing:
            self._hang_up(*end.closing.popleft())

    def _receive(self, end: _End) -> "list[zmq.Frame] | None":
        with self._lock, contextlib.suppress(zmq.ZMQError):
            if _has_message(end.socket):
                return end.socket.recv_multipart(NOBLOCK, copy=False)
        return None

    def _deliver(self, end: _End, frames: "list[zmq.Frame]") -> None:
        connection = end.connection
        if connection is None:
            connection = self._connection(end, frames.pop(0).bytes, frames[0])
        if connection.is_closed:
            return
        message: Message | Hangup = Hangup(TOO_LONG)
        if sum(map(len, frames)) <= end.max_bytes(connection):
            try:
                message = messages.decode(frames[0].buffer)
            except TesseraError as error:
                message = Hangup(str(error))
        if isinstance(message, Hangup):
            self._hang_up(connection, message)
        else:
            end.hear(connection, message, frames[1].buffer if len(frames) > 1 else None)

    def _connection(self, end: _End, name: bytes, frame: zmq.Frame) -> PeerConnection:
        connection = end.by_name.get(name)
        if connection is None:
            with self._lock:
                is_remote = not end.socket.closed and end.socket.curve_server
            host = str(frame.get("Peer-Address")) if is_remote else ""
            connection = end.by_name[name] = PeerConnection(self, end, name, host)
            fd = int(frame.get(zmq.SRCFD))
            # An earlier connection of this descriptor is closed before it is used again.
            self._read_monitor(end)
            if fd in end.hosts:
                end.by_fd[fd] = connection
            else:
                end.closing.append((connection, Hangup()))
        return connection

    def _hang_up(self, connection: PeerConnection, hangup: Hangup) -> None:
        end = connection.end
        if end.by_name.get(connection.name) is connection and hangup == Hangup():
            del end.by_name[connection.name]
        if not connection.is_closed:
            connection.is_closed = True
            end.hear(connection, hangup, None)

    def _read_monitor(self, end: _End) -> None:
        while True:
            try:
                with self._lock:  # or the library ends the process if another thread closes it meanwhile
                    event = recv_monitor_message(end.monitor, zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            kind, value = int(event["event"]), int(event["value"])
            if end.connection is not None:
                if (hangup := self._connecting(end.connection, kind)) is not None:
                    end.closing.append((end.connection, hangup))
            elif kind == zmq.EVENT_ACCEPTED:
                end.hosts[value] = _host(value)
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                end.refusal = "" if value in (errno.EPIPE, errno.ECONNRESET) else "it was silent"
            elif kind in REFUSALS:
                end.refusal = REFUSALS[kind]
            elif kind == zmq.EVENT_DISCONNECTED:
                host, refusal, end.refusal = end.hosts.pop(value, ""), end.refusal, None
                if (connection := end.by_fd.pop(value, None)) is not None:
                    end.closing.append((connection, Hangup()))
                elif refusal != "":
                    self._refused(host or "a caller", refusal or "it is no worker")

    def _connecting(self, connection: PeerConnection, kind: int) -> Hangup | None:
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            connection.is_open = True
        elif kind in REFUSALS:  # the library does not try again
            connection.num_failed += MAX_HANDSHAKES
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            connection.num_failed += 1
        elif kind == zmq.EVENT_DISCONNECTED and connection.is_open:
            return Hangup("the connection was closed")
        elif not connection.is_open and time.monotonic() > connection.until_s:
            return Hangup("no connection could be opened")
        return None


def _has_message(source: "zmq.Socket[bytes]") -> bool:
    return bool(source.getsockopt(EVENTS) & POLLIN)  # type: ignore[operator]


def _host(fd: int) -> str:
    try:
        with socket.socket(fileno=os.dup(fd)) as accepted:
            name = accepted.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""
