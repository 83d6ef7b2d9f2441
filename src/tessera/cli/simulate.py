"""tessera simulate: a plan -> what a run would look like, on a virtual clock."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import Record, needs, option, progress, say, shown
from tessera.cli.plan_model import ServiceFigures
from tessera.errors import ArrivalsError, MismatchError, TesseraError, check_known
from tessera.ir import Arrivals, Clock, Decision, Plan, ServicePlan, Timeline, kind_of, load, save
from tessera.ir.units import quantile
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.stepper import NO_FAULTS, Faults, Loss

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NUM_REQUESTS = 100
# A device, seconds, and when it is back or how much slower it is.
LOSS = re.compile(r"(.+)@(\d+\.?\d*)(?:-(\d+\.?\d*))?")
SLOWDOWN = re.compile(r"(.+)@(\d+\.?\d*)x(\d+\.?\d*)")

ONLINE = needs("arrivals")
REQUESTS_HELP = "Number of requests; of plans of steps, all wait at the start."
ARRIVALS_HELP = (
    "Requests over time: a CSV file (BurstGPT or Azure), poisson:RATE, bursty:RATE[,PEAK,SHARE,SECONDS] or "
    "batch:N."
)
LENGTHS_HELP = "Prompt and answer tokens: fixed:P,O, uniform:P,O, geometric:P,O or lognormal:P,O,SIGMA."


@dataclass(frozen=True)
class PlayedRequests:
    requests: int | None = option(None, REQUESTS_HELP, shown="100; with a CSV file, all of it", min=1)
    arrivals: str | None = option(None, ARRIVALS_HELP)
    monitor: bool = option(False, "Let a monitor choose between two plans.", "--monitor", callback=ONLINE)
    lengths: str | None = option(None, LENGTHS_HELP, callback=ONLINE)
    seed: int = option(0, "Random seed.", min=0)
    noise: float = option(
        0.0, "Relative error of every kernel type's cost.", callback=ONLINE, min=0.0, max=0.99
    )
    lose: list[str] | None = option(
        None, "Lose a device: DEVICE@SECONDS[-SECONDS when it is back].", callback=ONLINE
    )
    slow: list[str] | None = option(None, "Slow a device down: DEVICE@SECONDSxFACTOR.", callback=ONLINE)

    def arrived(self) -> Arrivals | None:
        """None: the full load of a service plan."""
        if self.arrivals is not None:
            return make_arrivals(self.arrivals, self.requests, self.seed, self.lengths)
        if self.requests is not None:
            remedy = "Add --arrivals poisson:RATE, or leave it out."
            raise TesseraError("a service plan without --arrivals runs at full load", remedy, "--requests")
        return None

    @property
    def num_waiting(self) -> int:
        """Requests that wait at the start."""
        if self.arrivals is not None:
            remedy = "Make one by: tessera plan MODEL --devices ... --output-tokens N."
            raise TesseraError("requests over time need a service plan", remedy, "--arrivals")
        return self.requests or NUM_REQUESTS

    def faults(self) -> Faults:
        losses = tuple(_read_loss(word) for word in self.lose or ())
        return Faults(losses=losses, slowdowns=tuple(_read_slowdown(word) for word in self.slow or ()))


def _read_loss(word: str) -> Loss:
    device, lost_s, back_s = _read(LOSS, word, "--lose", "DEVICE@SECONDS[-SECONDS], as emu:l40s@30-90")
    if back_s is not None and back_s <= lost_s:
        raise ArrivalsError(f"'{word}' comes back before it goes", "Write DEVICE@SECONDS-SECONDS.", "--lose")
    return Loss(device, lost_s, back_s)


def _read_slowdown(word: str) -> tuple[str, float, float]:
    device, at_s, factor = _read(SLOWDOWN, word, "--slow", "DEVICE@SECONDSxFACTOR, as emu:l40s@30x1.5")
    if not factor:
        raise ArrivalsError(f"the factor of '{word}' must be above zero", "", "--slow")
    return device, at_s, factor


def _read(pattern: re.Pattern[str], word: str, place: str, form: str) -> tuple[str, float, float | None]:
    match = pattern.fullmatch(word)
    if match is None:
        raise ArrivalsError(f"cannot read '{word}'", f"Write {form}.", place)
    device, first, second = match.groups()
    return device, float(first), None if second is None else float(second)


class SimulatedTimeline(Record, frozen=True):
    """A simulated run in which all requests wait at the start."""

    clock: Clock
    requests: int
    microbatches: int
    throughput: float
    rows_per_s: float
    makespan_us: float
    # From a request's first launch to its completion.
    latency_us: dict[str, float]
    utilisation: dict[str, float]
    trace: Path | None


class SimulatedService(Record, frozen=True):
    """A service on a virtual clock: full load without --arrivals, else requests over time."""

    clock: Clock
    policy: str
    arrivals: str
    service: ServiceFigures
    # To the last answer's end; and from the first one's end to the last request's begin, if that is later.
    tokens_per_s: float
    steady_tokens_per_s: Annotated[float | None, shown("steady")]
    tpot_ms: float
    ttft_ms: float
    # The median is of the slowest group; 99th percentiles are of all requests.
    tpot_p99_ms: float
    ttft_p99_ms: float
    requests_at_once: int
    pages_moved: int
    utilisation: dict[str, float]
    is_within: bool
    # Rate over the plan's own; None with arrivals.
    ratio_to_plan: float | None = None
    num_failed: int = 0
    num_restarted: int = 0
    decisions: tuple[Decision, ...] = ()


def simulate(
    plan: Annotated[Path, typer.Argument(help="The plan to simulate.")],
    options: PlayedRequests,
    other: Annotated[
        Path | None, typer.Argument(callback=ONLINE, help="With --monitor: a second service plan.")
    ] = None,
    trace: Path | None = option(None, "Perfetto trace to write.", shown=False),
    output: Path | None = option(None, "Timeline to write.", "-o", "--output"),
) -> SimulatedTimeline | SimulatedService:
    """Run requests through a plan on a virtual clock.

    Costs are modelled; the schedule is the executor's own.

    A service plan runs as a service, at full load or with --arrivals over time; devices may be lost or slow,
    and a monitor may choose between two plans. Other plans run requests that all wait at the start.
    """
    if kind_of(plan) == "service-plan":
        from tessera.capture.models import positions_of
        from tessera.serve.rehearse import shape_for

        for name, path in (("--trace", trace), ("--output", output)):
            if path is not None:
                raise TesseraError("a service plan makes no timeline", "Leave it out.", name)
        if (other is not None) != options.monitor:
            message = "a monitor chooses between two service plans"
            raise TesseraError(message, "Give both or none.", "--monitor")
        with progress(f"reading {plan.name}") as advance:
            plans = [load(ServicePlan, path) for path in (plan, other) if path is not None]
            advance("simulating")
            arrived = options.arrived()
            figures = simulate_service(plans, arrived, options.seed, options.faults(), options.noise)
        if arrived is not None:
            outputs = arrived.outputs or (plans[0].load.output_tokens,)
            load_per_s = arrived.rate_per_s * sum(outputs) / len(outputs)
            most = max((plan.expected.tokens_per_s for plan in plans if plan.expected), default=math.inf)
            if most < load_per_s < math.inf and figures.tokens_per_s < load_per_s:
                say(f"warning: {load_per_s:,.0f} tokens/s are asked for and the plan gives {most:,.0f}")
            lengths = [sum(pair) for pair in zip(arrived.prompts, arrived.outputs, strict=True)]
            longest = min(shape_for(plan).max_tokens for plan in plans)
            if num_cut := sum(length > longest for length in lengths):
                say(f"warning: {num_cut:,} requests are cut to the {longest:,} tokens that have pages")
            positions = positions_of(plans[0].model) or math.inf
            if num_refused := sum(length > positions for length in lengths):
                message = f"{num_refused:,} requests are beyond the {positions:,} positions of the model"
                say(f"warning: {message}; a service refuses them")
        return figures
    with progress(f"reading {plan.name}") as advance:
        loaded, num = load(Plan, plan), options.num_waiting
        advance(f"simulating {num:,} requests")
        return simulate_steps(loaded, num, trace, output)


def simulate_plan(plan: Plan | ServicePlan, options: PlayedRequests) -> SimulatedTimeline | SimulatedService:
    if isinstance(plan, ServicePlan):
        return simulate_service([plan], options.arrived(), options.seed)
    return simulate_steps(plan, options.num_waiting)


def simulate_service(
    plans: Sequence[ServicePlan],
    arrivals: Arrivals | None = None,
    seed: int = 0,
    faults: Faults = NO_FAULTS,
    noise: float = 0.0,
) -> SimulatedService:
    from tessera.serve.rehearse import Played, play, rehearse

    plan = plans[0]
    if len({plan.policy for plan in plans}) < len(plans):
        message = f"both plans follow the policy {plan.policy}"
        raise MismatchError(message, "Plan them with different --policy.")
    if any(other.cluster != plan.cluster for other in plans):
        raise MismatchError("the plans are for different devices", "Plan both for the same devices.")
    for device in (*(loss.device for loss in faults.losses), *(name for name, _, _ in faults.slowdowns)):
        check_known("device", device, plan.cluster.names, "--lose, --slow")
    if arrivals is None:
        clients = plan.expected.clients if plan.expected else None
        played = Played(rehearse(plan, plan.load, clients, seed), plan.policy)
    else:
        played = play(plans, arrivals, seed, faults, noise)
    expected = played.expected
    planned = None if arrivals else plan.expected
    return SimulatedService.of(
        expected,
        played,
        clock=Clock.SIMULATED,
        policy=", ".join(plan.policy for plan in plans),
        arrivals=arrivals.name if arrivals else "full load",
        service=ServiceFigures(groups=tuple(group.size for group in plan.groups), expected=expected),
        requests_at_once=expected.clients,
        utilisation=dict(zip(plan.cluster.names, expected.busy, strict=True)),
        ratio_to_plan=expected.tokens_per_s / planned.tokens_per_s if planned else None,
        is_within=expected.is_within(plan.load),
    )


def simulate_steps(
    plan: Plan, requests: int, trace: Path | None = None, output: Path | None = None
) -> SimulatedTimeline:
    from tessera import simulate as simulator
    from tessera.report import utilisation, write_perfetto

    timeline = simulator.simulate(plan, requests, is_detailed=trace is not None or output is not None)
    if trace is not None:
        write_perfetto(timeline, trace)
    if output is not None:
        save(timeline, output)
    per_s = simulator.throughput_per_s(timeline)
    times = sorted(stop - start for start, stop in _service(timeline))
    tracks = (*plan.cluster.names, *(f"{x.src} -> {x.dst}" for x in plan.cluster.links))
    return SimulatedTimeline.of(
        timeline,
        requests=len(timeline.requests),
        microbatches=plan.microbatches,
        throughput=per_s,
        rows_per_s=plan.batch * per_s,
        latency_us={name: quantile(times, q) for name, q in QUANTILES.items()},
        utilisation=dict.fromkeys(tracks, 0.0) | utilisation(timeline),
        trace=trace,
    )


def _service(timeline: Timeline) -> list[tuple[float, float]]:
    """From a request's first span on, since all wait from time zero."""
    first: dict[int, float] = {}
    for span in timeline.spans:
        first.setdefault(span.request, span.start_us)
    return [(first.get(number, start), stop) for number, start, stop in timeline.requests]
