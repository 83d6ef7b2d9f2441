"""Links: authenticated connections between worker processes, opened when they are needed and again when cut.

A link carries frames one way, from the worker that opened it. Every worker listens: at a socket in the
session's private folder where all workers are on one machine, at a TCP port of its host otherwise. It tells
its address through the engine's store, under its device and epoch, so that nobody reaches an earlier worker
of a device by mistake. Both ends prove that they know the session's key (`handshake`).

A frame is a header and its bytes. A header that no program could have sent closes the link with the reason.
"""

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tessera.errors import TesseraError
from tessera.execute import handshake
from tessera.execute.handshake import Door, Unproved, end, prove, tune
from tessera.execute.orders import key_of
from tessera.execute.pipes import read_into

# Run, transfer, bytes, when it was sent.
_HEADER = struct.Struct("<qqqd")
# Source device, its epoch, destination device: what a caller says of itself.
_NAMES = struct.Struct("<qqq")
# A run that there is not: the sender opens another link.
BYE = -1
# What a worker sets its address under; see `orders.key_of`.
LINK = "link"
# How long a link is tried to be opened: the other worker may be starting.
OPEN_S, RETRY_S = 20.0, 0.05
# Bytes that are thrown away are read in parts of this size; shorter frames are written at once.
PART_BYTES = 1 << 16


class LinkLost(TesseraError):
    """A link that cannot be opened, or was cut."""


@dataclass(frozen=True, slots=True)
class LinkFrame:
    """What travels over a link, but for its bytes."""

    run: int
    transfer: int
    size: int
    # By the sender's clock.
    sent_s: float


class Receiver(Protocol):
    """Who gets what arrives; called by one thread a peer."""

    def place(self, peer: int, frame: LinkFrame) -> memoryview | None:
        """Where the frame's bytes go, exactly as many; None: nowhere. Not asked for a frame of no bytes."""

    def arrived(self, peer: int, frame: LinkFrame) -> None:
        """The bytes are in their place."""

    def gone(self, peer: int, why: str) -> None:
        """The link from a peer, or to it, was cut."""


class KeyStore(Protocol):
    """The engine's store, from a worker."""

    def set(self, key: str, value: bytes) -> None:
        """Others can have it from now on."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """What was set under this key, or will be within the time."""


@dataclass
class _Out:
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: socket.socket | None = None
    # What could not be written at once, for a thread of its own; the count includes what it is at.
    waiting: "queue.SimpleQueue[tuple[int, int, bytearray]]" = field(default_factory=queue.SimpleQueue)
    num_waiting: int = 0
    has_thread: bool = False
    # True while that thread writes to the link, which is then not to be closed by another.
    is_writing: bool = False
    # Counts the links that were given up; what waits for an earlier one is dropped.
    turn: int = 0
    # Memory for what waits, used again: fresh memory costs more than the copy into it.
    spare: dict[int, bytearray] = field(default_factory=dict)


class Links:
    """One worker's ends of all its links.

    epochs     of every device's worker, its own among them
    max_bytes  peer -> how many bytes a frame from it may have
    """

    def __init__(
        self,
        device: int,
        epochs: Sequence[int],
        key: bytes,
        store: KeyStore,
        receiver: Receiver,
        max_bytes: Callable[[int], int],
        *,
        folder: str = "",
        host: str = "",
    ) -> None:
        # As they become known.
        self.epochs = list(epochs)
        self._device, self._key = device, key
        self._store, self._receiver, self._max_bytes = store, receiver, max_bytes
        self._folder, self._host = folder, host
        self._outs = [_Out() for _ in epochs]
        # Peer -> its link to this worker.
        self._ins: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self.door: Door | None = None
        self._is_closed = False

    def start(self) -> None:
        """Listens, and tells where."""
        if self._host:
            server = socket.create_server((self._host, 0), backlog=128)
            address = f"tcp {self._host} {server.getsockname()[1]}"
        else:
            path = os.path.join(self._folder, f"link-{self._device}-{self.epochs[self._device]}")
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(path)
            server.listen(128)
            address = f"unix {path}"
        self.door = Door(server, self._key, handshake.LINK, self._check, self._serve)
        self._store.set(key_of(LINK, self._device, self.epochs[self._device]), address.encode())

    def send(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        """Writes a frame, and opens the link where there is none; for a thread a peer. Raises LinkLost.

        Not to be mixed with `post` for the same peer.
        """
        out = self._outs[peer]
        with out.lock:
            turn = out.turn
        header = _HEADER.pack(frame.run, frame.transfer, frame.size, frame.sent_s)
        is_small = len(contents) <= PART_BYTES
        self._write(peer, out, turn, *([header + contents] if is_small else [header, contents]))

    def post(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        """Sends a frame without waiting; the contents may be overwritten when this returns.

        A link that cannot be opened or written is told as gone.
        """
        out = self._outs[peer]
        try:
            with out.lock:
                self._post(peer, out, frame, contents)
        except LinkLost as error:
            self._receiver.gone(peer, error.message)

    def _post(self, peer: int, out: _Out, frame: LinkFrame, contents: memoryview) -> None:
        """With the lock held."""
        sent = 0
        if out.link is not None and not out.num_waiting:
            try:
                sent = _write_some(out.link, frame, contents)
            except OSError as error:
                self._drop(out)
                raise LinkLost(words(error)) from error
        size = _HEADER.size + len(contents)
        if sent == size:
            return
        kept = out.spare.pop(size, None) or bytearray(size)
        _HEADER.pack_into(kept, 0, frame.run, frame.transfer, frame.size, frame.sent_s)
        memoryview(kept)[_HEADER.size :] = contents
        out.num_waiting += 1
        out.waiting.put((out.turn, sent, kept))
        if not out.has_thread:
            out.has_thread = True
            threading.Thread(target=self._write_waiting, args=(peer, out), daemon=True).start()

    def relink(self, peer: int, epoch: int) -> None:
        """The link to a peer is given up, with what waits for it; the next frame opens another.

        With a new epoch the peer was started again, and its link to here is given up too.
        """
        out = self._outs[peer]
        with out.lock:
            if out.link is not None and not out.is_writing:
                _say_bye(out.link)
            self._drop(out)
        with self._lock:
            stale = self._ins.pop(peer, None) if epoch > self.epochs[peer] else None
            self.epochs[peer] = max(epoch, self.epochs[peer])
        if stale is not None:
            end(stale)

    def close(self) -> None:
        """Ends all links, without a word to the receiver."""
        self._is_closed = True
        if self.door is not None:
            self.door.close()
        for out in self._outs:
            with out.lock:
                self._drop(out)
        with self._lock:
            ins, self._ins = list(self._ins.values()), {}
        for link in ins:
            end(link)

    def _drop(self, out: _Out) -> None:
        """With the lock held: this link is over."""
        out.turn += 1
        if out.link is not None:
            end(out.link)
            if not out.is_writing:
                out.link.close()
            out.link = None

    def _write_waiting(self, peer: int, out: _Out) -> None:
        while not self._is_closed:
            turn, sent, kept = out.waiting.get()
            try:
                if turn == out.turn:
                    self._write(peer, out, turn, memoryview(kept)[sent:])
            except LinkLost as error:
                self._receiver.gone(peer, error.message)
            finally:
                with out.lock:
                    out.num_waiting -= 1
                    out.spare[len(kept)] = kept

    def _write(self, peer: int, out: _Out, turn: int, *parts: memoryview | bytes) -> None:
        """All of them, over a link that is opened if need be; nothing if the link was given up meanwhile."""
        try:
            link = out.link or self._open(peer)
        except LinkLost:
            if turn != out.turn:
                return
            raise
        with out.lock:
            is_stale = turn != out.turn
            if not is_stale:
                out.link, out.is_writing = link, True
        if is_stale:
            _say_bye(link)
            link.close()
            return
        why: OSError | None = None
        try:
            for part in parts:
                link.sendall(part)
        except OSError as error:
            why = error
        with out.lock:
            out.is_writing = False
            is_stale = turn != out.turn  # given up meanwhile, on purpose
            if is_stale:
                link.close()
            elif why is not None:
                self._drop(out)
        if why is not None and not is_stale:
            raise LinkLost(words(why)) from why

    def _open(self, peer: int) -> socket.socket:
        """A link to the peer's present worker."""
        deadline, said = time.monotonic() + OPEN_S, "it does not say where it listens"
        epoch = self.epochs[peer]
        while not self._is_closed and epoch == self.epochs[peer] and time.monotonic() < deadline:
            try:
                address = self._store.get(key_of(LINK, peer, epoch), deadline - time.monotonic()).decode()
                link = call(address)
            except (OSError, TesseraError) as error:
                said = words(error)
                time.sleep(RETRY_S)
                continue
            try:
                names = _NAMES.pack(self._device, self.epochs[self._device], peer)
                prove(link, self._key, handshake.LINK, names)
            except (OSError, Unproved, EOFError) as error:
                link.close()
                said = words(error)
                time.sleep(RETRY_S)
                continue
            return link
        raise LinkLost(f"no link could be opened: {said}")

    def _check(self, names: bytes) -> None:
        """Who has the key must also be a peer's present worker."""
        src, epoch, dst = _NAMES.unpack(names) if len(names) == _NAMES.size else (-1, 0, -1)
        if dst != self._device or not 0 <= src < len(self.epochs) or src == dst:
            raise LinkLost("it is no peer of this worker")
        with self._lock:
            if epoch < self.epochs[src]:
                raise LinkLost("it was given up")
            self.epochs[src] = epoch

    def _serve(self, link: socket.socket, names: bytes, host: str) -> None:
        """What one caller sends, in a thread of its own."""
        peer = int(_NAMES.unpack(names)[0])
        with self._lock:
            stale, self._ins[peer] = self._ins.get(peer), link
        if stale is not None:
            end(stale)
        why = self._receive(peer, link)
        link.close()
        with self._lock:
            is_news = self._ins.get(peer) is link
            if is_news:
                del self._ins[peer]
        if is_news and why and not self._is_closed:
            self._receiver.gone(peer, why)

    def _receive(self, peer: int, link: socket.socket) -> str:
        """Frames until the link ends; why it did, empty if the peer opens another."""
        header = bytearray(_HEADER.size)
        scratch = memoryview(bytearray(PART_BYTES))
        try:
            while True:
                read_into(link, memoryview(header))
                frame = LinkFrame(*_HEADER.unpack(header))
                if frame.run == BYE:
                    return ""
                limit = self._max_bytes(peer)
                if min(frame.run, frame.transfer, frame.size) < 0 or frame.size > limit:
                    return f"it sent a frame of {frame.size} bytes, no program has more than {limit}"
                place = self._receiver.place(peer, frame) if frame.size else None
                if place is not None:
                    read_into(link, place)
                else:
                    for start in range(0, frame.size, PART_BYTES):
                        read_into(link, scratch[: min(PART_BYTES, frame.size - start)])
                self._receiver.arrived(peer, frame)
        except (OSError, EOFError) as error:
            return words(error)


def _write_some(link: socket.socket, frame: LinkFrame, contents: memoryview) -> int:
    """How many bytes of a frame the link takes at once."""
    header = _HEADER.pack(frame.run, frame.transfer, frame.size, frame.sent_s)
    try:
        return link.sendmsg([header, contents], [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _say_bye(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.send(_HEADER.pack(BYE, 0, 0, 0.0), socket.MSG_DONTWAIT)


def call(address: str) -> socket.socket:
    """A socket to where a worker says that it listens."""
    kind, *where = address.split(" ", 2)
    if kind == "tcp":
        link = socket.create_connection((where[0], int(where[1])), timeout=handshake.HANDSHAKE_S)
    else:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(handshake.HANDSHAKE_S)
        link.connect(" ".join(where))
    tune(link)
    return link


def words(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the link was closed"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return getattr(error, "message", str(error))
