"""The map of regimes: over pairs, models, batch, context and link, who is best and by how much.

Verdicts: `kernel-level` where the throughput plan beats every coarse policy by more than `CLEAR`;
`data-parallel` where that policy is within `CLEAR` of the plan; else the coarse policy that is.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.paper.records import Case, Outcome
from tessera.paper.scale import Scale, wires

NAME = "regimes"
CLEAR = 1.02


def tasks(scale: Scale) -> list[Case]:
    """The whole grid."""
    return [
        Case(workload, pair, wire, scale.slots)
        for workload in scale.regime_workloads
        for pair in scale.regime_pairs
        for wire in wires(scale.regime_links)
    ]


def document(scale: Scale, done: Mapping[Any, Any]) -> dict[str, Any]:
    """Every cell, and how often each verdict."""
    cells = [_cell(case, done[case]) for case in tasks(scale)]
    return {
        "clear_above": CLEAR,
        "verdicts": dict(Counter(cell["verdict"] for cell in cells).most_common()),
        "cells": cells,
    }


def _cell(case: Case, found: Outcome) -> dict[str, Any]:
    best, parallel = found.best_coarse, found.policies.get("data-parallel")
    over_best = found.own / best[1] if found.own and best else None
    over_parallel = found.own / parallel if found.own and parallel else None
    return {
        "pair": case.pair,
        "model": case.workload.model,
        "batch": case.workload.batch,
        "prompt": case.workload.prompt,
        "output": case.workload.output,
        "link": case.wire.name,
        "throughput": found.own,
        "best_coarse": best[0] if best else None,
        "ratio_to_best_coarse": over_best,
        "ratio_to_data_parallel": over_parallel,
        "verdict": verdict(over_best, over_parallel, best[0] if best else None),
        "source": found.source,
        "why_none": found.why or None,
    }


def verdict(over_best: float | None, over_parallel: float | None, best: str | None) -> str:
    """Who is best, in a word."""
    if over_best is None or best is None:
        return "does not fit"
    if over_best > CLEAR:
        return "kernel-level"
    return "data-parallel" if over_parallel is not None and over_parallel <= CLEAR else best


def draw(figure: Any, found: dict[str, Any]) -> None:
    """A heat map a link: rows are workloads, columns pairs; the figure in a cell is the gain."""
    cells = found["cells"]
    links = list(dict.fromkeys(c["link"] for c in cells))
    pairs = list(dict.fromkeys(c["pair"] for c in cells))
    works = list(dict.fromkeys((c["model"], c["batch"], c["prompt"]) for c in cells))
    keys = (("ratio_to_data_parallel", "data-parallel"), ("ratio_to_best_coarse", "the best coarse policy"))
    panels = figure.subplots(len(links), 2, squeeze=False, sharex=True, sharey=True)
    for row, link in enumerate(links):
        for column, (key, title) in enumerate(keys):
            values = np.full((len(works), len(pairs)), np.nan)
            for cell in (c for c in cells if c["link"] == link):
                at = works.index((cell["model"], cell["batch"], cell["prompt"])), pairs.index(cell["pair"])
                values[at] = cell[key] or np.nan
            _heat(panels[row][column], values, f"{link}: times {title}")
    for panel in panels[-1]:
        panel.set_xticks(range(len(pairs)), pairs, fontsize=6, rotation=30, ha="right")
    for row_of in panels:
        row_of[0].set_yticks(range(len(works)), [f"{m} b{b} p{p}" for m, b, p in works], fontsize=6)


def _heat(panel: Any, values: np.ndarray, title: str) -> None:
    panel.imshow(values, cmap="viridis", vmin=1.0, vmax=1.5, aspect="auto")
    panel.set_title(title, fontsize=8)
    for (row, column), value in np.ndenumerate(values):
        text, colour = ("none", "grey") if np.isnan(value) else (f"{value:.2f}", "white")
        panel.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
