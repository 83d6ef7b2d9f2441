"""tessera plan --batch-choices: the same steps recorded at several batches, and what each gives.

The plan's lanes may be of unlike batches where that is better; see `tessera.plan.batches`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessera.cli.output import console
from tessera.errors import MismatchError, PlanInfeasible
from tessera.ir import Plan, Trace

if TYPE_CHECKING:
    from tessera.plan import Tried


def by_batch(traces: Sequence[Trace]) -> list[list[Trace]]:
    """The traces of each batch, in the order given; every batch must have the same steps."""
    found: dict[int, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.step.batch, []).append(trace)
    (first, mine), *others = found.items()
    for batch, group in others:
        if [replace(t.step, batch=first) for t in group] != [t.step for t in mine]:
            message = f"batch {first} has {_words(mine, group)}; batch {batch} has {_words(group, mine)}"
            raise MismatchError(message, "Capture the same steps at every batch.", "--batch-choices")
    return list(found.values())


def _words(traces: Sequence[Trace], others: Sequence[Trace]) -> str:
    """Kinds of steps; where those are the same, all that is known of them."""
    kinds = [t.step.kind for t in traces]
    if kinds != [t.step.kind for t in others]:
        return ", ".join(kinds)
    return ", ".join(
        f"{s.kind} of {s.model} (context {s.context}, reserve {s.reserve}, seed {s.seed})"
        for s in (t.step for t in traces)
    )


def document(made: Plan, tried: "Sequence[Tried]") -> dict[str, Any]:
    """For machines: what each batch by itself gives, and by how much the plan is better than the best."""
    lines = [_line(t) for t in tried]
    best = max((x["rows_per_s"] for x in lines if x["rows_per_s"] is not None), default=None)
    return {"by_batch": lines, "gain_over_one_batch": made.rows_per_s / best if best else None}


def _line(one: "Tried") -> dict[str, Any]:
    if isinstance(one.made, PlanInfeasible):
        return {"batch": one.variant.batch, "rows_per_s": None, "why": str(one.made)}
    return {
        "batch": one.variant.batch,
        "rows_per_s": one.made.rows_per_s,
        "latency_us": one.made.latency_us,
    }


def show(made: Plan, tried: "Sequence[Tried]") -> None:
    """For people."""
    out = console()
    for one in tried:
        rows = None if isinstance(one.made, PlanInfeasible) else one.made.rows_per_s
        text = str(one.made) if rows is None else f"{_number(rows)} rows/s (simulated)"
        out.print(f"batch {one.variant.batch} alone: {text}", markup=False)
    if made.variants:
        gain = document(made, tried)["gain_over_one_batch"]
        batches = ", ".join(str(variant.batch) for variant in made.every_variant)
        text = f"lanes of batch {batches}: {_number(made.rows_per_s)} rows/s (simulated)"
        out.print(f"{text}, {gain:.3f}x the best single batch", markup=False)


def _number(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 1000 else f"{rows:.4g}"
