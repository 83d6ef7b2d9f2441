"""The online half of `tessera simulate`: requests over time, one plan, two, or a monitor that chooses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tessera.adapt.capability import Capability, crossing_per_s
from tessera.adapt.monitor import MonitorConfig
from tessera.cli.output import console, print_json, progress
from tessera.errors import ArrivalsError
from tessera.ir import Objective, Plan, Quantiles, ServingReport, load, need_one_batch
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.metrics import parse_limits
from tessera.simulate.stepper import Faults, Loss
from tessera.simulate.study import Setting, adapt, compare


@dataclass(frozen=True)
class OnlineOptions:
    """What the user asked for, as written."""

    arrivals: str
    requests: int | None = None
    lengths: str | None = None
    speed: float = 1.0
    seqs: int | None = None
    seed: int = 0
    noise: float = 0.0
    jitter: float = 0.0
    max_waiting: int | None = None
    lose: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    slo: str | None = None
    window_s: float | None = None
    threshold: float | None = None

    def monitor(self) -> MonitorConfig:
        """How the monitor watches."""
        usual = MonitorConfig(window_s=self.window_s)
        if self.threshold is None:
            return usual
        if not 0.0 <= self.threshold < float("inf"):
            message = f"{self.threshold:g} standard errors are none"
            raise ArrivalsError(message, "Use a number from zero on.", "--threshold")
        return replace(usual, errors=self.threshold)

    def setting(self) -> Setting:
        """Parsed."""
        for name, value in (("--noise", self.noise), ("--jitter", self.jitter)):
            if not 0.0 <= value < 1.0:
                raise ArrivalsError(f"{value:g} is not a relative error", "Use 0.1 for 10 %.", name)
        for name, count in (("--seqs", self.seqs), ("--max-waiting", self.max_waiting)):
            if count is not None and count < 1:
                raise ArrivalsError(f"{count} requests are none", "Use at least one.", name)
        if self.window_s is not None and not self.window_s > 0.0:
            raise ArrivalsError(
                f"a window of {self.window_s:g} s is none", "Use a time above zero.", "--window"
            )
        arrivals = make_arrivals(self.arrivals, self.requests, self.seed, self.lengths, self.speed)
        faults = Faults(
            seed=self.seed,
            jitter=self.jitter,
            losses=tuple(_loss(word) for word in self.lose),
            slowdowns=tuple(_slowdown(word) for word in self.slow),
        )
        limits = parse_limits(self.slo) if self.slo else ()
        return Setting(arrivals, faults, limits, self.seqs, self.noise, self.max_waiting)


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


def run_online(paths: Sequence[Path], options: OnlineOptions, has_monitor: bool, as_json: bool) -> None:
    """Simulates and shows."""
    setting = options.setting()
    plans = [(plan.policy, plan) for plan in (load(Plan, path) for path in paths)]
    for path, (_, plan) in zip(paths, plans, strict=True):
        need_one_batch(plan, "a simulation of arrivals", str(path))
    plans = _distinct(plans, paths)
    known: tuple[Capability, ...] = ()
    adaptive = None
    with progress("planning") as advance:
        if has_monitor:
            from tessera.flow import replan

            plans = with_other(plans)
            advance("simulating with the monitor")
            adaptive, known = adapt(plans, setting, options.monitor(), replan)
        advance("simulating each plan alone")
        fixed = compare(plans, setting)
    found = document(fixed, adaptive, known, setting)
    print_json(found) if as_json else _show(found, fixed, adaptive)


def _distinct(plans: list[tuple[str, Plan]], paths: Sequence[Path]) -> list[tuple[str, Plan]]:
    """Named by policy, or by file where that is not enough."""
    names = [name for name, _ in plans]
    if len(set(names)) == len(names):
        return plans
    return [(path.stem, plan) for path, (_, plan) in zip(paths, plans, strict=True)]


def with_other(plans: Sequence[tuple[str, Plan]]) -> list[tuple[str, Plan]]:
    """Two plans to choose among: where one was given, that of the other objective is made."""
    if len(plans) > 1:
        return list(plans)
    from tessera.flow import make_plan
    from tessera.plan import constraints_of

    name, plan = plans[0]
    is_latency = plan.objective is Objective.LATENCY
    other = Objective.THROUGHPUT if is_latency else Objective.LATENCY
    made = make_plan(
        plan.unit, plan.costs, plan.cluster, other, plan.microbatches, None, constraints_of(plan), True
    )
    return [(name, plan), (other.value, made)]


def document(
    fixed: Sequence[ServingReport],
    adaptive: ServingReport | None,
    known: Sequence[Capability],
    setting: Setting,
) -> dict[str, Any]:
    """A simulation in figures."""
    found: dict[str, Any] = {
        "clock": "simulated",
        "arrivals": setting.arrivals.name,
        "requests": len(setting.arrivals.times_s),
        "offered_per_s": _finite(setting.arrivals.rate_per_s),
        "longest_gap_s": setting.arrivals.longest_gap_s,
        "seed": setting.faults.seed,
        "policies": {report.policy: figures(report) for report in fixed},
    }
    if adaptive is None:
        return found
    # A policy that served fewer requests is no measure: those that it failed have no latency.
    whole = [r for r in fixed if r.num_finished >= adaptive.num_finished]
    best = min((r.normalised_s.mean for r in whole if r.normalised_s), default=None)
    own = adaptive.normalised_s.mean if adaptive.normalised_s else None
    kinds = [d.kind.value for d in adaptive.decisions]
    return found | {
        "adaptive": figures(adaptive),
        "switches": kinds.count("switch"),
        "decisions": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "ratio_to_better_fixed": own / best if own and best else None,
        "crossing_per_s": crossing_per_s(tuple(known)),
        "capacity_per_s": {x.name: x.capacity_per_s for x in known},
        "reasons": [
            {"at_s": d.at_s, "kind": d.kind.value, "policy": d.policy, "why": d.why}
            for d in adaptive.decisions
        ],
    }


def figures(report: ServingReport) -> dict[str, Any]:
    """One report as JSON; a time is in seconds."""
    found = asdict(report) | {"clock": report.clock.value, "utilisation": dict(report.utilisation)}
    found["offered_per_s"] = _finite(report.offered_per_s)
    found["capacity_per_s"] = _finite(report.capacity_per_s)
    del found["decisions"]
    return found


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _show(found: dict[str, Any], fixed: Sequence[ServingReport], adaptive: ServingReport | None) -> None:
    """For people."""
    out = console()
    reports = (*fixed, *((adaptive,) if adaptive else ()))
    table = Table("", title=f"{found['requests']} requests of {found['arrivals']} (simulated)")
    for report in reports:
        table.add_column(report.policy, justify="right")
    columns = [_rows(report) for report in reports]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    out.print(table)
    notes = dict.fromkeys(f"{r.policy}: {note}" for r in reports for note in r.notes)
    for note in notes:
        out.print(note, markup=False)
    if adaptive is None:
        return
    for decision in adaptive.decisions[:SHOWN]:
        out.print(f"{decision.at_s:9.2f} s  {decision.kind.value}: {decision.why}", markup=False)
    if len(adaptive.decisions) > SHOWN:
        out.print(f"... and {len(adaptive.decisions) - SHOWN} decisions more")
    ratio = found["ratio_to_better_fixed"]
    if ratio is not None:
        what = f"{found['switches']} switches; normalised latency {ratio:.3f}x the better fixed policy's"
        out.print(f"{what} (simulated)")


# Decisions that are shown to people.
SHOWN = 10


def _rows(report: ServingReport) -> dict[str, str]:
    """What people read of one report, by the name of its row."""
    from tessera.report import duration, percent

    def shown(times: Quantiles | None) -> str:
        return ", ".join(duration(t * 1e6) for t in (times.p50, times.p90, times.p99)) if times else "-"

    normalised = report.normalised_s
    slo, dollars, joules = report.slo_attainment, report.usd_per_million_tokens, report.joules_per_token
    lost = (report.num_refused, report.num_restarted, report.num_failed)
    busy = (percent(share) for name, share in report.utilisation if " -> " not in name)
    return {
        "requests per second": f"{report.requests_per_s:.4g}",
        "tokens per second": f"{report.tokens_per_s:.4g}",
        "first token: p50, p90, p99": shown(report.ttft_s),
        "each further token: p50, p90, p99": shown(report.tpot_s),
        "latency: p50, p90, p99": shown(report.latency_s),
        "latency over tokens: mean": duration(normalised.mean * 1e6) if normalised else "-",
        "requests within the limits": percent(slo) if slo is not None else "-",
        "most waiting; refused, restarted, failed": f"{report.max_waiting}; {', '.join(map(str, lost))}",
        "busy": ", ".join(busy),
        "dollars per million tokens": f"{dollars:.3g}" if dollars is not None else "-",
        "joules per token": f"{joules:.3g}" if joules is not None else "-",
    }
