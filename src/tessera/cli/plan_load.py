"""tessera plan MODEL: batch, microbatches and placement for a load, from a model's name alone."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tessera.cli.output import console, print_json, progress
from tessera.cli.plan_text import sure
from tessera.errors import TesseraError
from tessera.ir import Cluster, Step, save
from tessera.plan import BATCHES, LoadPlan, Option, Room, Target, explain

# Columns of the curve in the terminal.
WIDTH = 48


def plan_for_load(
    model: str,
    cluster: Cluster,
    prompt_tokens: int,
    output_tokens: int,
    limits: tuple[float | None, float | None],
    batch: int | None,
    slots: int | None,
    random_weights: bool,
    launches: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plans, writes the plan and shows what was chosen and why."""
    started = time.perf_counter()
    tpot_ms, ttft_ms = limits
    if min(prompt_tokens, 1 if output_tokens == 0 else output_tokens) < 1:
        raise TesseraError("a request has at least one token", place="--prompt-tokens, --output-tokens")
    with progress("importing torch") as advance:
        from tessera.capture import place_of
        from tessera.capture.models import steps_of_model
        from tessera.flow import anchors_of, choose_launches, make_load_plan

        steps = _steps(place_of(model), steps_of_model(model), prompt_tokens, output_tokens, random_weights)
        target = Target(output_tokens if steps[-1].kind == "decode" else 1, tpot_ms, ttft_ms)
        batches = (batch,) if batch else BATCHES
        is_compiled, note = choose_launches(steps, anchors_of(batches), launches)
        found = make_load_plan(steps, cluster, target, batches, slots, advance, is_compiled)
    path = output or Path(f"{Path(model).name}.plan")
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


def _steps(model: str, kinds: tuple[str, ...], prompt: int, output: int, is_random: bool) -> list[Step]:
    """The steps of a request: prefill and decode where there are both, decode alone for no new tokens."""
    if "decode" not in kinds:
        return [Step(model, kinds[0], 1, prompt, random_weights=is_random)]
    decode = Step(model, "decode", 1, prompt + output, random_weights=is_random)
    if output == 0 or "prefill" not in kinds:
        return [decode]
    return [Step(model, "prefill", 1, prompt, reserve=output, random_weights=is_random), decode]


def document(found: LoadPlan) -> dict[str, Any]:
    """For machines."""
    chosen, best = found.chosen, _best(found)
    parallel = next((o for o in found.baselines if o.policy == "data-parallel"), None)
    return {
        "source": "simulated on modelled costs",
        "policy": found.plan.policy,
        "throughput": found.plan.simulated_per_s,
        "bound": found.plan.bound_per_s,
        "tokens_per_s": chosen.tokens_per_s,
        "tpot_ms": chosen.tpot_ms,
        "ttft_ms": chosen.ttft_ms,
        "batch": found.plan.batch,
        "batches": chosen.batch,
        "microbatches": chosen.microbatches,
        "baselines": {
            o.policy: {"tokens_per_s": o.tokens_per_s, "batch": o.batch, "tpot_ms": o.tpot_ms}
            | {"microbatches": o.microbatches}
            for o in found.baselines
        },
        "best_baseline": best.policy if best else None,
        "ratio_to_best_baseline": chosen.tokens_per_s / best.tokens_per_s if best else None,
        "ratio_to_data_parallel": chosen.tokens_per_s / parallel.tokens_per_s if parallel else None,
        "frontier": [asdict(option) for option in found.frontier],
        "costs": sure(found.plan),
        "memory": {room.device: _room(room) for room in explain(found.plan, is_brief=True).memory},
    }


def _room(room: Room) -> dict[str, int]:
    return {
        "weights": room.weight_bytes,
        "state": room.state_bytes,
        "temporaries": room.temporary_bytes,
        "capacity": room.capacity_bytes,
    }


def _best(found: LoadPlan) -> Option | None:
    return max(found.baselines, key=lambda o: o.tokens_per_s, default=None)


def show(found: LoadPlan) -> None:
    """For people."""
    from tessera.report import size

    out, shown = console(), document(found)
    table = Table(
        "policy",
        "tokens/s",
        "ms a token",
        "batch",
        "in flight",
        title="Each policy at its own best (simulated)",
    )
    for option in sorted((*found.baselines, found.chosen), key=lambda o: o.tokens_per_s):
        is_plan = option is found.chosen
        batches = ", ".join(f"{name} {rows}" for name, rows in option.batch.items())
        if len(set(option.batch.values())) == 1:
            batches = str(next(iter(option.batch.values())))
        cells = (f"{option.tokens_per_s:,.0f}", f"{option.tpot_ms:.3g}", batches, str(option.microbatches))
        table.add_row("the plan" if is_plan else option.policy, *cells, style="bold" if is_plan else "")
    out.print(table)
    memory = Table("device", "weights", "state", "temporaries", "of", title="Memory (modelled)")
    for name, room in shown["memory"].items():
        memory.add_row(name, *(size(room[key]) for key in ("weights", "state", "temporaries", "capacity")))
    out.print(memory)
    _curve(found)
    out.print(f"Costs: {shown['costs']['sentence']}", markup=False)
    if shown["ratio_to_best_baseline"] is None:
        return
    if found.plan.policy == shown["best_baseline"]:
        out.print(f"No gain: {shown['best_baseline']} is best here.", markup=False)
        return
    text = f"{shown['ratio_to_best_baseline']:.3f}x {shown['best_baseline']}"
    if shown["ratio_to_data_parallel"] is not None and shown["best_baseline"] != "data-parallel":
        text += f", {shown['ratio_to_data_parallel']:.3f}x data-parallel"
    out.print(f"{text}, each at its own best batch (simulated on modelled costs).", markup=False)


def _curve(found: LoadPlan) -> None:
    """Throughput over time per token: the best baseline's, and what the plan adds."""
    most = max(o.tokens_per_s for o in found.options)
    out = console()
    out.print("tokens/s within so many ms a token (simulated): # best baseline, + what a plan adds")
    for limit in sorted({o.tpot_ms for o in found.frontier if o.policy == "plan"}):
        within = [o for o in found.options if o.tpot_ms <= limit]
        others = max((o.tokens_per_s for o in within if o.policy != "plan"), default=0.0)
        best = max(o.tokens_per_s for o in within)
        base = round(WIDTH * others / most)
        bar = "#" * base + "+" * (round(WIDTH * best / most) - base)
        out.print(f"{limit:8.3g} ms  {bar} {best:,.0f}", markup=False)
