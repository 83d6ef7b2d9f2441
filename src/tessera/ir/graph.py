"""Dependencies of a trace, values, and work units.

A value is one version of a buffer: a write makes another value.

`StepFamily` interpolates a step: sizes, strides, offsets and extents are linear in the step's sizes; other
differences are refused. Interpolated traces are for planning only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, reduce
from math import lcm
from operator import mul, or_
from typing import Any

import msgspec

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import Access, BufferKind, Launch, Region, Step, Trace

PLACE = "--counts"
# Simulated run by run: a thousand runs of a small step take seconds.
MAX_RUNS = 1 << 15


def joined(num: int, sets: Iterable[Sequence[int]]) -> list[int]:
    """Number -> the representative of all that sets with common members tie to it."""
    parent = list(range(num))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for members in sets:
        for other in members[1:]:
            parent[find(other)] = find(members[0])
    return [find(x) for x in range(num)]


def ancestors(num: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Number -> bits of all smaller ones with a path to it."""
    sources: list[list[int]] = [[] for _ in range(num)]
    for src, dst in pairs:
        sources[dst].append(src)
    above: list[int] = []
    for listed in sources:
        above.append(reduce(or_, (above[src] | 1 << src for src in listed), 0))
    return above


class Hazard(StrEnum):
    RAW = "raw"
    WAR = "war"
    WAW = "waw"


@dataclass(frozen=True, slots=True)
class Edge:
    src: int
    dst: int
    hazard: Hazard
    buffer: int


@dataclass(frozen=True, slots=True)
class Value:
    buffer: int
    # None: present at the start.
    producer: int | None
    # Ascending, including in-place updates.
    readers: tuple[int, ...]
    # Half-open byte range needed by the readers.
    start: int
    stop: int
    # Returned by the step or kept as state.
    is_final: bool = False

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Graph:
    trace: Trace
    # Transitively reduced, sorted by (dst, src).
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    # Launches on one device: users of one state buffer.
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def states(self) -> dict[str, tuple[int, int]]:
        """Name -> (bytes, the first launch of its group)."""
        first = {launch: group[0] for group in self.groups for launch in group}
        return {
            buffer.name: (buffer.size_bytes, first[index])
            for index, launch in enumerate(self.trace.launches)
            for buffer in (self.trace.buffers[access.buffer] for access in launch.accesses)
            if buffer.kind is BufferKind.STATE
        }


@dataclass(frozen=True)
class WorkUnit:
    """Steps of an average request, joined by state of the same name."""

    graphs: tuple[Graph, ...]
    # Runs per request: (1, 32) for one prefill and 32 decodes.
    counts: tuple[int, ...]
    name: str = ""

    @property
    def num_launches(self) -> int:
        return sum(len(g.trace.launches) for g in self.graphs)

    @property
    def batch(self) -> int:
        batches = {g.trace.step.kind: g.trace.step.batch for g in self.graphs}
        return batches.get("decode", self.graphs[0].trace.step.batch)

    @property
    def is_served(self) -> bool:
        """A service runs the steps in any order, so state has one home."""
        return any(g.trace.step.kind == "tokens" for g in self.graphs)


def check_counts(counts: Sequence[int], num_steps: int) -> None:
    if len(counts) != num_steps:
        raise TesseraError(f"{len(counts)} counts for {num_steps} traces", "Give one per trace.", PLACE)
    if min(counts, default=1) < 1:
        remedy = "Give one or more for each trace, and leave out the trace of a step that does not run."
        raise TesseraError(f"a step cannot run {min(counts)} times in a request", remedy, PLACE)
    if sum(counts) > MAX_RUNS:
        remedy = f"A request is simulated run by run, up to {MAX_RUNS} runs; plan for a shorter answer."
        raise TesseraError(f"one request would take {sum(counts)} runs", remedy, PLACE)


def check_steps(traces: Sequence[Trace]) -> None:
    kinds = [trace.step.kind for trace in traces]
    models = {trace.step.model.partition(":")[0]: trace.step.model for trace in traces}
    if len(models) > 1:
        remedy = "A request runs steps of one model; plan each model by itself."
        raise MismatchError(f"these are steps of several models: {', '.join(models.values())}", remedy)
    first: dict[str, int] = {}
    for number, trace in enumerate(traces):
        same = first.setdefault(trace.digest, number)
        if same != number:
            what = f"traces {same + 1} and {number + 1} are the same {trace.step.kind}"
            raise MismatchError(what, "Give it once, with its runs in --counts.")
    if "prefill" in kinds and "decode" in kinds and kinds.index("decode") < kinds.index("prefill"):
        raise MismatchError("the decode is given before the prefill", "Give the steps in the order they run.")


def widened(traces: Sequence[Trace]) -> list[Trace]:
    """Recordings at several sizes, known to the same detail.

    An access that is of the whole buffer at one size, where the analysis was less exact, becomes so at every
    size, and reads it, as the bytes that are not written stay.
    """
    if len({len(trace.launches) for trace in traces}) > 1:
        return list(traces)
    sizes = [[buffer.size_bytes for buffer in trace.buffers] for trace in traces]
    columns = [_widened(launches, sizes) for launches in zip(*(t.launches for t in traces), strict=True)]
    rows = zip(*columns, strict=True)
    return [replace(trace, launches=row) for trace, row in zip(traces, rows, strict=True)]


def _widened(launches: Sequence[Launch], sizes: Sequence[Sequence[int]]) -> Sequence[Launch]:
    if len({len(launch.accesses) for launch in launches}) > 1 or not launches[0].accesses:
        return launches
    columns: list[Sequence[Access]] = []
    for accesses in zip(*(launch.accesses for launch in launches), strict=True):
        wholes = [Region(0, own[a.buffer]) for a, own in zip(accesses, sizes, strict=True)]
        detail = {(a.region == whole, a.read) for a, whole in zip(accesses, wholes, strict=True)}
        if len(detail) > 1 and any(is_whole for is_whole, _ in detail):
            pairs = zip(accesses, wholes, strict=True)
            columns.append([replace(a, region=whole, read=True) for a, whole in pairs])
        else:
            columns.append(accesses)
    rows = zip(*columns, strict=True)
    return [replace(launch, accesses=row) for launch, row in zip(launches, rows, strict=True)]


class _Differs(Exception):
    """The args are the path to the difference."""


@dataclass(frozen=True, eq=False)
class StepFamily:
    """Every recording after the first differs from it in one size: a field of the step, or several that grow
    together.
    """

    recordings: tuple[Graph, ...]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        first = self.recordings[0].trace.step
        steps = [graph.trace.step for graph in self.recordings[1:]]
        names = [
            [f.name for f in fields(first) if getattr(s, f.name) != getattr(first, f.name)] for s in steps
        ]
        if not all(names):
            raise ValueError("two recordings are of the same step")
        return tuple(changed[0] for changed in names)

    def at(self, step: Step) -> Graph:
        for graph in self.recordings:
            if graph.trace.step == step:
                return graph
        first = self.recordings[0].trace.step
        pairs = list(zip(self.fields, self.recordings[1:], strict=True))
        parts = [getattr(step, name) - getattr(first, name) for name, _ in pairs]
        wholes = [getattr(graph.trace.step, name) - getattr(first, name) for name, graph in pairs]
        whole = lcm(*wholes)
        factors = [part * (whole // size) for part, size in zip(parts, wholes, strict=True)]
        try:
            written: Graph = self._interpolate(factors, whole)
        except _Differs as error:
            where = ".".join(map(str, error.args))
            sizes = ", ".join(f"{name} {getattr(step, name)}" for name in self.fields)
            raise MismatchError(
                f"{first.kind} is recorded differently at other sizes ({sizes}): {where}",
                "Record it at the size that is wanted.",
            ) from None
        if written.trace.step != step:
            raise MismatchError(f"no recording varies all that differs between {first} and {step}")
        return written

    @cached_property
    def _interpolate(self) -> "_Interpolation":
        return _Interpolation(self.recordings)


# (factor of each recording's growth, common denominator, earlier parts) -> part.
_Make = Callable[[Sequence[int], int, Sequence[Any]], Any]


class _Interpolation:
    """Equal parts, such as those of a model's layers, are interpolated once."""

    def __init__(self, recordings: Sequence[Graph]) -> None:
        self._one = recordings[0]
        self._makes: list[_Make] = []
        self._places: dict[tuple[type, bytes], int] = {}
        self._place_of(recordings)

    def __call__(self, factors: Sequence[int], whole: int) -> Any:
        parts: list[Any] = [self._one]
        for make in self._makes:
            parts.append(make(factors, whole, parts))
        return parts[-1]

    def _place_of(self, values: Sequence[Any], *path: Any) -> int | None:
        """Place of the part that interpolates one value of each recording. None: they are equal."""
        one = values[0]
        if any(type(other) is not type(one) for other in values):
            raise _Differs(*path)
        if all(other == one for other in values[1:]):
            return None
        key = type(one), msgspec.msgpack.encode(values)
        if key not in self._places:
            make = _grow(values, path) if type(one) is int else self._join(values, path)
            self._makes.append(make)
            self._places[key] = len(self._makes)
        return self._places[key]

    def _join(self, values: Sequence[Any], path: Sequence[Any]) -> _Make:
        one = values[0]
        names: Sequence[Any] = getattr(type(one), "__match_args__", ())  # a dataclass or a Struct
        rows: Sequence[Sequence[Any]]
        if names and not isinstance(one, tuple):
            rows = [[getattr(value, name) for value in values] for name in names]
        elif isinstance(one, tuple) and len({len(value) for value in values}) == 1:
            names, rows = range(len(one)), list(zip(*values, strict=True))
        else:
            raise _Differs(*path)
        places = [self._place_of(row, *path, name) for name, row in zip(names, rows, strict=True)]
        varying = [(number, place) for number, place in enumerate(places) if place is not None]
        first = [row[0] for row in rows]

        def joined(factors: Sequence[int], whole: int, parts: Sequence[Any]) -> Any:
            items = first.copy()
            for number, place in varying:
                items[number] = parts[place]
            return tuple(items) if isinstance(one, tuple) else type(one)(*items)

        return joined


def _grow(values: Sequence[int], path: Sequence[Any]) -> _Make:
    one, growth = values[0], tuple(other - values[0] for other in values[1:])

    def grown(factors: Sequence[int], whole: int, parts: Sequence[Any]) -> Any:
        more, rest = divmod(sum(map(mul, growth, factors)), whole)
        if rest:
            raise _Differs(*path)
        return one + more

    return grown
