"""Capability: capacity and latency curve of one policy, modelled or simulated.

Below both capacities the policy with less normalised latency is better, else the one with more capacity.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# At capacity there are 1 + NEXT times the requests of the curve's last point.
NEXT = 0.5
FLUID_STEPS = 8
# Three-point Gauss-Hermite quadrature: standard errors and weights.
ERRORS = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
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
        return _interpolated(rate_per_s, rates, normalised)

    def usual(self, rate_per_s: float) -> float:
        """Mean number of requests present."""
        rates, _, numbers = self._columns
        return _interpolated(rate_per_s, rates, numbers)

    def served_per_s(self, num_requests: float) -> float:
        """The inverse of `usual`, up to the capacity."""
        return _interpolated(num_requests, *self._by_number)

    @cached_property
    def _columns(self) -> list[tuple[float, ...]]:
        return list(zip(*self.curve, strict=True))

    @cached_property
    def _by_number(self) -> tuple[list[float], list[float]]:
        rates, numbers = [0.0], [0.0]
        for rate, _, number in self.curve:
            if number > numbers[-1]:
                rates.append(rate)
                numbers.append(number)
        return [*numbers, (1.0 + NEXT) * numbers[-1]], [*rates, self.capacity_per_s]

    def expected(self, rate_per_s: float, error_per_s: float, num_requests: float, window_s: float) -> float:
        """Mean number of requests over a window that begins with `num_requests`.

        The error of the load matters near the capacity, where a slightly higher load is much worse.
        """
        loads = ((max(0.0, rate_per_s + error * error_per_s), weight) for error, weight in ERRORS)
        return sum(weight * self._mean(load, num_requests, window_s) for load, weight in loads)

    def _mean(self, load_per_s: float, num_requests: float, window_s: float) -> float:
        """As a fluid: the number moves towards the usual one (or grows without bound), at the rate of
        arrivals minus completions.
        """
        growth = (load_per_s - self.served_per_s(num_requests)) * window_s
        end = self.usual(load_per_s) if load_per_s < self.capacity_per_s else num_requests + growth
        step, now, left_s, sum_s = (end - num_requests) / FLUID_STEPS, num_requests, window_s, 0.0
        for number in range(FLUID_STEPS):
            net = load_per_s - _interpolated(num_requests + step * (number + 0.5), *self._by_number)
            if net * step <= 0.0 or not left_s:
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


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """As numpy does, which takes several times as long for one number."""
    place = bisect_right(xs, x)
    if place in (0, len(xs)):
        return ys[max(0, place - 1)]
    slope = (ys[place] - ys[place - 1]) / (xs[place] - xs[place - 1])
    return slope * (x - xs[place - 1]) + ys[place - 1]


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
