"""Figures 2 and 3: launches and time in kernels that are faster on the L40S than on the A100-PCIe.

Times are those of one request of the re-measured lengths: its prompt alone, and its share of decodes of 32
sequences, on compiled launches where the package has them.
"""

from typing import Any

from benchmarks.published import figures
from benchmarks.published.setup import MODELS, PAIRS, SEQUENCES, cluster, launches, served

from tessera.profile import OpClass, works

PAIR = "a100_l40s"


def shares(name: str) -> dict[str, Any]:
    """Shares of launches and of A100 time that are faster on the L40S, in all and by phase."""
    model = MODELS[name]
    steps = served(model, cluster(PAIRS[PAIR]))
    family, counts = steps._kinds  # one launch of each kind
    phases = {
        "prefill": (model.prompt, 1, model.prompt, 1.0),
        "decode": (SEQUENCES, SEQUENCES, model.prompt + model.output // 2, model.output / SEQUENCES),
    }
    found: dict[str, Any] = {"recorded": launches(model)}
    totals = {"launches": [0.0, 0.0], "time": [0.0, 0.0]}
    for phase, (tokens, sequences, length, weight) in phases.items():
        us = steps.price(tokens, sequences, length).us
        trace = family.at(steps.step(tokens, sequences, steps.anchors[0].reserve, length)).trace
        here = {"launches": [0.0, 0.0], "time": [0.0, 0.0]}
        for (a100, l40s), count, work in zip(us, counts, works(trace), strict=True):
            if work.op is OpClass.ALLOCATION or a100 <= 0:
                continue
            for key, amount in (("launches", float(count)), ("time", float(a100))):
                here[key][0] += amount * (l40s < a100)
                here[key][1] += amount
        for key, (faster, whole) in here.items():
            totals[key][0] += weight * faster
            totals[key][1] += weight * whole
        found[phase] = {key: round(float(faster / whole), 4) for key, (faster, whole) in here.items()}
    return found | {key: round(float(faster / whole), 4) for key, (faster, whole) in totals.items()}


def fig2b(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Percent of A100 time in kernels that are faster on the L40S; launches beside it (figure 2a)."""
    time, count = figures()["fig2b"]["published"], figures()["fig2a"]["published"]
    rows = []
    for model in (m for m in time if m not in ("mean", "max")):
        ours = found.get(model)
        rows.append(
            {
                "pair": PAIR,
                "model": model,
                "policy": "kernels faster on the L40S",
                "unit": "percent of A100 time",
                "published": time[model],
                "re_measured": None,
                "ours": round(100 * ours["time"], 1) if ours else None,
                "ours_best_batch": None,
                "published_percent_of_launches": round(
                    100 * count["share_of_launches_faster_on_l40s"][model], 1
                ),
                "ours_percent_of_launches": round(100 * ours["launches"], 1) if ours else None,
                "ours_by_phase": {p: ours[p] for p in ("prefill", "decode")} if ours else None,
                "launches": ours["recorded"] if ours else None,
            }
        )
    return rows
