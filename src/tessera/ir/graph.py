"""Edge, Value, Graph, WorkUnit: what must precede what, and which bytes flow.

Edges order launches; values are what a placement has to move. A value is one version of one
buffer: the version it starts the step with, or the one a launch leaves behind. Renaming is
implied: two versions of one buffer are two values, so an overwritten temporary makes no edge
between the readers of the old version and the writer of the new one.

`check_steps`, `check_counts`: what traces can be the steps of one request, and how often each may run.

Only what is surely a mistake is refused: steps of two models, whose weights no run could hold as one; a trace
given twice; a decode before its prefill. Callables of one module may be steps of one model. Models with no
notion of prefill and decode are not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import BufferKind, Trace


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
        """Bytes that cross a link when a reader sits elsewhere."""
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
        """Launches of all steps, each step counted once."""
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


PLACE = "--counts"
# A request is simulated run by run, for every candidate: a thousand runs of a small step take seconds.
MAX_RUNS = 1 << 15


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
    """Where a model comes from: the module of a module:callable, else its name or folder."""
    return model.partition(":")[0]
