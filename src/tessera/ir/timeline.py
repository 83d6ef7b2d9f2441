"""Timelines of runs, request arrivals and decisions."""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import msgspec

HIDDEN = msgspec.Meta(extra={"hidden": True})
LINK_ARROW = " -> "


def shown(label: str = "", unit: str = "") -> msgspec.Meta:
    return msgspec.Meta(extra={"label": label, "unit": unit})


class Clock(StrEnum):
    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Span:
    # Device name, or "src -> dst" for a link.
    track: str
    label: str
    request: int
    microbatch: int
    start_us: float
    stop_us: float
    is_transfer: bool = False


@dataclass(frozen=True)
class Timeline:
    clock: Clock
    # Sorted by start.
    spans: tuple[Span, ...]
    # (request, arrival, completion) in microseconds.
    requests: tuple[tuple[int, float, float], ...]

    @property
    def makespan_us(self) -> float:
        return max((stop for _, _, stop in self.requests), default=0.0)

    @cached_property
    def intervals(self) -> dict[str, list[tuple[float, float]]]:
        """Track -> when it was busy: overlapping spans are one interval."""
        tracks: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            _join(tracks.setdefault(span.track, []), span.start_us, span.stop_us)
        return tracks

    def busy_us(self) -> dict[str, float]:
        return {
            track: sum(stop - start for start, stop in listed) for track, listed in self.intervals.items()
        }

    def transfer_us(self) -> tuple[float, float]:
        """Total, and the part hidden by compute on the destination."""
        total = hidden = 0.0
        for span in self.spans:
            if span.is_transfer:
                total += span.stop_us - span.start_us
                busy = self.intervals.get(span.track.rpartition(LINK_ARROW)[2], [])
                hidden += _overlap_us(busy, span.start_us, span.stop_us)
        return total, hidden


def _join(intervals: list[tuple[float, float]], start: float, stop: float) -> None:
    if intervals and start <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], stop))
    else:
        intervals.append((start, stop))


def _overlap_us(intervals: list[tuple[float, float]], start: float, stop: float) -> float:
    shared_us = 0.0
    index = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    while index < len(intervals) and intervals[index][0] < stop:
        shared_us += max(0.0, min(stop, intervals[index][1]) - max(start, intervals[index][0]))
        index += 1
    return shared_us


@dataclass(frozen=True)
class Arrivals:
    name: str
    times_s: tuple[float, ...]
    # Tokens per request; empty: one average work unit each.
    prompts: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def rate_per_s(self) -> float:
        if not self.times_s:
            return 0.0
        span = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span if span else float("inf")


class DecisionKind(StrEnum):
    SWITCH = "switch"
    REPLAN = "replan"
    ADOPT = "adopt"
    LOSE = "lose"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Decision:
    at_s: float
    kind: DecisionKind
    policy: str
    why: str
