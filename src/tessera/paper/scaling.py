"""Scaling: the first workload on 2 to 16 GPUs, half of each kind of the first pair.

Batches in flight grow with the GPUs; every two GPUs have a link of their own.
"""

from collections.abc import Mapping
from typing import Any

from tessera.paper.records import Case, Wire
from tessera.paper.scale import Scale

NAME = "scaling"


def tasks(scale: Scale) -> list[Case]:
    """Two batches in flight for each GPU."""
    a, b = scale.pairs[0][:2]
    wire = Wire.preset(scale.links[0])
    workload = scale.workloads[0]
    return [Case(workload, (a,) * (n // 2) + (b,) * (n - n // 2), wire, 2 * n) for n in scale.sizes]


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a number of GPUs."""
    rows = []
    for case in tasks(scale):
        found = done[case]
        best = found.best_baseline
        rows.append(
            {
                "model": case.workload.model,
                "gpus": len(case.gpus),
                "devices": case.pair,
                "slots": case.slots,
                "link": case.wire.name,
                "policies": dict(found.policies),
                "bound": found.bound_per_s,
                "best_baseline": best[0] if best else None,
                "ratio_to_best_baseline": found.own / best[1] if found.own and best else None,
                "planning_cpu_s": found.cpu_s,
                "source": found.source,
                "why_none": found.why or None,
            }
        )
    first = rows[0]["policies"].get("throughput")
    for row in rows:
        own = row["policies"].get("throughput")
        row["of_linear"] = own / first / (row["gpus"] / rows[0]["gpus"]) if own and first else None
    return rows


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Throughput over GPUs."""
    axes = figure.subplots()
    for name in ("throughput", "data-parallel", "layer-pipeline", "prefill-decode-fractional"):
        points = [(r["gpus"], r["policies"][name]) for r in rows if r["policies"].get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    bounds = [(r["gpus"], r["bound"]) for r in rows if r["bound"]]
    axes.plot(*zip(*bounds, strict=True), color="grey", linestyle=":", label="bound by busy time")
    axes.set_xlabel("GPUs, half of each kind")
    axes.set_ylabel("requests per second")
    axes.set_title(f"{rows[0]['model']} on {rows[0]['devices']} and multiples", fontsize=9)
    axes.legend(fontsize=8)
