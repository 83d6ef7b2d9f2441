"""Figures 7 and 8: latency over the request rate of gpt-oss, and the rate at 50 ms per token.

Requests with the conversation's lengths arrive at random; each policy's service is played on a virtual clock.
Latency is that of the whole request over its output tokens, from medians (and 99th percentiles) of the times
to the first token and per token. As published, every engine holds 32 sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.published import figures
from benchmarks.published.offline import best_plan, published_plan
from benchmarks.published.setup import (
    CONVERSATION,
    FRACTIONAL,
    MODELS,
    PAIRS,
    POLICIES,
    cards,
    cluster,
    served,
)

from tessera.errors import TesseraError
from tessera.ir import ServicePlan
from tessera.serve.rehearse import play, rehearse
from tessera.simulate.arrivals import make_arrivals

MODEL = "gpt_oss_20b"
SLO_MS = 50.0
# Rates that are played, as shares of the capacity.
SHARES = (0.3, 0.6, 0.8, 0.95, 1.1, 1.3, 1.6, 2.0)
LENGTHS = f"lognormal:{CONVERSATION.prompt_tokens},{CONVERSATION.output_tokens},0.7"


@dataclass(frozen=True, slots=True)
class OnlineCase:
    pair: str
    policy: str
    is_best: bool
    num_requests: int
    shares: tuple[float, ...] = SHARES


@dataclass(frozen=True, slots=True)
class Curve:
    capacity_per_s: float
    # Requests per second, ms per token: median and 99th percentile.
    points: tuple[tuple[float, float, float], ...]

    def rate_at(self, limit_ms: float, column: int) -> float | None:
        """The rate at which the latency passes a limit; None if it never keeps it."""
        before: tuple[float, float] | None = None
        for point in self.points:
            rate, ms = point[0], point[column]
            if ms > limit_ms:
                if before is None:
                    return None
                return before[0] + (rate - before[0]) * (limit_ms - before[1]) / (ms - before[1])
            before = rate, ms
        return before[0] if before else None


def curve(case: OnlineCase) -> Curve | None:
    plan = _plan(case.pair, case.policy, case.is_best)
    if plan is None:
        return None
    capacity = rehearse(plan, CONVERSATION).tokens_per_s / CONVERSATION.output_tokens
    points = []
    for share in case.shares:
        rate = share * capacity
        arrivals = make_arrivals(f"poisson:{rate:.6g}", case.num_requests, 0, LENGTHS)
        found, tokens = play([plan], arrivals).expected, CONVERSATION.output_tokens
        middle, tail = (
            tpot + ttft / tokens
            for tpot, ttft in ((found.tpot_ms, found.ttft_ms), (found.tpot_p99_ms, found.ttft_p99_ms))
        )
        points.append((round(rate, 3), round(middle, 2), round(tail, 2)))
        if middle > 2 * SLO_MS:
            break
    return Curve(capacity, tuple(points))


@cache
def _plan(pair: str, policy: str, is_best: bool) -> ServicePlan | None:
    steps = served(MODELS[MODEL], cluster(cards(pair, policy)))
    make = best_plan if is_best else published_plan
    try:
        return make(steps, CONVERSATION, POLICIES[policy])
    except TesseraError:
        return None


def cases(pairs: Sequence[str], num_requests: int, has_best: bool) -> list[OnlineCase]:
    return [
        OnlineCase(pair, policy, is_best, num_requests)
        for pair in pairs
        for policy in POLICIES
        if policy != FRACTIONAL
        for is_best in ((False, True) if has_best else (False,))
    ]


def fig7(curves: dict[OnlineCase, Curve | None]) -> list[dict[str, Any]]:
    """The rate at 50 ms per token, and the curve behind it."""
    doc, rows = figures()["fig7"], []
    for pair in PAIRS:
        published = doc["published"][pair]
        again = doc["re_measured"] if doc["re_measured"]["pair"] == pair else {}
        for policy in (name for name in POLICIES if name != FRACTIONAL):
            row: dict[str, Any] = {"pair": pair, "model": MODEL, "policy": policy}
            row["published"] = published["rate_at_slo"].get(policy)
            row["published_curve"] = published["curves_rate_and_ms_per_token"].get(policy)
            row["re_measured"] = again.get("rate_at_50_ms_per_token", {}).get(policy)
            for column, is_best in (("ours", False), ("ours_best_batch", True)):
                found = next(
                    (
                        c
                        for k, c in curves.items()
                        if (k.pair, k.policy, k.is_best) == (pair, policy, is_best)
                    ),
                    None,
                )
                row[column] = _rounded(found.rate_at(SLO_MS, 1)) if found else None
                row[f"{column}_p99"] = _rounded(found.rate_at(SLO_MS, 2)) if found else None
                row[f"{column}_curve"] = found.points if found else None
            rows.append(row)
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
