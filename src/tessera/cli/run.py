"""tessera run: a plan on real worker processes, compared with the undivided model."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.runnable import check_runnable
from tessera.errors import MismatchError, TesseraError
from tessera.ir import DeviceKind, Plan, Timeline, load


def run(
    plan: Annotated[Path, typer.Argument(help="The plan to run.")],
    requests: Annotated[int, typer.Option(help="How many requests to run.")] = 8,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the undivided run, bit by bit.")
    ] = False,
    devices: Annotated[str | None, typer.Option(help="Devices that must be the plan's own.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace of the run here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run requests through a plan, one worker process a device."""
    if requests < 1:
        raise TesseraError(f"{requests} requests are none", "Use at least one.", "--requests")
    loaded = load(Plan, plan)
    _check_devices(loaded, devices, str(plan))
    for graph in loaded.unit.graphs:
        check_runnable(graph.trace, str(plan))
    started = time.perf_counter()
    with progress("building the model", requests * (2 if verify else 1) + 1) as advance:
        from tessera.execute import Engine
        from tessera.flow import UnitRequest, run_undivided, workloads_of
        from tessera.report import write_perfetto

        workloads = workloads_of(loaded.unit)
        work = [UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(requests)]
        advance("starting workers")
        with Engine(loaded, workloads[0].weights()) as engine:
            ran = engine.run(work, lambda number: advance(f"ran request {number}"))
            timeline = engine.timeline()
        equal = True
        if verify:
            for request, result in zip(work, ran, strict=True):
                equal &= _equal(run_undivided(loaded.unit, request), result)
                advance(f"compared request {request.seed}")
    if trace is not None:
        write_perfetto(timeline, trace)
    found = {
        "verified": equal if verify else None,
        "requests": requests,
        "lost": requests - len(ran),
        "overlap": overlap(timeline),
        "per_device": per_device(loaded, timeline),
        "lanes": [sum(r.lane == i for r in ran) for i in range(len(loaded.lanes))],
        "trace": str(trace) if trace else None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    print_json(found) if as_json else _show(found)
    if not equal:
        raise TesseraError(
            "the divided run differs from the undivided one", "Please report this plan.", str(plan)
        )


def _check_devices(plan: Plan, devices: str | None, place: str) -> None:
    made_for = ",".join(plan.cluster.names)
    if devices is not None:
        from tessera.profile import parse_devices

        if parse_devices(devices) != plan.cluster.devices:
            message = f"the plan was made for {made_for}, not for {devices}"
            raise MismatchError(message, f"Plan again with --devices {devices}.", place)
    foreign = [d.name for d in plan.cluster.devices if d.kind is not DeviceKind.EMU]
    if foreign:
        message = f"the plan was made for {made_for}; this machine cannot run {', '.join(foreign)}"
        raise MismatchError(message, "Plan again for emu: devices.", place)


def _equal(reference: Any, result: Any) -> bool:
    from tessera.execute.replay import same_bits

    outputs = len(reference.outputs) == len(result.outputs) and all(
        same_bits(one[name], other[name])
        for one, other in zip(reference.outputs, result.outputs, strict=True)
        for name in one
    )
    return outputs and all(same_bits(t, result.state[name]) for name, t in reference.state.items())


def per_device(plan: Plan, timeline: Timeline) -> list[dict[str, Any]]:
    """How long each worker computed, by this machine's clock."""
    busy = timeline.busy_us()
    whole = timeline.makespan_us or 1.0
    return [
        {"device": name, "busy_us": busy.get(name, 0.0), "utilisation": busy.get(name, 0.0) / whole}
        for name in plan.cluster.names
    ]


def overlap(timeline: Timeline) -> float:
    """Share of the busy time during which two or more devices computed at once."""
    edges = sorted(
        (time_us, change)
        for span in timeline.spans
        for time_us, change in ((span.start_us, 1), (span.stop_us, -1))
    )
    running, last, some, several = 0, 0.0, 0.0, 0.0
    for now, change in edges:
        some += (now - last) * (running >= 1)
        several += (now - last) * (running >= 2)
        running, last = running + change, now
    return several / some if some else 0.0


def _show(found: dict[str, Any]) -> None:
    out = console()
    for row in found["per_device"]:
        out.print(f"{row['device']}: busy {row['utilisation']:.0%} of the run (measured on this machine)")
    words = {True: "every output and state equal bit for bit", False: "DIFFERENT", None: "not compared"}
    out.print(f"{found['requests']} requests, {found['lost']} lost: {words[found['verified']]}")
    if found["trace"]:
        out.print(f"trace: {found['trace']}", markup=False)
