"""tessera simulate: a plan -> what a run would look like, on a virtual clock."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import TesseraError
from tessera.ir import Plan, Timeline, load, save

ArrivalsText = Annotated[
    str | None,
    typer.Option(
        help="Requests over time: a CSV file (BurstGPT or Azure), poisson:RATE, "
        "bursty:RATE[,PEAK,SHARE,SECONDS] or batch:N."
    ),
]
LengthsText = Annotated[
    str | None,
    typer.Option(help="Prompt and answer tokens: fixed:P,O, geometric:P,O or lognormal:P,O,SIGMA."),
]


OtherArgument = Annotated[
    Path | None, typer.Argument(help="With --arrivals: a second plan for the same work.")
]
RequestsOption = Annotated[
    int | None, typer.Option(help="Requests; without --arrivals, all wait at the start.")
]
MonitorOption = Annotated[bool, typer.Option("--monitor", help="Let a monitor choose between two plans.")]
SeqsOption = Annotated[
    int | None, typer.Option(help="Requests that share a microbatch. [default: the batch]")
]
NoiseOption = Annotated[float, typer.Option(help="Misprice every kernel type on every device by about this.")]
LoseOption = Annotated[
    list[str] | None, typer.Option(help="Lose a device: DEVICE@SECONDS[-SECONDS when it is back].")
]
SloOption = Annotated[str | None, typer.Option(help="Limits: ttft=500ms,tpot=50ms, latency=, normalised=.")]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        help="Standard errors of the load at which another policy must be better too.", show_default="1"
    ),
]


def simulate(
    plan: Annotated[Path, typer.Argument(help="The plan to simulate.")],
    other: OtherArgument = None,
    requests: RequestsOption = None,
    arrivals: ArrivalsText = None,
    monitor: MonitorOption = False,
    lengths: LengthsText = None,
    speed: Annotated[float, typer.Option(help="Arrivals so many times as fast.")] = 1.0,
    seqs: SeqsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
    noise: NoiseOption = 0.0,
    jitter: Annotated[float, typer.Option(help="Vary the time of every run by about this.")] = 0.0,
    lose: LoseOption = None,
    slow: Annotated[list[str] | None, typer.Option(help="Slow a device down: DEVICE@SECONDSxFACTOR.")] = None,
    slo: SloOption = None,
    max_waiting: Annotated[int | None, typer.Option(help="Turn requests away while so many wait.")] = None,
    window: Annotated[float | None, typer.Option(help="Seconds that the monitor looks back.")] = None,
    threshold: ThresholdOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML timeline here.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the timeline here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run requests through a plan on its modelled costs, with the executor's own schedule.

    With --arrivals requests come over time, through the service's own scheduler, and may find another
    policy in force; without, all wait at the start and a timeline is made.
    """
    if requests is not None and requests < 1:
        raise TesseraError(f"{requests} requests are none", "Use at least one.", "--requests")
    if arrivals is not None:
        from tessera.cli.online import OnlineOptions, run_online

        _refuse({"--trace": trace, "--page": page, "--output": output}, "makes no timeline with --arrivals")
        options = OnlineOptions(
            arrivals, requests, lengths, speed, seqs, seed, noise, jitter, max_waiting,
            tuple(lose or ()), tuple(slow or ()), slo, window, threshold,
        )  # fmt: skip
        run_online([plan] if other is None else [plan, other], options, monitor, as_json)
        return
    _refuse(
        {"a second plan": other, "--monitor": monitor, "--lengths": lengths, "--lose": lose, "--slow": slow,
         "--slo": slo, "--noise": noise, "--jitter": jitter, "--seqs": seqs, "--max-waiting": max_waiting,
         "--window": window, "--threshold": threshold},
        "needs --arrivals",
    )  # fmt: skip
    _offline(plan, requests or 100, trace, page, output, as_json)


def _refuse(options: dict[str, Any], why: str) -> None:
    """An option that would do nothing is a mistake."""
    for name, value in options.items():
        if value:
            raise TesseraError(f"{name} {why}", "Leave it out, or see: tessera simulate --help.")


def _offline(
    plan: Path, requests: int, trace: Path | None, page: Path | None, output: Path | None, as_json: bool
) -> None:
    """All requests wait at the start."""
    from tessera import simulate as simulator
    from tessera.plan import explain
    from tessera.report import write_page, write_perfetto

    with progress(f"reading {plan.name}") as advance:
        loaded = load(Plan, plan)
        advance(f"simulating {requests:,} requests")
        timeline = simulator.simulate(loaded, requests, is_detailed=trace is not None or output is not None)
        advance("writing")
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

    reached = throughput_per_s(timeline)
    times = sorted(stop - start for start, stop in _service(timeline))
    busy = timeline.busy_us()
    whole = timeline.makespan_us or 1.0
    links = [f"{x.src} -> {x.dst}" for x in plan.cluster.links]
    return {
        "clock": timeline.clock.value,
        "requests": len(timeline.requests),
        "microbatches": plan.microbatches,
        "slots": plan.microbatches,
        "throughput": reached,
        "rows_per_s": plan.batch * reached,
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
    counted = f" (requests of batch {plan.batch})" if plan.variants else ""
    out.print(
        f"simulated: {found['requests']} requests in {duration(found['makespan_us'])}, "
        f"{rate(found['throughput'])}{counted} with {plan.microbatches} in flight; one request "
        f"p50 {duration(found['latency_us']['p50'])}, p99 {duration(found['latency_us']['p99'])}"
    )
    for key in ("trace", "page"):
        if found[key]:
            out.print(f"{key}: {found[key]}", markup=False)
