"""Dependencies of a trace, values, and work units.

Edges order launches; values are what a placement moves. A value is one version of a buffer, so an overwritten
temporary makes no edge between readers of the old version and the next writer.

`check_steps` and `check_counts` validate the steps of one request. `StepFamily` interpolates a step at any
size from a few recordings: sizes, strides, offsets and extents are linear in the step's sizes, and recordings
that differ otherwise are refused. Interpolated traces are for planning; a trace to run is recorded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, partial
from math import lcm
from typing import Any

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import BufferKind, Step, Trace

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
class StepFamily:
    """A step with its dependencies at any size, from recordings at a few.

    Every recording after the first differs from it in one size: a field of the step, or several that grow
    together.
    """

    recordings: tuple[Graph, ...]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The step's field that each recording after the first varies."""
        first = self.recordings[0].trace.step
        steps = [graph.trace.step for graph in self.recordings[1:]]
        names = [
            [f.name for f in fields(first) if getattr(s, f.name) != getattr(first, f.name)] for s in steps
        ]
        if not all(names):
            raise ValueError("two recordings are of the same step")
        return tuple(changed[0] for changed in names)

    def at(self, step: Step) -> Graph:
        """The step at other sizes; raises MismatchError for unlike recordings."""
        for graph in self.recordings:
            if graph.trace.step == step:
                return graph
        first = self.recordings[0].trace.step
        pairs = list(zip(self.fields, self.recordings[1:], strict=True))
        wholes = [getattr(graph.trace.step, name) - getattr(first, name) for name, graph in pairs]
        parts = [getattr(step, name) - getattr(first, name) for name in self.fields]
        whole = lcm(*wholes)
        factors = [part * (whole // size) for part, size in zip(parts, wholes, strict=True)]
        try:
            written: Graph = self._write(factors, whole)
        except _Uneven as error:
            where = ".".join(str(part) for part in reversed(error.args))
            sizes = ", ".join(f"{name} {getattr(step, name)}" for name in self.fields)
            raise MismatchError(
                f"{first.kind} is recorded differently at other sizes ({sizes}): {where}",
                "Record it at the size that is wanted.",
            ) from None
        if written.trace.step != step:
            raise MismatchError(f"no recording varies all that differs between {first} and {step}")
        return written

    @cached_property
    def _write(self) -> "_Write":
        return _writer(self.recordings)


# (factors, whole) -> value: that of the first recording plus, for every other one, its difference times its
# factor / whole.
_Write = Callable[[Sequence[int], int], Any]


def _writer(values: Sequence[Any]) -> _Write:
    """Writes a value at any size, given those of the recordings; raises _Uneven."""
    one = values[0]
    if any(type(other) is not type(one) for other in values):
        raise _Uneven
    if all(other is one or other == one for other in values):
        return lambda factors, whole: one
    if type(one) is int:
        return partial(_grown, one, [other - one for other in values[1:]])
    if isinstance(one, tuple) and len({len(value) for value in values}) == 1:
        return _record_writer(lambda *parts: parts, range(len(one)), zip(*values, strict=True))
    if names := getattr(type(one), "__match_args__", ()):  # a dataclass or a Struct
        rows = ([getattr(value, name) for value in values] for name in names)
        return _record_writer(type(one), names, rows)
    raise _Uneven


def _grown(start: int, growth: Sequence[int], factors: Sequence[int], whole: int) -> int:
    grown, rest = divmod(sum(a * b for a, b in zip(growth, factors, strict=True)), whole)
    if rest:
        raise _Uneven
    return start + grown


def _record_writer(make: Callable[..., Any], names: Iterable[Any], rows: Iterable[Sequence[Any]]) -> _Write:
    writers = [(name, _named(name, _writer, row)) for name, row in zip(names, rows, strict=True)]
    return lambda factors, whole: make(*(_named(name, write, factors, whole) for name, write in writers))


def _named(name: Any, make: Callable[..., Any], *given: Any) -> Any:
    """A part of a record; an error gets its name."""
    try:
        return make(*given)
    except _Uneven as error:
        raise _Uneven(*error.args, name) from None
