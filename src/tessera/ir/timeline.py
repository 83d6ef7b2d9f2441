"""Span, Timeline: what happened when, on which device or link.

Arrivals, Decision, ServingReport: requests over time, what was decided, and what they saw.

An arrival is one request: when it comes, how many tokens it brings and how many it wants. Times are in
seconds from the start. Every figure of a report says by its `clock` whose time it is in.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

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
    microbatch: int
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


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order in which they come."""

    # Where they are from: "poisson:20", or a file.
    name: str
    times_s: tuple[float, ...]
    # Tokens of each request's prompt and answer; empty: each request is one average work unit.
    prompts: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def rate_per_s(self) -> float:
        """Requests per second from the first to the last; infinite if all come at once."""
        if not self.times_s:
            return 0.0
        span = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span if span else float("inf")

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in pairwise(self.times_s)), default=0.0)


class DecisionKind(StrEnum):
    """What a monitor can want."""

    SWITCH = "switch"  # another policy
    REPLAN = "replan"  # new plans, made beside the running ones
    ADOPT = "adopt"  # new plans are there and taken up
    LOSE = "lose"  # a device is gone
    RETURN = "return"  # and it is back


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, with its reason in one line."""

    at_s: float
    kind: DecisionKind
    # The policy in force from here on.
    policy: str
    why: str


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How a time is spread over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServingReport:
    """What requests saw. Without finished requests the quantiles are None."""

    clock: Clock
    policy: str
    arrivals: str
    num_requests: int
    num_finished: int
    # Turned away because too many were waiting; never served because no device was left.
    num_refused: int
    num_failed: int
    # Begun again because a device was lost under them.
    num_restarted: int
    duration_s: float
    offered_per_s: float
    # What the first policy and these lengths can sustain, requests per second.
    capacity_per_s: float
    is_saturated: bool
    requests_per_s: float
    tokens_per_s: float
    ttft_s: Quantiles | None
    # Time per output token after the first; only of requests with two or more.
    tpot_s: Quantiles | None
    latency_s: Quantiles | None
    # Latency divided by the number of output tokens.
    normalised_s: Quantiles | None
    # Share of all requests that met every limit; None without limits.
    slo_attainment: float | None
    # (device or bus, share of the time it was busy)
    utilisation: tuple[tuple[str, float], ...]
    # None where a price or a power is not known.
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    max_waiting: int
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()


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
