"""Span, Timeline: what happened when, on which device or link."""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum

# A link's track is its source, this, and its destination.
LINK_ARROW = " -> "


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
    # Work units in each of them, where lanes are of unlike batches; empty: one in each.
    weights: tuple[float, ...] = ()

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

    def transfer_us(self) -> tuple[float, float]:
        """Time of all transfers, and how much of it was hidden: their destination computed meanwhile."""
        computing: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            if not span.is_transfer:
                _join(computing.setdefault(span.track, []), span.start_us, span.stop_us)
        total = hidden = 0.0
        for span in self.spans:
            if span.is_transfer:
                total += span.stop_us - span.start_us
                busy = computing.get(span.track.rpartition(LINK_ARROW)[2], [])
                hidden += _shared(busy, span.start_us, span.stop_us)
        return total, hidden


def _join(intervals: list[tuple[float, float]], start: float, stop: float) -> None:
    """Adds an interval that starts no earlier than those before it; overlapping ones become one."""
    if intervals and start <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], stop))
    else:
        intervals.append((start, stop))


def _shared(intervals: list[tuple[float, float]], start: float, stop: float) -> float:
    """How much of [start, stop) lies in these disjoint intervals."""
    found = 0.0
    index = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    while index < len(intervals) and intervals[index][0] < stop:
        found += max(0.0, min(stop, intervals[index][1]) - max(start, intervals[index][0]))
        index += 1
    return found
