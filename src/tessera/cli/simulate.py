"""tessera simulate: a plan -> what a run would look like, on a virtual clock."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json
from tessera.errors import TesseraError
from tessera.ir import Plan, Timeline, load, save


def simulate(
    plan: Annotated[Path, typer.Argument(help="The plan to simulate.")],
    requests: Annotated[int, typer.Option(help="Requests, all waiting at the start.")] = 100,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML timeline here.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the timeline here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run requests through a plan on its modelled costs, with the executor's own schedule."""
    from tessera import simulate as simulator
    from tessera.plan import explain
    from tessera.report import write_page, write_perfetto

    if requests < 1:
        raise TesseraError(f"{requests} requests are none", "Use at least one.", "--requests")
    loaded = load(Plan, plan)
    timeline = simulator.simulate(loaded, requests, is_detailed=trace is not None or output is not None)
    if trace is not None:
        write_perfetto(timeline, trace)
    if page is not None:
        write_page(loaded, timeline, page, explain(loaded).verdict)
    if output is not None:
        save(timeline, output)
    found = figures(loaded, timeline) | {
        "trace": str(trace) if trace else None,
        "page": str(page) if page else None,
    }
    print_json(found) if as_json else _show(loaded, timeline, found)


def figures(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """A simulated run in figures."""
    from tessera.simulate import throughput_per_s

    times = sorted(stop - start for start, stop in _service(timeline))
    busy = timeline.busy_us()
    whole = timeline.makespan_us or 1.0
    links = [f"{x.src} -> {x.dst}" for x in plan.cluster.links]
    return {
        "clock": timeline.clock.value,
        "requests": len(timeline.requests),
        "slots": plan.slots,
        "throughput": throughput_per_s(timeline),
        "makespan_us": timeline.makespan_us,
        "latency_us": {name: times[int(q * (len(times) - 1))] for name, q in QUANTILES.items()},
        "utilisation": {name: busy.get(name, 0.0) / whole for name in (*plan.cluster.names, *links)},
    }


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _service(timeline: Timeline) -> list[tuple[float, float]]:
    """From a request's first span to its completion: all wait from time zero, which says little."""
    first: dict[int, float] = {}
    for span in timeline.spans:
        first.setdefault(span.request, span.start_us)
    return [(first.get(number, start), stop) for number, start, stop in timeline.requests]


def _show(plan: Plan, timeline: Timeline, found: dict[str, Any]) -> None:
    from tessera.report import devices_table, duration, rate

    out = console()
    out.print(devices_table(plan, timeline))
    out.print(
        f"simulated: {found['requests']} requests in {duration(found['makespan_us'])}, "
        f"{rate(found['throughput'])} with {plan.slots} in flight; one request "
        f"p50 {duration(found['latency_us']['p50'])}, p99 {duration(found['latency_us']['p99'])}"
    )
    for key in ("trace", "page"):
        if found[key]:
            out.print(f"{key}: {found[key]}", markup=False)
