"""Builds the graph of a trace: edges, values, and launches tied by state.

A launch that writes any byte of a buffer creates a new version (value) of it, and reads the previous one
unless its write covers the buffer.

A launch waits for an earlier one iff they have a hazard (RAW, WAR, WAW) on some byte of one buffer.
Edges that a longer path implies are dropped (transitive reduction); ancestors of a launch are the bits of one
integer. A launch that returns a new buffer writes all of it. Atomic updates of one byte are ordered: a float
sum depends on it.

A much-used buffer is divided into shelves, byte ranges of it or of one row (`fold`): a write to one slice of
a cache is compared with its neighbours only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tessera.ir import Access, BufferKind, Edge, Graph, Hazard, Launch, Region, Trace, Value, verify
from tessera.ir.graph import joined

# Buffers with fewer accesses get no shelves.
FEW = 32
# Accesses that span more shelves are kept apart.
WIDE = 8
# The first of several reasons names an edge.
PRECEDENCE = (Hazard.RAW, Hazard.WAW, Hazard.WAR)


@dataclass(slots=True, eq=False)
class Seen:
    launch: int
    region: Region
    start: int
    stop: int
    reads: bool
    writes: bool
    # True if every earlier entry of the list has a path to this launch.
    is_last_word: bool = False
    # True once a later write covers it.
    is_past: bool = False


@dataclass(slots=True)
class Shelves:
    # The buffer's size if shelves do not divide a row.
    row_bytes: int
    count: int

    def span(self, region: Region) -> range | None:
        start, stop = fold(region, self.row_bytes)
        first, last = (x * self.count // self.row_bytes for x in (start, stop - 1))
        return range(first, last + 1) if last - first < WIDE else None


class Entries:
    """Writes or reads of one buffer in program order, filed under shelves if any."""

    def __init__(self, shelves: Shelves | None) -> None:
        self._shelves = shelves
        self.all: list[Seen] = []
        self._filed: dict[int, list[Seen]] = {}
        self._wide: list[Seen] = []

    def add(self, seen: Seen) -> None:
        self.all.append(seen)
        if self._shelves is None:
            return
        span = self._shelves.span(seen.region)
        if span is None:
            self._wide.append(seen)
        for number in span or ():
            self._filed.setdefault(number, []).append(seen)

    def near(self, region: Region, has_wide: bool = True) -> list[list[Seen]]:
        """All entries that the region can overlap, each list oldest first.

        For a narrow region without the wide entries: all that it can cover.
        """
        span = self._shelves.span(region) if self._shelves else None
        if span is None:
            return [self.all]
        filed = [self._filed[number] for number in span if number in self._filed]
        return [self._wide, *filed] if has_wide else filed


def fold(region: Region, row_bytes: int) -> tuple[int, int]:
    start, dims = region.start % row_bytes, region.dims
    if dims and dims[0][1] == row_bytes:
        dims = dims[1:]
    stop = start + sum((n - 1) * stride for n, stride in dims) + region.item_bytes
    return (start, stop) if stop <= row_bytes else (0, row_bytes)


class History:
    def __init__(self, accesses: Sequence[Access], size_bytes: int) -> None:
        self.is_new = True
        shelves = _shelves(accesses, size_bytes) if len(accesses) >= FEW else None
        self._writes, self._reads = Entries(shelves), Entries(shelves)

    def entries(self, is_write: bool) -> Entries:
        return self._writes if is_write else self._reads

    def add(self, seen: Seen, above: list[int]) -> None:
        last = self.last(seen.writes)
        seen.is_last_word = bool(above) and (
            last is None
            or (last.is_last_word and (last.launch == seen.launch or bool(above[-1] >> last.launch & 1)))
        )
        self.is_new = False
        self.entries(seen.writes).add(seen)

    def last(self, is_write: bool) -> Seen | None:
        entries = self.entries(is_write).all
        while entries and entries[-1].is_past:
            entries.pop()
        return entries[-1] if entries else None

    def cover(self, by: Seen) -> None:
        region = by.region
        for listed in (*self._writes.near(region, False), *self._reads.near(region, False)):
            for seen in listed:
                inside = not seen.is_past and by.start <= seen.start and seen.stop <= by.stop
                if inside and seen.launch != by.launch and region.covers(seen.region):
                    seen.is_past = True
            listed[:] = [seen for seen in listed if not seen.is_past]


def _shelves(accesses: Sequence[Access], size_bytes: int) -> Shelves:
    """Divides the buffer, or a row of its commonest stride, whichever separates accesses better."""
    strides = Counter(a.region.dims[0][1] for a in accesses if a.region.dims)
    choices = [size_bytes, *(stride for stride, _ in strides.most_common(1) if stride < size_bytes)]

    def crowding(row_bytes: int) -> float:
        spans = (fold(a.region, row_bytes) for a in accesses)
        return sum((stop - start) / row_bytes for start, stop in spans)

    return Shelves(min(choices, key=crowding), len(accesses))


def hazards(trace: Trace) -> tuple[Edge, ...]:
    """Transitively reduced, sorted by (dst, src)."""
    return tuple(_scan(trace, is_reduced=True))


def direct_hazards(trace: Trace) -> tuple[Edge, ...]:
    """Every conflicting pair of launches with each reason; may be quadratic.

    Omits pairs with a covering write between them.
    """
    return tuple(_scan(trace, is_reduced=False))


def _scan(trace: Trace, is_reduced: bool) -> Iterator[Edge]:
    written = {a.buffer for x in trace.launches for a in x.accesses if a.write or a.atomic}
    accesses: dict[int, list[Access]] = defaultdict(list)
    for launch in trace.launches:
        for access in launch.accesses:
            accesses[access.buffer].append(access)
    histories = {b: History(accesses[b], trace.buffers[b].size_bytes) for b in written}
    above: list[int] = []
    for index, launch in enumerate(trace.launches):
        edges: dict[tuple[int, Hazard], Edge] = {}
        touched = []
        for access in (a for a in launch.accesses if a.buffer in written):
            history, buffer = histories[access.buffer], trace.buffers[access.buffer]
            is_new = history.is_new and _returns_new(buffer.kind, launch, access)
            region = Region(0, buffer.size_bytes) if is_new else access.region
            reads, writes = access.read or access.atomic, access.write or access.atomic
            seen = Seen(index, region, region.start, region.stop, reads, writes)
            touched.append((history, seen, access.write))
            for src, hazard in _waits(history, seen):
                edges.setdefault((src, hazard), Edge(src, index, hazard, access.buffer))
        if is_reduced:
            yield from _reduced(edges, above)
        else:
            yield from sorted(edges.values(), key=lambda e: (e.src, e.hazard))
        for history, seen, is_write in touched:
            if is_write:
                history.cover(seen)
            history.add(seen, above)


def _reduced(edges: dict[tuple[int, Hazard], Edge], above: list[int]) -> list[Edge]:
    """One edge per source that no other source implies, for its first reason; extends `above`."""
    reach, kept = 0, []
    for src in sorted({src for src, _ in edges}, reverse=True):
        if not reach >> src & 1:
            kept.append(next(edges[src, hazard] for hazard in PRECEDENCE if (src, hazard) in edges))
            reach |= above[src] | 1 << src
    above.append(reach)
    return kept[::-1]


def _returns_new(kind: BufferKind, launch: Launch, access: Access) -> bool:
    return (
        access.write
        and not access.read
        and kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        and any(view is not None and view.buffer == access.buffer for view in launch.outputs)
    )


def _waits(history: History, now: Seen) -> Iterator[tuple[int, Hazard]]:
    """(earlier launch, reason) pairs to wait for; implied ones may be missing."""
    covered_by = -1  # latest covering write: earlier ones are implied
    for past in _overlapping(history, now, True):
        if past.launch < covered_by:
            continue
        if past.region.covers(now.region):
            covered_by = past.launch
        if now.reads:
            yield past.launch, Hazard.RAW
        if now.writes:
            yield past.launch, Hazard.WAW
        if now.writes and past.reads:
            yield past.launch, Hazard.WAR
    if now.writes:
        for past in _overlapping(history, now, False):
            if past.launch > covered_by:
                yield past.launch, Hazard.WAR


def _overlapping(history: History, now: Seen, is_write: bool) -> Iterator[Seen]:
    region, start, stop, is_dense = now.region, now.start, now.stop, not now.region.dims
    for listed in history.entries(is_write).near(region):
        for past in reversed(listed):
            if past.is_past or past.stop <= start or stop <= past.start:
                continue
            if not (is_dense and not past.region.dims) and not past.region.overlaps(region):
                continue
            yield past
            if past.is_last_word:
                break


@dataclass(slots=True)
class _Version:
    buffer: int
    producer: int | None
    readers: list[int] = field(default_factory=list)
    start: int | None = None
    stop: int = 0

    def read_by(self, launch: int, start: int, stop: int) -> None:
        if not self.readers or self.readers[-1] != launch:
            self.readers.append(launch)
        self.start = start if self.start is None else min(self.start, start)
        self.stop = max(self.stop, stop)


def values(trace: Trace) -> tuple[Value, ...]:
    chains = [[_Version(buffer, None)] for buffer in range(len(trace.buffers))]
    for index, launch in enumerate(trace.launches):
        for buffer in dict.fromkeys(a.buffer for a in launch.accesses):
            _touch(trace, chains[buffer], index, [a for a in launch.accesses if a.buffer == buffer])
    kept = {view.buffer for _, view in trace.outputs} | set(trace.buffers_of(BufferKind.STATE))
    return tuple(
        Value(v.buffer, v.producer, tuple(v.readers), v.start or 0, v.stop, v is chain[-1] and number in kept)
        for number, chain in enumerate(chains)
        for v in chain
        if v.readers or v.producer is not None
    )


def _touch(trace: Trace, chain: list[_Version], index: int, accesses: list[Access]) -> None:
    """`chain`: versions of the buffer, the newest last."""
    newest, buffer = chain[-1], trace.buffers[chain[0].buffer]
    for access in accesses:
        if access.read or access.atomic:
            newest.read_by(index, access.region.start, access.region.stop)
    writes = [a for a in accesses if a.write or a.atomic]
    if not writes:
        return
    size, is_given = buffer.size_bytes, buffer.kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)
    covers = any(a.write and a.region.is_dense and a.region.num_bytes == size for a in writes)
    if not covers and (newest.producer is not None or is_given):
        newest.read_by(index, 0, size)
    chain.append(_Version(newest.buffer, index))


def build_graph(trace: Trace) -> Graph:
    graph = Graph(trace, hazards(trace), values(trace), state_groups(trace))
    verify(graph)
    return graph


def state_groups(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Launches that share state buffers, directly or through a common launch."""
    sharing: dict[int, list[int]] = {}
    for index, launch in enumerate(trace.launches):
        for buffer in {a.buffer for a in launch.accesses}:
            if trace.buffers[buffer].kind is BufferKind.STATE:
                sharing.setdefault(buffer, []).append(index)
    roots = joined(len(trace.launches), sharing.values())
    groups: dict[int, list[int]] = {}
    for index in sorted({index for members in sharing.values() for index in members}):
        groups.setdefault(roots[index], []).append(index)
    return tuple(tuple(group) for group in groups.values())
