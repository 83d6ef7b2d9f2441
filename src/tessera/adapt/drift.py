"""corrected: how wrong the costs are, from times of several kernels together.

Each observation says: on a device, kernels that were planned to take p_1, p_2, ... took t in all. Wanted are
factors f_k >= 0 per kernel type and device with sum of p_k f_k = t. There are usually fewer observations than
kernels, so the factors are also pulled towards 1, as hard as the costs say that they are right:

    minimise  sum over observations of ((sum_k p_k f_k - t) / (noise t))^2  +  sum_k ((f_k - 1) / error_k)^2

which is a non-negative least squares problem per device. Timing kernels one by one is the case of one term.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from tessera.errors import PlanInfeasible
from tessera.ir import Cluster, Costs, Placement, Plan, WorkUnit

# Relative error of one measured time.
MEASURED_ERROR = 0.02
# A new plan must do so many times as much. Capacities of one plan, measured with other requests of the same
# kind, differ by up to one percent, so less might be a loss; and a change of plans has a price.
LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Factors:
    """(device, kernel) -> real over planned time.

    A kernel that was not seen on a device is taken to be as wrong as the others there on average: a slow
    device is slow for all.
    """

    known: Mapping[tuple[str, str], float]
    # device -> mean factor, weighted by planned time
    usual: Mapping[str, float] = field(default_factory=dict)

    def of(self, kernel: str, device: str) -> float:
        return self.known.get((device, kernel), self.usual.get(device, 1.0))

    def times(self, older: "Factors") -> "Factors":
        """These on top of those that the plan was already corrected by."""
        keys = {*self.known, *older.known}
        devices = {*self.usual, *older.usual}
        return Factors(
            {(d, kernel): self.of(kernel, d) * older.of(kernel, d) for d, kernel in keys},
            {d: self.usual.get(d, 1.0) * older.usual.get(d, 1.0) for d in devices},
        )

    def apply(self, unit: WorkUnit, costs: Sequence[Costs]) -> tuple[Costs, ...]:
        """The price lists corrected; sources and errors stay those of the prices."""
        return scaled_costs(unit, costs, self.of)


def scaled_costs(
    unit: WorkUnit, costs: Sequence[Costs], factor: Callable[[str, str], float]
) -> tuple[Costs, ...]:
    """Price lists with every time multiplied by factor(kernel, device)."""
    known, made = cache(factor), []
    for graph, priced in zip(unit.graphs, costs, strict=True):
        rows = tuple(
            tuple(
                replace(cost, us=cost.us * known(graph.trace.kernel_of(launch).name, device.name))
                for cost, device in zip(row, priced.devices, strict=True)
            )
            for launch, row in enumerate(priced.costs)
        )
        made.append(replace(priced, costs=rows))
    return tuple(made)


# device -> observations: (planned microseconds by kernel, real microseconds of all)
Observations = Mapping[str, Sequence[tuple[Mapping[str, float], float]]]


def corrected(observations: Observations, error: float) -> Factors:
    """The factors that explain what was measured; `error` is what the costs say of themselves."""
    from scipy.optimize import nnls  # slow to import, and rarely needed

    known: dict[tuple[str, str], float] = {}
    usual: dict[str, float] = {}
    for device, rows in observations.items():
        kernels = sorted({kernel for planned, _ in rows for kernel in planned})
        column = {kernel: index for index, kernel in enumerate(kernels)}
        matrix = np.zeros((len(rows) + len(kernels), len(kernels)))
        target = np.zeros(len(matrix))
        for row, (planned, us) in enumerate(rows):
            for kernel, planned_us in planned.items():
                matrix[row, column[kernel]] = planned_us / (MEASURED_ERROR * us)
            target[row] = 1.0 / MEASURED_ERROR
        for index in range(len(kernels)):
            matrix[len(rows) + index, index] = target[len(rows) + index] = 1.0 / max(error, 1e-3)
        found, _ = nnls(matrix, target)
        known |= {(device, kernel): float(f) for kernel, f in zip(kernels, found, strict=True)}
        total = {kernel: sum(planned.get(kernel, 0.0) for planned, _ in rows) for kernel in kernels}
        weight = sum(total.values())
        usual[device] = sum(total[k] * known[device, k] for k in kernels) / weight if weight else 1.0
    return Factors(known, usual)


def drift(observations: Observations, factors: Factors) -> float:
    """How far the costs are off in a way that matters: mean relative error about the common factor.

    A factor that all kernels on all devices share changes no placement; so errors count from their mean.
    """
    weights: dict[tuple[str, str], float] = defaultdict(float)
    for device, rows in observations.items():
        for planned, _ in rows:
            for kernel, us in planned.items():
                weights[device, kernel] += us
    total = sum(weights.values())
    if not total:
        return 0.0
    mean = sum(w * factors.of(kernel, device) for (device, kernel), w in weights.items()) / total
    off = sum(w * abs(factors.of(kernel, device) - mean) for (device, kernel), w in weights.items())
    return off / total / mean if mean else 0.0


# A running system knows one cluster; a plan that uses fewer of its devices is still a plan for that cluster.


def without_devices(
    cluster: Cluster, costs: Sequence[Costs], without: Collection[str]
) -> tuple[Cluster, tuple[Costs, ...]]:
    kept = [index for index, name in enumerate(cluster.names) if name not in without]
    if not kept:
        raise PlanInfeasible("no device is left")
    devices = tuple(cluster.devices[d] for d in kept)
    links = tuple(x for x in cluster.links if x.src not in without and x.dst not in without)
    prices = tuple(
        Costs(c.trace_digest, devices, tuple(tuple(row[d] for d in kept) for row in c.costs)) for c in costs
    )
    return Cluster(devices, links), prices


def widened(plan: Plan, cluster: Cluster, costs: Sequence[Costs]) -> Plan:
    """A plan for some devices of a cluster as one for all of them, with their price lists."""
    place = [cluster.names.index(name) for name in plan.cluster.names]
    lanes = []
    for lane in plan.lanes:
        placed = tuple(tuple([place[d] for d in step]) for step in lane.placement.devices)
        lanes.append(replace(lane, placement=Placement(placed)))
    return replace(plan, cluster=cluster, costs=tuple(costs), lanes=tuple(lanes))
