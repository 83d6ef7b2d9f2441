"""Figures of tables and pages.

Lanes are averaged by rate. Utilisation counts overlapping time once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.ir import Baseline, Plan, Span, Step, Timeline
from tessera.plan.explain import explain, gain_over

ROUND = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)


def shares(plan: Plan) -> tuple[float, ...]:
    rates = [lane.rate_per_s for lane in plan.lanes]
    return tuple(rate / sum(rates) for rate in rates)


def main_lane(plan: Plan) -> int:
    return max(enumerate(shares(plan)), key=lambda lane: lane[1])[0]


def step_title(step: Step) -> str:
    return f"{step.kind}, batch {step.batch}, context {step.context}"


def ratios(plan: Plan) -> dict[str, float]:
    """The plan over each coarse policy by the plan's objective, where both are known."""
    gains = ((b.name, getattr(gain_over(plan, b), plan.objective.value)) for b in plan.baselines)
    return {name: ratio for name, ratio in gains if ratio}


def best_baseline(plan: Plan) -> tuple[str, float] | None:
    return min(ratios(plan).items(), key=lambda x: x[1], default=None)


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """Latency is that of one request alone."""

    policy: str
    how: str
    requests_per_s: float | None
    ratio_to_best_baseline: float | None = None
    latency_us: float | None = None


def compared(plan: Plan) -> tuple[PolicyLine, ...]:
    gains = ratios(plan)
    least = min(gains.values(), default=None)
    name, how = f"{plan.policy} (this plan)", f"simulated, {plan.microbatches} in flight"
    baselines = sorted(plan.baselines, key=lambda b: -(b.throughput_per_s or 0.0))
    best = {policy for policy, ratio in gains.items() if ratio == least}
    marks = {b.name: f"{b.name} (best baseline)" if b.name in best else b.name for b in baselines}
    relative = {name: least / ratio for name, ratio in gains.items() if least}
    return (
        PolicyLine(name, how, plan.simulated_per_s, least, plan.latency_us),
        PolicyLine("the same", "by busy time alone", plan.throughput_per_s),
        *(
            PolicyLine(marks[b.name], _how(b), b.throughput_per_s, relative.get(b.name), b.latency_us)
            for b in baselines
        ),
        PolicyLine("upper bound", "of any mix, modelled", plan.bound_per_s),
    )


def _how(baseline: Baseline) -> str:
    return "does not apply" if baseline.throughput_per_s is None else "simulated"


@dataclass(frozen=True, slots=True)
class UsedDevice:
    device: str
    gpu: str
    launches: float
    share: float
    utilisation: float
    weight_bytes: int


def device_uses(plan: Plan, timeline: Timeline | None = None) -> tuple[UsedDevice, ...]:
    """Utilisation is of the timeline, else of the plan's rates."""
    explanation, names = explain(plan), plan.cluster.names
    busy = {usage.name: usage.utilisation for usage in explanation.devices}
    placed = [sum(k.num_runs * k.share[d] for k in explanation.kernels) for d in range(len(names))]
    if timeline is not None:
        busy = dict.fromkeys(names, 0.0) | utilisation(timeline)
    return tuple(
        UsedDevice(x.name, x.gpu, num, num / (sum(placed) or 1), busy[x.name], memory.weight_bytes)
        for x, num, memory in zip(plan.cluster.devices, placed, explanation.memory, strict=True)
    )


def headline(plan: Plan) -> tuple[float, str]:
    """Tokens for decodes, else requests."""
    units = zip(plan.unit.counts, plan.unit.graphs, strict=True)
    decodes = sum(count for count, graph in units if graph.trace.step.kind == "decode")
    return (plan.rows_per_s * decodes, "tokens") if decodes else (plan.rows_per_s, "requests")


@dataclass(frozen=True, slots=True)
class Track:
    name: str
    is_link: bool
    spans: tuple[Span, ...]


def tracks(timeline: Timeline, devices: Iterable[str] = ()) -> tuple[Track, ...]:
    """Devices come first, even if idle."""
    by_track: dict[str, list[Span]] = {name: [] for name in devices}
    for span in timeline.spans:
        by_track.setdefault(span.track, []).append(span)
    listed = [Track(name, any(s.is_transfer for s in x), tuple(x)) for name, x in by_track.items()]
    return tuple(sorted(listed, key=lambda track: track.is_link))  # stable: order of appearance within a kind


def utilisation(timeline: Timeline) -> dict[str, float]:
    run_us = end_us(timeline)
    return {name: us / run_us for name, us in timeline.busy_us().items()} if run_us > 0.0 else {}


def end_us(timeline: Timeline) -> float:
    return max(timeline.makespan_us, max((s.stop_us for s in timeline.spans), default=0.0))


def ticks(us: float) -> int:
    """Whole nanoseconds, so that equal moments compare equal."""
    return round(us * 1000)


def rows(spans: Sequence[Span]) -> list[int]:
    free_at: list[int] = []
    placed = []
    for span in spans:
        start = ticks(span.start_us)
        row = next((n for n, free in enumerate(free_at) if free <= start), len(free_at))
        if row == len(free_at):
            free_at.append(0)
        free_at[row] = ticks(span.stop_us)
        placed.append(row)
    return placed


def round_limits(least: float, most: float) -> list[float]:
    scale = 10.0 ** math.floor(math.log10(least))
    tens = range(math.ceil(math.log10(most / scale)) + 1)
    numbers = [scale * step * 10**n for n in tens for step in ROUND]
    end = next(x for x in numbers if x >= most)
    return [x for x in numbers if least <= x <= end]


def short_name(name: str) -> str:
    """ "aten.mm.default" is "mm"; other names are unchanged."""
    parts = name.split(".")
    if len(parts) < 2 or parts[0] not in ("aten", "prims"):
        return name
    return parts[1].lstrip("_").replace("scaled_dot_product", "sdpa") or name
