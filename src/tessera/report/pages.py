"""HTML pages of a folder and of `tessera advise`.

The folder page has a summary of its plans, best first, and each plan. The advice page has the answer first.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.errors import ArtifactError
from tessera.ir import Plan
from tessera.report.figures import gain, percent, ratio
from tessera.report.page import Bar, Shown, layers, plan_part, render

# Minimum gain of each shade.
SHADES = ((1.30, "g4"), (1.15, "g3"), (1.06, "g2"), (1.02, "g1"))
AGAIN = "Make it again with `python -m benchmarks.paper`."

Case = Mapping[str, Any]


def write_report(folder: Path, plans: Sequence[tuple[str, Shown]], path: Path) -> None:
    """Writes one file; `plans` are (name, content)."""
    ordered = sorted(plans, key=lambda named: -(gain(named[1].plan, named[1].plan) or 0.0))
    render(
        path,
        "folder.html",
        title=folder.resolve().name,
        plans=[(name, plan_part(shown)) for name, shown in ordered],
        remark="Every figure says whether it was measured, simulated or modelled.",
    )


def read_paper(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot be read: {error}", AGAIN, str(path)) from error
    if not isinstance(document, dict):
        raise ArtifactError("not an evaluation", AGAIN, str(path))
    return document


def regimes_map(rows: Sequence[Case]) -> dict[str, Any]:
    """Best policy and gain, a table per model and link."""
    tables: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for row in rows:
        tables[row["model"], row["link"]].append(row)
    better = sum(row["verdict"] == "kernel-level" for row in rows)
    return {
        "better": better,
        "total": len(rows),
        "share": percent(better / max(1, len(rows))),
        "maps": [_map(f"{model}, {link}", cases) for (model, link), cases in tables.items()],
    }


def _map(title: str, rows: Sequence[Case]) -> dict[str, Any]:
    loads = list(dict.fromkeys(row["workload"] for row in rows))
    cells = {(row["pair"], row["workload"]): row for row in rows}
    return {
        "title": title,
        "loads": [load.split(", ", 1)[-1] for load in loads],
        "rows": [
            (pair, [_cell(cells.get((pair, load))) for load in loads])
            for pair in dict.fromkeys(row["pair"] for row in rows)
        ],
    }


def _cell(row: Case | None) -> tuple[str, str, str]:
    factor = row["ratio_to_best_coarse"] if row else None
    if row is None or factor is None:
        return "none", "does not fit" if row else "", ""
    shade = next((name for least, name in SHADES if factor >= least), "even")
    return shade, ratio(factor), str(row["best_coarse"])


@dataclass(frozen=True, slots=True)
class AdviceTable:
    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_advice(
    path: str | Path,
    title: str,
    answer: Sequence[str],
    bars: Sequence[Bar],
    tables: Sequence[AdviceTable],
    plan: Plan | None,
    remarks: Sequence[str],
    regimes: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes one self-contained file; shares of `bars` are relative, `regimes` are cells of a map, if any."""
    top = max(bar.share for bar in bars) or 1.0
    render(
        path,
        "advice.html",
        title=title,
        answer=answer,
        bars=[replace(bar, share=bar.share / top) for bar in bars],
        tables=tables,
        layers=layers(plan) if plan is not None else (),
        remarks=remarks,
        regimes=regimes_map(regimes) if regimes else None,
        remark="All figures are modelled or simulated; none was measured.",
    )
