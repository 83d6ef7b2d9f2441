"""Figures 6 (throughput on three pairs), 10 (pipelining), 12a (bandwidth), Table III (throughput per dollar).

Every policy is a service rehearsed by its scheduler on a virtual clock; requests always wait. As published,
every engine holds 32 sequences; an engine over both cards has them in one, two or four microbatches, as is
best. "Best batch" is every policy's own best configuration, by the planner's search. Kernel disaggregation
is one placement of launches, the publication's algorithm; `tessera_mix` is the best of all policies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks.published import figures
from benchmarks.published.setup import (
    FRACTIONAL,
    MIX,
    MODELS,
    PAIRS,
    POLICIES,
    SEQUENCES,
    UNSERVED,
    PublishedModel,
    cards,
    cluster,
    launches,
    served,
    usd_per_hour,
)

from tessera.errors import TesseraError
from tessera.ir import Expected, Load, Role, ServicePlan
from tessera.plan import QUICK
from tessera.plan.fluid import QUICK_FLUID, FluidConfig, FluidModel, GroupDraft
from tessera.planning import ServedSteps, make_group, make_service_plan
from tessera.serve.rehearse import rehearse

# Tokens of a step with prompts beside answers, and sizes that a lane over both cards tries.
CHUNK, LANE_CHUNK = 2048, 512
DIVIDED = ("attention-ffn", "kernel-level")
# A placement of blocks is one of launches.
CONTAINS = {"kernel_disaggregation": ("attention_ffn",)}
AS_PUBLISHED = replace(QUICK_FLUID, most_sequences=SEQUENCES)
BANDWIDTHS = (200, 100, 50, 25)
# Microbatches of the sequences of an engine over both cards.
MICROBATCHES = (1, 2, 4)
NO_PRIORITY = (
    "ours has no stream priorities: the oldest microbatch goes first; measured again, they lose 1.8 %"
)
# Links without cost: the optimum without communication.
FREE_GBIT, FREE_US = 1e6, 0.0


@dataclass(frozen=True, slots=True)
class Rated:
    tokens_per_s: float
    tpot_ms: float
    plan: str


@dataclass(frozen=True, slots=True)
class OfflineCase:
    """One policy of one model on one pair, as published or at its best batch."""

    pair: str
    model: str
    policy: str
    is_best: bool
    gbit_per_s: float = 200.0


def cases(
    pairs: tuple[str, ...] = tuple(PAIRS), models: tuple[str, ...] = tuple(MODELS)
) -> Iterator[OfflineCase]:
    for pair in pairs:
        for model in models:
            for policy in POLICIES:
                for is_best in (False, True):
                    yield OfflineCase(pair, model, policy, is_best)


def rate(case: OfflineCase) -> Rated | None:
    """None where a policy does not fit."""
    model = MODELS[case.model]
    steps = served(model, cluster(cards(case.pair, case.policy), case.gbit_per_s))
    policy = POLICIES[case.policy]
    tried = MICROBATCHES if policy in DIVIDED and not case.is_best else (1,)
    rated = []
    for microbatches in tried:
        try:
            if case.is_best:
                plan = best_plan(steps, model.load, policy)
            else:
                plan = published_plan(steps, model.load, policy, microbatches)
            rated.append(_rated(plan, model.load))
        except TesseraError:
            continue
    return max(rated, key=lambda r: r.tokens_per_s, default=None)


def _rated(plan: ServicePlan, load: Load) -> Rated:
    expected: Expected = plan.expected or rehearse(plan, load)
    words = ", ".join(
        f"{g.role.value} {g.sequences}x{g.microbatches} steps {'/'.join(map(str, g.sizes))}"
        for g in plan.groups
    )
    return Rated(expected.tokens_per_s, expected.tpot_ms, words)


def best_plan(steps: ServedSteps, load: Load, policy: str, config: FluidConfig = QUICK_FLUID) -> ServicePlan:
    """A policy's own best configuration."""
    return make_service_plan(steps, load, rehearse, QUICK, config=config, policies=(policy,))


def published_plan(steps: ServedSteps, load: Load, policy: str, microbatches: int = 2) -> ServicePlan:
    """A policy with 32 sequences in every engine that answers."""
    if policy.startswith("prefill-decode"):
        return best_plan(steps, load, policy, AS_PUBLISHED)
    fluid = FluidModel(load, steps.cluster, steps.price, steps.model_bytes, AS_PUBLISHED)
    devices = tuple(range(len(steps.cluster.devices)))
    drafts, alone = [], devices
    if policy in DIVIDED:  # the first card and the last; others serve whole requests
        pair, alone = (devices[0], devices[-1]), devices[1:-1]
        drafts = [_engine(fluid, pair, SEQUENCES // microbatches, LANE_CHUNK, microbatches)]
    drafts += [_engine(fluid, (device,), SEQUENCES, CHUNK) for device in alone]
    groups = tuple(make_group(steps, draft, policy, QUICK) for draft in drafts)
    return ServicePlan(steps.model, policy, load, groups)


def _engine(
    fluid: FluidModel, devices: tuple[int, ...], sequences: int, tokens: int, microbatches: int = 1
) -> GroupDraft:
    pool = fluid.pool_tokens(sequences * microbatches, fluid.load.prompt_tokens + fluid.load.output_tokens)
    sizes = (sequences, tokens)
    return GroupDraft(Role.MIXED, devices, sequences, sizes, microbatches, pool, fluid.length)


def fig6(rated: Mapping[OfflineCase, Rated | None]) -> list[dict[str, Any]]:
    """A row a policy; the planner's choice is the best of all."""
    published, again = figures()["fig6"]["published"], figures()["fig6"]["re_measured"]
    rows = []
    for pair, models in published.items():
        for model, bars in models.items():
            here = {c: r for c, r in rated.items() if (c.pair, c.model, c.gbit_per_s) == (pair, model, 200.0)}
            measured = again["models"].get(model, {}).get("bars", {}) if pair == again["pair"] else {}
            names = [*bars, FRACTIONAL, MIX]
            for policy in names:
                ours, best = (best_rated(here, policy, is_best) for is_best in (False, True))
                rows.append(
                    {
                        "pair": pair,
                        "model": model,
                        "policy": policy,
                        "unit": "images per minute" if "diffusion" in model else "output tokens per second",
                        "published": bars.get(policy),
                        "re_measured": measured.get(policy, [None])[0],
                        "ours": round(ours.tokens_per_s, 1) if ours else None,
                        "ours_best_batch": round(best.tokens_per_s, 1) if best else None,
                        "plan": ours.plan if ours else None,
                        "plan_best_batch": best.plan if best else None,
                        "why": _why(model, policy, bool(here)),
                    }
                )
    return rows


def best_rated(rated: dict[OfflineCase, Rated | None], policy: str, is_best: bool) -> Rated | None:
    names = (policy, *CONTAINS.get(policy, ()))
    found = [
        r for c, r in rated.items() if c.is_best == is_best and r and (policy == MIX or c.policy in names)
    ]
    return max(found, key=lambda r: r.tokens_per_s, default=None)


def bar(rated: dict[OfflineCase, Rated | None], policy: str, is_best: bool) -> float | None:
    found = best_rated(rated, policy, is_best)
    return found.tokens_per_s if found else None


def _why(model: str, policy: str, is_rated: bool) -> str:
    if not is_rated:
        return UNSERVED.get(model, "not evaluated with --quick")
    if model in UNSERVED:
        return "step by step, at the published batch alone; no service plan runs this model"
    if policy in (FRACTIONAL, MIX):
        return "not published"
    if policy == "kernel_disaggregation":
        return (
            "ours is one placement of launches over both cards; measured again, the publication's is a "
            "prefill/decode split whose overflow is served whole elsewhere"
        )
    words = {
        "request_distribution": "published: 0.85 of the sum of both cards or 0.95 of the prefill/decode bar",
        "attention_ffn": "ours moves activations over the link after every layer's attention",
    }
    return words.get(policy, "lengths and batch behind the published bar are not stated")


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The throughput of kernel disaggregation, and of the planner's mix, over baselines."""
    found: dict[str, Any] = {}
    for column in ("published", "re_measured", "ours", "ours_best_batch"):
        for own in ("kernel_disaggregation", MIX):
            over: dict[str, list[float]] = {"sum_of_cards": [], "prefill_decode": [], "attention_ffn": []}
            for pair, model in dict.fromkeys((r["pair"], r["model"]) for r in rows):
                bars = {r["policy"]: r[column] for r in rows if (r["pair"], r["model"]) == (pair, model)}
                mine = bars.get(own)
                alone = [bars.get(x) for x in ("left_card_alone", "right_card_alone")]
                if mine and all(alone):
                    over["sum_of_cards"].append(mine / sum(x for x in alone if x))
                for name in ("prefill_decode", "attention_ffn"):
                    if mine and bars.get(name):
                        over[name].append(mine / bars[name])
            if any(over.values()):
                found[f"{column}, {own}"] = {
                    name: {
                        "median": round(median(x), 3),
                        "mean": round(fmean(x), 3),
                        "most": round(max(x), 3),
                    }
                    | {"rows": len(x)}
                    for name, x in over.items()
                    if x
                }
    return found


def over_sum(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kernel disaggregation on A100 + L40S over the sum of both cards alone, by model."""
    found: dict[str, dict[str, Any]] = {}
    for model in dict.fromkeys(r["model"] for r in rows):
        bars = {r["policy"]: r for r in rows if (r["pair"], r["model"]) == ("a100_l40s", model)}
        alone = [bars[name] for name in ("left_card_alone", "right_card_alone")]
        found[model] = {}
        for column in ("published", "re_measured", "ours", "ours_best_batch"):
            mine, each = bars["kernel_disaggregation"][column], [row[column] for row in alone]
            found[model][column] = round(mine / sum(each), 4) if mine and all(each) else None
    return found


def table3(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Throughput per dollar over the left card alone, mean over models, at the publication's prices."""
    doc, found = figures()["table3"], []
    for pair, gpus in PAIRS.items():
        usd = {"left_card_alone": usd_per_hour(gpus[:1]), "right_card_alone": usd_per_hour(gpus[1:])}
        models = dict.fromkeys(r["model"] for r in rows if r["pair"] == pair)
        for policy in (*POLICIES, MIX):
            row: dict[str, Any] = {"pair": pair, "model": "mean over models", "policy": policy}
            computed = doc["computed_here"]["from_the_bars_of_fig6"][pair].get(policy)
            row["published"] = doc["published"].get(pair, {}).get(policy, computed)
            row["re_measured"] = doc["re_measured"].get(pair, {}).get(policy)
            for column in ("ours", "ours_best_batch"):
                per_dollar = []
                for model in models:
                    bars = {r["policy"]: r[column] for r in rows if (r["pair"], r["model"]) == (pair, model)}
                    if bars.get(policy) and bars.get("left_card_alone"):
                        mine = bars[policy] / usd.get(policy, usd_per_hour(gpus))
                        per_dollar.append(mine / (bars["left_card_alone"] / usd["left_card_alone"]))
                row[column] = round(fmean(per_dollar), 3) if per_dollar else None
            found.append(row)
    return found


def two_alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A mixed pair against two of its better card, which give twice what one gives."""
    found = []
    for pair, model in dict.fromkeys((r["pair"], r["model"]) for r in rows):
        row: dict[str, Any] = {"pair": pair, "model": model}
        for column in ("published", "re_measured", "ours", "ours_best_batch"):
            bars = {r["policy"]: r[column] for r in rows if (r["pair"], r["model"]) == (pair, model)}
            mine = max((x for p in ("kernel_disaggregation", MIX) if (x := bars.get(p))), default=None)
            alone = max(
                (x for p in ("left_card_alone", "right_card_alone") if (x := bars.get(p))), default=None
            )
            row[column] = round(mine / (2 * alone), 3) if mine and alone else None
        found.append(row)
    return found


def fig12a(rated: dict[OfflineCase, Rated | None]) -> list[dict[str, Any]]:
    """Kernel disaggregation of gpt-oss over the speed of the link."""
    doc = figures()["fig12a_bandwidth"]
    published = {row[0]: row for row in doc["published"]["rows"]}
    rows = []
    for gbit in BANDWIDTHS:
        for policy in ("kernel_disaggregation", "prefill_decode"):
            case = OfflineCase("a100_l40s", "gpt_oss_20b", policy, False, float(gbit))
            ours = rated.get(case)
            best = rated.get(replace(case, is_best=True))
            rows.append(
                {
                    "pair": case.pair,
                    "model": case.model,
                    "policy": policy,
                    "gbit_per_s": gbit,
                    "published": published[gbit][1] if policy == "kernel_disaggregation" else None,
                    "re_measured": None,
                    "ours": round(ours.tokens_per_s, 1) if ours else None,
                    "ours_tpot_ms": round(ours.tpot_ms, 2) if ours else None,
                    "ours_best_batch": round(best.tokens_per_s, 1) if best else None,
                }
            )
    return rows


def bandwidth_cases(has_best: bool) -> list[OfflineCase]:
    return [
        OfflineCase("a100_l40s", "gpt_oss_20b", policy, is_best, float(gbit))
        for gbit in BANDWIDTHS
        for policy in ("kernel_disaggregation", "prefill_decode")
        for is_best in ((False, True) if has_best else (False,))
    ]


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """Kernel disaggregation of gpt-oss with the best of so many microbatches of the 32 sequences."""

    microbatches: tuple[int, ...]
    is_free: bool = False
    pair: str = "a100_l40s"
    model: str = "gpt_oss_20b"


PIPELINES = {
    "off": PipelineCase((1,)),
    "pipelined": PipelineCase((2,)),
    "pipelined_deeper": PipelineCase((4,)),
    "optimum_without_communication": PipelineCase(MICROBATCHES, is_free=True),
}


def pipeline_rate(case: PipelineCase) -> Rated:
    model: PublishedModel = MODELS[case.model]
    gbit, latency = (FREE_GBIT, FREE_US) if case.is_free else (200.0, 15.0)
    steps = served(model, cluster(PAIRS[case.pair], gbit, latency))
    rated = [
        _rated(published_plan(steps, model.load, "kernel-level", num), model.load)
        for num in case.microbatches
    ]
    return max(rated, key=lambda r: r.tokens_per_s)


def fig10(rated: dict[PipelineCase, Rated]) -> list[dict[str, Any]]:
    doc = figures()["fig10_pipelining"]
    rows = []
    for policy in (
        "off",
        "pipelined",
        "pipelined_deeper",
        "pipelined_with_priority",
        "optimum_without_communication",
    ):
        ours = rated.get(PIPELINES[policy]) if policy in PIPELINES else None
        again = doc["re_measured"].get(policy)
        rows.append(
            {
                "pair": "a100_l40s",
                "model": "gpt_oss_20b",
                "policy": policy,
                "published": doc["published"].get(policy),
                "re_measured": median(again) if again else None,
                "ours": round(ours.tokens_per_s, 1) if ours else None,
                "ours_best_batch": None,
                "why": NO_PRIORITY if policy == "pipelined_with_priority" else "",
            }
        )
    return rows


def launches_of() -> dict[str, str]:
    """Whether the launches of each model are compiled."""
    return {name: launches(model) for name, model in MODELS.items()}
