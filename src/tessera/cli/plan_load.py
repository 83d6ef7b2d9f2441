"""tessera plan MODEL: batch, microbatches and placement for a load, from a model's name."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.text import Text

from tessera.cli.output import HIDDEN, Illustrated, Record, progress, shown
from tessera.cli.plan_text import CostFigures, sure
from tessera.errors import TesseraError
from tessera.ir import Cluster, Objective, Step, save
from tessera.plan import (
    BATCHES,
    Comparison,
    DeviceMemory,
    LoadConfig,
    LoadPlan,
    Option,
    Target,
    explain,
    search_config,
)

BASELINES = "coarser policies, each at its own best (simulated)"
# Columns of the curve in the terminal.
WIDTH = 40


@dataclass(frozen=True)
class PlannedLoad:
    model: str
    prompt_tokens: int
    # 0: decodes only, with the prompt as context.
    output_tokens: int
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    # None: chosen by the planner.
    batch: int | None = None
    prefill_batch: int | None = None
    microbatches: int | None = None
    random_weights: bool = False
    # compiled, eager, or empty: compiled where cached.
    launches: str = ""
    objective: Objective = Objective.THROUGHPUT
    effort: str = "full"


class PolicyFigures(Record, frozen=True):
    """One policy at its own best batch."""

    tokens_per_s: float
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    tpot_ms: float
    # Rows of a microbatch on each device, and of a prefill.
    batch: dict[str, int]
    prefill_batch: Annotated[dict[str, int], shown("prefill")]
    microbatches: Annotated[int, shown("in flight")]


class MemoryFigures(Record, frozen=True):
    """Memory of one device."""

    weights: Annotated[int, shown(unit="bytes")]
    state: Annotated[int, shown(unit="bytes")]
    temporaries: Annotated[int, shown(unit="bytes")]
    capacity: Annotated[int, shown("of", "bytes")]


class LoadFigures(Record, frozen=True):
    """A plan for a load, with each coarser policy."""

    source: str
    objective: Objective
    policy: str
    # Requests of `batch` rows per second.
    throughput: Annotated[float, HIDDEN]
    bound: Annotated[float, HIDDEN]
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    batch: Annotated[int, HIDDEN]
    batches: Annotated[dict[str, int], shown("batch")]
    prefill_batch: Annotated[int | None, HIDDEN]
    prefill_batches: Annotated[dict[str, int], shown("prefill batch")]
    microbatches: Annotated[int, shown("microbatches in flight")]
    baselines: Annotated[dict[str, PolicyFigures], shown(BASELINES)]
    best_baseline: str | None
    ratio_to_best_baseline: float | None
    ratio_to_data_parallel: float | None
    frontier: Annotated[tuple[Option, ...], HIDDEN]
    costs: Annotated[CostFigures, HIDDEN]
    memory: Annotated[dict[str, MemoryFigures], shown("memory (modelled)")]
    launches: str = ""
    output: Path | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    headline: str = ""


def plan_for_load(load: PlannedLoad, cluster: Cluster, output: Path | None) -> Illustrated[LoadFigures]:
    """Plan, write the plan, and report what was chosen."""
    started = time.perf_counter()
    with progress("importing torch") as advance:
        found, is_compiled, note = planned(load, cluster, advance)
    path = output or Path(f"{Path(load.model).name}.plan")
    save(found.plan, path)
    record = load_figures(found)
    record = msgspec.structs.replace(
        record,
        launches="compiled" if is_compiled else "eager",
        notes=(*record.notes, *([f"Note: {note}"] if note else [])),
        output=path,
        seconds=round(time.perf_counter() - started, 3),
    )
    return Illustrated(record, (Text("\n".join(curve(found))),))


def planned(
    load: PlannedLoad, cluster: Cluster, advance: Callable[[str], None]
) -> tuple[LoadPlan, bool, str]:
    """The plan, whether its launches are compiled, and why not."""
    check(load)
    from tessera.flow import anchors_of, at_batches, choose_launches, make_load_plan

    steps = _steps(load)
    target = Target(load.output_tokens if steps[-1].kind == "decode" else 1, load.tpot_ms, load.ttft_ms)
    batches = (load.batch,) if load.batch else BATCHES
    is_compiled, note = choose_launches(at_batches(steps, anchors_of(batches)), load.launches)
    search = search_config(load.effort)
    config = LoadConfig(
        batches,
        max_microbatches=load.microbatches,
        objective=load.objective,
        advance=advance,
        search=search,
    )
    found = make_load_plan(steps, cluster, target, config, is_compiled, load.prefill_batch)
    return found, is_compiled, note


def check(load: PlannedLoad) -> None:
    """Refuse impossible limits before anything takes long."""
    for name, limit in (("--tpot-ms", load.tpot_ms), ("--ttft-ms", load.ttft_ms)):
        if limit is not None and not 0 < limit < math.inf:
            raise TesseraError(f"{limit} ms is no limit", "Give a number above zero, or leave it out.", name)
    if load.prefill_batch and load.batch and load.batch % load.prefill_batch:
        message = f"a batch of {load.batch} rows has no parts of {load.prefill_batch}"
        raise TesseraError(message, "Give a number that divides the batch.", "--prefill-batch")


def _steps(load: PlannedLoad) -> list[Step]:
    """The steps of a request: prefill and decode where there are both, decode alone for no new tokens."""
    from tessera.capture import place_of
    from tessera.capture.models import steps_of_model

    model, kinds = place_of(load.model), steps_of_model(load.model)
    prompt, output, is_random = load.prompt_tokens, load.output_tokens, load.random_weights
    if "decode" not in kinds:
        return [Step(model, kinds[0], 1, prompt, random_weights=is_random)]
    decode = Step(model, "decode", 1, prompt + output, random_weights=is_random)
    if output == 0 or "prefill" not in kinds:
        return [decode]
    return [Step(model, "prefill", 1, prompt, reserve=output, random_weights=is_random), decode]


def load_figures(found: LoadPlan) -> LoadFigures:
    """The record of a plan for a load."""
    chosen, best = found.chosen, found.best_baseline
    parallel = next((o for o in found.baselines if o.policy == "data-parallel"), None)
    costs = sure(found.plan)
    return LoadFigures(
        source="simulated on modelled costs",
        objective=found.objective,
        policy=found.policy,
        throughput=found.plan.simulated_per_s,
        bound=found.plan.bound_per_s,
        tokens_per_s=chosen.tokens_per_s,
        tpot_ms=chosen.tpot_ms,
        ttft_ms=chosen.ttft_ms,
        usd_per_million_tokens=chosen.usd_per_million_tokens,
        joules_per_token=chosen.joules_per_token,
        batch=found.plan.batch,
        batches=chosen.batch,
        prefill_batch=found.plan.unit.prefill_batch,
        prefill_batches=chosen.prefill_batch,
        microbatches=chosen.microbatches,
        baselines={o.policy: policy_figures(o) for o in found.baselines},
        best_baseline=best.policy if best else None,
        ratio_to_best_baseline=found.ratio_to(best) if best else None,
        ratio_to_data_parallel=found.ratio_to(parallel) if parallel else None,
        frontier=tuple(found.frontier),
        costs=costs,
        memory={room.device: memory_figures(room) for room in explain(found.plan, is_brief=True).memory},
        notes=(f"Costs: {costs.sentence}", how_sure(found, costs.rel_error)),
        headline=verdict(found),
    )


def policy_figures(option: Option) -> PolicyFigures:
    names = PolicyFigures.__struct_fields__
    return PolicyFigures(**{name: getattr(option, name) for name in names})


def memory_figures(room: DeviceMemory) -> MemoryFigures:
    return MemoryFigures(
        weights=room.weight_bytes,
        state=room.state_bytes,
        temporaries=room.temporary_bytes,
        capacity=room.capacity_bytes,
    )


def _ratios(found: Comparison) -> dict[str, float]:
    """Coarser policy -> ratio of the plan to it, for data-parallel and the best one."""
    best = found.best_baseline
    compared = [o for o in found.baselines if o is best or o.policy == "data-parallel"]
    return {o.policy: found.ratio_to(o) for o in sorted(compared, key=lambda o: o is best)}


def verdict(found: Comparison, how: str = "simulated") -> str:
    """The plan against the best coarser policy and data-parallel, in a sentence."""
    if found.best_baseline is None:
        return "No coarser policy keeps to the limits."
    best, ratios = found.best_baseline.policy, _ratios(found)
    text = f"No gain: {best} is best here" if found.policy == best else f"{ratios[best]:.3f}x {best}"
    if "data-parallel" in ratios and best not in ("single", "data-parallel"):
        text += f", {ratios['data-parallel']:.3f}x data-parallel"
    what = {Objective.COST: "by the dollar, ", Objective.ENERGY: "by the joule, "}.get(found.objective, "")
    return f"{text}, {what}each at its own best batch ({how} on modelled costs)."


def how_sure(found: Comparison, error: float) -> str:
    """Which of the gains exceed the error of the costs."""
    parts = [
        f"{ratio:.2f}x {name} is {'beyond' if ratio - 1.0 > error else 'within'} it"
        for name, ratio in _ratios(found).items()
        if name != found.policy
    ]
    return f"The costs have an error of ±{error:.0%}{': ' if parts else ''}{', '.join(parts)}."


def curve(found: LoadPlan) -> list[str]:
    """Throughput over time per token: the best coarser policy's, and what a plan adds.

    Only the target's limit was searched for; plans for other limits may give more, so no ratio is given.
    """
    from tessera.report import round_limits

    best = {o.tokens_per_s: o.tpot_ms for o in sorted(found.options, key=lambda o: -o.tpot_ms)}
    most = max(best)
    lines = [
        "tokens/s within so many ms a token, of what was tried: # best coarser policy, + what a plan adds"
    ]
    for limit in round_limits(min(o.tpot_ms for o in found.options), best[most]):
        within = [o for o in found.options if o.tpot_ms <= limit]
        others = max((o.tokens_per_s for o in within if o.policy != "plan"), default=0.0)
        rate = max(o.tokens_per_s for o in within)
        base = round(WIDTH * others / most)
        bar = "#" * base + "+" * (round(WIDTH * rate / most) - base)
        lines.append(f"{limit:8.3g} ms  {bar} {rate:,.0f}")
    return lines
