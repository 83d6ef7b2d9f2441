"""History: the accesses of one buffer that a later access may still have to wait for.

Writes and reads are kept apart, in program order. A buffer that many launches touch also gets shelves: its
bytes are cut into as many ranges as it has accesses, and an access that spans few of them is filed under
each, so that a launch which writes one slice of a cache looks at its neighbours only. Where the slices are
columns, byte ranges do not tell them apart and their place within a row does: the shelves then divide one
row (see `fold`). Shelves only choose who is compared; `Region.overlaps` decides.

A write that covers earlier accesses makes them a matter of the past: later launches wait for the write.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.ir import Access, Region

# Buffers with fewer accesses are looked through from end to end.
FEW = 32
# An access that spans more shelves than this is kept beside them.
WIDE = 8


@dataclass(slots=True, eq=False)
class Seen:
    """One earlier access."""

    launch: int
    region: Region
    start: int
    stop: int
    reads: bool
    # Decides the list it is in: writes, also those that read; or reads alone.
    writes: bool
    # True if a path leads to this launch from every earlier entry of the same list.
    is_last_word: bool
    # True once a later write has covered it.
    is_past: bool = False


@dataclass(slots=True)
class Shelves:
    """How the bytes of one buffer are divided."""

    # Bytes of one row if the shelves divide a row; else the size of the buffer.
    row_bytes: int
    count: int
    writes: dict[int, list[Seen]] = field(default_factory=dict)
    reads: dict[int, list[Seen]] = field(default_factory=dict)
    wide_writes: list[Seen] = field(default_factory=list)
    wide_reads: list[Seen] = field(default_factory=list)

    def span(self, region: Region) -> range | None:
        """The shelves a region touches; None if they are many."""
        start, stop = fold(region, self.row_bytes)
        first, last = (x * self.count // self.row_bytes for x in (start, stop - 1))
        return range(first, last + 1) if last - first < WIDE else None

    def put(self, seen: Seen) -> None:
        """Files an entry."""
        span = self.span(seen.region)
        if span is None:
            (self.wide_writes if seen.writes else self.wide_reads).append(seen)
            return
        shelves = self.writes if seen.writes else self.reads
        for number in span:
            shelves.setdefault(number, []).append(seen)

    def near(self, region: Region, is_write: bool) -> list[list[Seen]] | None:
        """Lists that together hold every entry the region can overlap; None if that is all of them."""
        span = self.span(region)
        if span is None:
            return None
        shelves = self.writes if is_write else self.reads
        filed = [shelves[number] for number in span if number in shelves]
        return [self.wide_writes if is_write else self.wide_reads, *filed]


def fold(region: Region, row_bytes: int) -> tuple[int, int]:
    """The part of a row that encloses the region in every row it touches."""
    start, dims = region.start % row_bytes, region.dims
    if dims and dims[0][1] == row_bytes:
        dims = dims[1:]
    stop = start + sum((n - 1) * stride for n, stride in dims) + region.item_bytes
    return (start, stop) if stop <= row_bytes else (0, row_bytes)


class History:
    """The accesses of one buffer so far."""

    def __init__(self, accesses: Sequence[Access], size_bytes: int) -> None:
        # Accesses of the whole trace that have not been added yet.
        self.left = len(accesses)
        self.is_new = True
        self._writes: list[Seen] = []
        self._reads: list[Seen] = []
        self._num_past = 0
        self._shelves = _shelves(accesses, size_bytes) if len(accesses) >= FEW else None

    def lists(self, region: Region, is_write: bool) -> list[list[Seen]]:
        """Lists that together hold every write, or read, that may overlap a region; each oldest first."""
        near = self._shelves.near(region, is_write) if self._shelves else None
        return near if near is not None else [self._writes if is_write else self._reads]

    def add(self, seen: Seen) -> None:
        """Remembers an access."""
        self.is_new = False
        (self._writes if seen.writes else self._reads).append(seen)
        if self._shelves:
            self._shelves.put(seen)

    def last(self, is_write: bool) -> Seen | None:
        """The latest write, or read, that still counts."""
        entries = self._writes if is_write else self._reads
        while entries and entries[-1].is_past:
            entries.pop()
            self._num_past -= 1
        return entries[-1] if entries else None

    def cover(self, region: Region, by: int) -> list[int]:
        """Forgets what a write covers, its own launch's accesses aside; returns the launches forgotten."""
        gone = []
        stop = region.stop
        lists = [listed for is_write in (True, False) for listed in self._coverable(region, is_write)]
        for seen in (s for listed in lists for s in listed):
            inside = not seen.is_past and region.start <= seen.start and seen.stop <= stop
            if inside and seen.launch != by and region.covers(seen.region):
                seen.is_past = True
                gone.append(seen.launch)
        self._num_past += len(gone)
        if gone and (not self._shelves or self._num_past > FEW + (len(self._writes) + len(self._reads)) // 2):
            self._compact()
        return gone

    def _coverable(self, region: Region, is_write: bool) -> list[list[Seen]]:
        """Like `lists`, less what is wide where the region is not: nobody covers more than itself."""
        lists = self.lists(region, is_write)
        return lists[1:] if self._shelves and self._shelves.span(region) is not None else lists

    def launches(self) -> list[int]:
        """Launches still named, once for each entry."""
        return [s.launch for s in (*self._writes, *self._reads) if not s.is_past]

    def _compact(self) -> None:
        """Throws away what is past; with shelves only when that is half of all, which pays for refiling."""
        self._writes = [s for s in self._writes if not s.is_past]
        self._reads = [s for s in self._reads if not s.is_past]
        self._num_past = 0
        if self._shelves:
            self._shelves = Shelves(self._shelves.row_bytes, self._shelves.count)
            for seen in (*self._writes, *self._reads):
                self._shelves.put(seen)


def _shelves(accesses: Sequence[Access], size_bytes: int) -> Shelves:
    """Divides the buffer, or a row of its commonest stride, whichever keeps the accesses further apart."""
    strides = Counter(a.region.dims[0][1] for a in accesses if a.region.dims)
    choices = [size_bytes, *(stride for stride, _ in strides.most_common(1) if stride < size_bytes)]

    def crowding(row_bytes: int) -> float:
        spans = (fold(a.region, row_bytes) for a in accesses)
        return sum((stop - start) / row_bytes for start, stop in spans)

    return Shelves(min(choices, key=crowding), len(accesses))
