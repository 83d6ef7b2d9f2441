"""PageMover: a worker's end of moves of pages.

The source gathers pieces of bounded size into staging slots (shared memory, or bytes over the link) and tells
the destination, which scatters each, returns the slot, and reports the end.

Nothing blocks the worker's loop. On a modelled link a piece leaves no sooner than its time allows. Not
handled: moves and transfers of steps that compete for a modelled link.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tessera.execute.driver import LOOK_S
from tessera.execute.links import Links, PageNews
from tessera.execute.memory import StatePlace, Storage, bytes_of
from tessera.execute.messages import PIECE_BYTES, Done, Message, MovePages, PageFrame, PageTaken, Setup
from tessera.execute.transport import IPC, SHM, shared_bytes

# A page is a multiple of this.
WORD = 8
# Pieces under way to one destination.
SLOTS = 8
# To drop late pieces of cancelled moves.
REMEMBERED = 4096
# (pages of one state buffer as rows, chosen pages)
PageRows = tuple[torch.Tensor, Sequence[int]]
# (state buffer, bytes of a page, pages here, pages at the destination)
PiecePart = tuple[str, int, Sequence[int], Sequence[int]]


class PageCopier:
    def __init__(self, card: torch.device) -> None:
        self._card = card

    def gather(self, parts: Sequence[PageRows], into: torch.Tensor) -> Any:
        at = 0
        with self.stream():
            for rows, pages in parts:
                chosen = rows.index_select(0, self._index(pages)).view(torch.uint8).reshape(-1)
                into[at : at + chosen.numel()].copy_(chosen, non_blocking=True)
                at += chosen.numel()
            return self.mark()

    def scatter(self, parts: Sequence[PageRows], contents: torch.Tensor) -> Any:
        at = 0
        with self.stream():
            staged = contents.to(self._card, non_blocking=True)
            for rows, pages in parts:
                size = len(pages) * rows.shape[1] * WORD
                chosen = staged[at : at + size].view(torch.int64).view(len(pages), -1)
                rows.index_copy_(0, self._index(pages), chosen)
                at += size
            return self.mark()

    def copy(self, sources: Sequence[PageRows], destinations: Sequence[PageRows]) -> Any:
        with self.stream():
            for (rows, pages), (others, places) in zip(sources, destinations, strict=True):
                others.index_copy_(0, self._index(places), rows.index_select(0, self._index(pages)))
            return self.mark()

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self._card, non_blocking=True)

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def mark(self) -> Any:
        return None

    def staging(self, size: int, path: Path | None) -> torch.Tensor:
        return shared_bytes(path, size)


@dataclass
class _Job:
    order: MovePages
    pieces: deque[list[PiecePart]]
    total: int


@dataclass
class _Copying:
    """`finish` is called with True if the move was cancelled."""

    run: int
    mark: Any
    finish: Callable[[bool], None]
    due_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return (self.mark is None or self.mark.query()) and time.monotonic() >= self.due_s


@dataclass
class _Direction:
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    sent: dict[int, int] = field(default_factory=dict)
    jobs: deque[_Job] = field(default_factory=deque)
    free_s: float = 0.0


class PageMover:
    """Used by the worker's loop.

    find    None: the state is not here
    hold_s  (destination, bytes) -> modelled seconds on the wire, and of latency
    """

    def __init__(
        self,
        setup: Setup,
        find: Callable[[StatePlace, str], Storage | None],
        copier: PageCopier,
        links: Links,
        tell: Callable[[Message], None],
        hold_s: Callable[[int, int], tuple[float, float]] = lambda device, size: (0.0, 0.0),
    ) -> None:
        self._device, self._find, self._copier = setup.device, find, copier
        self._links, self._tell, self._hold_s = links, tell, hold_s
        self._folder = setup.folder if setup.transport in (SHM, IPC) else ""
        self._ways: dict[int, _Direction] = defaultdict(_Direction)
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._copying: list[_Copying] = []
        # Move -> pieces copied; moves that write nothing any more; pieces for unknown homes.
        self._copied: dict[int, int] = {}
        self._cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self._early: list[PageNews] = []
        # Pieces of an earlier worker of this device have other numbers.
        self._numbers = count(setup.epoch << 32)

    def order(self, order: MovePages) -> None:
        pieces = cut(order)
        self._ways[order.device].jobs.append(_Job(order, pieces, len(pieces)))

    def advance(self) -> bool:
        """False if only news can continue the copies."""
        over = [copying for copying in self._copying if copying.is_over]
        for copying in over:
            self._copying.remove(copying)
            copying.finish(False)
        started = [self._start_piece(device, way) for device, way in list(self._ways.items()) if way.jobs]
        if self._copying and not over and not any(started):
            time.sleep(LOOK_S)
        return bool(self._copying) or any(started)

    def hear(self, news: PageNews) -> None:
        frame = news.frame
        if isinstance(frame, PageTaken):
            way = self._ways[news.peer]
            slot = way.sent.pop(frame.piece, None)
            if slot is not None:
                way.free.append(slot)
        elif frame.run in self._cancelled:
            self._links.post(news.peer, PageTaken(frame.piece))
        elif any(self._find(frame.place, name) is None for name, _, _ in frame.parts):
            self._early.append(news)
        else:
            self._take(news.peer, frame, news.contents)

    def retry(self) -> None:
        early, self._early = self._early, []
        for news in early:
            self.hear(news)

    def cancel(self, run: int) -> None:
        """Nothing of the move is copied when this returns."""
        self._cancelled.append(run)
        self._copied.pop(run, None)
        for way in self._ways.values():
            way.jobs = deque(job for job in way.jobs if job.order.run != run)
        for copying in [copying for copying in self._copying if copying.run == run]:
            if copying.mark is not None:
                copying.mark.synchronize()
            self._copying.remove(copying)
            copying.finish(True)
        self.retry()

    def reset(self, peer: int) -> None:
        """Frees the slots of a reopened link; the engine has cancelled moves over the last one."""
        way = self._ways[peer]
        way.free, way.sent = list(range(SLOTS)), {}

    def _rows(self, place: StatePlace, name: str, page_bytes: int) -> torch.Tensor:
        storage = self._find(place, name)
        assert storage is not None, "a move names state of its place"
        return bytes_of(storage, 0, storage.nbytes()).view(torch.int64).view(-1, page_bytes // WORD)

    def _start_piece(self, device: int, way: _Direction) -> bool:
        job = way.jobs[0]
        if device != self._device and not way.free:
            return False
        parts, order = job.pieces.popleft(), job.order
        if not job.pieces:
            way.jobs.popleft()
        sources = [(self._rows(order.place, name, size), pages) for name, size, pages, _ in parts]
        if device == self._device:
            targets = [(self._rows(order.to_place, name, size), places) for name, size, _, places in parts]
            mark = self._copier.copy(sources, targets)
            self._add(_Copying(order.run, mark, partial(self._put_down, order.run, job.total)))
            return True
        slot, piece = way.free.pop(), next(self._numbers)
        size = sum(size * len(pages) for _, size, pages, _ in parts)
        contents = self._staging(self._device, device)[slot][:size]
        wire_s, latency_s = self._hold_s(device, size)
        way.free_s = max(way.free_s, time.monotonic()) + wire_s
        listed = [(name, size, list(places)) for name, size, _, places in parts]
        frame = PageFrame(order.run, piece, slot, order.to_place, listed, job.total)

        def send(is_cancelled: bool) -> None:
            if is_cancelled:
                way.free.append(slot)
            else:
                way.sent[piece] = slot
                self._links.post(device, frame, None if self._folder else contents.numpy().data)

        mark = self._copier.gather(sources, contents)
        self._add(_Copying(order.run, mark, send, way.free_s + latency_s if wire_s else 0.0))
        return True

    def _take(self, peer: int, frame: PageFrame, raw: memoryview) -> None:
        sizes = [size * len(places) for _, size, places in frame.parts]
        for name, size, _ in frame.parts:
            held = self._find(frame.place, name)
            if held is None or size < 1 or size % WORD or held.nbytes() % size:
                return  # no worker of this session sends that
        if self._folder:
            contents = self._staging(peer, self._device)[frame.slot % SLOTS][: sum(sizes)]
        else:
            contents = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        targets = [(self._rows(frame.place, name, size), places) for name, size, places in frame.parts]
        if contents.numel() != sum(sizes) or any(max(p, default=0) >= len(rows) for rows, p in targets):
            return

        def finish(is_cancelled: bool) -> None:
            self._links.post(peer, PageTaken(frame.piece))
            self._put_down(frame.run, frame.total, is_cancelled)

        self._add(_Copying(frame.run, self._copier.scatter(targets, contents), finish))

    def _put_down(self, run: int, total: int, is_cancelled: bool) -> None:
        if is_cancelled:
            return
        self._copied[run] = self._copied.get(run, 0) + 1
        if self._copied[run] == total:
            del self._copied[run]
            self._tell(Done(run, {}, {}))

    def _add(self, copying: _Copying) -> None:
        if copying.is_over:
            copying.finish(False)
        else:
            self._copying.append(copying)

    def _staging(self, source: int, destination: int) -> torch.Tensor:
        key = (source, destination)
        if key not in self._slots:
            path = Path(self._folder) / f"pages-{source}-{destination}" if self._folder else None
            self._slots[key] = self._copier.staging(SLOTS * PIECE_BYTES, path).view(SLOTS, PIECE_BYTES)
        return self._slots[key]


def cut(order: MovePages) -> deque[list[PiecePart]]:
    """Pieces of at most `PIECE_BYTES`; larger pages are divided."""
    pieces: deque[list[PiecePart]] = deque()
    left = 0
    for name, page_bytes in order.buffers:
        parts = max(1, -(-page_bytes // PIECE_BYTES))
        while parts > 1 and page_bytes % (parts * WORD):
            parts += 1
        size, at = page_bytes // parts, 0
        sources, targets = (
            [page * parts + part for page in pages for part in range(parts)]
            for pages in (order.from_pages, order.to_pages)
        )
        while at < len(sources):
            if left < size:
                pieces.append([])
                left = PIECE_BYTES
            num = min(left // size, len(sources) - at)
            pages, places = sources[at : at + num], targets[at : at + num]
            pieces[-1].append((name, size, pages, places))
            at, left = at + num, left - num * size
    return pieces
