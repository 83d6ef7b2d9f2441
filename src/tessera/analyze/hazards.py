"""Hazards: which launch must wait for which.

Launch b waits for an earlier launch a iff, on some byte of one buffer,
  (RAW) a writes and b reads,  (WAR) a reads and b writes,  (WAW) both write.
The scan for a read ends at the first write that covers it: order through that write is implied.
Edges that a longer path implies are dropped (transitive reduction).

Two atomic updates of one byte are ordered like two writes: the sum of floats depends on their order.
"""

from collections import defaultdict
from dataclasses import dataclass

from tessera.ir import Access, Edge, Hazard, Trace


@dataclass(slots=True)
class _Seen:
    """One earlier access that a later one may have to wait for."""

    launch: int
    access: Access

    @property
    def writes(self) -> bool:
        return self.access.write or self.access.atomic


def hazards(trace: Trace) -> tuple[Edge, ...]:
    """All RAW, WAR and WAW edges of a trace, transitively reduced, sorted by (dst, src)."""
    history: dict[int, list[_Seen]] = defaultdict(list)
    found: list[Edge] = []
    for index, launch in enumerate(trace.launches):
        for access in launch.accesses:
            found += _waits(history[access.buffer], index, access)
        for access in launch.accesses:
            _remember(history, index, access)
    return _reduce(found, len(trace.launches))


def _waits(seen: list[_Seen], index: int, access: Access) -> list[Edge]:
    """Edges from the accesses seen so far to this one, nearest first."""
    edges = []
    writes = access.write or access.atomic
    for past in reversed(seen):
        hazard = _hazard(past, access, writes)
        if hazard is None or past.launch == index or not past.access.region.overlaps(access.region):
            continue
        edges.append(Edge(past.launch, index, hazard, access.buffer))
        if past.writes and past.access.region.covers(access.region):
            break
    return edges


def _hazard(past: _Seen, access: Access, writes: bool) -> Hazard | None:
    if past.writes and (access.read or access.atomic):
        return Hazard.RAW
    if past.writes and writes:
        return Hazard.WAW
    if writes and past.access.read:
        return Hazard.WAR
    return None


def _remember(history: dict[int, list[_Seen]], index: int, access: Access) -> None:
    """A write makes everything it covers a matter of the past: later launches wait for the write."""
    seen = history[access.buffer]
    if access.write:
        seen[:] = [p for p in seen if p.launch == index or not access.region.covers(p.access.region)]
    seen.append(_Seen(index, access))


def _reduce(edges: list[Edge], num_launches: int) -> tuple[Edge, ...]:
    """Keeps one edge per pair of launches, and only pairs that no longer path joins."""
    incoming: list[dict[int, Edge]] = [{} for _ in range(num_launches)]
    order = {Hazard.RAW: 0, Hazard.WAW: 1, Hazard.WAR: 2}
    for edge in edges:
        known = incoming[edge.dst].get(edge.src)
        if known is None or order[edge.hazard] < order[known.hazard]:
            incoming[edge.dst][edge.src] = edge
    ancestors: list[int] = []  # one bit per launch
    kept = []
    for sources in incoming:
        reach = 0
        for src in sorted(sources, reverse=True):
            if not reach >> src & 1:
                kept.append(sources[src])
                reach |= ancestors[src] | 1 << src
        ancestors.append(reach)
    return tuple(sorted(kept, key=lambda e: (e.dst, e.src)))
