"""Explain: what a plan does and why, as records for others to show.

Figures are per average request and follow from the plan's own costs. The error of the plan's costs assumes
that errors are shared by all launches of a kernel and independent between kernels: the root of the summed
squares of (share of the work x relative error). A gain below it is not called a gain. Under the cost and
energy objectives gains are of work per dollar and per joule. Where lanes are of unlike batches, figures are
per work unit, costs of a kernel are means over the batches, and reasons are those of the main lane.

Reasons price a kernel elsewhere: all launches of it that the main lane runs on its usual device are moved
to every other device in turn, at the same shares. A reason is exact for that move alone; several moves
together may pay where each alone does not.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.arrays import Labels
from tessera.plan.config import FULL
from tessera.plan.latency import bound_us
from tessera.plan.problem import Column, Mix, Problem, build, joined, mix_of

MAX_REASONS = 8
# Relative changes of the period below this are ignored.
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Usage:
    """How busy one device or link is at the plan's rate by busy time."""

    # Device name, or "src -> dst".
    name: str
    is_link: bool
    # Busy microseconds per request, and the fraction of the time that is.
    busy_us: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel in one kind of module: what it costs where, and where it runs."""

    kernel: str
    # Module path with numbers as "*": "model.layers.*.mlp".
    scope: str
    # Runs per request.
    num_runs: int
    # Per device: microseconds per request if all of it ran there, and the share that does.
    us: tuple[float, ...]
    share: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """The plan against one coarse policy; above one is better. None where the policy does not apply."""

    name: str
    throughput: float | None
    latency: float | None
    # Work per dollar and per joule; None also where prices or power are not known.
    cost: float | None = None
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    device: str
    capacity_bytes: int
    # Weights of all lanes; state and temporaries of one request in flight, at most.
    weight_bytes: int
    microbatch_bytes: int
    # Bytes of all requests in flight, each on its lane.
    state_bytes: int
    temporary_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True)
class Reason:
    """One kernel in one kind of module: where it runs, and what the best other place would cost."""

    kernel: str
    scope: str
    device: str
    other: str
    # Per request: own time here and there, and transfers that the move would add (or save, if negative).
    here_us: float
    there_us: float
    transfers_us: float
    # Time between two requests by busy time, after the move, as a multiple of before.
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
    """What `explain` says about a plan."""

    devices: tuple[Usage, ...]
    links: tuple[Usage, ...]
    bottleneck: str
    kernels: tuple[KernelUse, ...]
    gains: tuple[Gain, ...]
    # Transfers and bytes per average request.
    num_transfers: float
    transfer_bytes: float
    # Relative error to expect of the plan's figures.
    error: float
    # No placement serves one request alone faster than this; 0 if it was not asked for.
    latency_bound_us: float
    is_gain: bool
    verdict: str
    memory: tuple[DeviceMemory, ...] = ()
    reasons: tuple[Reason, ...] = ()
    # What else is worth knowing, in words.
    remarks: tuple[str, ...] = ()


def explain(plan: ir.Plan, is_brief: bool = False) -> Explanation:
    """Figures and sentences about a plan; `is_brief` leaves out the latency bound, which takes long."""
    problem = _problem(plan)
    mix = mix_of(problem, plan)
    main = problem.problems[mix.columns[int(np.argmax(mix.shares))].variant]
    devices, links = _usages(problem, mix, plan)
    busiest = max((*devices, *links), key=lambda u: u.utilisation)
    gains = tuple(_gain(plan, b) for b in plan.baselines)
    error = _error(plan, mix)
    is_gain, verdict = _verdict(plan, gains, busiest, error)
    return Explanation(
        devices=devices,
        links=links,
        bottleneck=busiest.name,
        kernels=_kernels(plan, mix, problem),
        gains=gains,
        num_transfers=mix.num_messages,
        transfer_bytes=sum(s * _bytes(problem, c) for s, c in zip(mix.shares, mix.columns, strict=True)),
        error=error,
        latency_bound_us=0.0 if is_brief else _latency_bound_us(problem),
        is_gain=is_gain,
        verdict=verdict,
        memory=_memory(problem, mix),
        reasons=reasons(main, mix, _nodes(main), problem.weight_of),
        remarks=tuple(_remarks(plan)),
    )


def latency_bound_us(plan: ir.Plan) -> float:
    """No placement makes one request alone faster than this."""
    return _latency_bound_us(_problem(plan))


def _latency_bound_us(problem: Problem) -> float:
    return min(bound_us(p, FULL) for p in problem.problems)


def _problem(plan: ir.Plan) -> Problem:
    """The plan's batches, most often one."""
    return joined([build(v.unit, v.costs, plan.cluster) for v in plan.every_variant])


def _usages(problem: Problem, mix: Mix, plan: ir.Plan) -> tuple[tuple[Usage, ...], tuple[Usage, ...]]:
    num, names = problem.num_devices, problem.cluster.names
    per_us = plan.throughput_per_s / 1e6
    busy = mix.busy_us.tolist()
    devices = tuple(Usage(names[d], False, busy[d], busy[d] * per_us) for d in range(num))
    links = tuple(
        Usage(f"{names[a]} -> {names[b]}", True, us, us * per_us)
        for a in range(num)
        for b in range(num)
        if a != b
        for us in (busy[num + a * num + b],)
    )
    return devices, links


def _memory(problem: Problem, mix: Mix) -> tuple[DeviceMemory, ...]:
    weights, each = problem.footprints(mix.columns)
    num = problem.num_devices
    states = np.array([problem.problems[c.variant].states.bytes_on(c.labels, num) for c in mix.columns])
    counts = np.array(mix.microbatches)
    columns = (weights, each.max(axis=0), counts @ states, counts @ (each - states))
    return tuple(
        DeviceMemory(device.name, device.memory_bytes, *(int(x) for x in row))
        for device, *row in zip(problem.cluster.devices, *columns, strict=True)
    )


def _nodes(problem: Problem) -> dict[tuple[str, str], Labels]:
    """(kernel, scope) -> its nodes, heaviest first."""
    found: dict[tuple[str, str], set[int]] = {}
    for step, graph in enumerate(problem.unit.graphs):
        nodes = problem.node_of[step].tolist()
        for index, launch in enumerate(graph.trace.launches):
            key = (graph.trace.kernel_of(index).name, _kind_of(launch.scope))
            found.setdefault(key, set()).add(nodes[index])
    listed = {key: np.array(sorted(nodes)) for key, nodes in found.items()}
    return dict(sorted(listed.items(), key=lambda x: -float(problem.load_us[x[1]].max(axis=1).sum())))


def _kind_of(scope: str) -> str:
    """Numbers as "*": "model.layers.*.mlp"."""
    return re.sub(r"\b\d+\b", "*", scope)


def _bytes(problem: Problem, column: Column) -> float:
    """Bytes that one work unit moves."""
    own = problem.problems[column.variant]
    value, _, _ = own.crossings(column.labels)
    total = float((own.values.num_bytes * own.values.runs)[value].sum())
    return total / problem.weight_of(column)


def _kernels(plan: ir.Plan, mix: Mix, problem: Problem) -> tuple[KernelUse, ...]:
    """Heaviest first."""
    num = problem.num_devices
    runs: dict[tuple[str, str], float] = {}
    tables: dict[tuple[str, str], np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for variant, own in enumerate(problem.problems):
        lanes = [n for n, c in enumerate(mix.columns) if c.variant == variant]
        # Requests of each lane in an average work unit, and of all lanes of this batch.
        shares = np.array([mix.shares[n] for n in lanes]) * (plan.batch / own.unit.batch)
        each = float(shares.sum()) if plan.variants else 1.0
        for step, (graph, count) in enumerate(zip(own.unit.graphs, own.unit.counts, strict=True)):
            placed = np.array([mix.columns[n].labels[own.node_of[step]] for n in lanes])
            for index, launch in enumerate(graph.trace.launches):
                key = (graph.trace.kernel_of(index).name, _kind_of(launch.scope))
                runs[key] = runs.get(key, 0.0) + each * count
                table = tables.setdefault(key, np.zeros((2, num)))
                table[0] += each * count * own.cost_us[step][index]
                table[1] += count * np.bincount(placed[:, index], weights=shares, minlength=num)
    found = [
        KernelUse(key[0], key[1], round(runs[key]), tuple(us.tolist()), tuple((on / runs[key]).tolist()))
        for key, (us, on) in tables.items()
    ]
    return tuple(sorted(found, key=lambda k: (-max(k.us), k.scope, k.kernel)))


def _gain(plan: ir.Plan, baseline: ir.Baseline) -> Gain:
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


def _error(plan: ir.Plan, mix: Mix) -> float:
    """Shared within a kernel, independent between kernels; weighed by the time the plan spends on each."""
    spread: dict[str, float] = {}
    total = 0.0
    for share, lane in zip(mix.shares, plan.lanes, strict=True):
        unit, each = plan.unit_of(lane), share / plan.weight_of(lane)
        for step, (graph, count) in enumerate(zip(unit.graphs, unit.counts, strict=True)):
            for index, row in enumerate(plan.costs_of(lane)[step].costs):
                name = graph.trace.kernel_of(index).name
                cost = row[lane.placement.devices[step][index]]
                us = each * count * cost.us
                total += us
                spread[name] = spread.get(name, 0.0) + us * cost.rel_error
    return float(np.sqrt(sum(x * x for x in spread.values())) / total) if total else 0.0


def _verdict(plan: ir.Plan, gains: tuple[Gain, ...], busiest: Usage, error: float) -> tuple[bool, str]:
    known = [(ratio, g.name) for g in gains if (ratio := getattr(g, plan.objective.value)) is not None]
    where = f"{busiest.name} is the bottleneck ({busiest.utilisation:.0%} busy)"
    if plan.policy in {g.name for g in gains}:
        return False, f"The plan is {plan.policy}; {where}."
    if len(plan.cluster.devices) == 1:
        return False, f"One device: there is nothing to divide; {where}."
    if not known:
        return True, f"No coarser policy applies; {where}."
    ratio, name = min(known)
    what = {
        ir.Objective.THROUGHPUT: "the throughput of",
        ir.Objective.LATENCY: "as fast for one request as",
        ir.Objective.COST: "the work per dollar of",
        ir.Objective.ENERGY: "the work per joule of",
    }[plan.objective]
    if ratio - 1.0 <= error:
        reason = f"within the costs' own error of {error:.1%}" if error else "and the costs state no error"
        return False, f"No gain: use {name}. The plan has {ratio:.3f}x {what} it, {reason}; {where}."
    return True, (
        f"{ratio:.2f}x {what} the best coarser policy, {name}, "
        f"which is more than the costs' own error of {error:.1%}; {where}."
    )


def _remarks(plan: ir.Plan) -> Iterator[str]:
    """One sentence each."""
    below = 1.0 - plan.simulated_per_s / plan.bound_per_s
    yield f"The simulated rate is {below:.1%} below the bound that no mix of placements exceeds."
    if plan.variants:
        batches = ", ".join(str(variant.batch) for variant in plan.every_variant)
        yield f"Lanes are of batch {batches}; rates count requests of batch {plan.batch}."
    if plan.lane_table and len(plan.lanes) > 1:
        order = [plan.lane_table[n % len(plan.lane_table)] for n in range(plan.microbatches)]
        held = ", ".join(f"{order.count(n)}" for n in range(len(plan.lanes)))
        loss = f"{plan.rounding_loss:.2%} of the rate (simulated)"
        yield f"Microbatches that follow each lane: {held}; rounding to whole ones costs {loss}."
    if plan.by_microbatches:
        listed = ", ".join(f"{n}: {rate / plan.simulated_per_s:.2f}x" for n, rate in plan.by_microbatches)
        yield f"With other numbers of requests in flight (simulated): {listed}."
    if plan.max_microbatches is not None:
        yield f"Memory holds up to {_count(plan.max_microbatches, 'request')} in flight."
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


def _count(number: int, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g} ms"


def reasons(
    problem: Problem,
    mix: Mix,
    kernels: dict[tuple[str, str], Labels],
    weight_of: Callable[[Column], float] = lambda column: 1.0,
) -> tuple[Reason, ...]:
    """kernels: (kernel, scope) -> its nodes, heaviest first; the problem is the main lane's.

    weight_of: work units in a request of a column, where lanes are of unlike batches.
    """
    if problem.num_devices < 2:
        return ()
    main = int(np.argmax(mix.shares))
    weight = weight_of(mix.columns[main])
    found = (_reason(problem, mix, main, name, nodes, weight) for name, nodes in kernels.items())
    return tuple(r for r in found if r is not None)[:MAX_REASONS]


def _reason(
    problem: Problem, mix: Mix, main: int, name: tuple[str, str], nodes: Labels, weight: float
) -> Reason | None:
    column = mix.columns[main]
    placed = column.labels[nodes]
    here = int(np.bincount(placed, minlength=problem.num_devices).argmax())
    moved = nodes[placed == here]
    options = []
    for there in range(problem.num_devices):
        if there != here:
            labels = column.labels.copy()
            labels[moved] = there
            if problem.is_allowed(labels):
                options.append((_period(mix, main, problem.column(labels), weight), there))
    if not options:
        return None
    period, there = min(options)
    labels = column.labels.copy()
    labels[moved] = there
    here_us, there_us = (float(problem.load_us[moved, d].sum()) for d in (here, there))
    added = problem.column(labels).path_us - column.path_us * weight - (there_us - here_us)
    names = problem.cluster.names
    return Reason(*name, names[here], names[there], here_us, there_us, added, period)


def _period(mix: Mix, main: int, column: Column, weight: float) -> float:
    moved = column.busy_us / weight - mix.columns[main].busy_us
    return float((mix.busy_us + mix.shares[main] * moved).max() / mix.busy_us.max())
