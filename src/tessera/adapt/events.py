"""What a monitor is told and what it answers: the same for a simulator and for an engine."""

from dataclasses import dataclass

from tessera.adapt.capability import Capability
from tessera.adapt.drift import Factors
from tessera.ir import Decision


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
    """A device does not answer any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A device that was lost is back."""

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
    # Of a rebalance: the lanes' new rates.
    rates_per_s: tuple[float, ...] = ()
    # Of a replan: how wrong the costs were, and devices that are gone.
    factors: Factors | None = None
    without: frozenset[str] = frozenset()
