"""Span, Timeline: what happened when, on which device or link."""

from dataclasses import dataclass
from enum import StrEnum


class Clock(StrEnum):
    """Whose time the spans are in."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """One launch on a device or one transfer on a link."""

    # Device name, or "src -> dst" for a link.
    track: str
    label: str
    request: int
    slot: int
    start_us: float
    stop_us: float
    is_transfer: bool = False


@dataclass(frozen=True)
class Timeline:
    """A run of requests."""

    clock: Clock
    # Sorted by start.
    spans: tuple[Span, ...]
    # (request, arrival, completion) in microseconds.
    requests: tuple[tuple[int, float, float], ...]

    @property
    def makespan_us(self) -> float:
        """From time zero to the last completion."""
        return max((stop for _, _, stop in self.requests), default=0.0)

    def busy_us(self) -> dict[str, float]:
        """Track -> time it was occupied."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.track] = busy.get(span.track, 0.0) + span.stop_us - span.start_us
        return busy
