"""Cost: dollars for a million tokens on mixed cards, and on as many of the card that is best alone.

Rents are those of `tessera gpus`; the throughput is that of the throughput figure, from the same cases. Of
pictures, a thousand.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.paper import throughput
from benchmarks.paper.records import Case, Outcome, usd_per_million
from benchmarks.paper.scale import Scale

NAME = "cost"
PER_HOUR = 3600


def tasks(scale: Scale) -> list[Case]:
    """Those of the throughput figure."""
    return throughput.tasks(scale)


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a case that is done; without prices it has no figures."""
    return [_row(case, done[case]) for case in scale.cases if case in done]


def _row(case: Case, found: Outcome) -> dict[str, Any]:
    load = case.load
    card, cards, rent = found.alike(len(case.gpus)) or (None, None, None)
    own, other = _per_dollar(found.own, found.usd_per_hour), _per_dollar(cards, rent)
    tokens = load.tokens_per_result
    best = found.best_baseline

    def million(usd: float | None, per_s: float | None) -> float | None:
        return usd_per_million(usd, per_s * tokens) if per_s and tokens else None

    return {
        "model": load.model,
        "workload": load.title,
        "pair": case.pair,
        "gpus": len(case.gpus),
        "link": case.wire.name,
        "counted": load.counted,
        "requests_per_usd": own,
        "usd_per_million_tokens": million(found.usd_per_hour, found.own),
        "best_baseline": best[0] if best else None,
        "best_baseline_usd_per_million_tokens": million(found.usd_per_hour, best[1] if best else None),
        "usd_per_thousand_pictures": None if tokens or not own else 1e3 / own,
        "alike": card,
        "alike_requests_per_usd": other,
        "alike_usd_per_million_tokens": million(rent, cards),
        "alike_policy": "data-parallel" if cards else None,
        "ratio_per_usd": own / other if own and other else None,
        "ratio_throughput": found.own / cards if found.own and cards else None,
        "source": f"{found.source}; list prices",
    }


def _per_dollar(per_s: float | None, usd_per_hour: float | None) -> float | None:
    return per_s * PER_HOUR / usd_per_hour if per_s and usd_per_hour else None


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Dollars for a million tokens: the plan against the best baseline, and as many cards alike."""
    left, right = figure.subplots(1, 2, sharey=True)
    kept = [r for r in rows if r["usd_per_million_tokens"]]
    panels = (
        (left, "best_baseline_usd_per_million_tokens", "the best policy on the same cards"),
        (right, "alike_usd_per_million_tokens", "as many of the card that is best alone"),
    )
    for panel, key, title in panels:
        for name in dict.fromkeys(r["model"] for r in kept):
            here = [r for r in kept if r["model"] == name and r[key]]
            own = [r["usd_per_million_tokens"] for r in here]
            panel.loglog([r[key] for r in here], own, "o", markersize=3, label=name)
        ends = [x for r in kept for x in (r[key], r["usd_per_million_tokens"]) if x]
        if ends:
            panel.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.6)
        panel.set_xlabel(f"$ for a million tokens, {title}")
    left.set_ylabel("$ for a million tokens, the plan")
    left.legend(fontsize=7)
