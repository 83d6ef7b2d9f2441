"""Cost and energy: work per dollar and per joule, and which sets of devices may be worth using.

Rent is paid for every device that some lane uses, busy or not. Energy is modelled: a device in use draws
`IDLE_SHARE` of its board power while it waits and all of it while it is busy; links and hosts are not
counted. Devices without a lane are off and cost nothing.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.arrays import Floats
from tessera.plan.problem import Mix, Problem, spread_us

# Power of an idle GPU as a share of its board power: an assumption.
IDLE_SHARE = 0.2

Devices = tuple[int, ...]


def usd_per_hour(cluster: ir.Cluster, devices: Devices) -> float:
    """PlanInfeasible if a device has no price."""
    total = 0.0
    for device in (cluster.devices[d] for d in devices):
        if device.usd_per_hour is None:
            message = f"{device.name} has no price, so work per dollar is unknown"
            raise PlanInfeasible(message, "Leave it out, or use another objective; see `tessera gpus`.")
        total += device.usd_per_hour
    return total


def joules(problem: Problem, mix: Mix, rate_per_s: float) -> float:
    """Energy of one work unit at a rate; PlanInfeasible if a device's power is unknown."""
    idle, full = _watts(problem.cluster, mix.devices)
    busy_s = mix.busy_us[list(mix.devices)] * 1e-6
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
    """The objective's figure of a mix at a rate; more is better."""
    if objective is ir.Objective.COST:
        return rate_per_s / usd_per_hour(problem.cluster, mix.devices)
    if objective is ir.Objective.ENERGY:
        return 1.0 / joules(problem, mix, rate_per_s)
    return rate_per_s


def subsets(problem: Problem, objective: ir.Objective) -> Iterator[Devices]:
    """Sets of devices, best bound first; of equal devices only their number varies."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, device in enumerate(problem.cluster.devices):
        constraint = b"" if problem.allowed is None else problem.allowed[:, index].tobytes()
        costs = problem.load_us[:, index].tobytes()
        key = (device.gpu, device.memory_bytes, device.usd_per_hour, costs, constraint)
        kinds.setdefault(key, []).append(index)
    groups = list(kinds.values())
    counts = (n for n in product(*(range(len(g) + 1) for g in groups)) if any(n))
    sets = (tuple(sorted(x for g, n in zip(groups, num, strict=True) for x in g[:n])) for num in counts)
    return iter(sorted(sets, key=lambda devices: -bound(problem, objective, devices)))


def bound(problem: Problem, objective: ir.Objective, devices: Devices) -> float:
    """No mix on these devices has a better figure."""
    load = problem.load_us[:, list(devices)]
    period_us = spread_us(load)
    if objective is ir.Objective.COST:
        return 1e6 / period_us / usd_per_hour(problem.cluster, devices)
    idle, full = _watts(problem.cluster, devices)
    least = float((load * (full - idle)).min(axis=1).sum()) + float(idle.sum()) * period_us
    return 1e6 / least
