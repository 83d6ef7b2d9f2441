"""Cost and energy objectives: work per dollar and joule, and promising device sets.

Every device in use is rented; unused ones are off. Energy is modelled: `IDLE_SHARE` of the board power while
idle, all of it while busy; links and hosts are not counted.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.arrays import Floats
from tessera.plan.problem import Mix, Problem, spread_us

# An assumption.
IDLE_SHARE = 0.2

Devices = tuple[int, ...]


def usd_per_hour(cluster: ir.Cluster, devices: Devices) -> float:
    total = 0.0
    for device in (cluster.devices[d] for d in devices):
        if device.usd_per_hour is None:
            message = f"{device.name} has no price, so work per dollar is unknown"
            raise PlanInfeasible(message, "Leave it out, or use another objective; see `tessera gpus`.")
        total += device.usd_per_hour
    return total


def joules(problem: Problem, mix: Mix, rate_per_s: float) -> float:
    idle, full = watts(problem.cluster, mix.devices)
    busy_s = mix.busy_us[list(mix.devices)] * 1e-6
    return float((full - idle) @ busy_s + idle.sum() / rate_per_s)


def watts(cluster: ir.Cluster, devices: Devices) -> tuple[Floats, Floats]:
    full = []
    for device in (cluster.devices[d] for d in devices):
        if device.tdp_w is None:
            message = f"the power of {device.name} is not known, so work per joule is unknown"
            raise PlanInfeasible(message, "Leave it out, or use another objective.")
        full.append(device.tdp_w)
    return IDLE_SHARE * np.array(full), np.array(full)


def figure(problem: Problem, objective: ir.Objective, mix: Mix, rate_per_s: float) -> float:
    if objective is ir.Objective.COST:
        return rate_per_s / usd_per_hour(problem.cluster, mix.devices)
    if objective is ir.Objective.ENERGY:
        return 1.0 / joules(problem, mix, rate_per_s)
    return rate_per_s


def sets_of(kinds: Sequence[Sequence[int]]) -> Iterator[Devices]:
    """Not empty; devices of a kind vary in number only."""
    for counts in product(*(range(len(kind) + 1) for kind in kinds)):
        if any(counts):
            yield tuple(sorted(d for kind, num in zip(kinds, counts, strict=True) for d in kind[:num]))


def bound(problem: Problem, objective: ir.Objective, devices: Devices) -> float:
    load = problem.load_us[:, list(devices)]
    period_us = spread_us(load)
    if objective is ir.Objective.COST:
        return 1e6 / period_us / usd_per_hour(problem.cluster, devices)
    idle, full = watts(problem.cluster, devices)
    least = float((load * (full - idle)).min(axis=1).sum()) + float(idle.sum()) * period_us
    return 1e6 / least
