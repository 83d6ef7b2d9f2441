"""tessera simulate: a plan -> what a run would look like, on a virtual clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.online import OnlineOptions, OnlineRun, run_online
from tessera.cli.output import Record, excludes, needs, progress
from tessera.cli.plan import EffortOption
from tessera.cli.plan_model import ServiceFigures
from tessera.errors import MismatchError, TesseraError
from tessera.ir import Clock, Decision, Plan, ServicePlan, Timeline, kind_of, load, save

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NUM_REQUESTS = 100

ArrivalsText = Annotated[
    str | None,
    typer.Option(
        is_eager=True,
        help="Requests over time: a CSV file (BurstGPT or Azure), poisson:RATE, "
        "bursty:RATE[,PEAK,SHARE,SECONDS] or batch:N.",
    ),
]
# Options of each form: with arrivals, and without.
ONLINE = needs("arrivals")
OFFLINE = excludes("arrivals", "makes no timeline with --arrivals")
Share = typer.Option(callback=ONLINE, min=0.0, max=0.99, help="Relative error of every kernel type's cost.")
OtherArgument = Annotated[
    Path | None, typer.Argument(callback=ONLINE, help="With --arrivals: a second plan for the same work.")
]
RequestsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of requests; without --arrivals, all wait at the start."),
]
MonitorOption = Annotated[
    bool, typer.Option("--monitor", callback=ONLINE, help="Let a monitor choose between two plans.")
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        callback=ONLINE,
        help="Prompt and answer tokens: fixed:P,O, geometric:P,O or lognormal:P,O,SIGMA.",
    ),
]
SpeedOption = Annotated[float, typer.Option(callback=ONLINE, help="Factor on the speed of arrivals.")]
SeqsOption = Annotated[
    int | None,
    typer.Option(callback=ONLINE, min=1, help="Sequences of a microbatch. [default: the plan's batch]"),
]
JitterOption = Annotated[
    float, typer.Option(callback=ONLINE, min=0.0, max=0.99, help="Relative variation of every run's time.")
]
LoseOption = Annotated[
    list[str] | None,
    typer.Option(callback=ONLINE, help="Lose a device: DEVICE@SECONDS[-SECONDS when it is back]."),
]
SlowOption = Annotated[
    list[str] | None, typer.Option(callback=ONLINE, help="Slow a device down: DEVICE@SECONDSxFACTOR.")
]
SloOption = Annotated[
    str | None, typer.Option(callback=ONLINE, help="Limits: ttft=500ms,tpot=50ms, latency=, normalised=.")
]
WaitingOption = Annotated[
    int | None, typer.Option(callback=ONLINE, min=1, help="Refuse requests while this many wait.")
]
WindowOption = Annotated[
    float | None, typer.Option(callback=ONLINE, min=1e-9, help="Seconds that the monitor looks back.")
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        callback=ONLINE,
        min=0.0,
        help="Standard errors of the load at which another policy must be better too.",
        show_default="1",
    ),
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
    other: OtherArgument = None,
    requests: RequestsOption = None,
    arrivals: ArrivalsText = None,
    monitor: MonitorOption = False,
    lengths: LengthsOption = None,
    speed: SpeedOption = 1.0,
    seqs: SeqsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    noise: Annotated[float, Share] = 0.0,
    jitter: JitterOption = 0.0,
    lose: LoseOption = None,
    slow: SlowOption = None,
    slo: SloOption = None,
    max_waiting: WaitingOption = None,
    window: WindowOption = None,
    threshold: ThresholdOption = None,
    effort: EffortOption = "full",
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
        for name, value in (("--lose", lose), ("--slow", slow)):
            if value:
                raise TesseraError("a service plan is simulated without faults", place=name)
        if (other is not None) != monitor:
            raise TesseraError(
                "a monitor chooses between two service plans", "Give both or none.", "--monitor"
            )
        with progress(f"reading {plan.name}") as advance:
            plans = [load(ServicePlan, path) for path in (plan, other) if path is not None]
            advance("simulating")
            return simulate_service(plans, requests, arrivals, lengths, speed, seed)
    if arrivals is None:
        with progress(f"reading {plan.name}") as advance:
            loaded, num = load(Plan, plan), requests or NUM_REQUESTS
            advance(f"simulating {num:,} requests")
            return simulate_steps(loaded, num, trace, page, output)
    options = OnlineOptions(
        arrivals, requests, lengths, speed, seqs, seed, noise, jitter, max_waiting,
        tuple(lose or ()), tuple(slow or ()), slo, window, threshold, effort,
    )  # fmt: skip
    return run_online([plan] if other is None else [plan, other], options, monitor)


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
    return SimulatedService(
        clock=Clock.SIMULATED,
        policy=", ".join(plan.policy for plan in plans),
        arrivals=arrivals or "full load",
        service=ServiceFigures(groups=tuple(group.size for group in plan.groups), expected=expected),
        tokens_per_s=expected.tokens_per_s,
        tpot_ms=expected.tpot_ms,
        ttft_ms=expected.ttft_ms,
        tpot_p99_ms=expected.tpot_p99_ms,
        ttft_p99_ms=expected.ttft_p99_ms,
        requests_at_once=expected.clients,
        pages_moved=expected.pages_moved,
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
