"""Cost and energy: work per dollar and per joule, and which of the devices are worth having on.

Rent is paid for every device that some lane uses, busy or not. Energy is modelled: a device that is on
draws `IDLE_SHARE` of its board power when it waits and all of it when it is busy; links and hosts are
not counted. Devices without a lane are off and cost nothing.

So a plan may do better without some of its devices. Subsets are tried from the most promising: by what no
placement on them can exceed, then by the optimum of busy time; candidates are made for the best few. Of
equal devices the first are taken, whatever their links.
"""

from collections.abc import Callable, Iterator
from itertools import islice, product

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.arrays import Floats
from tessera.plan.problem import Mix, Problem, restricted, spread_us
from tessera.plan.search.local import throughput_mixes
from tessera.plan.search.task import Task

# What a GPU that is on draws while it waits, as a share of its board power: an assumption.
IDLE_SHARE = 0.2
# Subsets whose figure is bounded, solved, and given candidates.
MAX_BOUNDED, MAX_SOLVED, MAX_KEPT = 4096, 12, 4
# A subset whose optimum is below this share of the best one's is not worth simulating.
WORTH = 0.85

Devices = tuple[int, ...]


def used(mix: Mix) -> Devices:
    """Devices with a lane."""
    return tuple(np.unique(np.concatenate([c.labels for c in mix.columns])).tolist())


def usd_per_hour(cluster: ir.Cluster, devices: Devices) -> float:
    """Rent of some devices; PlanInfeasible if one has no price."""
    total = 0.0
    for device in (cluster.devices[d] for d in devices):
        if device.usd_per_hour is None:
            message = f"{device.name} has no price, so work per dollar is unknown"
            raise PlanInfeasible(message, "Leave it out, or use another objective; see `tessera gpus`.")
        total += device.usd_per_hour
    return total


def joules(problem: Problem, mix: Mix, rate_per_s: float) -> float:
    """Energy of one work unit at a rate; PlanInfeasible if a device's power is unknown."""
    idle, full = _watts(problem.cluster, used(mix))
    busy_s = mix.busy_us[list(used(mix))] * 1e-6
    return float((full - idle) @ busy_s + idle.sum() / rate_per_s)


def _watts(cluster: ir.Cluster, devices: Devices) -> tuple[Floats, Floats]:
    full = []
    for device in (cluster.devices[d] for d in devices):
        if device.tdp_w is None:
            message = f"the power of {device.name} is not known, so work per joule is unknown"
            raise PlanInfeasible(message, "Leave it out, or use another objective.")
        full.append(device.tdp_w)
    return IDLE_SHARE * np.array(full), np.array(full)


def figure(problem: Problem, objective: ir.Objective, mix: Mix, rate_per_s: float) -> float:
    """What the objective makes of a mix at a rate: more is better."""
    if objective is ir.Objective.COST:
        return rate_per_s / usd_per_hour(problem.cluster, used(mix))
    if objective is ir.Objective.ENERGY:
        return 1.0 / joules(problem, mix, rate_per_s)
    return rate_per_s


def planner(objective: ir.Objective) -> Callable[[Task], tuple[Mix, ...]]:
    """Candidates of the cost or the energy objective: those of throughput on the subsets worth having."""

    def mixes(task: Task) -> tuple[Mix, ...]:
        found: list[Mix] = []
        for devices, part in _worthwhile(task, objective):
            found += [_widened(task, devices, mix) for mix in throughput_mixes(part)]
        if not found:
            raise PlanInfeasible(
                "no subset of the devices fits", "Add a device, or lower --batch or --microbatches."
            )
        return tuple(found)

    return mixes


def _widened(task: Task, devices: Devices, mix: Mix) -> Mix:
    """A mix of some devices as one of all."""
    at = np.array(devices)
    return Mix(tuple(task.problem.column(at[c.labels]) for c in mix.columns), mix.shares, mix.microbatches)


def _quick(task: Task, devices: Devices) -> Callable[[Mix], float] | None:
    look = task.quick
    return None if look is None else lambda mix: look(_widened(task, devices, mix))


def _worthwhile(task: Task, objective: ir.Objective) -> Iterator[tuple[Devices, Task]]:
    """Subsets by the optimum of busy time, best first, with their tasks."""
    prob = task.problem
    order = sorted(islice(subsets(prob), MAX_BOUNDED), key=lambda d: -bound(prob, objective, d))
    solved: list[tuple[float, Devices, Task]] = []
    best = 0.0
    for devices in order:
        if len(solved) >= MAX_SOLVED or bound(prob, objective, devices) < WORTH * best:
            break
        part = restricted(prob, devices)
        if part is None:
            continue
        alone = Task(part, task.microbatches, task.is_judged, task.is_served, _quick(task, devices))
        try:
            mix = alone.free.mix
        except PlanInfeasible:  # does not fit: no candidate
            continue
        solved.append((figure(part, objective, mix, mix.rate_per_s), devices, alone))
        best = max(best, solved[-1][0])
    solved.sort(key=lambda x: -x[0])
    yield from ((d, part) for value, d, part in solved[:MAX_KEPT] if value >= WORTH * best)


def subsets(problem: Problem) -> Iterator[Devices]:
    """Every choice of how many of each kind of equal devices."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, device in enumerate(problem.cluster.devices):
        constraint = b"" if problem.allowed is None else problem.allowed[:, index].tobytes()
        key = (
            device.gpu,
            device.memory_bytes,
            device.usd_per_hour,
            problem.load_us[:, index].tobytes(),
            constraint,
        )
        kinds.setdefault(key, []).append(index)
    groups = list(kinds.values())
    for counts in product(*(range(len(g) + 1) for g in groups)):
        if any(counts):
            yield tuple(sorted(x for g, n in zip(groups, counts, strict=True) for x in g[:n]))


def bound(problem: Problem, objective: ir.Objective, devices: Devices) -> float:
    """No mix on these devices has a better figure."""
    load = problem.load_us[:, list(devices)]
    period_us = spread_us(load)
    if objective is ir.Objective.COST:
        return 1e6 / period_us / usd_per_hour(problem.cluster, devices)
    idle, full = _watts(problem.cluster, devices)
    least = float((load * (full - idle)).min(axis=1).sum()) + float(idle.sum()) * period_us
    return 1e6 / least
