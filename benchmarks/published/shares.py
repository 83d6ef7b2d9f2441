"""Figures 2 and 3: launches and time in kernels that are faster on the L40S than on the A100-PCIe.

Times are those of one request of the re-measured lengths: its prompt alone, and its share of decodes of 32
sequences, on compiled launches where the package has them. Steps of Mamba and SD 3.5 are those of `stepwise`.
A step of one token is beside them: launches of the Llama census number one small decode. Blocks of figure 3
are told by the module of a launch; a fused launch counts where it begins.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.published import figures
from benchmarks.published.setup import MODELS, PAIRS, SEQUENCES, cluster, launches, served
from benchmarks.published.stepwise import STEPWISE, priced

from tessera.profile import OpClass, works

PAIR = "a100_l40s"
ONE_TOKEN = (1, 1, 512)
BLOCKS = {
    "attention": ("attn", "rotary", "input_layernorm"),
    "ffn": ("mlp", "experts", "router", "post_attention_layernorm"),
}
WHY = {
    "llama_3_1_8b": "launches agree (one small decode); the census gives ratios without times, and in ours "
    "products, slower on the L40S, take nine tenths of the time",
    "qwen_2_5_vl_7b": "as Llama: launches agree, times of the census are not published",
    "mamba_codestral_7b": "batch and lengths of the census are not stated",
    "stable_diffusion_3_5_medium": "64 launches are published; ours is a whole denoising step, compiled",
}
# Microseconds on both cards, number of launches, block, phase.
Point = tuple[float, float, float, str, str]


def _block(scope: str, op: OpClass) -> str:
    if op in (OpClass.DECODE, OpClass.PREFILL):
        return "attention"
    return next((name for name, words in BLOCKS.items() if any(w in scope for w in words)), "other")


def _served_points(name: str) -> tuple[list[Point], list[Point]]:
    """One point a kind of launch: of a request, and of a step of one token."""
    model = MODELS[name]
    steps = served(model, cluster(PAIRS[PAIR]))
    family, counts, _ = steps._kinds  # one launch of each kind
    phases = {
        "prefill": (model.prompt, 1, model.prompt, 1.0),
        "decode": (SEQUENCES, SEQUENCES, model.prompt + model.output // 2, model.output / SEQUENCES),
        "one token": (*ONE_TOKEN, 1.0),
    }
    found: dict[str, list[Point]] = {}
    for phase, (tokens, sequences, length, runs) in phases.items():
        us = steps.price(tokens, sequences, length).us
        trace = family.at(steps.step(tokens, sequences, steps.anchors[0].reserve, length)).trace
        found[phase] = [
            (runs * a100, runs * l40s, runs * count, _block(launch.scope, work.op), phase)
            for (a100, l40s), count, work, launch in zip(
                us, counts, works(trace), trace.launches, strict=True
            )
            if work.op is not OpClass.ALLOCATION and a100 > 0
        ]
    return found["prefill"] + found["decode"], found["one token"]


def _stepwise_points(name: str) -> list[Point]:
    how = STEPWISE[name]
    return [
        (runs * row[0].us, runs * row[1].us, runs, "other", step.kind)
        for step, runs in zip(how.steps, how.runs, strict=True)
        for row in priced(step, cluster(PAIRS[PAIR])).costs
        if row[0].us > 0
    ]


def _percent(points: Iterable[Point]) -> dict[str, float]:
    """Percent of A100 time, of launches and of kinds of launches that are faster on the L40S."""
    rows = [(a100, count, 1.0, l40s < a100) for a100, l40s, count, _, _ in points]
    return {
        key: round(float(100 * sum(row[n] for row in rows if row[3]) / sum(row[n] for row in rows)), 1)
        for n, key in enumerate(("time", "launches", "kinds"))
    }


def shares(name: str) -> dict[str, Any]:
    """Percentages over a request, by phase and by block, and of a step of one token."""
    request, one = (_stepwise_points(name), []) if name in STEPWISE else _served_points(name)
    found: dict[str, Any] = {
        "recorded": "compiled" if name in STEPWISE else launches(MODELS[name]),
        "whole": _percent(request),
        "one_token": _percent(one) if one else None,
    }
    for key, at in (("phases", 4), ("blocks", 3)):
        found[key] = {x: _percent(p for p in request if p[at] == x) for x in {p[at] for p in request}}
    return found


def fig2b(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Percent of A100 time in kernels that are faster on the L40S; launches beside it (figure 2a)."""
    time, count = figures()["fig2b"]["published"], figures()["fig2a"]["published"]
    rows = []
    for model in (m for m in time if m not in ("mean", "max")):
        ours = found.get(model)
        one = ours["one_token"] if ours else None
        rows.append(
            {
                "pair": PAIR,
                "model": model,
                "policy": "kernels faster on the L40S",
                "unit": "percent of A100 time",
                "published": time[model],
                "re_measured": None,
                "ours": ours["whole"]["time"] if ours else None,
                "ours_best_batch": None,
                "published_percent_of_launches": round(
                    100 * count["share_of_launches_faster_on_l40s"][model], 1
                ),
                "ours_percent_of_launches": ours["whole"]["launches"] if ours else None,
                "ours_one_token_step": one,
                "ours_by_phase": ours["phases"] if ours else None,
                "launches": ours["recorded"] if ours else None,
                "why": WHY.get(model, ""),
            }
        )
    return rows


def fig3(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """gpt-oss by phase and block: percent of points, a point being a kind of launch."""
    doc = figures()["fig3"]
    ours = found.get(doc["model"])
    rows = []
    for part, percent in doc["published"]["share_of_points_faster_on_l40s_percent"].items():
        here = (ours["phases"] | ours["blocks"])[part] if ours else None
        rows.append(
            {
                "pair": PAIR,
                "model": doc["model"],
                "policy": f"{part}: kinds of launches faster on the L40S",
                "unit": "percent of points",
                "published": percent,
                "re_measured": None,
                "ours": here["kinds"] if here else None,
                "ours_best_batch": None,
                "ours_percent_of_launches": here["launches"] if here else None,
                "ours_percent_of_time": here["time"] if here else None,
            }
        )
    return rows
