"""What traces can be the steps of one request, and how often each may run; refused with what to do instead.

Only what is surely a mistake is refused: steps of two models, whose weights no run could hold as one; a trace
given twice; a decode before its prefill. Callables of one module may be steps of one model. Models with no
notion of prefill and decode are not looked at.
"""

from collections.abc import Sequence

from tessera.errors import MismatchError, TesseraError
from tessera.ir.trace import Trace

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
