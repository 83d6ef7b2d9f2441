"""Monitor: which policy a running system should follow, and when its costs are wrong. Runs nothing itself.

Load. Arrivals are counted over a window; a count has a standard error of its square root, more where arrivals
come in bursts (`Meter`). Policies are compared by the expected number of requests present, from the load with
its error and the requests present now. A switch must pay for itself within one of `horizons` windows
at both ends of the error interval, by more than `least_gain`, and not within `dwell_windows` of the last
switch. A policy past its capacity is left whatever the switch costs.

Costs. Times of steps are collected for `cost_windows`; factors that explain them are fitted (`drift`). If the
costs are off by `min_drift`, new plans are wanted. One replan at a time.

The first window can only be chosen: by default the time in which 100 requests come at the load where the
policies cross, so that the standard error is a tenth.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tessera.adapt.capability import Capability, better, crossing_per_s
from tessera.adapt.drift import Factors, corrected, drift
from tessera.ir import Plan

# Windows that are remembered, and windows of a Poisson stream assumed before them.
NUM_WINDOWS, NUM_SUPPOSED = 24, 4
# Levels that a steady load may have had in that time.
NUM_LEVELS = 2

# (kernel, planned microseconds) of launches on one device.
Planned = tuple[tuple[str, float], ...]


class PlannedLane(Protocol):
    """A lane of a loaded plan."""

    @property
    def number(self) -> int:
        """Unique among all lanes."""

    @property
    def plan(self) -> Plan: ...

    @property
    def index(self) -> int:
        """Among the plan's lanes."""


class MeasuredSteps:
    """Busy times of devices by step."""

    def __init__(self) -> None:
        # (lane, step) -> device -> (seconds, runs), and the planned times.
        self._seen: dict[tuple[int, int], dict[str, tuple[float, int]]] = {}
        self._planned: dict[tuple[int, int], dict[str, Planned]] = {}

    def add(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        key = (lane.number, step)
        if key not in self._planned:
            self._planned[key] = planned_us(lane.plan, lane.index, step)
        seen = self._seen.setdefault(key, {})
        for device, seconds in busy_s.items():
            total, num = seen.get(device, (0.0, 0))
            seen[device] = (total + seconds, num + 1)

    def take(self) -> dict[str, list[tuple[dict[str, float], float]]]:
        """Device -> (planned microseconds by kernel, mean measured microseconds of all of them)."""
        totals: dict[tuple[str, Planned], tuple[float, int]] = {}
        for key, devices in self._seen.items():
            for device, (seconds, num) in devices.items():
                if planned := self._planned[key].get(device):  # steps planned alike are one observation
                    before_s, runs = totals.get((device, planned), (0.0, 0))
                    totals[device, planned] = (before_s + seconds, runs + num)
        self._seen.clear()
        observations: dict[str, list[tuple[dict[str, float], float]]] = {}
        for (device, planned), (seconds, num) in totals.items():
            observations.setdefault(device, []).append((dict(planned), seconds / num * 1e6))
        return observations


def planned_us(plan: Plan, index: int, step: int) -> dict[str, Planned]:
    """Device -> (kernel, planned microseconds) of one step of a lane, without launches that take no time."""
    lane = plan.lanes[index]
    graph, costs = plan.graphs[step], plan.prices[step]
    by_device: dict[str, dict[str, float]] = {}
    for launch, device in enumerate(lane.placement.devices[step - plan.first_step(lane)]):
        here = by_device.setdefault(plan.cluster.names[device], {})
        kernel = graph.trace.kernel_of(launch).name
        here[kernel] = here.get(kernel, 0.0) + costs.us(launch, device)
    return {
        device: tuple((kernel, us) for kernel, us in sorted(kernels.items()) if us)
        for device, kernels in by_device.items()
    }


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    # Seconds; None: by the policies.
    window_s: float | None = None
    # Arrivals per window at the load where the policies cross, where the window is not given.
    window_requests: int = 100
    # Standard errors to either side of the load at which the other policy must be better. Two were tried: a
    # system near the crossing stayed too long on the worse side.
    errors: float = 1.0
    # Windows within which a switch may pay for itself.
    horizons: tuple[int, ...] = (1, 2, 4)
    # Windows between two switches, at least.
    dwell_windows: float = 1.0
    # Relative gain that modelled figures can tell apart.
    least_gain: float = 1.03
    # Price of a switch: this share of the requests present waits once for all of them.
    switch_cost: float = 0.5
    # Windows of measured times before costs are judged, and the relative error that is worth new plans.
    cost_windows: int = 1
    min_drift: float = 0.05
    # Relative error that the plans' costs are taken to have.
    cost_error: float = 0.1


DEFAULT = MonitorConfig()


class Monitor:
    """Watches one system; time only needs to run forward."""

    def __init__(self, policies: Sequence[Capability], config: MonitorConfig = DEFAULT) -> None:
        self._config = config
        self._policies = {policy.name: policy for policy in policies}
        self._order = tuple(self._policies)
        self.current = better(tuple(policies), 0.0).name
        self._meter = Meter()
        self._start_s: float | None = None
        self._switched_s = -math.inf
        self._times = MeasuredSteps()
        self._costs_since_s = 0.0
        self.is_replanning = False
        self._place()

    def _place(self) -> None:
        ordered = tuple(self._policies[name] for name in self._order)
        self.crossing_per_s = crossing_per_s(ordered)
        reference = self.crossing_per_s or max(p.capacity_per_s for p in ordered)
        self.window_s = self._config.window_s or self._config.window_requests / reference
        # The load before watching began is unknown: assume the one that favours neither policy.
        self._meter.set(self.window_s, self.crossing_per_s or 0.0)

    def begin(self, now_s: float) -> None:
        """Starts watching: no arrival until now means none came."""
        if self._start_s is None:
            self._start_s = self._costs_since_s = now_s
            self._meter.start(now_s)

    def arrived(self, now_s: float) -> None:
        self.begin(now_s)
        self._meter.arrived(now_s)

    def stepped(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        """A step of a lane of a plan in force kept each device busy for so long."""
        self._times.add(lane, step, busy_s)

    def load(self, now_s: float) -> tuple[float, float]:
        """Requests per second, and their standard error."""
        num_came = self._meter.count(now_s)
        error = math.sqrt(self._meter.dispersion * num_came)
        return num_came / self.window_s, error / self.window_s

    def switch(self, now_s: float, num_requests: int) -> str | None:
        """Changes `current` if that pays, and says why in one line; `num_requests` wait or are served now."""
        self.begin(now_s)
        load, error = self.load(now_s)
        now = self._policies[self.current]
        is_over = load - self._config.errors * error > now.capacity_per_s
        if now_s - self._switched_s < self._config.dwell_windows * self.window_s and not is_over:
            return None
        for horizon in self._config.horizons:
            seconds = horizon * self.window_s

            def expected(policy: Capability, errors: float, seconds: float = seconds) -> float:
                return policy.expected(max(0.0, load + errors * error), error, num_requests, seconds)

            chosen = min(self._policies.values(), key=lambda policy: expected(policy, 0.0))
            if chosen is now or (is_over and chosen.capacity_per_s <= now.capacity_per_s):
                continue
            # Requests are read again, or end beside microbatches of the new policy. By Little's law each one
            # stays for requests present over arrivals per second.
            usual = chosen.usual(load)
            price = 0.0 if is_over else self._config.switch_cost * usual * usual / max(load * seconds, usual)
            ends = (-self._config.errors, self._config.errors)
            if all(self._config.least_gain * expected(chosen, e) + price < expected(now, e) for e in ends):
                self.current, self._switched_s = chosen.name, now_s
                figures = (
                    f"{expected(p, 0.0):.3g} with {p.name} ({p.capacity_per_s:.3g}/s)" for p in (chosen, now)
                )
                here = f"{self._meter.seen(now_s)}, {num_requests} are here"
                return f"{here}; in the next {seconds:.3g} s there would be {', '.join(figures)}"
        return None

    def drifted(self, now_s: float) -> tuple[Factors, float] | None:
        """Factors that correct the costs, and the relative error, if new plans are wanted for it."""
        self.begin(now_s)
        if self.is_replanning or now_s - self._costs_since_s < self._config.cost_windows * self.window_s:
            return None
        observations = self._times.take()
        self._costs_since_s = now_s
        if not observations:
            return None
        factors = corrected(observations, self._config.cost_error)
        error = drift(observations, factors)
        self.is_replanning = error >= self._config.min_drift
        return (factors, error) if self.is_replanning else None

    def adopt(self, now_s: float, capabilities: Sequence[Capability]) -> None:
        """New plans replace those of the same names; times measured before are of the old ones."""
        self._policies |= {policy.name: policy for policy in capabilities}
        self.is_replanning = False
        self._times = MeasuredSteps()
        self._costs_since_s = now_s
        self._place()


class Meter:
    """Arrivals within a window, and how much that number varies; time only needs to run forward.

    Counts of a Poisson stream vary by their square root. Bursts vary more: the variance of a window's count
    is a multiple of its mean, the dispersion, measured over the last windows. So a lull in a bursty
    stream does not look like a load that has gone.
    """

    def __init__(self) -> None:
        self.window_s = math.inf
        # Load assumed before watching began.
        self.before_per_s = 0.0
        self._times: deque[float] = deque()
        self._start_s: float | None = None
        self._counts: deque[int] = deque(maxlen=NUM_WINDOWS)
        self._mark_s = 0.0
        self._num = 0
        # Computed on demand, once a window.
        self._dispersion: float | None = None

    def set(self, window_s: float, before_per_s: float) -> None:
        """Changes the window; counts of windows of another length are dropped."""
        if window_s != self.window_s:
            self._counts.clear()
            self._dispersion = None
            self._num = 0
            self._mark_s = self._times[-1] if self._times else self._start_s or 0.0
        self.window_s, self.before_per_s = window_s, before_per_s

    def start(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._mark_s = now_s

    def arrived(self, now_s: float) -> None:
        self._roll(now_s)
        self._times.append(now_s)
        self._num += 1

    def _roll(self, now_s: float) -> None:
        # After a long silence only the last windows count.
        self._mark_s = max(self._mark_s, now_s - (NUM_WINDOWS + 1) * self.window_s)
        while now_s >= self._mark_s + self.window_s:
            self._counts.append(self._num)
            self._dispersion = None
            self._num = 0
            self._mark_s += self.window_s

    def count(self, now_s: float) -> float:
        """Arrivals within a window; `before_per_s` stands for the part of it before watching began."""
        self._roll(now_s)
        while self._times and self._times[0] <= now_s - self.window_s:
            self._times.popleft()
        unseen_s = max(0.0, self.window_s - (now_s - (self._start_s or 0.0)))
        return len(self._times) + unseen_s * self.before_per_s

    def seen(self, now_s: float) -> str:
        """What really came, in words: counted, with nothing supposed."""
        num, span_s = len(self._times), min(self.window_s, now_s - (self._start_s or 0.0))
        came = "1 request" if num == 1 else f"{num} requests"
        if span_s < self.window_s:
            return f"{came} came in the first {span_s:.3g} s"
        return f"{came} came in the last {span_s:.3g} s ({num / span_s:.3g} a second)"

    @property
    def dispersion(self) -> float:
        """Variance of a window's count over its mean; 1 for a Poisson stream, and never less here.

        About a mean that may have changed once: such a load is steady before and after, and that is no burst.
        """
        if self._dispersion is None:
            self._dispersion = self._measure()
        return self._dispersion

    def _measure(self) -> float:
        counts, num = list(self._counts), len(self._counts)
        mean = sum(counts) / max(1, num)
        if num <= NUM_LEVELS or not mean:
            return 1.0
        sums, squares = [0, *accumulate(counts)], [0, *accumulate(n * n for n in counts)]

        def spread(a: int, b: int) -> float:
            """Squares about the mean of windows a to b."""
            return squares[b] - squares[a] - (sums[b] - sums[a]) ** 2 / (b - a) if b > a else 0.0

        least = min(spread(0, cut) + spread(cut, num) for cut in range(num))
        return max(1.0, (NUM_SUPPOSED + least / mean) / (NUM_SUPPOSED + num - NUM_LEVELS))
