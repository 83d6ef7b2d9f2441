"""Links: authenticated connections between worker processes, opened when they are needed and again when cut.

A link carries frames one way, from the worker that opened it. Every worker listens: at a socket in the
session's private folder where all workers are on one machine, at a TCP port of its host otherwise. It tells
its address through the engine's store, under its device and epoch, so that nobody reaches an earlier worker
of a device by mistake. Both ends prove that they know the session's key (`handshake`).

A frame is a header and its bytes. A header that no program could have sent closes the link with the reason.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.errors import TesseraError
from tessera.execute import handshake
from tessera.execute.handshake import Door, prove, tune
from tessera.execute.orders import key_of
from tessera.execute.pipes import Outbox, end, read_into

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
        # Peer -> the link to it, and its link to this worker.
        self._outs: dict[int, Outbox] = {}
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
        is_small = len(contents) <= PART_BYTES
        try:
            self._out(peer).write(*([_packed(frame) + contents] if is_small else [_packed(frame), contents]))
        except (OSError, TesseraError) as error:
            raise LinkLost(words(error)) from error

    def post(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        """Sends a frame without waiting; the contents may be overwritten when this returns.

        A link that cannot be opened or written is told as gone.
        """
        self._out(peer).post(_packed(frame), contents)

    def _out(self, peer: int) -> Outbox:
        with self._lock:
            out = self._outs.get(peer)
            if out is None or out.is_gone:
                out = self._outs[peer] = Outbox(
                    lambda: self._open(peer),
                    lambda why: self._receiver.gone(peer, words(why)),
                    _packed(LinkFrame(BYE, 0, 0, 0.0)),
                )
            return out

    def relink(self, peer: int, epoch: int) -> None:
        """The link to a peer is given up, with what waits for it; the next frame opens another.

        With a new epoch the peer was started again, and its link to here is given up too.
        """
        with self._lock:
            out = self._outs.pop(peer, None)
            stale = self._ins.pop(peer, None) if epoch > self.epochs[peer] else None
            self.epochs[peer] = max(epoch, self.epochs[peer])
        if out is not None:
            out.close()
        if stale is not None:
            end(stale)

    def close(self) -> None:
        """Ends all links, without a word to the receiver."""
        self._is_closed = True
        if self.door is not None:
            self.door.close()
        with self._lock:
            outs, ins, self._outs, self._ins = self._outs, self._ins, {}, {}
        for out in outs.values():
            out.close()
        for link in ins.values():
            end(link)

    def _open(self, peer: int) -> socket.socket:
        """A link to the peer's present worker."""
        deadline, said = time.monotonic() + OPEN_S, "it does not say where it listens"
        epoch = self.epochs[peer]
        while not self._is_closed and epoch == self.epochs[peer] and time.monotonic() < deadline:
            link = None
            try:
                address = self._store.get(key_of(LINK, peer, epoch), deadline - time.monotonic()).decode()
                link = call(address)
                names = _NAMES.pack(self._device, self.epochs[self._device], peer)
                prove(link, self._key, handshake.LINK, names)
                return link
            except (OSError, EOFError, TesseraError) as error:
                if link is not None:
                    link.close()
                said = words(error)
                time.sleep(RETRY_S)
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


def _packed(frame: LinkFrame) -> bytes:
    return _HEADER.pack(frame.run, frame.transfer, frame.size, frame.sent_s)


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
