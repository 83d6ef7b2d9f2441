"""Builds the graph of a trace: its edges, its values, and the launches that state ties together."""

from tessera.analyze.hazards import hazards
from tessera.analyze.values import values
from tessera.ir import BufferKind, Graph, Trace, verify


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
