"""What a monitor is told and what it answers: the same for a simulator and for an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tessera.adapt.capability import Capability
from tessera.adapt.drift import Factors
from tessera.ir import Decision, Plan


@dataclass(frozen=True, slots=True)
class Arrived:
    """One request has come; so many are waiting or being served, this one among them."""

    num_requests: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Nothing happened, but time went by; so many are waiting or being served."""

    num_requests: int


@dataclass(frozen=True, slots=True)
class MeasuredLaunches:
    """Launches of some kernels were timed together: planned microseconds of each, real ones of all."""

    device: str
    planned_us: tuple[tuple[str, float], ...]
    us: float
    # Runs that were averaged.
    num_runs: int = 1


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


Event = Arrived | Ticked | MeasuredLaunches | Lost | Returned | Adopted


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


class MeasuredSteps:
    def __init__(self) -> None:
        # (lane, step) -> device -> (seconds, runs)
        self._seen: dict[tuple[int, int], dict[str, tuple[float, int]]] = {}
        # (lane, step) -> device -> ((kernel, planned microseconds), ...)
        self._planned: dict[tuple[int, int], dict[str, tuple[tuple[str, float], ...]]] = {}

    def add(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float], scale: float = 1.0) -> None:
        """A step has kept devices busy; `scale` times as long as it would by itself."""
        key = (lane.number, step)
        if key not in self._planned:
            self._planned[key] = planned_us(lane.plan, lane.index, step)
        seen = self._seen.setdefault(key, {})
        for device, seconds in busy_s.items():
            total, num = seen.get(device, (0.0, 0))
            seen[device] = (total + seconds / scale, num + 1)

    def events(self) -> list[MeasuredLaunches]:
        found = []
        for key, devices in self._seen.items():
            for device, (seconds, num) in devices.items():
                planned = self._planned[key].get(device)
                if planned:
                    found.append(MeasuredLaunches(device, planned, seconds / num * 1e6, num))
        self._seen.clear()
        return found


def planned_us(plan: Plan, index: int, step: int) -> dict[str, tuple[tuple[str, float], ...]]:
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
