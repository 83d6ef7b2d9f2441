"""Links: connections between workers that carry transfers, opened on first use and reopened when cut.

A link is one-way, from the worker that opened it. Workers listen in the session's private folder if all are
local, else at a TCP port. The engine tells them each other's addresses, by device and epoch. A frame that no
program could have sent closes the link.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tessera.execute.mailbox import Hangup, Mailbox, PeerConnection
from tessera.execute.messages import PIECE_BYTES, LinkClose, LinkFrame, LinkOpen, PageFrame, PageTaken

# Time to open a link.
OPEN_S = 20.0
# Time to tell the other end that a link is closed on purpose.
CLOSE_S = 1.0


class Receiver(Protocol):
    """Consumer of arriving frames; called by the thread that pumps the mailbox."""

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        """`contents` stays valid."""

    def gone(self, peer: int, why: str) -> None:
        """The link from a peer, or to it, was closed."""


class Links:
    """All links of one worker.

    epochs     of every device's worker, this one included; updated by `relink`
    max_bytes  maximum size of a frame from a peer
    """

    def __init__(
        self,
        mailbox: Mailbox,
        device: int,
        epochs: Sequence[int],
        receiver: Receiver,
        max_bytes: Callable[[int], int],
        *,
        secret: bytes = b"",
        folder: str = "",
        host: str = "",
    ) -> None:
        self.epochs = list(epochs)
        self._mailbox, self._device, self._secret = mailbox, device, secret
        self._receiver, self._max_bytes = receiver, max_bytes
        # Peer -> its address, the link to it, and its link to this worker.
        self._addresses: dict[int, str] = {}
        self._outs: dict[int, PeerConnection] = {}
        self._ins: dict[int, PeerConnection] = {}
        self._peers: dict[PeerConnection, int] = {}
        # Frames for a peer whose address is still to come: at the start it may know this worker's first.
        self._early: dict[int, list[tuple[LinkFrame | PageFrame | PageTaken, bytes | None]]] = {}
        # Takes frames about pages; called by the thread that pumps the mailbox.
        self.pages: Callable[[int, PageFrame | PageTaken, memoryview], None] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        name = f"link-{device}-{self.epochs[device]}"
        address = f"tcp://{host}:*" if host else f"ipc://{folder}/{name}"
        self.address = mailbox.listen(address, self._hear_in, secret if host else b"")
        if not host:
            self._secret = b""

    def post(
        self, peer: int, frame: LinkFrame | PageFrame | PageTaken, contents: memoryview | None = None
    ) -> None:
        """Sends a frame without waiting; the contents may be overwritten when this returns."""
        with self._lock:
            out = self._outs.get(peer)
            if out is None and not self._addresses.get(peer):
                kept = None if contents is None else bytes(contents)
                self._early.setdefault(peer, []).append((frame, kept))
                return
            if out is None and not self._is_closed:
                secret = self._secret
                out = self._mailbox.connect(self._addresses[peer], self._hear_out, secret, patience_s=OPEN_S)
                self._outs[peer], self._peers[out] = out, peer
                out.send(LinkOpen(self._device, self.epochs[self._device]))
        if out is not None:
            out.send(frame, contents)

    def relink(self, peer: int, epoch: int, address: str) -> None:
        """Closes the link to a peer; the next frame opens another. With a new epoch its link to this one
        closes too.
        """
        with self._lock:
            out = self._outs.pop(peer, None)
            early = self._early.pop(peer, [])
            if epoch > self.epochs[peer]:
                self._ins.pop(peer, None)
                early = []
            self.epochs[peer] = max(epoch, self.epochs[peer])
            self._addresses[peer] = address
        self._close_out(out)
        for frame, contents in early:
            self.post(peer, frame, None if contents is None else memoryview(contents))

    def close(self) -> None:
        """Closes all links without news to the receiver."""
        self._is_closed = True
        with self._lock:
            outs, self._outs, self._ins = self._outs, {}, {}
        for out in outs.values():
            self._close_out(out)

    def _close_out(self, out: PeerConnection | None) -> None:
        if out is not None:
            self._peers.pop(out, None)
            out.send(LinkClose())
            out.close(CLOSE_S)

    def _hear_out(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        """A link to a peer: nothing comes back but its end."""
        with self._lock:
            peer = self._peers.pop(connection, None)
            is_news = peer is not None and self._outs.get(peer) is connection
            if peer is not None and is_news:
                del self._outs[peer]
        connection.close()
        if peer is not None and is_news and not self._is_closed:
            why = message.reason if isinstance(message, Hangup) else "it answered over a one-way link"
            self._receiver.gone(peer, why)

    def _hear_in(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        match message:
            case LinkOpen(device, epoch):
                self._open(connection, device, epoch)
            case LinkFrame() | PageFrame() | PageTaken() if (peer := self._peers.get(connection)) is not None:
                is_step = isinstance(message, LinkFrame)
                size, limit = len(contents or b""), self._max_bytes(peer) if is_step else PIECE_BYTES
                if size > limit:
                    self._end(
                        connection, f"it sent a frame of {size} bytes, no program has more than {limit}"
                    )
                elif isinstance(message, LinkFrame):
                    self._receiver.arrived(peer, message, contents or memoryview(b""))
                elif self.pages is not None:
                    self.pages(peer, message, contents or memoryview(b""))
            case LinkClose():
                with self._lock:
                    sender = self._peers.pop(connection, -1)
                    if self._ins.get(sender) is connection:
                        del self._ins[sender]
            case Hangup(reason):
                self._end(connection, reason or "the link was closed")
            case _:
                self._end(connection, f"it sent {type(message).__name__} over a link")

    def _open(self, connection: PeerConnection, device: int, epoch: int) -> None:
        """Admits a link from the present worker of a peer."""
        with self._lock:
            if device == self._device or device >= len(self.epochs) or epoch < self.epochs[device]:
                connection.close()
                return
            self.epochs[device] = epoch
            self._ins[device], self._peers[connection] = connection, device

    def _end(self, connection: PeerConnection, why: str) -> None:
        connection.close()
        with self._lock:
            peer = self._peers.pop(connection, None)
            is_news = peer is not None and self._ins.get(peer) is connection
            if peer is not None and is_news:
                del self._ins[peer]
        if peer is not None and is_news and not self._is_closed:
            self._receiver.gone(peer, why)
