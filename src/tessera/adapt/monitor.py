"""Monitor: which policy a system should follow, and when its costs are wrong. Runs nothing itself.

Load: arrivals over the last windows of one level, with a standard error (`Meter`). Policies are compared by
the expected number of requests present, given the load, its error and the requests present now. A switch must
pay for itself within one of `horizons` windows at both ends of the error interval, by more than `least_gain`;
no other follows within `dwell_windows`. A policy past its capacity is left at any price and time.

Costs: factors are fitted (`drift`) to the step times of `cost_windows`. An error of `min_drift` triggers a
replan.

The default window is the time of 100 arrivals at the load where the policies cross: a standard error of a
tenth.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tessera.adapt.capability import Capability, better, crossing_per_s
from tessera.adapt.drift import Factors, corrected, drift
from tessera.ir import Plan

# Windows remembered, and windows of a Poisson stream assumed before them.
NUM_WINDOWS, NUM_SUPPOSED = 24, 4
# Load levels in that time that count as steady.
NUM_LEVELS = 2
# Arrivals from which the variation of the times between them counts.
MIN_ARRIVALS = 30

Planned = tuple[tuple[str, float], ...]


class PlannedLane(Protocol):
    @property
    def number(self) -> int:
        """Unique among all lanes."""

    @property
    def plan(self) -> Plan: ...

    @property
    def index(self) -> int:
        """Position in the plan."""


class MeasuredSteps:
    def __init__(self) -> None:
        self._planned: dict[tuple[int, int], dict[str, Planned]] = {}
        # Steps planned alike are one observation: seconds, and number of runs.
        self._totals: dict[tuple[str, Planned], tuple[float, int]] = {}

    def add(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        key = (lane.number, step)
        if key not in self._planned:
            self._planned[key] = planned_us(lane.plan, lane.index, step)
        for device, seconds in busy_s.items():
            if planned := self._planned[key].get(device):
                total, num = self._totals.get((device, planned), (0.0, 0))
                self._totals[device, planned] = (total + seconds, num + 1)

    def take(self) -> dict[str, list[tuple[dict[str, float], float]]]:
        """Device -> (planned microseconds by kernel, mean measured total)."""
        observations: dict[str, list[tuple[dict[str, float], float]]] = {}
        for (device, planned), (seconds, num) in self._totals.items():
            observations.setdefault(device, []).append((dict(planned), seconds / num * 1e6))
        self._totals.clear()
        return observations


def planned_us(plan: Plan, index: int, step: int) -> dict[str, Planned]:
    """Without launches of zero time."""
    lane = plan.lanes[index]
    graph, costs = plan.graphs[step], plan.costs[step]
    by_device: dict[str, dict[str, float]] = {}
    for launch, device in enumerate(lane.placement.devices[step]):
        by_kernel = by_device.setdefault(plan.cluster.names[device], {})
        kernel = graph.trace.kernel_of(launch).name
        by_kernel[kernel] = by_kernel.get(kernel, 0.0) + costs.us(launch, device)
    return {
        device: tuple((kernel, us) for kernel, us in sorted(kernels.items()) if us)
        for device, kernels in by_device.items()
    }


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    window_s: float | None = None
    window_requests: int = 100
    # Half-width of the load interval, in standard errors. With two, systems near the crossing stay too long
    # on the worse side.
    errors: float = 1.0
    # Standard errors past a capacity that count. With one, a steady load at 0.9 often seems past it.
    over_errors: float = 2.0
    # Poisson errors between two windows that are one level of load.
    level_errors: float = 3.0
    level_windows: int = 8
    # Windows within which a switch may pay for itself.
    horizons: tuple[int, ...] = (1, 2, 4)
    dwell_windows: float = 4.0
    # Smallest gain that modelled figures can resolve.
    least_gain: float = 1.03
    cost_windows: int = 1
    min_drift: float = 0.05
    cost_error: float = 0.1


DEFAULT = MonitorConfig()


class Monitor:
    def __init__(self, policies: Sequence[Capability], config: MonitorConfig = DEFAULT) -> None:
        self._config = config
        self._policies = {policy.name: policy for policy in policies}
        self.current = better(tuple(policies), 0.0).name
        self._meter = Meter()
        self._start_s: float | None = None
        self._settled_s = -math.inf
        self._times = MeasuredSteps()
        self._costs_since_s = 0.0
        self._place()

    def _place(self) -> None:
        self.crossing_per_s = crossing_per_s(self.capabilities)
        reference = self.crossing_per_s or max(p.capacity_per_s for p in self.capabilities)
        self.window_s = self._config.window_s or self._config.window_requests / reference
        self._meter.window_s = self.window_s
        # The load that favours neither policy.
        self._meter.before_per_s = self.crossing_per_s or 0.0

    def begin(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._costs_since_s = now_s
            self._meter.start(now_s)

    def arrived(self, now_s: float) -> None:
        self.begin(now_s)
        self._meter.arrived(now_s)

    def stepped(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        self._times.add(lane, step, busy_s)

    def load(self, now_s: float) -> tuple[float, float]:
        num_came, windows = self._meter.level(now_s, self._config.level_errors, self._config.level_windows)
        error = math.sqrt(self._meter.dispersion * num_came)
        return num_came / windows / self.window_s, error / windows / self.window_s

    def switch(self, now_s: float, num_requests: int, switch_s: float) -> str | None:
        """Changes `current` if that pays, and returns the reason.

        `switch_s`: seconds that requests wait for a switch.
        """
        self.begin(now_s)
        load, error = self.load(now_s)
        if len(self._policies) == 1:
            return None
        now = self._policies[self.current]
        is_over = load - self._config.over_errors * error > now.capacity_per_s
        is_full = now.served_per_s(num_requests) >= now.capacity_per_s
        if now_s < self._settled_s and not (is_over or is_full):
            return None
        best = better(self.capabilities, 0.0)
        if not (num_requests or load) and best is not now:
            self._use(best.name, now_s)
            return f"{self._meter.seen(now_s)}, none are here; {best.name} is quickest for the next"
        for horizon in self._config.horizons:
            seconds = horizon * self.window_s

            def expected(policy: Capability, errors: float, seconds: float = seconds) -> float:
                return policy.expected(max(0.0, load + errors * error), error, num_requests, seconds)

            chosen = min(self.capabilities, key=lambda policy: expected(policy, 0.0))
            if chosen is now or (is_over and chosen.capacity_per_s <= now.capacity_per_s):
                continue
            # Requests present that the switch adds.
            price = 0.0 if is_over else num_requests * switch_s / seconds
            ends = (-self._config.errors, self._config.errors)
            if all(self._config.least_gain * expected(chosen, e) + price < expected(now, e) for e in ends):
                self._use(chosen.name, now_s)
                figures = (
                    f"{expected(p, 0.0):.3g} with {p.name} ({p.capacity_per_s:.3g}/s)" for p in (chosen, now)
                )
                seen = f"{self._meter.seen(now_s)}, {num_requests} are here"
                cost = f"the switch takes about {1e3 * switch_s:.3g} ms"
                return f"{seen}; in the next {seconds:.3g} s there would be {', '.join(figures)}; {cost}"
        return None

    def _use(self, policy: str, now_s: float) -> None:
        self.current, self._settled_s = policy, now_s + self._config.dwell_windows * self.window_s

    def drifted(self, now_s: float) -> tuple[Factors, float] | None:
        self.begin(now_s)
        if now_s - self._costs_since_s < self._config.cost_windows * self.window_s:
            return None
        observations = self._times.take()
        self._costs_since_s = now_s
        if not observations:
            return None
        factors = corrected(observations, self._config.cost_error)
        error = drift(observations, factors)
        return (factors, error) if error >= self._config.min_drift else None

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        return tuple(self._policies.values())

    def adopt(self, now_s: float, capabilities: Sequence[Capability]) -> None:
        """No capabilities: the policies stay."""
        if capabilities:
            self._policies = {policy.name: policy for policy in capabilities}
            if self.current not in self._policies:
                best = better(self.capabilities, self.load(now_s)[0])
                self._use(best.name, now_s)
        self._times = MeasuredSteps()
        self._costs_since_s = now_s
        self._place()


class Meter:
    """Arrivals in windows that end now, and their dispersion; time must not go back.

    The variance of a Poisson count is its mean; of bursts a multiple, measured over the last windows. So a
    lull in a bursty stream is not taken for a lower load.
    """

    def __init__(self) -> None:
        self.window_s = math.inf
        # Load assumed before the start.
        self.before_per_s = 0.0
        self._times: list[float] = []
        self._start_s: float | None = None
        self._now_s = 0.0

    def start(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._now_s = now_s

    def arrived(self, now_s: float) -> None:
        self._now_s = now_s
        self._times.append(now_s)
        del self._times[: self._before(NUM_WINDOWS)]

    def _before(self, windows: int) -> int:
        """Arrivals up to so many windows ago."""
        return bisect_right(self._times, self._now_s - windows * self.window_s)

    @property
    def _watched_s(self) -> float:
        return self._now_s - (self._start_s or 0.0)

    def _counts(self) -> list[int]:
        """Arrivals of each whole window since the start, the newest first."""
        num = min(NUM_WINDOWS, int(self._watched_s / self.window_s))
        return [newer - older for newer, older in pairwise(map(self._before, range(num + 1)))]

    def count(self, now_s: float) -> float:
        self._now_s = max(self._now_s, now_s)
        unseen_s = max(0.0, self.window_s - self._watched_s)
        return len(self._times) - self._before(1) + unseen_s * self.before_per_s

    def level(self, now_s: float, errors: float, most: int) -> tuple[float, int]:
        """Arrivals in the last windows of one level, at most `most` before the present one, and the number of
        these windows.
        """
        last, total, num = self.count(now_s), 0.0, 0
        for count in self._counts()[1 : 1 + most]:
            if num and not _is_level(count, total / num, num, errors):
                break
            total, num = total + count, num + 1
        if not num or not _is_level(last, total / num, num, errors):
            return last, 1
        return last + total, 1 + num

    def seen(self, now_s: float) -> str:
        self._now_s = max(self._now_s, now_s)
        num, span_s = len(self._times) - self._before(1), min(self.window_s, self._watched_s)
        came = "1 request" if num == 1 else f"{num} requests"
        if span_s < self.window_s:
            return f"{came} came in the first {span_s:.3g} s"
        return f"{came} came in the last {span_s:.3g} s ({num / span_s:.3g} a second)"

    @property
    def dispersion(self) -> float:
        """Variance of a window's count over its mean, at least 1 (Poisson)."""
        dispersion = _dispersion(np.array(self._counts(), dtype=np.float64))
        gaps_s = np.diff(self._times[self._before(1) :])
        if len(gaps_s) < MIN_ARRIVALS:
            return dispersion
        # Times between arrivals show it before the second window ends.
        return max(dispersion, float((gaps_s**2).mean()) / max(float(gaps_s.mean()), 1e-9) ** 2 - 1.0)


def _dispersion(counts: npt.NDArray[np.float64]) -> float:
    """About a mean that may have changed once: a changed load is not a burst."""
    num = len(counts)
    if num <= NUM_LEVELS or not counts.any():
        return 1.0
    cut, sums, squares = np.arange(1, num), counts.cumsum(), (counts**2).cumsum()
    before = squares[:-1] - sums[:-1] ** 2 / cut
    after = squares[-1] - squares[:-1] - (sums[-1] - sums[:-1]) ** 2 / (num - cut)
    least = min(counts.var() * num, (before + after).min())
    return max(1.0, float(NUM_SUPPOSED + least / counts.mean()) / (NUM_SUPPOSED + num - NUM_LEVELS))


def _is_level(count: float, mean: float, num: int, errors: float) -> bool:
    """Whether a Poisson count may be of the same load as `num` others."""
    return abs(count - mean) <= errors * math.sqrt(mean * (1.0 + 1.0 / num))
