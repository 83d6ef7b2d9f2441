"""Monitor: observe(now, event) -> actions. Keeps a running system on the right policy; runs nothing itself.

What it is told and what it answers is the same for a simulator and for an engine.

Load. Arrivals are counted over a window; a count has a standard error of its square root, more where arrivals
come in bursts (`Meter`). Policies are compared by how many requests there would be on average in the next
window, with the load known to that error and with those that are here now: a backlog goes as fast as more
leave than come, by the policy's own figures. So a burst is answered as soon as its backlog is worth it, and
a few that came together, who are soon gone, are no load. A policy that a little more would overload is left
in time; and a policy is left only if another is better at both ends of the interval that the error makes:
that is the hysteresis. Where the policies cross follows from their capabilities.

Costs. Times of kernels are collected until a window has passed; factors that explain them are fitted. If the
costs are off by `MIN_DRIFT`, new plans are asked for, while the old ones run on. One replan at a time. A lost
device asks for new plans at once.

The first window can only be chosen, not known: by default as long as it takes a hundred requests to come
at the load where the policies cross, so that the standard error is a tenth.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tessera.adapt.capability import Capability, better, crossing_per_s
from tessera.adapt.drift import Factors, corrected, drift
from tessera.ir import Decision, DecisionKind, Plan


@dataclass(frozen=True, slots=True)
class Arrived:
    """One request has come; so many are waiting or being served, this one among them."""

    num_requests: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Nothing happened, but time went by; so many are waiting or being served."""

    num_requests: int


@dataclass(frozen=True, slots=True)
class Lost:
    device: str


@dataclass(frozen=True, slots=True)
class Returned:
    device: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """New plans have replaced those of the same names."""

    capabilities: tuple[Capability, ...]
    why: str = "new plans were ready"


Event = Arrived | Ticked | Lost | Returned | Adopted


@dataclass(frozen=True, slots=True)
class Action:
    """A decision and what is needed to carry it out."""

    decision: Decision
    # Of a replan: how wrong the costs were, and devices that are gone.
    factors: Factors | None = None
    without: frozenset[str] = frozenset()


class PlannedLane(Protocol):
    """A lane of a plan that is loaded."""

    @property
    def number(self) -> int:
        """No other lane has it."""

    @property
    def plan(self) -> Plan:
        """That it is of."""

    @property
    def index(self) -> int:
        """Among the plan's lanes."""


# (kernel, planned microseconds) of launches on one device.
Planned = tuple[tuple[str, float], ...]


class MeasuredSteps:
    """How long steps kept devices busy."""

    def __init__(self) -> None:
        # (lane, step) -> device -> (seconds, runs), and what was planned there.
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
        """Of each device: planned microseconds by kernel, and what these took together on average."""
        totals: dict[tuple[str, Planned], tuple[float, int]] = {}
        for key, devices in self._seen.items():
            for device, (seconds, num) in devices.items():
                if planned := self._planned[key].get(device):  # steps that are planned alike are one
                    before_s, runs = totals.get((device, planned), (0.0, 0))
                    totals[device, planned] = (before_s + seconds, runs + num)
        self._seen.clear()
        found: dict[str, list[tuple[dict[str, float], float]]] = {}
        for (device, planned), (seconds, num) in totals.items():
            found.setdefault(device, []).append((dict(planned), seconds / num * 1e6))
        return found


def planned_us(plan: Plan, index: int, step: int) -> dict[str, Planned]:
    """Device -> (kernel, planned microseconds) of one step of a lane; what takes no time is left out."""
    lane = plan.lanes[index]
    graph, costs = plan.graphs[step], plan.prices[step]
    found: dict[str, dict[str, float]] = {}
    for launch, device in enumerate(lane.placement.devices[step - plan.first_step(lane)]):
        here = found.setdefault(plan.cluster.names[device], {})
        kernel = graph.trace.kernel_of(launch).name
        here[kernel] = here.get(kernel, 0.0) + costs.us(launch, device)
    return {
        device: tuple((kernel, us) for kernel, us in sorted(kernels.items()) if us)
        for device, kernels in found.items()
    }


# Requests that should come within a window where it matters.
WINDOW_REQUESTS = 100
# What a switch costs: of the requests that are usual for the load, how many more there are until those
# who are here would have left.
SWITCH_COST = 0.5
# Less is not worth a change of plans.
MIN_DRIFT = 0.05
# What the plans' costs say of their own error.
COST_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """How it watches."""

    # Seconds; None: by the policies.
    window_s: float | None = None
    # The threshold: standard errors to either side of a counted load at which another policy must be better.
    # Two were tried as the default: a system near the crossing stayed too long on the worse side.
    errors: float = 1.0
    # Windows of measured times before costs are judged.
    cost_windows: int = 1


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
        self._times = MeasuredSteps()
        self._costs_since_s = 0.0
        self._factors = Factors({})
        self._is_replanning = False
        self._lost: frozenset[str] = frozenset()
        self._place()

    def _place(self) -> None:
        known = tuple(self._policies[name] for name in self._order)
        self.crossing_per_s = crossing_per_s(known)
        reference = self.crossing_per_s or max(p.capacity_per_s for p in known)
        self.window_s = self._config.window_s or WINDOW_REQUESTS / reference
        # What came before the system was watched is not known: as much as makes neither policy better.
        self._meter.set(self.window_s, self.crossing_per_s or 0.0)

    def begin(self, now_s: float) -> None:
        """From now on it watches: what has not come since then has not come."""
        if self._start_s is None:
            self._start_s = self._costs_since_s = now_s
            self._meter.start(now_s)

    def observe(self, now_s: float, event: Event) -> tuple[Action, ...]:
        """What follows from an event; most often nothing."""
        self.begin(now_s)
        match event:
            case Arrived(num_requests):
                self._meter.arrived(now_s)
                return self._judge_load(now_s, num_requests)
            case Ticked(num_requests):
                return (*self._judge_load(now_s, num_requests), *self._judge_costs(now_s))
            case Lost(device):
                return self._lose(now_s, device)
            case Returned(device):
                self._lost -= {device}
                return (self._action(now_s, DecisionKind.RETURN, f"{device} is back"),)
            case Adopted():
                return self._adopt(now_s, event)

    def stepped(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        """A step of a lane of a plan in force has kept each device busy for so long."""
        self._times.add(lane, step, busy_s)

    def load(self, now_s: float) -> tuple[float, float]:
        """Requests per second, and their standard error."""
        num_came = self._meter.count(now_s)
        error = math.sqrt(self._meter.dispersion * num_came)
        return num_came / self.window_s, error / self.window_s

    def _judge_load(self, now_s: float, num_requests: int) -> tuple[Action, ...]:
        load, error = self.load(now_s)
        now = self._policies[self.current]

        def expected(policy: Capability, errors: float) -> float:
            return policy.expected(max(0.0, load + errors * error), error, num_requests, self.window_s)

        chosen = min(self._policies.values(), key=lambda policy: expected(policy, 0.0))
        if chosen is now:
            return ()
        # Requests read again what they have, or end where they are beside microbatches of the new policy. How
        # long they stay is, by Little's law, how many there are over how many come.
        usual = chosen.usual(load)
        price = SWITCH_COST * usual * usual / max(load * self.window_s, usual)
        for errors in (-self._config.errors, self._config.errors):
            if not expected(chosen, errors) + price < expected(now, errors):
                return ()
        self.current = chosen.name
        figures = (f"{expected(p, 0.0):.3g} with {p.name} ({p.capacity_per_s:.3g}/s)" for p in (chosen, now))
        here = f"{self._meter.seen(now_s)}, {num_requests} are here"
        why = f"{here}; in the next {self.window_s:.3g} s there would be {', '.join(figures)}"
        return (self._action(now_s, DecisionKind.SWITCH, why),)

    def _judge_costs(self, now_s: float) -> tuple[Action, ...]:
        if self._is_replanning or now_s - self._costs_since_s < self._config.cost_windows * self.window_s:
            return ()
        observations = self._times.take()
        self._costs_since_s = now_s
        if not observations:
            return ()
        self._factors = corrected(observations, COST_ERROR)
        off = drift(observations, self._factors)
        if off < MIN_DRIFT:
            return ()
        why = f"measured times differ from the plan's by {off:.0%}; planning anew beside the running plan"
        return (self._replan(now_s, why),)

    def _replan(self, now_s: float, why: str) -> Action:
        self._is_replanning = True
        decision = Decision(now_s, DecisionKind.REPLAN, self.current, why)
        return Action(decision, self._factors, self._lost)

    def _lose(self, now_s: float, device: str) -> tuple[Action, ...]:
        self._lost |= {device}
        gone = f"{device} does not answer; lanes that use it are closed"
        why = f"planning for what is left without {', '.join(sorted(self._lost))}"
        return self._action(now_s, DecisionKind.LOSE, gone), self._replan(now_s, why)

    def _adopt(self, now_s: float, event: Adopted) -> tuple[Action, ...]:
        self._policies |= {policy.name: policy for policy in event.capabilities}
        self._is_replanning = False
        self._times = MeasuredSteps()  # what was measured of the plans before is corrected already
        self._costs_since_s = now_s
        self._factors = Factors({})
        self._place()
        return (self._action(now_s, DecisionKind.ADOPT, event.why),)

    def _action(self, now_s: float, kind: DecisionKind, why: str) -> Action:
        return Action(Decision(now_s, kind, self.current, why))


# Windows that are remembered, and how many windows of a Poisson stream are supposed before them.
NUM_WINDOWS, NUM_SUPPOSED = 24, 4
# Levels that a steady load may have had in that time.
NUM_LEVELS = 2


class Meter:
    """Counts arrivals in a window, and how much that number varies; time only needs to run forward.

    Counts of a Poisson stream vary by their square root. Real streams come in bursts and vary more: the
    variance of a window's count is a multiple of its mean, the dispersion, which is measured over the last
    windows. A lull in a bursty stream is then not taken for a load that has gone.
    """

    def __init__(self) -> None:
        self.window_s = math.inf
        # What is supposed of the time before the first arrival.
        self.before_per_s = 0.0
        self._times: deque[float] = deque()
        self._start_s: float | None = None
        self._counts: deque[int] = deque(maxlen=NUM_WINDOWS)
        self._mark_s = 0.0
        self._num = 0
        # Measured when it is asked for, once a window.
        self._dispersion: float | None = None

    def set(self, window_s: float, before_per_s: float) -> None:
        """Another window; counts of windows of another length say nothing about it."""
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
        """Arrivals within a window; the part of it before watching began is supposed."""
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
