"""tessera plan MODEL: batch, microbatches and placement for a load, from a model's name alone."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tessera.cli.output import console, print_json, progress
from tessera.cli.plan_text import sure
from tessera.errors import TesseraError
from tessera.ir import Cluster, Objective, Step, save
from tessera.plan import BATCHES, DeviceMemory, LoadConfig, LoadPlan, Option, Target, explain, search_config

# Columns of the curve in the terminal.
WIDTH = 40
# A column of the table, by the objective.
WORTH = {Objective.COST: ("$ a million tokens",), Objective.ENERGY: ("J a token",)}


@dataclass(frozen=True)
class PlannedLoad:
    """What is to be planned."""

    model: str
    prompt_tokens: int
    # 0: decodes alone, at a context of the prompt.
    output_tokens: int
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    # None: the best.
    batch: int | None = None
    prefill_batch: int | None = None
    microbatches: int | None = None
    random_weights: bool = False
    # compiled, eager, or empty for what is known.
    launches: str = ""
    objective: Objective = Objective.THROUGHPUT
    effort: str = "full"


def plan_for_load(load: PlannedLoad, cluster: Cluster, output: Path | None, as_json: bool) -> None:
    """Plans, writes the plan and shows what was chosen and why."""
    started = time.perf_counter()
    with progress("importing torch") as advance:
        found, is_compiled, note = planned(load, cluster, advance)
    path = output or Path(f"{Path(load.model).name}.plan")
    save(found.plan, path)
    if as_json:
        print_json(
            document(found)
            | {"launches": "compiled" if is_compiled else "eager", "note": note, "output": str(path)}
            | {"seconds": round(time.perf_counter() - started, 3)}
        )
    else:
        show(found)
        if note:
            console().print(f"Note: {note}", markup=False)
        console().print(f"{path}: written", markup=False)


def planned(
    load: PlannedLoad, cluster: Cluster, advance: Callable[[str], None]
) -> tuple[LoadPlan, bool, str]:
    """The plan, whether it is of compiled launches, and one line why not."""
    _check(load)
    from tessera.flow import anchors_of, choose_launches, make_load_plan

    steps = _steps(load)
    target = Target(load.output_tokens if steps[-1].kind == "decode" else 1, load.tpot_ms, load.ttft_ms)
    batches = (load.batch,) if load.batch else BATCHES
    is_compiled, note = choose_launches(steps, anchors_of(batches), load.launches)
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


def _check(load: PlannedLoad) -> None:
    """Refuses what makes no load, before anything takes long."""
    if min(load.prompt_tokens, 1 if load.output_tokens == 0 else load.output_tokens) < 1:
        raise TesseraError("a request has at least one token", place="--prompt-tokens, --output-tokens")
    for name, number in (("--batch", load.batch), ("--microbatches", load.microbatches)):
        if number is not None and number < 1:
            raise TesseraError(f"{number} is too few", "Give one or more, or leave it out.", name)
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


def document(found: LoadPlan) -> dict[str, Any]:
    """For machines."""
    chosen, best = found.chosen, found.best_baseline
    parallel = next((o for o in found.baselines if o.policy == "data-parallel"), None)
    return {
        "source": "simulated on modelled costs",
        "objective": found.objective,
        "policy": found.plan.policy,
        "throughput": found.plan.simulated_per_s,
        "bound": found.plan.bound_per_s,
        "tokens_per_s": chosen.tokens_per_s,
        "tpot_ms": chosen.tpot_ms,
        "ttft_ms": chosen.ttft_ms,
        **_worth(chosen),
        "batch": found.plan.batch,
        "batches": chosen.batch,
        "prefill_batch": found.plan.unit.prefill_batch,
        "prefill_batches": chosen.prefill_batch,
        "microbatches": chosen.microbatches,
        "baselines": {
            o.policy: {"tokens_per_s": o.tokens_per_s, "batch": o.batch, "tpot_ms": o.tpot_ms}
            | {"microbatches": o.microbatches, "prefill_batch": o.prefill_batch, **_worth(o)}
            for o in found.baselines
        },
        "best_baseline": best.policy if best else None,
        "ratio_to_best_baseline": found.ratio_to(best) if best else None,
        "ratio_to_data_parallel": found.ratio_to(parallel) if parallel else None,
        "frontier": [asdict(option) for option in found.frontier],
        "costs": sure(found.plan),
        "memory": {room.device: _room(room) for room in explain(found.plan, is_brief=True).memory},
    }


def _worth(option: Option) -> dict[str, float | None]:
    """By the dollar and by the joule."""
    return {
        "usd_per_million_tokens": option.usd_per_million_tokens,
        "joules_per_token": option.joules_per_token,
    }


def _room(room: DeviceMemory) -> dict[str, int]:
    return {
        "weights": room.weight_bytes,
        "state": room.state_bytes,
        "temporaries": room.temporary_bytes,
        "capacity": room.capacity_bytes,
    }


def show(found: LoadPlan) -> None:
    """For people."""
    from tessera.report import size

    out, shown = console(), document(found)
    out.print(policies_table(found))
    memory = Table("device", "weights", "state", "temporaries", "of", title="Memory (modelled)")
    for name, room in shown["memory"].items():
        memory.add_row(name, *(size(room[key]) for key in ("weights", "state", "temporaries", "capacity")))
    out.print(memory)
    for line in curve(found):
        out.print(line, markup=False)
    out.print(f"Costs: {shown['costs']['sentence']}", markup=False)
    out.print(verdict(found), markup=False)
    out.print(how_sure(found), markup=False)


def policies_table(found: LoadPlan) -> Table:
    """The plan and every coarser policy, rising."""
    others = [o for o in found.baselines if o is not found.chosen]
    prefill = ("prefill",) if any(o.prefill_batch for o in (*others, found.chosen)) else ()
    worth = {Objective.COST: ("$ a million tokens",), Objective.ENERGY: ("J a token",)}.get(
        found.objective, ()
    )
    head = ("policy", "tokens/s", *worth, "ms a token", "batch", *prefill, "in flight")
    table = Table(*head, title="Each policy at its own best (simulated)")
    for option in sorted((*others, found.chosen), key=lambda o: o.figure(found.objective)):
        rows = (_rows(option.batch), *(_rows(option.prefill_batch) for _ in prefill))
        price = tuple(f"{1.0 / option.figure(found.objective):.3g}" for _ in worth)
        rate = (f"{option.tokens_per_s:,.0f}", *price, f"{option.tpot_ms:.3g}")
        cells = (*rate, *rows, str(option.microbatches))
        if option is not found.chosen:
            table.add_row(option.policy, *cells)
        else:
            coarse = f": {option.policy}" if option in found.baselines else ""
            table.add_row(f"the plan{coarse}", *cells, style="bold")
    return table


def _rows(by_device: dict[str, int]) -> str:
    """One number where all devices have the same."""
    if len(set(by_device.values())) <= 1:
        return "".join(str(rows) for rows in set(by_device.values()))
    return ", ".join(f"{name} {rows}" for name, rows in by_device.items())


def verdict(found: LoadPlan) -> str:
    """The plan against the best coarser policy and data-parallel, in a sentence."""
    shown = document(found)
    best, ratio, parallel = (
        shown[key] for key in ("best_baseline", "ratio_to_best_baseline", "ratio_to_data_parallel")
    )
    if best is None:
        return "No coarser policy keeps to the limits."
    text = f"No gain: {best} is best here" if found.plan.policy == best else f"{ratio:.3f}x {best}"
    if parallel is not None and best not in ("single", "data-parallel"):
        text += f", {parallel:.3f}x data-parallel"
    what = {Objective.COST: "by the dollar, ", Objective.ENERGY: "by the joule, "}.get(found.objective, "")
    return f"{text}, {what}each at its own best batch (simulated on modelled costs)."


def how_sure(found: LoadPlan) -> str:
    """Which of the gains are beyond the error of the costs."""
    shown = document(found)
    error = shown["costs"]["rel_error"]
    gains = {
        "data-parallel": shown["ratio_to_data_parallel"],
        shown["best_baseline"]: shown["ratio_to_best_baseline"],
    }
    parts = [
        f"{ratio:.2f}x {name} is {'beyond' if ratio - 1.0 > error else 'within'} it"
        for name, ratio in gains.items()
        if ratio is not None and name != found.plan.policy
    ]
    return f"The costs have an error of ±{error:.0%}{': ' if parts else ''}{', '.join(parts)}."


def curve(found: LoadPlan) -> list[str]:
    """Throughput over time per token: the best coarser policy's, and what a plan adds.

    Other limits than the target's were not searched for: a plan with such a limit may give more, and so may
    the coarser policies. So no ratio is told for them.
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
