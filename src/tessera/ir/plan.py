"""Placement, Lane, Plan: the planner's decision. Nothing else crosses from plan to execute.

A placement sends every launch of a work unit to a device. A plan is a mix of placements, its
lanes: a share of the requests follows each. Every figure in a plan is modelled.
"""

from dataclasses import dataclass
from enum import StrEnum

from tessera.ir.cluster import Cluster
from tessera.ir.costs import Costs
from tessera.ir.graph import WorkUnit


class Objective(StrEnum):
    """What a plan was made to be good at."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Placement:
    """Launch -> device for every step of a work unit."""

    # devices[step][launch] is an index into the cluster's devices.
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One placement and how much of the work follows it."""

    placement: Placement
    # Work units per second through this lane when the system is full.
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a coarser policy would reach under the same costs."""

    name: str
    # Work units per second; None if the policy does not apply to this work.
    throughput_per_s: float | None
    # One request alone, start to end; None likewise.
    latency_us: float | None


@dataclass(frozen=True)
class Plan:
    """Which device runs which launch, what that should give, and what it was compared with."""

    unit: WorkUnit
    cluster: Cluster
    # One per step of the unit.
    costs: tuple[Costs, ...]
    objective: Objective
    # Name of the policy that made it: "throughput", "latency", "data-parallel", ...
    policy: str
    lanes: tuple[Lane, ...]
    # Requests in flight that the figures below assume.
    slots: int
    # Work units per second by busy time, and as simulated with `slots` in flight.
    throughput_per_s: float
    simulated_per_s: float
    # No mix of placements can exceed this under the same costs.
    bound_per_s: float
    # One request alone, start to end.
    latency_us: float
    baselines: tuple[Baseline, ...] = ()

    @property
    def gap(self) -> float:
        """How far below the bound the plan is, as a fraction of the bound."""
        return max(0.0, 1.0 - self.throughput_per_s / self.bound_per_s) if self.bound_per_s else 0.0
