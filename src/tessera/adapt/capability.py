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
# (standard errors, weight): three-point Gauss-Hermite quadrature.
NORMAL = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
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
        """Expected mean number of requests over a window.

        The error of the load matters near the capacity, where a slightly higher load is much worse.
        """
        return sum(
            weight * self._over(max(0.0, rate_per_s + errors * error_per_s), num_requests, window_s)
            for errors, weight in NORMAL
        )

    def _over(self, rate_per_s: float, num_requests: float, window_s: float) -> float:
        """Mean over a window that begins with `num_requests`, as a fluid.

        The number moves towards the usual one (or grows without bound), at the rate of arrivals minus
        completions.
        """
        end = self.usual(rate_per_s)
        if rate_per_s >= self.capacity_per_s:
            end = num_requests + (rate_per_s - self.served_per_s(num_requests)) * window_s
        now, left_s, sum_s = num_requests, window_s, 0.0
        step = (end - now) / FLUID_STEPS
        for _ in range(FLUID_STEPS):
            net = rate_per_s - self.served_per_s(now + step / 2)
            if net * step <= 0.0 or left_s <= 0.0:
                break
            took_s = min(left_s, step / net)
            sum_s += took_s * (now + net * took_s / 2)
            now, left_s = now + net * took_s, left_s - took_s
        return (sum_s + left_s * now) / window_s

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
