"""EngineConfig: how an engine takes requests. State: what it is doing, for other threads to look at."""

from dataclasses import dataclass, field

from tessera.execute.serving import Stepper
from tessera.serve.rows import Slot


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests are taken."""

    # Requests that may wait for a row.
    max_waiting: int = 1024
    # Of each policy: slots at work that keep its devices busy; missing: one.
    widths: tuple[int, ...] = ()
    # Seconds over which utilisation and rates are shown.
    window_s: float = 5.0
    # Starts of a request after its first.
    max_retries: int = 1


@dataclass
class State:
    """What other threads may look at."""

    stepper: Stepper
    # Number of the policy in force, for slots that are opened from now on.
    policy: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    is_closing: bool = False
    # Why nothing can be served any more.
    failure: str = ""
