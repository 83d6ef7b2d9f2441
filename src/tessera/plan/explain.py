"""Explain: figures and reasons of a plan, as records.

Figures are per average request and use the plan's costs. Cost errors are shared by all launches of a kernel
and independent between kernels; a gain below the error is not called a gain. With several batches, figures
are per work unit, kernel costs are means. A reason moves all launches of a kernel of the main lane to another
device at the same shares, and is exact for that move alone.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated

import numpy as np

from tessera import ir
from tessera.ir.units import plural
from tessera.plan.arrays import Labels
from tessera.plan.config import FULL
from tessera.plan.latency import bound_us
from tessera.plan.problem import Column, Mix, Problem, build, mix_of
from tessera.plan.search.robust import Sampler

MAX_REASONS = 8
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Usage:
    # "src -> dst" for a link.
    name: str
    is_link: Annotated[bool, ir.timeline.HIDDEN]
    busy_us: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel in one kind of module."""

    kernel: str
    # Module path with numbers as "*": "model.layers.*.mlp".
    scope: str
    num_runs: int
    # Per device: microseconds per request if all ran there; share that does.
    us: tuple[float, ...]
    share: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """Ratio to a coarse policy; above one is better. None: does not apply."""

    name: str
    throughput: float | None
    latency: float | None
    cost: float | None = None
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    device: str
    capacity_bytes: int
    # Weights of all lanes; the rest of one request.
    weight_bytes: int
    microbatch_bytes: int
    state_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True)
class Reason:
    """The device of a kernel, and the cost of the best alternative."""

    kernel: str
    scope: str
    device: str
    other: str
    # Per request; negative transfers are saved.
    here_us: float
    there_us: float
    transfers_us: float
    # After the move, relative, by busy time.
    period: float

    @property
    def sentence(self) -> str:
        moved = "save" if self.transfers_us < 0 else "add"
        transfers = f"and {moved} {_ms(abs(self.transfers_us))} of transfers" if self.transfers_us else ""
        what = f"{self.kernel} in {self.scope or 'the model'} runs on {self.device}"
        times = f"{_ms(self.there_us)} instead of {_ms(self.here_us)}"
        price = f"on {self.other} it would take {times} {transfers}".rstrip()
        return f"{what}: {price}, {self._effect}."

    @property
    def _effect(self) -> str:
        if self.period > 1 + SAME:
            return f"and each request {self.period - 1:.1%} longer"
        if self.period < 1 - SAME:
            return f"and busy time alone {1 - self.period:.1%} less; the plan is better as simulated"
        return "with no change of the rate"


@dataclass(frozen=True)
class Explanation:
    devices: tuple[Usage, ...]
    links: tuple[Usage, ...]
    bottleneck: str
    kernels: tuple[KernelUse, ...]
    gains: tuple[Gain, ...]
    # Per average request.
    num_transfers: float
    transfer_bytes: float
    error: float
    verdict: str
    memory: tuple[DeviceMemory, ...]
    reasons: tuple[Reason, ...]
    # Sentences of the reasons, then remarks.
    notes: tuple[str, ...]


def explain(plan: ir.Plan) -> Explanation:
    problem = build(plan.unit, plan.costs, plan.cluster)
    mix = mix_of(problem, plan)
    devices, links = _usages(problem, mix, plan)
    busiest = max((*devices, *links), key=lambda u: u.utilisation)
    gains = tuple(gain_over(plan, b) for b in plan.baselines)
    error = Sampler(problem).rel_error(mix)
    top_reasons = reasons(problem, mix, _nodes(problem))
    return Explanation(
        devices=devices,
        links=links,
        bottleneck=busiest.name,
        kernels=_kernels(mix, problem),
        gains=gains,
        num_transfers=mix.num_messages,
        transfer_bytes=sum(s * _bytes(problem, c) for s, c in zip(mix.shares, mix.columns, strict=True)),
        error=error,
        verdict=_verdict(plan, gains, busiest, error),
        memory=_memory(problem, mix),
        reasons=top_reasons,
        notes=(*(reason.sentence for reason in top_reasons), *_remarks(plan)),
    )


def latency_bound_us(plan: ir.Plan) -> float:
    return bound_us(build(plan.unit, plan.costs, plan.cluster), FULL)


def _usages(problem: Problem, mix: Mix, plan: ir.Plan) -> tuple[tuple[Usage, ...], tuple[Usage, ...]]:
    num, names = problem.num_devices, problem.cluster.names
    per_us = plan.throughput_per_s / 1e6
    busy = mix.busy_us.tolist()
    devices = tuple(Usage(names[d], False, busy[d], busy[d] * per_us) for d in range(num))
    pairs = permutations(range(num), 2)
    wires = [(f"{names[a]} -> {names[b]}", busy[num + a * num + b]) for a, b in pairs]
    return devices, tuple(Usage(name, True, us, us * per_us) for name, us in wires)


def _memory(problem: Problem, mix: Mix) -> tuple[DeviceMemory, ...]:
    weights, each = problem.footprints(mix.columns)
    num = problem.num_devices
    states = np.array([problem.states.bytes_on(c.labels, num) for c in mix.columns])
    counts = np.array(mix.microbatches)
    columns = (weights, each.max(axis=0), counts @ states, counts @ (each - states))
    return tuple(
        DeviceMemory(device.name, device.memory_bytes, *(int(x) for x in row))
        for device, *row in zip(problem.cluster.devices, *columns, strict=True)
    )


def _launches(problem: Problem) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(kernel, scope) -> launches, as (step, launch)."""
    launches: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for step, graph in enumerate(problem.unit.graphs):
        for index, launch in enumerate(graph.trace.launches):
            key = graph.trace.kernel_of(index).name, re.sub(r"\b\d+\b", "*", launch.scope)
            launches.setdefault(key, []).append((step, index))
    return launches


def _nodes(problem: Problem) -> dict[tuple[str, str], Labels]:
    """(kernel, scope) -> nodes, heaviest first."""
    node_of, launches = problem.node_of, _launches(problem)
    nodes = {key: np.unique([node_of[step][n] for step, n in at]) for key, at in launches.items()}
    return dict(sorted(nodes.items(), key=lambda x: -float(problem.load_us[x[1]].max(axis=1).sum())))


def _bytes(problem: Problem, column: Column) -> float:
    value, _, _ = problem.crossings(column.labels)
    return float((problem.values.num_bytes * problem.values.runs)[value].sum())


def _kernels(mix: Mix, problem: Problem) -> tuple[KernelUse, ...]:
    num, counts = problem.num_devices, problem.unit.counts
    uses = []
    for key, launches in _launches(problem).items():
        runs, us, on = 0.0, np.zeros(num), np.zeros(num)
        for step, launch in launches:
            placed = [column.labels[problem.node_of[step][launch]] for column in mix.columns]
            runs += counts[step]
            us += counts[step] * problem.cost_us[step][launch]
            on += counts[step] * np.bincount(placed, weights=mix.shares, minlength=num)
        uses.append(KernelUse(*key, round(runs), tuple(us.tolist()), tuple((on / runs).tolist())))
    return tuple(sorted(uses, key=lambda k: (-max(k.us), k.scope, k.kernel)))


def gain_over(plan: ir.Plan, baseline: ir.Baseline) -> Gain:
    rate = baseline.throughput_per_s
    return Gain(
        baseline.name,
        plan.simulated_per_s / rate if rate else None,
        _ratio(baseline.latency_us, plan.latency_us),
        _ratio(baseline.usd_per_1k_units, plan.usd_per_1k_units),
        _ratio(baseline.joules_per_unit, plan.joules_per_unit),
    )


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def _verdict(plan: ir.Plan, gains: tuple[Gain, ...], busiest: Usage, error: float) -> str:
    ratios = [(ratio, g.name) for g in gains if (ratio := getattr(g, plan.objective.value)) is not None]
    where = f"{busiest.name} is the bottleneck ({busiest.utilisation:.0%} busy)"
    if plan.policy in {g.name for g in gains}:
        return f"The plan is {plan.policy}; {where}."
    if len(plan.cluster.devices) == 1:
        return f"One device: there is nothing to divide; {where}."
    if not ratios:
        return f"No coarser policy applies; {where}."
    ratio, name = min(ratios)
    what = {
        ir.Objective.THROUGHPUT: "the throughput of",
        ir.Objective.LATENCY: "as fast for one request as",
        ir.Objective.COST: "the work per dollar of",
        ir.Objective.ENERGY: "the work per joule of",
    }[plan.objective]
    if ratio - 1.0 <= error:
        reason = f"within the costs' own error of {error:.1%}" if error else "and the costs state no error"
        return f"No gain: use {name}. The plan has {ratio:.3f}x {what} it, {reason}; {where}."
    return (
        f"{ratio:.2f}x {what} the best coarser policy, {name}, "
        f"which is more than the costs' own error of {error:.1%}; {where}."
    )


def _remarks(plan: ir.Plan) -> Iterator[str]:
    below = 1.0 - plan.simulated_per_s / plan.bound_per_s
    yield f"The simulated rate is {below:.1%} below the bound that no mix of placements exceeds."
    if plan.followers and len(plan.lanes) > 1:
        held = ", ".join(map(str, plan.followers))
        loss = f"{plan.rounding_loss:.2%} of the rate (simulated)"
        yield f"Microbatches that follow each lane: {held}; rounding to whole ones costs {loss}."
    if plan.by_microbatches:
        rates = ", ".join(f"{n}: {rate / plan.simulated_per_s:.2f}x" for n, rate in plan.by_microbatches)
        yield f"With other numbers of requests in flight (simulated): {rates}."
    if plan.max_microbatches is not None:
        yield f"Memory holds up to {plural(plan.max_microbatches, 'request')} in flight."
    if plan.robust is not None:
        low, high = (x / plan.simulated_per_s for x in (plan.robust.p10_per_s, plan.robust.p90_per_s))
        yield (
            f"If the costs are as wrong as they may be: {low:.2f}x to {high:.2f}x of the rate in 8 of 10 "
            "samples, "
            f"{plan.robust.regret:.1%} below the best candidate on average (modelled)."
        )
    idle = [x for n, x in enumerate(plan.cluster.names) if n not in plan.used]
    if idle:
        yield f"Not used: {', '.join(idle)}."
    yield from (f"As asked: {constraint}." for constraint in plan.constraints)


def _ms(us: float) -> str:
    return f"{us / 1e3:,.0f} ms" if us >= 1e5 else f"{us / 1e3:.3g} ms"


def reasons(problem: Problem, mix: Mix, kernels: dict[tuple[str, str], Labels]) -> tuple[Reason, ...]:
    main = int(np.argmax(mix.shares))
    candidates = (_reason(problem, mix, main, name, nodes) for name, nodes in kernels.items())
    return tuple(r for r in candidates if r is not None)[:MAX_REASONS]


def _reason(problem: Problem, mix: Mix, main: int, name: tuple[str, str], nodes: Labels) -> Reason | None:
    """None where constraints, or a single device, leave no alternative."""
    column = mix.columns[main]
    placed = column.labels[nodes]
    device = int(np.bincount(placed, minlength=problem.num_devices).argmax())
    moved = nodes[placed == device]
    options = []
    for other in {*range(problem.num_devices)} - {device}:
        labels = column.labels.copy()
        labels[moved] = other
        if problem.is_allowed(labels):
            moved_column = problem.column(labels)
            options.append((_period(mix, main, moved_column), other, moved_column.path_us))
    if not options:
        return None
    period, other, path_us = min(options)
    here_us, there_us = (float(problem.load_us[moved, d].sum()) for d in (device, other))
    added = path_us - column.path_us - (there_us - here_us)
    names = problem.cluster.names
    return Reason(*name, names[device], names[other], here_us, there_us, added, period)


def _period(mix: Mix, main: int, column: Column) -> float:
    moved = column.busy_us - mix.columns[main].busy_us
    return float((mix.busy_us + mix.shares[main] * moved).max() / mix.busy_us.max())
