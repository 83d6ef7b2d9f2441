"""corrected: correction factors of costs, from total times of several kernels.

An observation: kernels planned to take p_1, p_2, ... on a device took t in all. Wanted are factors f_k >= 0
per kernel type and device. Observations are usually fewer than kernels, so the costs' error draws factors
towards 1:

    minimise  sum over observations of ((sum_k p_k f_k - t) / (noise t))^2  +  sum_k ((f_k - 1) / error_k)^2

a non-negative least squares problem per device.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from tessera.ir import Costs, WorkUnit

MEASURED_ERROR = 0.02

# device -> (planned microseconds by kernel, measured total)
Observations = Mapping[str, Sequence[tuple[Mapping[str, float], float]]]


@dataclass(frozen=True)
class Factors:
    """Measured over planned time. An unseen kernel gets the mean factor of its device."""

    by_kernel: Mapping[tuple[str, str], float]
    # Means, weighted by planned time.
    by_device: Mapping[str, float] = field(default_factory=dict)

    def of(self, kernel: str, device: str) -> float:
        return self.by_kernel.get((device, kernel), self.by_device.get(device, 1.0))

    def apply(self, unit: WorkUnit, costs: Sequence[Costs]) -> tuple[Costs, ...]:
        return scaled_costs(unit, costs, self.of)


def scaled_costs(
    unit: WorkUnit, costs: Sequence[Costs], factor: Callable[[str, str], float]
) -> tuple[Costs, ...]:
    factor_of, scaled = cache(factor), []
    for graph, priced in zip(unit.graphs, costs, strict=True):
        rows = tuple(
            tuple(
                replace(cost, us=cost.us * factor_of(graph.trace.kernel_of(launch).name, device.name))
                for cost, device in zip(row, priced.devices, strict=True)
            )
            for launch, row in enumerate(priced.costs)
        )
        scaled.append(replace(priced, costs=rows))
    return tuple(scaled)


def corrected(observations: Observations, error: float) -> Factors:
    from scipy.optimize import nnls  # slow to import, rarely needed

    by_kernel: dict[tuple[str, str], float] = {}
    by_device: dict[str, float] = {}
    for device, rows in observations.items():
        kernels = sorted({kernel for planned, _ in rows for kernel in planned})
        planned_us = np.array([[planned.get(kernel, 0.0) for kernel in kernels] for planned, _ in rows])
        relative = planned_us / np.array([[us] for _, us in rows])
        weights = np.repeat([1.0 / MEASURED_ERROR, 1.0 / max(error, 1e-3)], [len(rows), len(kernels)])
        matrix = np.concatenate([relative, np.eye(len(kernels))])
        factors, _ = nnls(matrix * weights[:, None], weights)
        by_kernel |= {(device, kernel): float(f) for kernel, f in zip(kernels, factors, strict=True)}
        total = planned_us.sum(axis=0)
        by_device[device] = float(total @ factors / total.sum()) if total.any() else 1.0
    return Factors(by_kernel, by_device)


def drift(observations: Observations, factors: Factors) -> float:
    """Mean relative error of costs about their common factor, which does not affect placement."""
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
