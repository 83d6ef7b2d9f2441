"""A plan for machines and for people: the JSON document, the tables and the sentences of `tessera plan`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tessera.cli.output import console
from tessera.errors import PlanInfeasible
from tessera.ir import Objective, Plan

if TYPE_CHECKING:
    from tessera.plan import Tried


def document(made: Plan) -> dict[str, Any]:
    """A plan in figures, all modelled."""
    total = sum(lane.rate_per_s * made.weight_of(lane) for lane in made.lanes)
    names = made.cluster.names
    return {
        "objective": made.objective.value,
        "policy": made.policy,
        "modelled": True,
        "devices": list(names),
        "throughput": made.throughput_per_s,
        "simulated": made.simulated_per_s,
        "bound": made.bound_per_s,
        "gap": made.gap,
        "latency_us": made.latency_us,
        "microbatches": made.microbatches,
        "slots": made.microbatches,
        "max_slots": made.max_microbatches,
        "by_slots": {str(microbatches): rate for microbatches, rate in made.by_microbatches},
        "batch": made.batch,
        "rows_per_s": made.rows_per_s,
        "lanes": [
            {
                "share": lane.rate_per_s * made.weight_of(lane) / total,
                "rate": lane.rate_per_s,
                "batch": made.batch_of(lane),
                "launches": {
                    name: sum(step.count(i) for step in lane.placement.devices)
                    for i, name in enumerate(names)
                },
            }
            for lane in made.lanes
        ],
        "lane_table": list(made.lane_table),
        "rounding_loss": made.rounding_loss,
        "used": [names[d] for d in made.used],
        "usd_per_hour": made.usd_per_hour,
        "usd_per_1k_units": made.usd_per_1k_units,
        "joules_per_unit": made.joules_per_unit,
        "robust": _robust(made),
        "constraints": list(made.constraints),
        "wishes": list(made.constraints),  # the name of before, for one release
        "baselines": {b.name: b.throughput_per_s for b in made.baselines},
        "baseline_latency_us": {b.name: b.latency_us for b in made.baselines},
        "baseline_usd_per_1k_units": {b.name: b.usd_per_1k_units for b in made.baselines},
        "baseline_joules_per_unit": {b.name: b.joules_per_unit for b in made.baselines},
        "costs": sure(made),
    } | _latency(made)


def sure(made: Plan) -> dict[str, Any]:
    """How sure the costs are that the plan rests on."""
    from tessera.profile import sureness

    found = sureness(made)
    return {
        "rel_error": found.rel_error,
        "wide_share": found.wide_share,
        "by_source": found.by_source,
        "parts": [asdict(part) for part in found.parts],
        "sentence": found.sentence,
    }


def _latency(made: Plan) -> dict[str, float]:
    """How near a latency plan is to what no placement beats; of others that is not asked."""
    if made.objective is not Objective.LATENCY:
        return {}
    from tessera.plan import latency_bound_us

    bound = latency_bound_us(made)
    return {"latency_bound_us": bound, "latency_gap": max(0.0, 1.0 - bound / made.latency_us)}


def _robust(made: Plan) -> dict[str, float] | None:
    if made.robust is None:
        return None
    return {name.removesuffix("_per_s"): value for name, value in asdict(made.robust).items()}


def reasons(made: Plan) -> dict[str, Any]:
    """Why the plan is what it is, for machines."""
    from tessera.plan import explain

    found = explain(made)
    memory = [
        asdict(room) | {"slot_bytes": room.microbatch_bytes} for room in found.memory
    ]  # its old name too
    told = [asdict(reason) | {"sentence": reason.sentence} for reason in found.reasons]
    return asdict(found) | {"memory": memory, "reasons": told}


def show(made: Plan) -> None:
    """A plan for people."""
    from tessera.plan import explain
    from tessera.report import comparison_table, devices_table, layer_picture, main_lane

    out = console()
    step = len(made.unit.graphs) - 1
    out.print(layer_picture(made, main_lane(made), step))
    if made.variants:
        out.print(_lanes(made))
        out.print(f"Rates below count requests of batch {made.batch}.", markup=False)
    out.print(devices_table(made))
    out.print(comparison_table(made))
    out.print(explain(made).verdict, markup=False)
    out.print(f"Costs: {sure(made)['sentence']}", markup=False)
    for line in _money(made):
        out.print(line, markup=False)


def _lanes(made: Plan) -> Table:
    """Lanes of unlike batches."""
    found = document(made)["lanes"]
    table = Table("lane", "batch", "share of the rows", "requests/s", "launches on", title="Lanes (modelled)")
    for number, lane in enumerate(found):
        where = ", ".join(f"{name} {num:,}" for name, num in lane["launches"].items() if num)
        table.add_row(str(number), str(lane["batch"]), f"{lane['share']:.0%}", f"{lane['rate']:.4g}", where)
    return table


def _money(made: Plan) -> list[str]:
    lines = []
    if made.usd_per_1k_units is not None:
        rent = (
            f"{made.usd_per_hour:.2f} USD an hour for {', '.join(made.cluster.names[d] for d in made.used)}"
        )
        lines.append(f"{rent}; {made.usd_per_1k_units:.3g} USD for 1,000 requests (at the simulated rate).")
    if made.joules_per_unit is not None:
        lines.append(
            f"{made.joules_per_unit:.3g} J for a request (modelled: board power, a fifth when idle)."
        )
    return lines


def show_reasons(made: Plan) -> None:
    """How busy and how full everything is, why kernels are where they are, and what else is to be said."""
    from tessera.plan import explain
    from tessera.report import duration, size

    found = explain(made)
    out = console()
    busy = Table("device or link", "busy per request", "utilisation", title="Utilisation (modelled)")
    for use in (*found.devices, *found.links):
        mark = " (bottleneck)" if use.name == found.bottleneck else ""
        busy.add_row(use.name + mark, duration(use.busy_us), f"{use.utilisation:.0%}")
    out.print(busy)
    memory = Table(
        "device", "memory", "weights", "state", "temporaries", f"all, {made.microbatches} microbatches"
    )
    memory.title = "Memory (modelled, at most)"
    for room in found.memory:
        held = (room.weight_bytes, room.state_bytes, room.temporary_bytes)
        cells = (room.capacity_bytes, *held, room.used_bytes)
        memory.add_row(room.device, *(size(x) for x in cells))
    out.print(memory)
    kernels = Table("kernel", "module", title="Every kernel, per request (modelled): time there, share there")
    for name in made.cluster.names:
        kernels.add_column(name, justify="right")
    for row in found.kernels:
        cells_of = [f"{duration(us)}, {share:.0%}" for us, share in zip(row.us, row.share, strict=True)]
        kernels.add_row(row.kernel.removeprefix("aten."), row.scope, *cells_of)
    out.print(kernels)
    for reason in found.reasons:
        out.print(reason.sentence, markup=False)
    for remark in found.remarks:
        out.print(remark, markup=False)
    out.print(
        f"{found.num_transfers:.0f} transfers and {found.transfer_bytes / 1e3:.0f} KB a request; "
        f"no placement serves one request alone in less than {duration(found.latency_bound_us)}"
    )


def batches_document(made: Plan, tried: "Sequence[Tried]") -> dict[str, Any]:
    """With --batch-choices: what each batch gives by itself, and how much better the plan is."""
    lines = [_batch_line(t) for t in tried]
    best = max((x["rows_per_s"] for x in lines if x["rows_per_s"] is not None), default=None)
    return {"by_batch": lines, "gain_over_one_batch": made.rows_per_s / best if best else None}


def _batch_line(one: "Tried") -> dict[str, Any]:
    if isinstance(one.made, PlanInfeasible):
        return {"batch": one.variant.batch, "rows_per_s": None, "why": str(one.made)}
    return {
        "batch": one.variant.batch,
        "rows_per_s": one.made.rows_per_s,
        "latency_us": one.made.latency_us,
    }


def show_batches(made: Plan, tried: "Sequence[Tried]") -> None:
    """With --batch-choices, for people."""
    out = console()
    for one in tried:
        rows = None if isinstance(one.made, PlanInfeasible) else one.made.rows_per_s
        text = str(one.made) if rows is None else f"{_number(rows)} rows/s (simulated)"
        out.print(f"batch {one.variant.batch} alone: {text}", markup=False)
    if made.variants:
        gain = batches_document(made, tried)["gain_over_one_batch"]
        batches = ", ".join(str(variant.batch) for variant in made.every_variant)
        text = f"lanes of batch {batches}: {_number(made.rows_per_s)} rows/s (simulated)"
        out.print(f"{text}, {gain:.3f}x the best single batch", markup=False)


def _number(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 1000 else f"{rows:.4g}"
