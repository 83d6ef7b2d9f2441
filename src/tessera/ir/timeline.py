"""Timelines of runs, request arrivals, decisions and serving reports.

Arrival times are seconds from the start. `clock` states whether times are simulated or measured.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec

# How commands show a field: only in the JSON; under another label.
HIDDEN = msgspec.Meta(extra={"hidden": True})
PER_TOKEN = msgspec.Meta(extra={"label": "latency/token", "unit": "s"})
# Separator of source and destination in a link's track.
LINK_ARROW = " -> "


class Clock(StrEnum):
    """Clock of the spans."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """A launch on a device or a transfer on a link."""

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

    def busy_us(self) -> dict[str, float]:
        """Busy time by track."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.track] = busy.get(span.track, 0.0) + span.stop_us - span.start_us
        return busy

    def transfer_us(self) -> tuple[float, float]:
        """Total transfer time, and the part hidden by compute on the destination."""
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
    """Appends an interval, merging it with the last one if they overlap."""
    if intervals and start <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], stop))
    else:
        intervals.append((start, stop))


def _shared(intervals: list[tuple[float, float]], start: float, stop: float) -> float:
    """Overlap of [start, stop) with disjoint intervals."""
    found = 0.0
    index = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    while index < len(intervals) and intervals[index][0] < stop:
        found += max(0.0, min(stop, intervals[index][1]) - max(start, intervals[index][0]))
        index += 1
    return found


@dataclass(frozen=True)
class Arrivals:
    """Requests in order of arrival."""

    # "poisson:20", or a file.
    name: str
    times_s: tuple[float, ...]
    # Prompt and output tokens per request; empty: one average work unit each.
    prompts: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def rate_per_s(self) -> float:
        """Requests per second from first to last; infinite if simultaneous."""
        if not self.times_s:
            return 0.0
        span = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span if span else float("inf")

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in pairwise(self.times_s)), default=0.0)


class DecisionKind(StrEnum):
    SWITCH = "switch"  # another policy
    REPLAN = "replan"  # start planning
    ADOPT = "adopt"  # adopt new plans
    LOSE = "lose"  # device lost
    RETURN = "return"  # device recovered


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision with a one-line reason."""

    at_s: float
    kind: DecisionKind
    # Policy from here on.
    policy: str
    why: str


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServingReport:
    """Serving figures. Quantiles are None without finished requests."""

    clock: Annotated[Clock, HIDDEN]
    policy: Annotated[str, HIDDEN]
    arrivals: Annotated[str, HIDDEN]
    num_requests: Annotated[int, HIDDEN]
    num_finished: int
    # Rejected by a full queue; unserved for lack of devices.
    num_refused: int
    num_failed: int
    # Restarted after a device loss.
    num_restarted: int
    duration_s: float
    offered_per_s: Annotated[float, HIDDEN]
    # Sustainable requests per second of the first policy at these lengths.
    capacity_per_s: float
    is_saturated: bool
    requests_per_s: float
    tokens_per_s: float
    ttft_s: Quantiles | None
    # Time per output token after the first, of requests with two or more.
    tpot_s: Quantiles | None
    latency_s: Quantiles | None
    # Latency per output token.
    normalised_s: Annotated[Quantiles | None, PER_TOKEN]
    # Share of requests that met all limits; None without limits.
    slo_attainment: float | None
    # Device or bus -> busy share.
    utilisation: dict[str, float]
    # None if a price or power is unknown.
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    max_waiting: int
    decisions: Annotated[tuple[Decision, ...], HIDDEN] = ()
    notes: Annotated[tuple[str, ...], HIDDEN] = ()


ARRIVALS_RULES = [
    (
        "arrival times are ascending, finite and not negative",
        lambda a: (
            all(0.0 <= t < float("inf") for t in a.times_s) and all(x <= y for x, y in pairwise(a.times_s))
        ),
    ),
    (
        "every request has a prompt and an answer length, or none has",
        lambda a: len(a.prompts) == len(a.outputs) and len(a.prompts) in (0, len(a.times_s)),
    ),
    ("every length is at least one", lambda a: all(n >= 1 for n in (*a.prompts, *a.outputs))),
]
