"""`tessera simulate --arrivals`: requests over time, with one plan, two, or a monitor that chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tessera.adapt.capability import Capability, crossing_per_s
from tessera.adapt.monitor import MonitorConfig
from tessera.cli.output import Record, needs, progress, shown
from tessera.cli.plan import EffortOption
from tessera.errors import ArrivalsError
from tessera.ir import Arrivals, Clock, Decision, Objective, Plan, ServingReport, load
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.metrics import parse_limits
from tessera.simulate.stepper import Faults, Loss
from tessera.simulate.study import Scenario, adapt, compare

if TYPE_CHECKING:
    from tessera.plan import SearchConfig


class OnlineRun(Record, frozen=True):
    """A simulation of arrivals: every plan alone, and the monitor's choice among them."""

    clock: Clock
    arrivals: str
    requests: int
    offered_per_s: float
    longest_gap_s: float
    seed: int
    policies: Annotated[dict[str, ServingReport], shown("policies (simulated)")]
    # With a monitor only, from here on.
    adaptive: Annotated[ServingReport | None, shown("adaptive (simulated)")] = None
    switches: int | None = None
    decisions: dict[str, int] | None = None
    ratio_to_better_fixed: float | None = None
    crossing_per_s: float | None = None
    capacity_per_s: dict[str, float] | None = None
    reasons: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()


# Callback of an option that makes sense with arrivals only.
ONLINE = needs("arrivals")


@dataclass(frozen=True)
class OnlineOptions:
    """Options of `tessera simulate` that are about requests and the monitor."""

    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of requests; without --arrivals, all wait at the start.",
            show_default="100; with a CSV file, all of it",
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            help="Requests over time: a CSV file (BurstGPT or Azure), poisson:RATE, "
            "bursty:RATE[,PEAK,SHARE,SECONDS] or batch:N.",
        ),
    ] = None
    monitor: Annotated[
        bool, typer.Option("--monitor", callback=ONLINE, help="Let a monitor choose between two plans.")
    ] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            callback=ONLINE,
            help="Prompt and answer tokens: fixed:P,O, geometric:P,O or lognormal:P,O,SIGMA.",
        ),
    ] = None
    speed: Annotated[float, typer.Option(callback=ONLINE, help="Factor on the speed of arrivals.")] = 1.0
    seqs: Annotated[
        int | None,
        typer.Option(
            callback=ONLINE, min=1, help="Sequences of a microbatch.", show_default="the plan's batch"
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0
    noise: Annotated[
        float,
        typer.Option(callback=ONLINE, min=0.0, max=0.99, help="Relative error of every kernel type's cost."),
    ] = 0.0
    jitter: Annotated[
        float,
        typer.Option(callback=ONLINE, min=0.0, max=0.99, help="Relative variation of every run's time."),
    ] = 0.0
    lose: Annotated[
        list[str] | None,
        typer.Option(callback=ONLINE, help="Lose a device: DEVICE@SECONDS[-SECONDS when it is back]."),
    ] = None
    slow: Annotated[
        list[str] | None, typer.Option(callback=ONLINE, help="Slow a device down: DEVICE@SECONDSxFACTOR.")
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            callback=ONLINE,
            help="Limits in us, ms or s: ttft=500ms,tpot=50ms, latency=, normalised=.",
            show_default="none",
        ),
    ] = None
    max_waiting: Annotated[
        int | None,
        typer.Option(
            callback=ONLINE, min=1, help="Refuse requests while this many wait.", show_default="never"
        ),
    ] = None
    window: Annotated[
        float | None, typer.Option(callback=ONLINE, min=1e-9, help="Seconds that the monitor looks back.")
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(
            callback=ONLINE,
            min=0.0,
            help="Standard errors of the load at which another policy must be better too.",
            show_default="1",
        ),
    ] = None
    effort: EffortOption = "full"

    def monitor_config(self) -> MonitorConfig:
        usual = MonitorConfig(window_s=self.window)
        return usual if self.threshold is None else replace(usual, errors=self.threshold)

    def requested(self) -> Arrivals | None:
        """Arrivals; None: all requests wait at the start."""
        if self.arrivals is None:
            return None
        return make_arrivals(self.arrivals, self.requests, self.seed, self.lengths, self.speed)

    def setting(self, arrivals: Arrivals) -> Scenario:
        faults = Faults(
            seed=self.seed,
            jitter=self.jitter,
            losses=tuple(_loss(word) for word in self.lose or ()),
            slowdowns=tuple(_slowdown(word) for word in self.slow or ()),
        )
        limits = parse_limits(self.slo) if self.slo else ()
        return Scenario(arrivals, faults, limits, self.seqs, self.noise, self.max_waiting)


def _split(word: str, mark: str, place: str, form: str) -> tuple[str, float, float | None]:
    """DEVICE@SECONDS, and a number behind the mark if there is one."""
    device, _, rest = word.rpartition("@")
    if not device:
        raise ArrivalsError(f"'{word}' has no time", f"Write {form}.", place)
    time, is_there, last = rest.partition(mark)
    return device, _number(time, word, place), _number(last, word, place) if is_there else None


def _number(text: str, word: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArrivalsError(f"'{text}' in '{word}' is not a number", "", place) from None


def _loss(word: str) -> Loss:
    device, lost_s, back_s = _split(word, "-", "--lose", "DEVICE@SECONDS, as emu:l40s@30")
    if back_s is not None and not lost_s < back_s < float("inf"):
        raise ArrivalsError(f"'{word}' comes back before it goes", "Write DEVICE@SECONDS-SECONDS.", "--lose")
    return Loss(device, lost_s, back_s)


def _slowdown(word: str) -> tuple[str, float, float]:
    form = "DEVICE@SECONDSxFACTOR: emu:l40s@30x1.5"
    device, at_s, factor = _split(word, "x", "--slow", form)
    if factor is None or not 0.0 < factor < float("inf"):
        raise ArrivalsError(f"'{word}' has no finite factor above zero", f"Write {form}.", "--slow")
    return device, at_s, factor


def run_online(paths: Sequence[Path], options: OnlineOptions, arrivals: Arrivals) -> OnlineRun:
    setting = options.setting(arrivals)
    plans = [(plan.policy, plan) for plan in (load(Plan, path) for path in paths)]
    plans = _distinct(plans, paths)
    known: tuple[Capability, ...] = ()
    adaptive = None
    with progress("planning") as advance:
        if options.monitor:
            from tessera.flow import replan
            from tessera.plan import search_config

            search = search_config(options.effort)
            plans = with_other(plans, search)
            advance("simulating with the monitor")
            adaptive, known = adapt(plans, setting, options.monitor_config(), partial(replan, search=search))
        advance("simulating each plan alone")
        fixed = compare(plans, setting)
    return _result(fixed, adaptive, known, setting)


def _distinct(plans: list[tuple[str, Plan]], paths: Sequence[Path]) -> list[tuple[str, Plan]]:
    """Named by policy, or by file where that is not enough."""
    names = [name for name, _ in plans]
    if len(set(names)) == len(names):
        return plans
    return [(path.stem, plan) for path, (_, plan) in zip(paths, plans, strict=True)]


def with_other(plans: Sequence[tuple[str, Plan]], search: "SearchConfig") -> list[tuple[str, Plan]]:
    """Two plans to choose among: where one was given, that of the other objective is made."""
    if len(plans) > 1:
        return list(plans)
    from tessera.flow import make_plan
    from tessera.plan import constraints_of

    name, plan = plans[0]
    is_latency = plan.objective is Objective.LATENCY
    other = Objective.THROUGHPUT if is_latency else Objective.LATENCY
    made = make_plan(
        plan.unit,
        plan.costs,
        plan.cluster,
        other,
        plan.microbatches,
        None,
        constraints_of(plan),
        True,
        search,
    )
    return [(name, plan), (other.value, made)]


def _result(
    fixed: Sequence[ServingReport],
    adaptive: ServingReport | None,
    capabilities: Sequence[Capability],
    setting: Scenario,
) -> OnlineRun:
    reports = (*fixed, *((adaptive,) if adaptive else ()))
    run = OnlineRun(
        clock=Clock.SIMULATED,
        arrivals=setting.arrivals.name,
        requests=len(setting.arrivals.times_s),
        offered_per_s=setting.arrivals.rate_per_s,
        longest_gap_s=setting.arrivals.longest_gap_s,
        seed=setting.faults.seed,
        policies={report.policy: report for report in fixed},
        notes=tuple(dict.fromkeys(f"{r.policy}: {note}" for r in reports for note in r.notes)),
    )
    if adaptive is None:
        return run
    # A policy that served fewer requests is no measure: those that it failed have no latency.
    comparable = [r for r in fixed if r.num_finished >= adaptive.num_finished]
    best = min((r.normalised_s.mean for r in comparable if r.normalised_s), default=None)
    mean_s = adaptive.normalised_s.mean if adaptive.normalised_s else None
    kinds = [d.kind.value for d in adaptive.decisions]
    return msgspec.structs.replace(
        run,
        adaptive=adaptive,
        switches=kinds.count("switch"),
        decisions={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        ratio_to_better_fixed=mean_s / best if mean_s and best else None,
        crossing_per_s=crossing_per_s(tuple(capabilities)),
        capacity_per_s={x.name: x.capacity_per_s for x in capabilities},
        reasons=adaptive.decisions,
    )
