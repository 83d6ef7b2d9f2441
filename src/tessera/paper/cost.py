"""Cost efficiency: requests per dollar of a mixed pair against two of its better card.

Rents are those of `tessera gpus`; the throughput is that of the throughput figure, from the same cases.
"""

from collections.abc import Mapping
from typing import Any

from tessera.paper import throughput
from tessera.paper.records import Case, Outcome
from tessera.paper.scale import Scale

NAME = "cost"


def tasks(scale: Scale) -> list[Case]:
    """Those of the throughput figure."""
    return throughput.tasks(scale)


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a case with prices; the others are named."""
    return [_row(case, done[case], done[case.doubled()]) for case in throughput.cases(scale)]


def _row(case: Case, found: Outcome, doubled: Outcome) -> dict[str, Any]:
    two = doubled.best_baseline
    own = _per_dollar(found.own, found.usd_per_hour)
    other = _per_dollar(two[1] if two else None, doubled.usd_per_hour)
    return {
        "model": case.workload.model,
        "pair": case.pair,
        "link": case.wire.name,
        "requests_per_usd": own,
        "two_of": case.doubled().gpus[0],
        "two_of_requests_per_usd": other,
        "two_of_policy": two[0] if two else None,
        "ratio_per_usd": own / other if own and other else None,
        "ratio_throughput": found.own / two[1] if found.own and two else None,
        "source": f"{found.source}; list prices",
    }


def _per_dollar(per_s: float | None, usd_per_hour: float | None) -> float | None:
    return per_s * 3600 / usd_per_hour if per_s and usd_per_hour else None


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Throughput against two of the better card, and the same per dollar."""
    left, right = figure.subplots(1, 2, sharey=True)
    kept = [r for r in rows if r["ratio_throughput"]]
    names = [f"{r['model']}, {r['pair']}, {r['link']}" for r in kept]
    panels = ((left, "ratio_throughput", "throughput"), (right, "ratio_per_usd", "requests per dollar"))
    for panel, key, title in panels:
        panel.barh(range(len(kept)), [r[key] or 0.0 for r in kept], color="#2a6f97")
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{title}, against two of the better card", fontsize=9)
    left.set_yticks(range(len(kept)), names, fontsize=6)
    left.invert_yaxis()
