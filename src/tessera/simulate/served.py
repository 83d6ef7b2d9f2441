"""What a simulation of serving is given beside policies and arrivals, and what it gives back."""

from dataclasses import dataclass, field

from tessera.ir import Decision
from tessera.simulate.seats import Demand, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What happens beside the arrivals."""

    seed: int = 0
    # Each run takes exp(jitter * normal) times as long.
    jitter: float = 0.0
    # Requests that come while so many wait are turned away; None: none are.
    max_waiting: int | None = None
    # True: a slot goes over to another policy between two decodes, and its state moves. False: requests keep
    # the lane they were admitted to, as `execute.Engine` does, and a slot of the old policy takes no more.
    moves_state: bool = True
    # (device, second)
    losses: tuple[tuple[str, float], ...] = ()
    # (device, second, factor)
    slowdowns: tuple[tuple[str, float, float], ...] = ()


@dataclass
class Served:
    """The raw result of a simulation."""

    demand: Demand
    ledger: Ledger
    policy: str
    duration_us: float
    # Devices, then buses.
    busy_us: list[float]
    decisions: list[Decision] = field(default_factory=list)
