"""tessera plan MODEL: a plan for a load, from a model's name.

A load with answers is planned as the service that carries it. What no service runs in token steps
(`BatchSearch`) is planned as its steps, at the best batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tessera import ir
from tessera.advise import ModelLoad
from tessera.cli.capture import Launches, RandomWeights
from tessera.cli.output import (
    FILE,
    HIDDEN,
    PER_TOKEN,
    TO_FIRST,
    Record,
    info,
    limit_ms,
    only_if,
    option,
    progress,
    shown,
)
from tessera.errors import TesseraError
from tessera.plan import Comparison, DeviceMemory, explain, search_config
from tessera.plan.baselines import COARSE
from tessera.plan.batches import REPLICAS
from tessera.profile import sureness
from tessera.profile.coverage import Sureness

BASELINES = "coarser policies, each at its own best (simulated)"
ROWS = "this model has no text: a row of the batch counts as one token"


Effort = Literal["full", "quick"]
EffortOption = Annotated[Effort, info("Planning effort; quick: a rougher plan sooner.")]
MemoryShareOption = Annotated[
    float,
    info(
        "Share of each device's memory for weights and state (pages). The rest is for temporaries.",
        "--memory-share", "--gpu-memory-utilization", min=0.01, max=1,
    ),
]  # fmt: skip
FrequenciesOption = Annotated[
    Path | None, info("JSON of how often experts are chosen, by module: hot ones go to the GPU.", **FILE)
]


def is_model(words: Sequence[str]) -> bool:
    """A model is one word that is no file of a trace."""
    return len(words) == 1 and not Path(words[0]).is_file() and not words[0].endswith(".trace")


MODEL = only_if(lambda params: is_model(params["traces"]), "needs a model's name, not traces")
TRACES = only_if(lambda params: not is_model(params["traces"]), "needs traces, not a model's name")


@dataclass(frozen=True, kw_only=True)
class PlannedLoad:
    objective: ir.Objective = option(
        ir.Objective.THROUGHPUT,
        "Most requests per second, dollar or joule; latency (traces only): the quickest single request.",
    )
    microbatches: int | None = option(
        None, "Microbatches in flight, at most.", shown="4; MODEL form: chosen", min=1
    )
    batch: int | None = option(None, "Batch size (MODEL form only).", shown="chosen", min=1, callback=MODEL)
    prompt_tokens: int = option(1024, "Tokens per prompt (MODEL form only).", min=1, callback=MODEL)
    output_tokens: int = option(
        256,
        "Tokens per answer (MODEL form only); 0: decodes alone, at a context of the prompt.",
        min=0,
        callback=MODEL,
    )
    tpot_ms: float | None = limit_ms(f"{PER_TOKEN} (MODEL form)", MODEL)
    ttft_ms: float | None = limit_ms(f"{TO_FIRST} (MODEL form)", MODEL)
    random_weights: RandomWeights = False
    launches: Launches = None
    expert_frequencies: FrequenciesOption = None
    effort: EffortOption = "full"
    memory_share: MemoryShareOption = ir.MEMORY_SHARE

    def target(self, model: str) -> ModelLoad:
        return ModelLoad(
            model,
            ir.Load(self.prompt_tokens, self.output_tokens, tpot_ms=self.tpot_ms, ttft_ms=self.ttft_ms),
            launches=self.launches or "",
            search=search_config(self.effort),
            memory_share=self.memory_share,
            objective=self.objective,
            random_weights=self.random_weights,
            frequencies=frequencies_of(self.expert_frequencies),
            batch=self.batch,
            microbatches=self.microbatches,
        )


def frequencies_of(path: Path | None) -> dict[str, list[float]]:
    if path is None:
        return {}
    from tessera.planning import read_frequencies

    return read_frequencies(path)


class PolicyFigures(Record, frozen=True):
    """One policy at its own best configuration."""

    tokens_per_s: float
    usd_per_million_tokens: Annotated[float | None, shown("USD/M tokens")]
    joules_per_token: Annotated[float | None, shown("J/token")]
    tpot_ms: float
    ttft_ms: float
    batch: Annotated[dict[str, int], shown("sequences")]
    microbatches: int
    groups: Annotated[tuple[ir.GroupSize, ...], HIDDEN] = ()


class MemoryFigures(Record, frozen=True):
    weights: Annotated[int, shown(unit="bytes")]
    state: Annotated[int, shown(unit="bytes")]
    temporaries: Annotated[int, shown(unit="bytes")]
    capacity: Annotated[int, shown("of", "bytes")]


class ServiceFigures(Record, frozen=True):
    """The groups of a service, and what it gives under the load."""

    groups: tuple[ir.GroupSize, ...]
    expected: Annotated[ir.Expected, HIDDEN]


class ModelPlanFigures(Record, frozen=True):
    """A plan for a load, with every policy at its own best configuration."""

    source: str
    objective: ir.Objective
    policy: str
    # Requests per second, and their upper bound.
    throughput: Annotated[float, HIDDEN]
    bound: Annotated[float | None, HIDDEN]
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    usd_per_million_tokens: Annotated[float | None, shown("USD/M tokens")]
    joules_per_token: Annotated[float | None, shown("J/token")]
    batches: Annotated[dict[str, int], shown("sequences")]
    microbatches: int
    # None where steps are planned.
    service: ServiceFigures | None
    baselines: Annotated[dict[str, PolicyFigures], shown(BASELINES)]
    best_baseline: str | None
    ratio_to_best_baseline: float | None
    ratio_to_data_parallel: float | None
    ratio_to_bound: float | None
    costs: Annotated[Sureness, HIDDEN]
    memory: Annotated[dict[str, MemoryFigures], shown("memory (modelled)")]
    # Device -> module -> numbers of its experts there; empty if experts are not divided.
    experts: Annotated[dict[str, dict[str, tuple[int, ...]]], HIDDEN] = msgspec.field(default_factory=dict)
    # Device -> weights fetched from its host's memory in every step.
    fetched: Annotated[dict[str, tuple[str, ...]], HIDDEN] = msgspec.field(default_factory=dict)
    launches: str = ""
    output: Path | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    headline: str = ""


@dataclass(frozen=True)
class PlannedModel:
    plan: ir.ServicePlan | ir.Plan
    comparison: Comparison
    is_compiled: bool = False
    # Why launches are not compiled.
    note: str = ""


def plan_model(model: str, options: PlannedLoad, cluster: ir.Cluster, path: Path | None) -> ModelPlanFigures:
    with progress("importing torch") as advance:
        planned = plan_load(options.target(model), cluster, advance)
    path = path or Path(f"{Path(model).name}.plan")
    ir.save(planned.plan, path)
    return model_figures(planned, path)


def plan_load(
    target: ModelLoad, cluster: ir.Cluster, advance: Callable[[str], None] = lambda text: None
) -> PlannedModel:
    if target.objective is ir.Objective.LATENCY:
        remedy = "Limit it with --tpot-ms and --ttft-ms, or plan the traces of `tessera capture`."
        raise TesseraError("needs traces, not a model's name", remedy, "--objective latency")
    from tessera.advise.raters import ServiceRater, rater_of

    rater = rater_of(target, cluster, advance)
    for name, value in (("--batch", target.batch), ("--microbatches", target.microbatches)):
        if value is not None and isinstance(rater, ServiceRater):
            remedy = "Leave it out, or plan decodes alone with --output-tokens 0."
            raise TesseraError("sequences and microbatches of a service are chosen", remedy, name)
    plan, comparison = rater.plan(cluster)
    notes = [rater.note] if rater.note else []
    last = rater.trace.step
    if last.kind not in ("decode", "tokens") or ":" in last.model:  # a picture, or the user's callable
        notes.insert(0, ROWS)
    return PlannedModel(plan, comparison, rater.is_compiled, "; ".join(notes))


def model_figures(planned: PlannedModel, output: Path | None = None) -> ModelPlanFigures:
    comparison, note = planned.comparison, planned.note
    best, ratios = comparison.best_baseline, _ratios(comparison)
    figures, chosen = _figures_by_kind(planned.plan), comparison.chosen
    sizes = {rival.policy: rival.groups for rival in getattr(planned.plan, "rivals", ())}
    costs: Sureness = figures["costs"]
    return ModelPlanFigures.of(
        comparison,
        chosen,
        batches=chosen.batch,
        baselines={
            o.policy: PolicyFigures.of(o, groups=sizes.get(o.policy, ())) for o in comparison.baselines
        },
        best_baseline=best.policy if best else None,
        ratio_to_best_baseline=ratios[best.policy] if best else None,
        ratio_to_data_parallel=ratios.get("data-parallel"),
        launches="compiled" if planned.is_compiled else "eager",
        output=output,
        notes=(
            f"Costs: {costs.sentence}",
            how_sure(comparison, costs.rel_error),
            *([f"Note: {note}"] if note else []),
        ),
        headline=verdict(comparison, figures["source"].split()[0]),
        **figures,
    )


def _figures_by_kind(plan: ir.ServicePlan | ir.Plan) -> dict[str, Any]:
    if isinstance(plan, ir.Plan):
        return {
            "source": "simulated on modelled costs",
            "throughput": plan.rows_per_s,
            "bound": plan.bound_per_s * plan.batch,
            "ratio_to_bound": plan.simulated_per_s / plan.bound_per_s,
            "service": None,
            "costs": sureness(plan),
            "memory": memory_figures(explain(plan).memory),
        }
    from tessera.planning import experts_by_device, fetched_by_device, service_memory

    assert plan.expected is not None, "it was rehearsed"
    per_request = plan.load.output_tokens
    return {
        "source": "rehearsed on modelled costs",
        "throughput": plan.expected.tokens_per_s / per_request,
        "bound": plan.bound_per_s and plan.bound_per_s / per_request,
        "ratio_to_bound": plan.bound_per_s and plan.expected.tokens_per_s / plan.bound_per_s,
        "service": ServiceFigures(groups=tuple(g.size for g in plan.groups), expected=plan.expected),
        "costs": max((sureness(group.plan) for group in plan.groups), key=lambda c: c.rel_error),
        "memory": memory_figures(service_memory(plan)),
        "experts": experts_by_device(plan),
        "fetched": fetched_by_device(plan),
    }


def memory_figures(memory: Sequence[DeviceMemory]) -> dict[str, MemoryFigures]:
    return {
        one.device: MemoryFigures(
            weights=one.weight_bytes,
            state=one.state_bytes,
            temporaries=one.temporary_bytes,
            capacity=one.capacity_bytes,
        )
        for one in memory
    }


def _ratios(comparison: Comparison) -> dict[str, float]:
    best = comparison.best_baseline
    listed = [o for o in comparison.baselines if o is best or o.policy == "data-parallel"]
    return {o.policy: comparison.ratio_to(o) for o in sorted(listed, key=lambda o: o is best)}


def verdict(comparison: Comparison, how: str = "simulated") -> str:
    if comparison.best_baseline is None:
        return "No coarser policy keeps to the limits."
    policy, best, ratios = comparison.policy, comparison.best_baseline.policy, _ratios(comparison)
    text = f"{ratios[best]:.3f}x {best}"
    if policy == best:
        text = f"No gain: {best} is best here"
    elif ratios[best] < 1.0 and best in REPLICAS:  # copies with batches of their own are several plans
        text = f"No gain: use {best}. {policy}, which is planned, has {ratios[best]:.3f}x its figure"
    elif policy in COARSE:
        start = "No gain: " if policy in REPLICAS else ""
        text = f"{start}{policy} is {'best here' if ratios[best] >= 1.0 else 'planned'}: {text}"
    if "data-parallel" in ratios and best != "single" and "data-parallel" not in (policy, best):
        text += f", {ratios['data-parallel']:.3f}x data-parallel"
    per = {ir.Objective.COST: "by the dollar, ", ir.Objective.ENERGY: "by the joule, "}
    return f"{text}, {per.get(comparison.objective, '')}each at its own best batch ({how} on modelled costs)."


def how_sure(comparison: Comparison, error: float) -> str:
    """Which of the gains exceed the error of the costs."""
    parts = [
        f"{ratio:.2f}x {name} is {'beyond' if ratio - 1.0 > error else 'within'} it"
        for name, ratio in _ratios(comparison).items()
        if name != comparison.policy
    ]
    return f"The costs have an error of ±{error:.0%}{': ' if parts else ''}{', '.join(parts)}."
