"""tessera plan MODEL for a load with answers: the service that carries it, from a model's name."""

import time
from pathlib import Path
from typing import Annotated

from tessera.cli.output import HIDDEN, Record, progress, shown
from tessera.cli.plan_load import (
    BASELINES,
    MemoryFigures,
    PlannedLoad,
    check,
    how_sure,
    memory_figures,
    verdict,
)
from tessera.cli.plan_text import CostFigures, sure
from tessera.errors import TesseraError
from tessera.ir import Cluster, Expected, GroupSize, Load, Objective, ServicePlan, save
from tessera.plan import Option, search_config
from tessera.plan.service import compared


class ServicePolicy(Record, frozen=True):
    """One policy at its own best configuration."""

    tokens_per_s: float
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    tpot_ms: float
    ttft_ms: float
    # Sequences on each device.
    batch: Annotated[dict[str, int], shown("sequences")]
    microbatches: int
    groups: Annotated[tuple[GroupSize, ...], HIDDEN] = ()


class ServiceFigures(Record, frozen=True):
    """The groups of a service, and what it gives under the load."""

    groups: tuple[GroupSize, ...]
    expected: Annotated[Expected, HIDDEN]


class ServicePlanFigures(Record, frozen=True):
    """A plan for a load, with every policy at its own best configuration."""

    source: str
    objective: Objective
    policy: str
    # Requests per second, and their upper bound.
    throughput: Annotated[float, HIDDEN]
    bound: Annotated[float | None, HIDDEN]
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    # Sequences at once on each device.
    batches: Annotated[dict[str, int], HIDDEN]
    microbatches: Annotated[int, HIDDEN]
    service: ServiceFigures
    baselines: Annotated[dict[str, ServicePolicy], shown(BASELINES)]
    best_baseline: str | None
    ratio_to_best_baseline: float | None
    ratio_to_data_parallel: float | None
    ratio_to_bound: float | None
    costs: Annotated[CostFigures, HIDDEN]
    memory: Annotated[dict[str, MemoryFigures], shown("memory (modelled)")]
    launches: str = ""
    output: Path | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    headline: str = ""


def plan_for_service(load: PlannedLoad, cluster: Cluster, output: Path | None) -> ServicePlanFigures:
    """Plan a service, write its plan, and report what was chosen."""
    check(load)
    for name, value in (("--batch", load.batch), ("--microbatches", load.microbatches)):
        if value is not None:
            remedy = "Leave it out, or plan decodes alone with --output-tokens 0."
            raise TesseraError("sequences and microbatches of a service are chosen", remedy, name)
    started = time.perf_counter()
    with progress("importing torch") as advance:
        from tessera.flow import choose_launches
        from tessera.planning import ServedSteps, make_service_plan
        from tessera.serve.rehearse import rehearse

        steps = ServedSteps(load.model, cluster, load.random_weights, advance=advance)
        steps.is_compiled, note = choose_launches(steps.anchors, load.launches)
        wanted = Load(load.prompt_tokens, load.output_tokens, tpot_ms=load.tpot_ms, ttft_ms=load.ttft_ms)
        plan = make_service_plan(steps, wanted, rehearse, search_config(load.effort), load.objective)
    path = output or Path(f"{Path(load.model).name}.plan")
    save(plan, path)
    launches = "compiled" if steps.is_compiled else "eager"
    return service_figures(plan, load.objective, launches, note, path, time.perf_counter() - started)


def service_figures(
    plan: ServicePlan,
    objective: Objective,
    launches: str = "",
    note: str = "",
    output: Path | None = None,
    seconds: float | None = None,
) -> ServicePlanFigures:
    """The record of a plan for a load."""
    from tessera.planning import service_memory

    assert plan.expected is not None, "it was rehearsed"
    found = compared(plan, objective)
    best = found.best_baseline
    parallel = next((o for o in found.baselines if o.policy == "data-parallel"), None)
    costs = max((sure(group.plan) for group in plan.groups), key=lambda c: c.rel_error)
    per_request, chosen = plan.load.output_tokens, found.chosen
    sizes = {rival.policy: rival.groups for rival in plan.rivals}
    return ServicePlanFigures(
        source="rehearsed on modelled costs",
        objective=objective,
        policy=plan.policy,
        throughput=chosen.tokens_per_s / per_request,
        bound=plan.bound_per_s and plan.bound_per_s / per_request,
        tokens_per_s=chosen.tokens_per_s,
        tpot_ms=chosen.tpot_ms,
        ttft_ms=chosen.ttft_ms,
        usd_per_million_tokens=chosen.usd_per_million_tokens,
        joules_per_token=chosen.joules_per_token,
        batches=chosen.batch,
        microbatches=chosen.microbatches,
        service=ServiceFigures(groups=tuple(g.size for g in plan.groups), expected=plan.expected),
        baselines={o.policy: _line(o, sizes[o.policy]) for o in found.baselines},
        best_baseline=best.policy if best else None,
        ratio_to_best_baseline=found.ratio_to(best) if best else None,
        ratio_to_data_parallel=found.ratio_to(parallel) if parallel else None,
        ratio_to_bound=plan.bound_per_s and chosen.tokens_per_s / plan.bound_per_s,
        costs=costs,
        memory={room.device: memory_figures(room) for room in service_memory(plan)},
        launches=launches,
        output=output,
        seconds=None if seconds is None else round(seconds, 3),
        notes=(
            f"Costs: {costs.sentence}",
            how_sure(found, costs.rel_error),
            *([f"Note: {note}"] if note else []),
        ),
        headline=verdict(found, "rehearsed"),
    )


def _line(option: Option, groups: tuple[GroupSize, ...]) -> ServicePolicy:
    names = ServicePolicy.__struct_fields__[:-1]
    return ServicePolicy(**{name: getattr(option, name) for name in names}, groups=groups)
