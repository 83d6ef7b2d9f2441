"""Dependencies of a trace, values, and work units.

Edges order launches; values are what a placement moves. A value is one version of a buffer, so an overwritten
temporary makes no edge between readers of the old version and the next writer.

`check_steps` and `check_counts` validate the steps of one request. `Rebatched` interpolates a step at any
batch from recordings at two: sizes, strides, offsets and extents are linear in the batch, and recordings that
differ otherwise are refused. Interpolated traces are for planning; a trace to run is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import BufferKind, Trace

PLACE = "--counts"
# Requests are simulated run by run for every candidate: a thousand runs of a small step take seconds.
MAX_RUNS = 1 << 15


class Hazard(StrEnum):
    """Kind of dependency."""

    RAW = "raw"
    WAR = "war"
    WAW = "waw"


@dataclass(frozen=True, slots=True)
class Edge:
    """Launch `dst` waits for the earlier launch `src` because of one buffer."""

    src: int
    dst: int
    hazard: Hazard
    buffer: int


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one buffer."""

    buffer: int
    # Producing launch; None if present at the start.
    producer: int | None
    # Reading launches, ascending, including in-place updates.
    readers: tuple[int, ...]
    # Half-open byte range needed by the readers.
    start: int
    stop: int
    # True if returned by the step or kept as state.
    is_final: bool = False

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Graph:
    """A trace with its dependencies."""

    trace: Trace
    # Transitively reduced, sorted by (dst, src).
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    # Launches on one device: users of one state buffer.
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def state_groups(self) -> dict[str, int]:
        """State buffer name -> index of its group."""
        owner = {launch: g for g, group in enumerate(self.groups) for launch in group}
        found: dict[str, int] = {}
        for index, launch in enumerate(self.trace.launches):
            for access in launch.accesses:
                buffer = self.trace.buffers[access.buffer]
                if buffer.kind is BufferKind.STATE:
                    found[buffer.name] = owner[index]
        return found


@dataclass(frozen=True)
class WorkUnit:
    """Steps of an average request with counts, joined by state of the same name."""

    graphs: tuple[Graph, ...]
    # Runs per request: (1, 32) for one prefill and 32 decodes.
    counts: tuple[int, ...]
    # Batch rows that belong to one request.
    name: str = ""

    @property
    def num_launches(self) -> int:
        return sum(len(g.trace.launches) for g in self.graphs)

    @property
    def batch(self) -> int:
        """Rows of one request, by its decodes if any."""
        batches = {g.trace.step.kind: g.trace.step.batch for g in self.graphs}
        return batches.get("decode", self.graphs[0].trace.step.batch)

    @property
    def prefill_batch(self) -> int | None:
        """Rows of one prefill; None without one."""
        batches = (g.trace.step.batch for g in self.graphs if g.trace.step.kind == "prefill")
        return next(batches, None)

    @property
    def is_in_parts(self) -> bool:
        """True if a prefill covers some of the request's rows and runs once per part."""
        return self.prefill_batch not in (None, self.batch)

    @property
    def is_served(self) -> bool:
        """True if a service runs the steps in any order, so state has one home."""
        return any(g.trace.step.kind == "tokens" for g in self.graphs)


def check_counts(counts: Sequence[int], num_steps: int) -> None:
    """Checks one count per step, at least 1, within the simulation limit."""
    if len(counts) != num_steps:
        raise TesseraError(f"{len(counts)} counts for {num_steps} traces", "Give one per trace.", PLACE)
    if min(counts, default=1) < 1:
        remedy = "Give one or more for each trace, and leave out the trace of a step that does not run."
        raise TesseraError(f"a step cannot run {min(counts)} times in a request", remedy, PLACE)
    if sum(counts) > MAX_RUNS:
        remedy = f"A request is simulated run by run, up to {MAX_RUNS} runs; plan for a shorter answer."
        raise TesseraError(f"one request would take {sum(counts)} runs", remedy, PLACE)


def check_steps(traces: Sequence[Trace]) -> None:
    """Checks that the traces can follow one another in one request."""
    kinds = [trace.step.kind for trace in traces]
    models = {_origin(trace.step.model): trace.step.model for trace in traces}
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


def _origin(model: str) -> str:
    """Module of a module:callable, else model name or folder."""
    return model.partition(":")[0]


class _Uneven(Exception):
    """Recordings that differ in more than numbers; args are the path, innermost first."""


@dataclass(frozen=True, eq=False)
class Rebatched:
    """A step with its dependencies at any batch."""

    low: Graph
    high: Graph

    def __post_init__(self) -> None:
        if self.low.trace.step.batch >= self.high.trace.step.batch:
            raise ValueError("two batches are needed, the smaller first")

    def at(self, batch: int) -> Graph:
        """The step at one batch; raises MismatchError for unlike recordings."""
        first, second = self.low.trace.step.batch, self.high.trace.step.batch
        if batch in (first, second):
            return self.low if batch == first else self.high
        try:
            graph: Graph = _Writing(batch - first, second - first).of(self._shape)
        except _Uneven as error:
            where = ".".join(str(part) for part in reversed(error.args))
            raise MismatchError(
                f"{self.low.trace.step.kind} is recorded differently at batch {first} and {second}: {where}",
                "Record it at the batch that is wanted.",
            ) from None
        return graph

    @cached_property
    def _shape(self) -> "_Shape":
        """Common shape of the recordings."""
        return _Reading().of(self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """A constant, a number that grows, or a record of such parts.

    Equal shapes are one object, so repeated layers are built once per batch.
    """

    value: Any = None
    # Increase of a number at the higher batch.
    growth: int = 0
    # Constructor and part names.
    make: Callable[..., Any] | None = None
    parts: tuple["_Shape", ...] = ()
    names: tuple[Any, ...] = ()


class _Reading:
    """Derives shapes from two recordings."""

    def __init__(self) -> None:
        self._known: dict[Any, _Shape] = {}

    def of(self, one: Any, other: Any) -> _Shape:
        """Shape of two values; raises _Uneven."""
        if type(one) is not type(other):
            raise _Uneven
        if type(one) is int:
            return self._kept((int, one, other - one), one, growth=other - one)
        if isinstance(one, tuple):
            if len(one) != len(other):
                raise _Uneven
            return self._record(_tuple, range(len(one)), zip(one, other, strict=True), one)
        if names := getattr(type(one), "__match_args__", ()):  # a dataclass or a Struct
            pairs = ((getattr(one, name), getattr(other, name)) for name in names)
            return self._record(type(one), names, pairs, one)
        if one is not other and one != other:
            raise _Uneven
        return self._kept((type(one), one), one)

    def _record(self, make: Callable[..., Any], names: Any, pairs: Any, value: Any) -> _Shape:
        parts = []
        for name, (one, other) in zip(names, pairs, strict=True):
            try:
                parts.append(self.of(one, other))
            except _Uneven as error:
                raise _Uneven(*error.args, name) from None
        key = (make, tuple(id(part) for part in parts))
        if not any(part.growth or part.make for part in parts):
            return self._kept(key, value)
        return self._kept(key, make=make, parts=tuple(parts), names=tuple(names))

    def _kept(self, key: Any, *args: Any, **named: Any) -> _Shape:
        return self._known.setdefault(key, _Shape(*args, **named))


class _Writing:
    """Builds a recording at `part` of the way from the lower to the higher batch."""

    def __init__(self, part: int, whole: int) -> None:
        self._part, self._whole = part, whole
        self._known: dict[_Shape, Any] = {}

    def of(self, shape: _Shape) -> Any:
        """Value of a shape; raises _Uneven for a fractional number."""
        if shape.make is None and not shape.growth:
            return shape.value
        if shape not in self._known:
            self._known[shape] = self._made(shape)
        return self._known[shape]

    def _made(self, shape: _Shape) -> Any:
        if shape.make is None:
            grown, rest = divmod(shape.growth * self._part, self._whole)
            if rest:
                raise _Uneven
            return shape.value + grown
        values = []
        for name, part in zip(shape.names, shape.parts, strict=True):
            try:
                values.append(self.of(part))
            except _Uneven as error:
                raise _Uneven(*error.args, name) from None
        return shape.make(*values)


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values
