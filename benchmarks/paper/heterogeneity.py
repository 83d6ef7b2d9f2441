"""Heterogeneity: how unlike two cards are, kernel by kernel.

Of every launch of every workload, the time on the second card over that on the first: the distribution by
class of kernel, and the kernels that take most time one by one. Times are the costs that plans are made from.
A class is guessed from the kernel's name and the module that launched it. What no rule knows is "elementwise"
for an operator and "other" for anything else.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.paper.compare import sources_of
from benchmarks.paper.library import Library
from benchmarks.paper.records import Shape, Wire, costs_in_words, wired
from benchmarks.paper.scale import Scale

from tessera.flow import price
from tessera.ir import Costs, Kernel, Origin, Trace
from tessera.report import short_name

NAME = "heterogeneity"
PERCENTILES = (5, 25, 50, 75, 95)
# Kernels shown one by one, and points of a distribution.
NUM_SHOWN, NUM_POINTS = 12, 41


# The first rule that fits wins: (class, what the kernel's short name matches, what its scope must match).
RULES: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (name, re.compile(kernel), re.compile(scope))
    for name, kernel, scope in (
        ("attention", r"attention|flash|fmha|sdpa", r""),
        ("attention", r"^(bmm|baddbmm|softmax|safe_softmax|matmul)$", r"(?i)attn|attention"),
        ("matrix multiply", r"(^|_)(mm|addmm|bmm|baddbmm|matmul|linear|gemm|gemv)(_|$)|grouped_mm", r""),
        ("convolution, scan", r"conv|scan|ssm|ssd", r""),
        ("norm", r"norm", r""),
        ("norm", r"", r"(?i)norm[^.]*$|(^|\.)ln_?\w*$"),
        ("reduction", r"softmax|topk|sort|argm|^sum|^mean|^amax|cumsum|triton_(per|red)_", r""),
        ("lookup", r"embedding|index|gather|scatter|select", r""),
        ("copy", r"copy|clone|^cat$|stack|contiguous|fill|zero|ones|empty|arange|full|repeat", r""),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ratios:
    """One workload on two cards."""

    shape: Shape
    gpus: tuple[str, ...]


def tasks(scale: Scale) -> list[Ratios]:
    """Every load on the first pair, at one batch."""
    return [Ratios(shape, scale.first_pair) for shape in scale.shapes]


def work(library: Library, task: Ratios) -> dict[str, Any]:
    """Prices every launch of every step on both cards."""
    unit = library.unit(task.shape)
    cluster = wired(task.gpus, Wire.preset("pcie4"))
    costs = price(unit, cluster)
    steps = [_step(g.trace, priced) for g, priced in zip(unit.graphs, costs, strict=True)]
    return {"sources": sources_of(costs), "steps": steps}


def _step(trace: Trace, costs: Costs) -> dict[str, Any]:
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for launch, row in zip(trace.launches, costs.costs, strict=True):
        first, second = row[0].us, row[1].us
        if first > 0 and second > 0:
            kernel = trace.kernels[launch.kernel]
            rows[kernel_class(kernel, launch.scope)].append((second / first, first))
            for index, amount in enumerate((first, second, 1.0)):
                kernels[kernel.name][index] += amount
    every = [row for group in rows.values() for row in group]
    heavy = sorted(kernels.items(), key=lambda item: -item[1][0])[:NUM_SHOWN]
    return {
        "step": trace.step.kind,
        "launches": len(every),
        "all": _spread(every),
        "by_class": {name: _spread(group) for name, group in sorted(rows.items())},
        "kernels": [
            {"kernel": name, "launches": int(n), "first_us": a, "second_us": b, "ratio": b / a}
            for name, (a, b, n) in heavy
        ],
        "distribution": _distribution(every),
    }


def _spread(rows: list[tuple[float, float]]) -> dict[str, float]:
    ratios, us = np.array([r for r, _ in rows]), np.array([t for _, t in rows])
    found = {f"p{p}": float(np.percentile(ratios, p)) for p in PERCENTILES}
    second_faster = float(us[ratios < 1].sum() / us.sum())
    return (
        {"launches": len(rows), "first_us": float(us.sum())} | found | {"time_second_faster": second_faster}
    )


def _distribution(rows: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Ratio -> share of the launches, and of the time on the first card, below it."""
    ordered = sorted(rows)
    ratios, us = np.array([r for r, _ in ordered]), np.array([t for _, t in ordered])
    seen = np.cumsum(us) / us.sum()
    picks = np.unique(np.linspace(0, len(ordered) - 1, NUM_POINTS).astype(int))
    return [
        {"ratio": float(ratios[i]), "launches": (int(i) + 1) / len(ordered), "time": float(seen[i])}
        for i in picks
    ]


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a workload that is done."""
    rows = []
    for task in (task for task in tasks(scale) if task in done):
        found = done[task]
        rows.append(
            {
                "model": task.shape.load.model,
                "workload": task.shape.title,
                "first": task.gpus[0],
                "second": task.gpus[1],
                "source": costs_in_words(found["sources"]),
                "steps": found["steps"],
            }
        )
    return rows


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Distributions on the left, the heaviest kernels of the first workload on the right."""
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for row in rows:
        for step in row["steps"]:
            points = step["distribution"]
            label = f"{row['model']} {step['step']}"
            left.step([p["ratio"] for p in points], [p["time"] for p in points], where="post", label=label)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xscale("log")
    left.set_xlabel(f"time on {rows[0]['second']} / time on {rows[0]['first']}")
    left.set_ylabel(f"share of the time on {rows[0]['first']}")
    left.legend(fontsize=6)
    kernels = [(s["step"], k) for s in rows[0]["steps"] for k in s["kernels"][:8]]
    ratios = [k["ratio"] for _, k in kernels]
    names = [f"{step}: {k['kernel'].removeprefix('aten.')}" for step, k in kernels]
    colours = ["#2a6f97" if r > 1 else "#c8553d" for r in ratios]
    right.barh(range(len(names)), [r - 1 for r in ratios], left=1.0, color=colours)
    right.set_yticks(range(len(names)), names, fontsize=6)
    right.invert_yaxis()
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_title(f"{rows[0]['model']}: kernels that take most time", fontsize=9)


def kernel_class(kernel: Kernel, scope: str) -> str:
    """The class of work that one launch of a kernel does."""
    name = short_name(kernel.name)
    for label, by_name, by_scope in RULES:
        if by_name.search(name) and by_scope.search(scope):
            return label
    fused = kernel.origin is Origin.TRITON and name.startswith("triton_poi_")
    return "elementwise" if fused or kernel.origin is Origin.ATEN else "other"
