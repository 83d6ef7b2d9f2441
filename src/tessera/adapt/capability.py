"""Capability: capacity and latency curve of one policy, modelled or simulated.

Below both capacities the policy with less normalised latency is better, else the one with more capacity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# At capacity there are 1 + NEXT times the requests of the curve's last point.
NEXT = 0.5
FLUID_STEPS = 8
MIDDLES = np.arange(FLUID_STEPS) + 0.5
# Three-point Gauss-Hermite quadrature, in standard errors.
ERRORS, WEIGHTS = math.sqrt(3.0) * np.array([-1.0, 0.0, 1.0]), np.array([1 / 6, 2 / 3, 1 / 6])
# Load of a lone request, and the share of the capacity at which a curve ends.
ALONE, ENOUGH = 1e-3, 0.99


class Point(NamedTuple):
    rate_per_s: float
    # Per answer token.
    normalised_s: float
    # Mean number present.
    num_requests: float


@dataclass(frozen=True)
class Capability:
    name: str
    capacity_per_s: float
    # At ascending loads below the capacity.
    curve: tuple[Point, ...]

    def normalised_s(self, rate_per_s: float) -> float:
        """Interpolated; flat outside the curve."""
        rates, normalised, _ = self._columns
        return float(np.interp(rate_per_s, rates, normalised))

    def usual(self, rate_per_s: float) -> float:
        """Mean number of requests present."""
        rates, _, numbers = self._columns
        return float(np.interp(rate_per_s, rates, numbers))

    def served_per_s(self, num_requests: float) -> float:
        """The inverse of `usual`, up to the capacity."""
        return float(np.interp(num_requests, *self._by_number))

    @cached_property
    def _columns(self) -> Floats:
        return np.array(self.curve).T

    @cached_property
    def _by_number(self) -> tuple[Floats, Floats]:
        rates, _, numbers = self._columns
        is_new = numbers > np.maximum.accumulate([0.0, *numbers[:-1]])
        ascending = numbers[is_new]
        full = (1.0 + NEXT) * ascending[-1]
        return np.array([0.0, *ascending, full]), np.array([0.0, *rates[is_new], self.capacity_per_s])

    def expected(self, rate_per_s: float, error_per_s: float, num_requests: float, window_s: float) -> float:
        """Expected mean number of requests over a window that begins with `num_requests`, as a fluid.

        The number moves towards the usual one (or grows without bound), at the rate of arrivals minus
        completions. The error of the load matters near the capacity, where a slightly higher load is much
        worse.
        """
        loads = np.maximum(0.0, rate_per_s + ERRORS * error_per_s)
        rates, _, numbers = self._columns
        ends = np.interp(loads, rates, numbers)
        if loads[-1] >= self.capacity_per_s:
            growth = (loads - self.served_per_s(num_requests)) * window_s
            ends = np.where(loads < self.capacity_per_s, ends, num_requests + growth)
        # [load, step]
        steps = (ends[:, None] - num_requests) / FLUID_STEPS
        net = loads[:, None] - np.interp(num_requests + steps * MIDDLES, *self._by_number)
        moves = np.logical_and.accumulate(net * steps > 0.0, axis=1)
        took_s = np.divide(steps, net, out=np.zeros_like(net), where=moves)
        begun_s = took_s.cumsum(axis=1) - took_s
        took_s = np.minimum(took_s, np.maximum(0.0, window_s - begun_s))
        grown = net * took_s
        after = num_requests + grown.cumsum(axis=1)
        sums_s = (took_s * (after - grown / 2)).sum(axis=1)
        left_s = window_s - took_s.sum(axis=1)
        return float(WEIGHTS @ (sums_s + left_s * after[:, -1])) / window_s

    def badness(self, rate_per_s: float) -> tuple[bool, float]:
        """Sort key; policies that sustain the load come first."""
        if rate_per_s < self.capacity_per_s:
            return False, self.normalised_s(rate_per_s)
        return True, -self.capacity_per_s


def better(policies: tuple[Capability, ...], rate_per_s: float) -> Capability:
    return min(policies, key=lambda policy: policy.badness(rate_per_s))


def crossing_per_s(policies: tuple[Capability, ...]) -> float | None:
    """The smallest load at which the best policy is not the idle one."""
    idle = better(policies, 0.0)
    points = sorted(
        {0.0, *(x.rate_per_s for p in policies for x in p.curve), *(p.capacity_per_s for p in policies)}
    )
    above = next((point for point in points if better(policies, point) is not idle), None)
    if above is None:
        return None
    below = max(point for point in points if point < above)
    for _ in range(50):
        middle = (below + above) / 2
        if better(policies, middle) is idle:
            below = middle
        else:
            above = middle
    return above


def capability_of(name: str, points: Sequence[tuple[int, float]], tokens: int) -> Capability:
    """From (requests present, requests per second) at ascending numbers, and tokens of an answer.

    By Little's law, n requests present at r per second stay for n / r seconds each.
    """
    capacity = max(rate for _, rate in points)
    curve: list[Point] = []
    for num, rate in points:
        # More requests only wait.
        if not curve or curve[-1].rate_per_s < rate < ENOUGH * capacity:
            curve.append(Point(rate, num / rate / tokens, float(num)))
    first = curve[0]
    alone = Point(ALONE * first.rate_per_s, first.normalised_s, ALONE * first.num_requests)
    return Capability(name, capacity, (alone, *curve))
