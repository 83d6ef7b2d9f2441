"""tessera simulate: a plan -> what a run would look like, on a virtual clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.online import ONLINE, OnlineOptions, OnlineRun, run_online
from tessera.cli.output import Record, excludes, progress
from tessera.cli.plan_model import ServiceFigures
from tessera.errors import MismatchError, TesseraError
from tessera.ir import Clock, Decision, Plan, ServicePlan, Timeline, kind_of, load, save

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NUM_REQUESTS = 100

OFFLINE = excludes("arrivals", "makes no timeline with --arrivals")
OtherArgument = Annotated[
    Path | None, typer.Argument(callback=ONLINE, help="With --arrivals: a second plan for the same work.")
]
TraceOption = Annotated[
    Path | None, typer.Option(callback=OFFLINE, help="Perfetto trace to write.", show_default=False)
]
PageOption = Annotated[
    Path | None, typer.Option(callback=OFFLINE, help="HTML timeline to write.", show_default=False)
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", callback=OFFLINE, help="Timeline to write.")
]


class SimulatedTimeline(Record, frozen=True):
    """A simulated run in which all requests wait at the start."""

    clock: Clock
    requests: int
    microbatches: int
    # Requests per second, and rows: a request of batch n has n.
    throughput: float
    rows_per_s: float
    makespan_us: float
    # From a request's first launch to its completion.
    latency_us: dict[str, float]
    # Device or link -> share of the time that it is busy.
    utilisation: dict[str, float]
    trace: Path | None
    page: Path | None


class SimulatedService(Record, frozen=True):
    """A service on a virtual clock: full load without --arrivals, else requests over time."""

    clock: Clock
    policy: str
    arrivals: str
    service: ServiceFigures
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    # The median is of the slowest group; 99th percentiles are of all requests.
    tpot_p99_ms: float
    ttft_p99_ms: float
    # Most requests at once.
    requests_at_once: int
    pages_moved: int
    utilisation: dict[str, float]
    # Whether the load's limits are kept.
    is_within: bool
    # Rate over the plan's own; None with arrivals.
    ratio_to_plan: float | None = None
    # The monitor's, with two plans.
    decisions: tuple[Decision, ...] = ()


def simulate(
    plan: Annotated[Path, typer.Argument(help="The plan to simulate.")],
    options: OnlineOptions,
    other: OtherArgument = None,
    trace: TraceOption = None,
    page: PageOption = None,
    output: OutputOption = None,
) -> SimulatedTimeline | OnlineRun | SimulatedService:
    """Run requests through a plan on a virtual clock.

    Costs are modelled; the schedule is the executor's own.

    With --arrivals requests arrive over time, through the scheduler of the service, and a monitor may
    switch between policies; without, all wait at the start and a timeline is made.
    """
    if kind_of(plan) == "service-plan":
        for name, value in (("--lose", options.lose), ("--slow", options.slow)):
            if value:
                raise TesseraError("a service plan is simulated without faults", place=name)
        if (other is not None) != options.monitor:
            raise TesseraError(
                "a monitor chooses between two service plans", "Give both or none.", "--monitor"
            )
        with progress(f"reading {plan.name}") as advance:
            plans = [load(ServicePlan, path) for path in (plan, other) if path is not None]
            advance("simulating")
            given = (options.requests, options.arrivals, options.lengths, options.speed, options.seed)
            return simulate_service(plans, *given)
    arrivals = options.requested()
    if arrivals is None:
        with progress(f"reading {plan.name}") as advance:
            loaded, num = load(Plan, plan), options.requests or NUM_REQUESTS
            advance(f"simulating {num:,} requests")
            return simulate_steps(loaded, num, trace, page, output)
    return run_online([plan] if other is None else [plan, other], options, arrivals)


def simulate_service(
    plans: Sequence[ServicePlan],
    requests: int | None = None,
    arrivals: str | None = None,
    lengths: str | None = None,
    speed: float = 1.0,
    seed: int = 0,
) -> SimulatedService:
    """The service of a plan under its own load, or of one or two plans under arrivals."""
    from tessera.serve.rehearse import play, rehearse
    from tessera.simulate.arrivals import make_arrivals

    plan = plans[0]
    decisions: tuple[Decision, ...] = ()
    _check_alike(plans)
    if arrivals is None:
        expected = rehearse(plan, plan.load, plan.expected.clients if plan.expected else None, seed)
    else:
        played = play(plans, make_arrivals(arrivals, requests, seed, lengths, speed), seed)
        expected, decisions = played.expected, played.decisions
    planned = None if arrivals else plan.expected
    return SimulatedService.of(
        expected,
        clock=Clock.SIMULATED,
        policy=", ".join(plan.policy for plan in plans),
        arrivals=arrivals or "full load",
        service=ServiceFigures(groups=tuple(group.size for group in plan.groups), expected=expected),
        requests_at_once=expected.clients,
        utilisation=dict(zip(plan.cluster.names, expected.busy, strict=True)),
        ratio_to_plan=expected.tokens_per_s / planned.tokens_per_s if planned else None,
        is_within=expected.is_within(plan.load),
        decisions=decisions,
    )


def _check_alike(plans: Sequence[ServicePlan]) -> None:
    """Raises MismatchError unless a monitor can choose among these plans."""
    names = [plan.policy for plan in plans]
    if len(set(names)) < len(names):
        raise MismatchError(f"both plans follow the policy {names[0]}", "Plan them with different --policy.")
    if any(plan.cluster != plans[0].cluster for plan in plans):
        raise MismatchError("the plans are for different devices", "Plan both for the same devices.")


def simulate_steps(
    plan: Plan,
    requests: int = NUM_REQUESTS,
    trace: Path | None = None,
    page: Path | None = None,
    output: Path | None = None,
) -> SimulatedTimeline:
    """Requests through a plan; all wait at the start."""
    from tessera import simulate as simulator
    from tessera.plan import explain
    from tessera.report import write_page, write_perfetto

    timeline = simulator.simulate(plan, requests, is_detailed=trace is not None or output is not None)
    if trace is not None:
        write_perfetto(timeline, trace)
    if page is not None:
        write_page(plan, timeline, page, explain(plan).verdict)
    if output is not None:
        save(timeline, output)
    per_s, busy = simulator.throughput_per_s(timeline), timeline.busy_us()
    times = sorted(stop - start for start, stop in _service(timeline))
    tracks = (*plan.cluster.names, *(f"{x.src} -> {x.dst}" for x in plan.cluster.links))
    return SimulatedTimeline(
        clock=timeline.clock,
        requests=len(timeline.requests),
        microbatches=plan.microbatches,
        throughput=per_s,
        rows_per_s=plan.batch * per_s,
        makespan_us=timeline.makespan_us,
        latency_us={name: times[int(q * (len(times) - 1))] for name, q in QUANTILES.items()},
        utilisation={name: busy.get(name, 0.0) / (timeline.makespan_us or 1.0) for name in tracks},
        trace=trace,
        page=page,
    )


def _service(timeline: Timeline) -> list[tuple[float, float]]:
    """From a request's first span to its completion, since all wait from time zero."""
    first: dict[int, float] = {}
    for span in timeline.spans:
        first.setdefault(span.request, span.start_us)
    return [(first.get(number, start), stop) for number, start, stop in timeline.requests]
