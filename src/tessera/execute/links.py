"""Links: connections between workers that carry transfers and pages, reopened when cut.

A link is one-way, from the worker that opened it on first use. Workers listen in the session's private folder
if all are local, else at a TCP port. The engine tells them the addresses, by device and epoch. A frame that
no program could have sent closes the link.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.execute.mailbox import Hangup, Mailbox, PeerConnection
from tessera.execute.messages import (
    PIECE_BYTES,
    LinkClose,
    LinkFrame,
    LinkOpen,
    PageFrame,
    PageTaken,
    PeerLost,
    Setup,
)
from tessera.ir import Program

OPEN_S = 20.0
CLOSE_S = 1.0
Frame = LinkFrame | PageFrame | PageTaken


@dataclass(frozen=True, slots=True)
class PageNews:
    peer: int
    frame: PageFrame | PageTaken
    contents: memoryview


class Links:
    """`post` gets pages, and reports of links that were cut."""

    def __init__(self, setup: Setup, mailbox: Mailbox, post: Callable[[PeerLost | PageNews], None]) -> None:
        self.epochs = list(setup.epochs)
        self._mailbox, self._device, self._post = mailbox, setup.device, post
        # Gets transfers, in the thread that pumps the mailbox; the contents stay valid.
        self.arrived: Callable[[int, LinkFrame, memoryview], None] | None = None
        self._largest: Counter[int] = Counter()
        self.load(setup.programs)
        # Peer -> its address, the link to it, and its link to this worker.
        self._addresses: dict[int, str] = {}
        self._outs: dict[int, PeerConnection] = {}
        self._ins: dict[int, PeerConnection] = {}
        self._peers: dict[PeerConnection, int] = {}
        # For a peer whose address is still to come: at the start it may know this worker's first.
        self._early: dict[int, list[tuple[Frame, bytes | None]]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        host, name = setup.host, f"link-{setup.device}-{self.epochs[setup.device]}"
        self._secret = setup.secret if host else b""
        address = f"tcp://{host}:*" if host else f"ipc://{setup.folder}/{name}"
        self.address = mailbox.listen(address, self._hear, self._secret)

    def load(self, programs: Sequence[Sequence[Program]]) -> None:
        for transfer in (t for lane in programs for p in lane for t in p.transfers if t.dst == self._device):
            self._largest[transfer.src] = max(self._largest[transfer.src], transfer.num_bytes)

    def post(self, peer: int, frame: Frame, contents: memoryview | None = None) -> None:
        """Does not wait; the contents may be overwritten when this returns."""
        with self._lock:
            out = self._outs.get(peer)
            if out is None and not self._addresses.get(peer):
                kept = None if contents is None else bytes(contents)
                self._early.setdefault(peer, []).append((frame, kept))
                return
            if out is None and not self._is_closed:
                out = self._mailbox.connect(
                    self._addresses[peer], self._hear_back, self._secret, patience_s=OPEN_S
                )
                self._outs[peer], self._peers[out] = out, peer
                out.send(LinkOpen(self._device, self.epochs[self._device]))
        if out is not None:
            out.send(frame, contents)

    def relink(self, peer: int, epoch: int, address: str) -> None:
        """The next frame opens another link. With a new epoch the peer's link to this worker closes too."""
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

    def _hear_back(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        why = message.reason if isinstance(message, Hangup) else "it answered over a one-way link"
        self._end(connection, why)

    def _hear(self, connection: PeerConnection, message: Any, contents: memoryview | None) -> None:
        match message:
            case LinkOpen(device, epoch):
                self._open(connection, device, epoch)
            case LinkFrame() | PageFrame() | PageTaken() if (peer := self._peers.get(connection)) is not None:
                self._take(connection, peer, message, contents or memoryview(b""))
            case LinkClose():
                self._forget(connection)
            case Hangup(reason):
                self._end(connection, reason or "the link was closed")
            case _:
                self._end(connection, f"it sent {type(message).__name__} over a link")

    def _take(self, connection: PeerConnection, peer: int, frame: Frame, contents: memoryview) -> None:
        limit = PIECE_BYTES
        if isinstance(frame, LinkFrame):
            limit = self._largest[peer] if self.arrived is not None else 0
        if len(contents) > limit:
            why = f"it sent a frame of {len(contents)} bytes, no program has more than {limit}"
            self._end(connection, why)
        elif not isinstance(frame, LinkFrame):
            self._post(PageNews(peer, frame, contents))
        elif self.arrived is not None:
            self.arrived(peer, frame, contents)

    def _open(self, connection: PeerConnection, device: int, epoch: int) -> None:
        with self._lock:
            if device == self._device or device >= len(self.epochs) or epoch < self.epochs[device]:
                connection.close()
                return
            self.epochs[device] = epoch
            self._ins[device], self._peers[connection] = connection, device

    def _forget(self, connection: PeerConnection) -> int | None:
        with self._lock:
            peer = self._peers.pop(connection, -1)
            for links in (self._outs, self._ins):
                if links.get(peer) is connection:
                    del links[peer]
                    return peer
        return None

    def _end(self, connection: PeerConnection, why: str) -> None:
        connection.close()
        peer = self._forget(connection)
        if peer is not None and not self._is_closed:
            self._post(PeerLost(peer, why, self.epochs[peer]))
