"""Builds the graph of a trace: its edges, its values, and the launches that state ties together.

Values: the versions of every buffer, who makes them and who reads them.

A launch that writes any byte of a buffer leaves a new version of the whole buffer behind. Unless its
write covers the buffer it has read the version before, because the bytes it left alone live on. A reader
reads the newest version. So a version is complete on the device that made it, and moving one version
moves everything a reader can see.
"""

from dataclasses import dataclass, field

from tessera.analyze.hazards import hazards
from tessera.ir import Access, BufferKind, Graph, Trace, Value, verify


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
    """Every version of every buffer, in order of buffer and version."""
    newest = [_Version(b, None) for b in range(len(trace.buffers))]
    versions: list[list[_Version]] = [[v] for v in newest]
    for index, launch in enumerate(trace.launches):
        for buffer in dict.fromkeys(a.buffer for a in launch.accesses):
            mine = [a for a in launch.accesses if a.buffer == buffer]
            _touch(trace, newest, versions, index, mine)
    finals = {view.buffer for _, view in trace.outputs} | set(trace.buffers_of(BufferKind.STATE))
    return tuple(
        _freeze(v, v is chain[-1] and v.buffer in finals)
        for chain in versions
        for v in chain
        if v.readers or v.producer is not None
    )


def _touch(
    trace: Trace,
    newest: list[_Version],
    versions: list[list[_Version]],
    index: int,
    accesses: list[Access],
) -> None:
    buffer = accesses[0].buffer
    size = trace.buffers[buffer].size_bytes
    for access in accesses:
        if access.read or access.atomic:
            newest[buffer].read_by(index, access.region.start, access.region.stop)
    writes = [a for a in accesses if a.write or a.atomic]
    if not writes:
        return
    covers = any(a.write and a.region.is_dense and a.region.num_bytes == size for a in writes)
    if not covers and (newest[buffer].producer is not None or _is_given(trace, buffer)):
        newest[buffer].read_by(index, 0, size)
    newest[buffer] = _Version(buffer, index)
    versions[buffer].append(newest[buffer])


def _is_given(trace: Trace, buffer: int) -> bool:
    """True if the buffer has contents before the first launch."""
    return trace.buffers[buffer].kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)


def _freeze(version: _Version, is_final: bool) -> Value:
    start = version.start if version.start is not None else 0
    return Value(version.buffer, version.producer, tuple(version.readers), start, version.stop, is_final)


def build_graph(trace: Trace) -> Graph:
    """The dependencies of a trace, verified."""
    graph = Graph(trace, hazards(trace), values(trace), state_groups(trace))
    verify(graph)
    return graph


def state_groups(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Launches that touch the same state buffer, directly or through a common launch, are one group."""
    parent = list(range(len(trace.launches)))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    first: dict[int, int] = {}
    touching = []
    for index, launch in enumerate(trace.launches):
        state = {a.buffer for a in launch.accesses if trace.buffers[a.buffer].kind is BufferKind.STATE}
        for buffer in state:
            parent[find(index)] = find(first.setdefault(buffer, index))
        if state:
            touching.append(index)
    groups: dict[int, list[int]] = {}
    for index in touching:
        groups.setdefault(find(index), []).append(index)
    return tuple(tuple(group) for group in groups.values())
