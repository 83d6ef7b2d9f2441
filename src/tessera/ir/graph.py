"""Edge, Value, Graph, WorkUnit: what must precede what, and which bytes flow.

Edges order launches; values are what a placement moves. A value is one version of one buffer: the initial
one, or the one a launch leaves behind. Two versions are two values, so an overwritten temporary makes no edge
between readers of the old version and the writer of the new one.

`check_steps`, `check_counts`: which traces can be the steps of one request, and how often each may run. Steps
of two models, a trace given twice and a decode before its prefill are refused.

`Rebatched`: one step at any batch, from its recordings at two. Sizes, strides, offsets and extents grow
linearly with the batch, so traces at other batches are interpolated. Recordings that differ in anything else
are refused. Nothing proves that a program follows the same rule at a third batch: a trace that is to be run
is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import BufferKind, Trace

PLACE = "--counts"
# A request is simulated run by run, for every candidate: a thousand runs of a small step take seconds.
MAX_RUNS = 1 << 15


class Hazard(StrEnum):
    """Why one launch waits for another."""

    RAW = "raw"
    WAR = "war"
    WAW = "waw"


@dataclass(frozen=True, slots=True)
class Edge:
    """Launch `dst` waits for the earlier launch `src`, because of one buffer."""

    src: int
    dst: int
    hazard: Hazard
    buffer: int


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one buffer: made by one launch (or given), read by some."""

    buffer: int
    # The launch that leaves this version behind; None if the step starts with it.
    producer: int | None
    # Launches that read it, ascending; a launch that updates it in place reads it.
    readers: tuple[int, ...]
    # Half-open byte range that the readers need.
    start: int
    stop: int
    # True if this version is returned by the step, or is state handed to the next.
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
    # Launches that must share a device: the readers and writers of one state buffer.
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def state_groups(self) -> dict[str, int]:
        """State buffer name -> index of the group that holds its launches."""
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
    """The steps of one average request with their multiplicities, joined by state of the same name."""

    graphs: tuple[Graph, ...]
    # Runs of each step in one request: (1, 32) for one prefill and 32 decodes.
    counts: tuple[int, ...]
    # Rows of one step's batch that belong to one request; what "a request" means is up to the user.
    name: str = ""

    @property
    def num_launches(self) -> int:
        return sum(len(g.trace.launches) for g in self.graphs)

    @property
    def batch(self) -> int:
        """Rows of one request: of its decodes, where it has them."""
        batches = {g.trace.step.kind: g.trace.step.batch for g in self.graphs}
        return batches.get("decode", self.graphs[0].trace.step.batch)

    @property
    def prefill_batch(self) -> int | None:
        """Rows of one prefill, which may be some of the request's; None if no step is one."""
        batches = (g.trace.step.batch for g in self.graphs if g.trace.step.kind == "prefill")
        return next(batches, None)

    @property
    def is_in_parts(self) -> bool:
        """True if a prefill takes some of a request's rows, so that it runs once for each part."""
        return self.prefill_batch not in (None, self.batch)

    @property
    def is_served(self) -> bool:
        """True if a service runs its steps in any order: then state has one home in all of them."""
        return any(g.trace.step.kind == "tokens" for g in self.graphs)


def check_counts(counts: Sequence[int], num_steps: int) -> None:
    """One count for each step, each at least one, and no more runs than can be simulated."""
    if len(counts) != num_steps:
        raise TesseraError(f"{len(counts)} counts for {num_steps} traces", "Give one per trace.", PLACE)
    if min(counts, default=1) < 1:
        remedy = "Give one or more for each trace, and leave out the trace of a step that does not run."
        raise TesseraError(f"a step cannot run {min(counts)} times in a request", remedy, PLACE)
    if sum(counts) > MAX_RUNS:
        remedy = f"A request is simulated run by run, up to {MAX_RUNS} runs; plan for a shorter answer."
        raise TesseraError(f"one request would take {sum(counts)} runs", remedy, PLACE)


def check_steps(traces: Sequence[Trace]) -> None:
    """The traces can follow one another in one request."""
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
    """The module of a module:callable, else the model's name or folder."""
    return model.partition(":")[0]


class _Uneven(Exception):
    """The recordings differ in more than numbers; arguments are the path, innermost first."""


@dataclass(frozen=True, eq=False)
class Rebatched:
    """One step with its dependencies at every batch."""

    low: Graph
    high: Graph

    def __post_init__(self) -> None:
        if self.low.trace.step.batch >= self.high.trace.step.batch:
            raise ValueError("two batches are needed, the smaller first")

    def at(self, batch: int) -> Graph:
        """The step at one batch; MismatchError where the two recordings are not of one shape."""
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
        """Common shape of the two recordings."""
        return _Reading().of(self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What is the same in both recordings, a number that grows, or a record of such parts.

    Equal shapes are one object, so that what every layer repeats is written down once for a batch.
    """

    value: Any = None
    # What a number has at the higher batch beyond its value.
    growth: int = 0
    # How a record is made of its parts, with their names.
    make: Callable[..., Any] | None = None
    parts: tuple["_Shape", ...] = ()
    names: tuple[Any, ...] = ()


class _Reading:
    """Shapes of two recordings."""

    def __init__(self) -> None:
        self._known: dict[Any, _Shape] = {}

    def of(self, one: Any, other: Any) -> _Shape:
        """The shape of two values; _Uneven where they have none in common."""
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
    """A recording `part` of the way from the lower batch to the higher, or beyond it."""

    def __init__(self, part: int, whole: int) -> None:
        self._part, self._whole = part, whole
        self._known: dict[_Shape, Any] = {}

    def of(self, shape: _Shape) -> Any:
        """The value of a shape; _Uneven where a number would not be whole."""
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
