"""The map of regimes: over pairs, models, phases, limits and links, who is best and by how much.

Verdicts: `kernel-level` where the plan beats every coarse policy by more than `CLEAR` and is none of them;
`data-parallel` where that policy is within `CLEAR` of the plan; else the coarse policy that is.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from benchmarks.paper import throughput
from benchmarks.paper.records import Case, Outcome
from benchmarks.paper.scale import Scale

from tessera.plan.baselines import COARSE

NAME = "regimes"
CLEAR = 1.02


def tasks(scale: Scale) -> list[Case]:
    """Those of the throughput figure."""
    return list(scale.cases)


def document(scale: Scale, done: Mapping[Any, Any]) -> dict[str, Any]:
    """Every cell that is done, how often each verdict, and how the ratios are spread."""
    cells = [_cell(case, done[case]) for case in scale.cases if case in done]
    keys = ("ratio_to_data_parallel", "ratio_to_best_coarse")
    return {
        "clear_above": CLEAR,
        "verdicts": dict(Counter(cell["verdict"] for cell in cells).most_common()),
        "spread": {key: throughput.spread(cell[key] for cell in cells) for key in keys},
        "cells": cells,
    }


def _cell(case: Case, found: Outcome) -> dict[str, Any]:
    best, load = found.best_coarse, case.load
    own = found.policies.get("throughput")
    over_best, over_parallel = found.over(best[0] if best else None), found.over("data-parallel")
    return {
        "pair": case.pair,
        "model": load.model,
        "workload": load.title,
        "limit_ms": load.limit_ms,
        "batch": max(own.batch.values()) if own else None,
        "prompt": load.prompt,
        "output": load.output,
        "link": case.wire.name,
        "throughput": found.own,
        "best_coarse": best[0] if best else None,
        "ratio_to_best_coarse": over_best,
        "ratio_to_data_parallel": over_parallel,
        "verdict": verdict(over_best, over_parallel, best[0] if best else None, found.chosen),
        "source": found.source,
        "why_none": found.why or None,
    }


def verdict(over_best: float | None, over_parallel: float | None, best: str | None, chosen: str = "") -> str:
    """Who is best, in a word."""
    if over_best is None or best is None:
        return "does not fit"
    if over_best > CLEAR:
        return chosen if chosen in COARSE else "kernel-level"
    return "data-parallel" if over_parallel is not None and over_parallel <= CLEAR else best


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Two heat maps: rows are loads, columns pairs; the figure in a cell is the mean gain of its cases."""
    cells = found["cells"]
    pairs = list(dict.fromkeys(_kinds(c["pair"]) for c in cells))
    works = list(dict.fromkeys(c["workload"] for c in cells))
    keys = (("ratio_to_data_parallel", "data-parallel"), ("ratio_to_best_coarse", "the best coarse policy"))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, (key, title) in zip(panels, keys, strict=True):
        values = np.full((len(works), len(pairs)), np.nan)
        for at in np.ndindex(values.shape):
            here = [
                c[key]
                for c in cells
                if (c["workload"], _kinds(c["pair"])) == (works[at[0]], pairs[at[1]]) and c[key]
            ]
            values[at] = np.mean(here) if here else np.nan
        _heat(panel, values, f"times {title}")
        panel.set_xticks(range(len(pairs)), pairs, fontsize=6, rotation=30, ha="right")
    panels[0].set_yticks(range(len(works)), works, fontsize=6)


def _kinds(pair: str) -> str:
    """The cards of a pair, whatever their number."""
    return "+".join(name.split("x ")[-1] for name in pair.split("+"))


def _heat(panel: Any, values: np.ndarray, title: str) -> None:
    panel.imshow(values, cmap="viridis", vmin=1.0, vmax=1.5, aspect="auto")
    panel.set_title(title, fontsize=8)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white")
