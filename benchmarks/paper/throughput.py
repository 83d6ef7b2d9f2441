"""Offline throughput: the plan against every other policy, each at its own best batch and microbatches.

`policies` are what each gives on the case's own devices, all judged by the same simulation, at equal memory
and within an equal limit of time. As many of the card that is best alone are other hardware, so they stand
apart, in `elsewhere`: a replica on each, at its best batch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from benchmarks.paper.records import FAMILIES, Case, Outcome, usd_per_million
from benchmarks.paper.scale import Scale

NAME = "throughput"


def tasks(scale: Scale) -> list[Case]:
    """The cases of the scale."""
    return list(scale.cases)


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a case that is done."""
    return [row_of(case, done[case]) for case in scale.cases if case in done]


def row_of(case: Case, found: Outcome) -> dict[str, Any]:
    """A case in figures."""
    load, num = case.load, len(case.gpus)
    alike = found.alike(num)
    own = found.policies.get("throughput")
    return {
        "model": load.model,
        "family": FAMILIES.get(load.model),
        "phase": load.kind,
        "workload": load.title,
        "limit_ms": load.limit_ms,
        "pair": case.pair,
        "gpus": len(case.gpus),
        "link": case.wire.name,
        "launches": found.launches,
        "slots": own.microbatches if own else None,
        "unit": f"{load.counted} per second",
        "policies": found.rates,
        "reached": {
            policy: {"ms": r.ms, "batch": dict(r.batch), "microbatches": r.microbatches}
            for policy, r in found.policies.items()
        },
        "policy": found.chosen or None,
        **found.ratios,
        "ratios": {policy: found.over(policy) for policy in found.policies if policy != "throughput"},
        "bound": found.bound_per_s,
        "single_placement_by_busy_time": found.single_placement_busy_per_s,
        "single_placement_note": found.single_placement_note,
        "elsewhere": {f"{num}x {alike[0]}": {"policy": "data-parallel", "value": alike[1]}} if alike else {},
        "usd_per_hour": found.usd_per_hour,
        "usd_per_hour_elsewhere": alike[2] if alike else None,
        "usd_per_million_tokens": {
            policy: usd_per_million(found.usd_per_hour, rate * load.tokens_per_result)
            for policy, rate in found.rates.items()
        },
        "lanes": found.num_lanes,
        "planning_cpu_s": found.cpu_s,
        "source": found.source,
        "why_none": found.why or None,
    }


def spread(ratios: Iterable[float | None]) -> dict[str, float | int] | None:
    """A distribution in a few figures."""
    known = np.array([r for r in ratios if r is not None])
    if not len(known):
        return None
    points = {f"p{p}": float(np.percentile(known, p)) for p in (10, 25, 50, 75, 90)}
    ends = {"least": float(known.min()), "most": float(known.max())}
    return {"rows": len(known), "above_1.02": int((known > 1.02).sum()), **ends, **points}


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """How the plan stands to data-parallel and to the best policy, over all rows; and by family."""
    left, right = figure.subplots(1, 2)
    for key, label in (
        ("ratio_to_data_parallel", "over data-parallel"),
        ("ratio_to_best_baseline", "over the best policy"),
    ):
        known = sorted(r[key] for r in rows if r[key])
        if known:
            left.plot(np.linspace(0, 1, len(known)), known, marker=".", label=f"{label}, {len(known)} rows")
    left.axhline(1.0, color="black", linewidth=0.6)
    left.set_xlabel("share of the rows")
    left.set_ylabel("throughput of the plan, times")
    left.legend(fontsize=7)
    names = list(dict.fromkeys(r["model"] for r in rows))
    for at, name in enumerate(names):
        for phase, mark in (("request", "o"), ("decode", "s"), ("prefill", "^"), ("denoise", "D")):
            here = [
                r for r in rows if (r["model"], r["phase"]) == (name, phase) and r["ratio_to_best_baseline"]
            ]
            values = [r["ratio_to_best_baseline"] for r in here]
            mark_label = phase if at == 0 or phase == "denoise" else None
            right.plot(
                [at + 0.06 * i for i in range(len(here))], values, mark, markersize=3, label=mark_label
            )
    right.axhline(1.0, color="black", linewidth=0.6)
    right.set_xticks(range(len(names)), names, fontsize=7, rotation=15)
    right.set_ylabel("times the best policy")
    right.legend(fontsize=7)
