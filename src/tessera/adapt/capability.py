"""Capability: what one policy can do, as figures made from its plan beforehand (modelled or simulated).

Which of two policies serves a load better follows from these alone: below the capacity of both, the one with
the smaller normalised latency at that load; else the one with more capacity. So the load at which to
switch is computed, and moves when the plans do.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# With so many times more than at the last point of a curve, a policy is taken to work at its capacity.
NEXT = 0.5
# Parts of the way from one number of requests to another.
FLUID_STEPS = 8
# Standard errors and weights that stand for a normal distribution: moments up to the fifth are right.
NORMAL = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))


class Point(NamedTuple):
    """A policy under one load."""

    rate_per_s: float
    # Of a request: latency over tokens.
    normalised_s: float
    # Waiting or being served, on average.
    num_requests: float


@dataclass(frozen=True)
class Capability:
    """A policy in figures."""

    name: str
    # Requests per second that it can sustain.
    capacity_per_s: float
    # At ascending loads below the capacity.
    curve: tuple[Point, ...]

    def normalised_s(self, rate_per_s: float) -> float:
        """Seconds per token at a load, between the points of the curve; flat outside them."""
        return _between([(p.rate_per_s, p.normalised_s) for p in self.curve], rate_per_s)

    def usual(self, rate_per_s: float) -> float:
        """Requests that are here on average at a load; past the curve, as at its end."""
        return _between(self._by_rate, rate_per_s)

    def served_per_s(self, num_requests: float) -> float:
        """Requests that leave in a second when so many are there: the load at which so many are usual."""
        return _between(self._by_number, num_requests)

    @cached_property
    def _by_rate(self) -> list[tuple[float, float]]:
        return [(p.rate_per_s, p.num_requests) for p in self.curve]

    @cached_property
    def _by_number(self) -> list[tuple[float, float]]:
        points = [(0.0, 0.0)]
        for point in self.curve:  # a curve that was simulated need not ascend everywhere
            if point.num_requests > points[-1][0]:
                points.append((point.num_requests, point.rate_per_s))
        return [*points, (points[-1][0] * (1.0 + NEXT), self.capacity_per_s)]

    def expected(self, rate_per_s: float, error_per_s: float, num_requests: float, window_s: float) -> float:
        """Requests to be expected here over a window, on average, of a load known with a standard error.

        A policy near its limit is judged by what happens if the load is really higher, too.
        """
        return sum(
            weight * self._over(max(0.0, rate_per_s + errors * error_per_s), num_requests, window_s)
            for errors, weight in NORMAL
        )

    def _over(self, rate_per_s: float, num_requests: float, window_s: float) -> float:
        """The mean over a window that begins with so many here, as if requests were a fluid.

        The number goes towards the one that is usual for the load, past the capacity towards none, at the
        rate by which more come than leave at each number on the way.
        """
        end = self.usual(rate_per_s)
        if rate_per_s >= self.capacity_per_s:
            end = num_requests + (rate_per_s - self.served_per_s(num_requests)) * window_s
        now, left_s, sum_s = num_requests, window_s, 0.0
        step = (end - now) / FLUID_STEPS
        for _ in range(FLUID_STEPS):
            net = rate_per_s - self.served_per_s(now + step / 2)
            if net * step <= 0.0 or left_s <= 0.0:  # it stays, or the window is over
                break
            took_s = min(left_s, step / net)
            sum_s += took_s * (now + net * took_s / 2)
            now, left_s = now + net * took_s, left_s - took_s
        return (sum_s + left_s * now) / window_s

    def badness(self, rate_per_s: float) -> tuple[bool, float]:
        """Less is better; a policy that can sustain the load is better than one that cannot."""
        if rate_per_s < self.capacity_per_s:
            return False, self.normalised_s(rate_per_s)
        return True, -self.capacity_per_s


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    index = bisect_right(points, (x, float("inf")))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (a, low), (b, high) = points[index - 1], points[index]
    return low + (high - low) * (x - a) / (b - a)


def better(policies: tuple[Capability, ...], rate_per_s: float) -> Capability:
    """The best policy for a load; of equals the first."""
    return min(policies, key=lambda policy: policy.badness(rate_per_s))


def crossing_per_s(policies: tuple[Capability, ...]) -> float | None:
    """The smallest load at which another policy than that of an idle system is best, if any."""
    idle = better(policies, 0.0)
    points = sorted(
        {0.0, *(x.rate_per_s for p in policies for x in p.curve), *(p.capacity_per_s for p in policies)}
    )
    previous = 0.0
    for point in points:
        if better(policies, point) is not idle:
            return _bisected(policies, idle, previous, point)
        previous = point
    return None


def _bisected(policies: tuple[Capability, ...], idle: Capability, low: float, high: float) -> float:
    for _ in range(50):
        middle = (low + high) / 2
        if better(policies, middle) is idle:
            low = middle
        else:
            high = middle
    return high
