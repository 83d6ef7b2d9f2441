"""Robust: rates of candidates when costs are off by their stated error.

A seeded sample draws one log-normal factor per kernel and GPU. Busy time is linear in the factors, so a
candidate keeps its simulated share of the busy-time rate. Links are unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.plan.arrays import Floats, Ints
from tessera.plan.problem import Mix, Problem

SEED = 20261115

# Per launch: kernel, node, [device] microseconds per work unit, [device] relative error.
Table = tuple[Ints, Ints, Floats, Floats]


@dataclass(frozen=True, eq=False)
class Sampler:
    problem: Problem
    num_samples: int = 0

    @cached_property
    def _launches(self) -> Table:
        prob, number = self.problem, dict[str, int]()
        kernel = [
            number.setdefault(g.trace.kernel_of(i).name, len(number))
            for g in prob.unit.graphs
            for i in range(len(g.trace.launches))
        ]
        us = np.concatenate([x * count for x, count in zip(prob.cost_us, prob.unit.counts, strict=True)])
        errors = [[c.rel_error for c in row] for priced in prob.costs for row in priced.costs]
        nodes, error = np.concatenate(prob.node_of), np.array(errors, dtype=np.float64)
        return np.array(kernel, dtype=np.int64), nodes, us, error

    @cached_property
    def _factors(self) -> Floats:
        """[sample, device, kernel]."""
        kernel, _, us, error = self._launches
        num, devices = int(kernel.max()) + 1, self.problem.cluster.devices
        gpus = list(dict.fromkeys(d.gpu or d.name for d in devices))
        draws = np.random.default_rng(SEED).standard_normal((self.num_samples, len(gpus), num))
        factors = np.empty((self.num_samples, len(devices), num))
        for index, device in enumerate(devices):
            total = np.bincount(kernel, weights=us[:, index], minlength=num)
            spread = np.bincount(kernel, weights=us[:, index] * error[:, index], minlength=num)
            sigma = np.log1p(spread / np.maximum(total, 1e-12))
            factors[:, index] = np.exp(draws[:, gpus.index(device.gpu or device.name)] * sigma)
        return factors

    @property
    def has_errors(self) -> bool:
        return bool(self._launches[3].any())

    def rates_per_s(self, mix: Mix) -> npt.NDArray[np.float64]:
        """By busy time, per sample."""
        num = self.problem.num_devices
        busy = np.einsum("sdk,dk->sd", self._factors, self._by_kernel(mix)[0])
        links = float(mix.busy_us[num:].max(initial=0.0))
        return np.asarray(1e6 / np.maximum(busy.max(axis=1), links))

    def rel_error(self, mix: Mix) -> float:
        us, spread = self._by_kernel(mix).sum(axis=1)
        return float(np.sqrt((spread**2).sum()) / us.sum()) if us.any() else 0.0

    def _by_kernel(self, mix: Mix) -> Floats:
        """[busy time or its error, device, kernel] per request."""
        kernel, node, us, error = self._launches
        num = int(kernel.max()) + 1
        tables = np.zeros((2, self.problem.num_devices * num))
        for share, column in zip(mix.shares, mix.columns, strict=True):
            device = column.labels[node]
            rows = np.arange(len(device)), device
            for index, weights in enumerate((us[rows], us[rows] * error[rows])):
                tables[index] += share * np.bincount(device * num + kernel, weights, tables.shape[1])
        return tables.reshape(2, -1, num)


def robust_of(sampler: Sampler, mixes: Sequence[Mix], rates: Sequence[float]) -> list[ir.Robust]:
    sampled = np.array(
        [sampler.rates_per_s(m) * (rate / m.rate_per_s) for m, rate in zip(mixes, rates, strict=True)]
    )
    best = sampled.max(axis=0)
    ranges = []
    for row in sampled:
        p10, p50, p90 = np.quantile(row, (0.1, 0.5, 0.9)).tolist()
        ranges.append(ir.Robust(sampler.num_samples, p10, p50, p90, float((1.0 - row / best).mean())))
    return ranges
