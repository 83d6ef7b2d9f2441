"""tessera plan: traces and costs -> which device runs which launch."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import MismatchError, TesseraError, UnknownName
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, WorkUnit, load, save


def plan(
    traces: Annotated[list[Path], typer.Argument(help="The steps of one request, in order.")],
    costs: Annotated[list[Path] | None, typer.Option(help="Costs, one per trace in any order.")] = None,
    devices: Annotated[str | None, typer.Option(help="Devices to price, instead of --costs.")] = None,
    link: Annotated[str, typer.Option(help="What joins the devices.")] = "pcie4",
    objective: Annotated[str, typer.Option(help="throughput or latency.")] = "throughput",
    slots: Annotated[int, typer.Option(help="Requests in flight.")] = 4,
    counts: Annotated[str | None, typer.Option(help="Runs of each step in a request, as 1,32.")] = None,
    policy: Annotated[str | None, typer.Option(help="Force a coarser policy, such as data-parallel.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why: utilisation and every kernel.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The plan to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decide which device runs which launch, and what that gives.

    Give the traces of one request in order. A decode belongs to a prefill when both have the same batch and
    the decode's context is the prefill's context plus its reserve.
    """
    started = time.perf_counter()
    goal = _objective(objective)
    loaded = [load(Trace, path) for path in traces]
    with progress("building graphs", 3) as advance:
        from tessera.flow import make_plan, make_unit

        unit = make_unit(loaded, _counts(counts))
        advance("pricing")
        cluster, prices = _prices(unit, costs or [], devices, link)
        advance("planning")
        made = make_plan(unit, prices, cluster, goal, slots, policy)
    path = output or traces[-1].with_suffix(".plan")
    save(made, path)
    if as_json:
        print_json(document(made) | {"output": str(path), "seconds": round(time.perf_counter() - started, 3)})
    else:
        show(made)
        if explain:
            show_reasons(made)
        console().print(f"{path}: written", markup=False)


def _objective(name: str) -> Objective:
    if name not in tuple(Objective):
        raise UnknownName("objective", name, tuple(Objective))
    return Objective(name)


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise TesseraError(
            f"'{text}' is not a list of counts", "Write one per trace, as 1,32.", "--counts"
        ) from None


def _prices(
    unit: WorkUnit, files: list[Path], devices: str | None, link: str
) -> tuple[Cluster, tuple[Costs, ...]]:
    """Costs from the files given, or made from the best source present."""
    from tessera.flow import price
    from tessera.profile import make_cluster, parse_devices

    if files and devices:
        raise TesseraError(
            "--costs and --devices were both given", "The costs name their devices; leave one."
        )
    if not files:
        if devices is None:
            raise TesseraError("neither --costs nor --devices was given", "Name devices: emu:a100,emu:l40s.")
        cluster = make_cluster(parse_devices(devices), link)
        return cluster, price(unit, cluster)
    loaded = {path: load(Costs, path) for path in files}
    by_trace = {c.trace_digest: c for c in loaded.values()}
    steps = {g.trace.digest: g.trace.step for g in unit.graphs}
    for path, found in loaded.items():
        if found.trace_digest not in steps:
            raise MismatchError(
                "these are costs of another trace", "Price this trace with `tessera profile`.", str(path)
            )
    missing = [step.kind for digest, step in steps.items() if digest not in by_trace]
    if missing:
        raise MismatchError(f"no costs for {', '.join(missing)}", "Give --costs once for every trace.")
    cluster = make_cluster(next(iter(loaded.values())).devices, link)
    for path, found in loaded.items():
        if found.devices != cluster.devices:
            raise MismatchError("these costs are for other devices than the first", place=str(path))
    return cluster, tuple(by_trace[digest] for digest in (g.trace.digest for g in unit.graphs))


def document(made: Plan) -> dict[str, Any]:
    """A plan in figures, all modelled."""
    total = sum(lane.rate_per_s for lane in made.lanes)
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
        "slots": made.slots,
        "lanes": [
            {
                "share": lane.rate_per_s / total,
                "rate": lane.rate_per_s,
                "launches": {
                    name: sum(step.count(i) for step in lane.placement.devices)
                    for i, name in enumerate(names)
                },
            }
            for lane in made.lanes
        ],
        "baselines": {b.name: b.throughput_per_s for b in made.baselines},
        "baseline_latency_us": {b.name: b.latency_us for b in made.baselines},
    }


def show(made: Plan) -> None:
    """A plan for people."""
    from tessera.plan import explain
    from tessera.report import comparison_table, devices_table, layer_picture

    out = console()
    step = len(made.unit.graphs) - 1
    lane = max(range(len(made.lanes)), key=lambda i: made.lanes[i].rate_per_s)
    out.print(layer_picture(made, lane, step))
    out.print(devices_table(made))
    out.print(comparison_table(made))
    out.print(explain(made).verdict, markup=False)


def show_reasons(made: Plan) -> None:
    """How busy everything is, and for each kernel its price on each device and where it runs."""
    from tessera.plan import explain
    from tessera.report import duration

    found = explain(made)
    busy = Table("device or link", "busy per request", "utilisation", title="Utilisation (modelled)")
    for use in (*found.devices, *found.links):
        busy.add_row(use.name, duration(use.busy_us), f"{use.utilisation:.0%}")
    kernels = Table("kernel", "module", title="Every kernel, per request (modelled): time there, share there")
    for name in made.cluster.names:
        kernels.add_column(name, justify="right")
    for row in found.kernels:
        cells = [f"{duration(us)}, {share:.0%}" for us, share in zip(row.us, row.share, strict=True)]
        kernels.add_row(row.kernel.removeprefix("aten."), row.scope, *cells)
    out = console()
    out.print(busy)
    out.print(kernels)
    out.print(
        f"{found.num_transfers:.0f} transfers and {found.transfer_bytes / 1e3:.0f} KB a request; "
        f"no placement serves one request alone in less than {duration(found.latency_bound_us)}"
    )
