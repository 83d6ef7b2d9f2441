"""Scaling: the first load on 2 to 16 GPUs, half of each kind of the first pair.

Every two GPUs have a link of their own. Beyond three devices a plan is made of cells: plans for fewer side by
side.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.records import Case, Wire
from benchmarks.paper.scale import Scale

NAME = "scaling"


def tasks(scale: Scale) -> list[Case]:
    """As many of each kind as of the other."""
    a, b = scale.first_pair[:2]
    wire = Wire.preset("pcie4")
    return [
        Case(scale.first_load, (a,) * (n // 2) + (b,) * (n - n // 2), wire, scale.effort) for n in scale.sizes
    ]


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a number of GPUs that is done."""
    rows: list[dict[str, Any]] = []
    for case in (case for case in tasks(scale) if case in done):
        found = done[case]
        own = found.policies.get("throughput")
        rows.append(
            {
                "model": case.load.model,
                "workload": case.load.title,
                "gpus": len(case.gpus),
                "devices": case.pair,
                "slots": own.microbatches if own else None,
                "link": case.wire.name,
                "policies": found.rates,
                "bound": found.bound_per_s,
                **found.ratios,
                "planning_cpu_s": found.cpu_s,
                "launches": found.launches,
                "source": found.source,
                "why_none": found.why or None,
            }
        )
    if not rows:
        return rows
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
