"""Request metrics of a simulation (`report_of`), limits on them, and capabilities of policies.

    ttft        time to first token
    tpot        time per token after the first
    latency     arrival to last token
    normalised  latency per answer token

A refused or unserved request meets no limit. Rent is paid for every usable device until it is lost. Energy
follows the planner's model: a device draws a share of its board power when idle, all of it when busy.

Capabilities come from simulation: capacity, latency by load, and a request alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt
from benchmarks.row_service.server import RequestLoad, SimulatedRun, SimulatedServer

from tessera.adapt.capability import Capability, Point, crossing_per_s
from tessera.errors import ArrivalsError, UnknownName
from tessera.ir import Arrivals, Clock, Cluster, Decision, Plan
from tessera.plan.search.objectives import IDLE_SHARE
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.columns import Wires
from tessera.simulate.stepper import Truth

Floats = npt.NDArray[np.float64]
METRICS = ("ttft", "tpot", "latency", "normalised")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Fills of all seats while capacity is measured, and at each load of a curve.
TURNS = 8
# Minimum requests at each load.
LEAST = 1000
# Points added where curves cross.
REFINED = 3
# Loads of a curve as shares of each policy's capacity.
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


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

    clock: Clock
    policy: str
    arrivals: str
    num_requests: int
    num_finished: int
    # Rejected by a full queue; unserved for lack of devices.
    num_refused: int
    num_failed: int
    # Restarted after a device loss.
    num_restarted: int
    duration_s: float
    offered_per_s: float
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
    normalised_s: Quantiles | None
    # Share of requests that met all limits; None without limits.
    slo_attainment: float | None
    # Device or bus -> busy share.
    utilisation: dict[str, float]
    # None if a price or power is unknown.
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    max_waiting: int
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """One service-level objective: a metric and its maximum in seconds."""

    metric: str
    seconds: float


def parse_limits(text: str) -> tuple[LatencyLimit, ...]:
    """Limits from a user's text: ttft=500ms,tpot=50ms."""
    found = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in METRICS:
            raise UnknownName("limit", name, METRICS)
        digits = value.rstrip("smu")
        unit = value[len(digits) :] or "s"
        try:
            seconds = float(digits) * UNITS[unit]
        except (ValueError, KeyError):
            message = f"'{value}' is not a time"
            raise ArrivalsError(message, "Write ttft=500ms,tpot=50ms.", "--slo") from None
        if not 0.0 < seconds < math.inf:
            raise ArrivalsError(
                f"a limit must be above zero, got {value}", "Write ttft=500ms,tpot=50ms.", "--slo"
            )
        found.append(LatencyLimit(name, seconds))
    return tuple(found)


def measured(served: SimulatedRun) -> dict[str, Floats]:
    first = np.array(served.ledger.first_us)
    done = np.array(served.ledger.done_us)
    came = np.array(served.requests.times_us)
    tokens = np.array(served.requests.tokens, dtype=np.float64)
    latency = np.where(done >= 0.0, done - came, np.nan) * 1e-6
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where((done >= 0.0) & (tokens > 1.0), (done - first) * 1e-6 / (tokens - 1.0), np.nan)
    return {
        "ttft": np.where(first >= 0.0, first - came, np.nan) * 1e-6,
        "tpot": tpot,
        "latency": latency,
        "normalised": latency / tokens,
    }


def attainment(served: SimulatedRun, limits: Sequence[LatencyLimit]) -> float | None:
    """Share of requests within every limit; a request of one token has no tpot."""
    if not limits or not len(served.requests):
        return None
    found = measured(served)
    good = np.array(served.ledger.done_us) >= 0.0
    for limit in limits:
        values = found[limit.metric]
        good &= (values <= limit.seconds) | np.isnan(values)
    return float(good.mean())


def _quantiles(values: Floats) -> Quantiles | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    return Quantiles(float(known.mean()), *(float(x) for x in np.percentile(known, (50, 90, 99))))


def report_of(
    served: SimulatedRun,
    plans: Sequence[Plan],
    arrivals: Arrivals,
    capacity_per_s: float,
    limits: Sequence[LatencyLimit] = (),
    notes: Sequence[str] = (),
) -> ServingReport:
    found = measured(served)
    done = np.array(served.ledger.done_us) >= 0.0
    seconds = served.duration_us * 1e-6
    tokens = float(np.array(served.requests.tokens)[done].sum())
    cluster = plans[0].cluster
    names = (*cluster.names, *Wires(cluster).buses)
    offered = arrivals.rate_per_s
    used = sorted({device for plan in plans for device in plan.used})
    is_saturated = bool(math.isfinite(offered) and offered > capacity_per_s)
    return ServingReport(
        clock=Clock.SIMULATED,
        policy=served.policy,
        arrivals=arrivals.name,
        num_requests=len(served.requests),
        num_finished=int(done.sum()),
        num_refused=served.ledger.num_refused,
        num_failed=served.ledger.num_failed,
        num_restarted=served.ledger.num_restarted,
        duration_s=seconds,
        offered_per_s=offered,
        capacity_per_s=capacity_per_s,
        is_saturated=is_saturated,
        requests_per_s=float(done.sum()) / seconds if seconds else 0.0,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_s=_quantiles(found["ttft"]),
        tpot_s=_quantiles(found["tpot"]),
        latency_s=_quantiles(found["latency"]),
        normalised_s=_quantiles(found["normalised"]),
        slo_attainment=attainment(served, limits),
        utilisation={
            name: min(1.0, us * 1e-6 / seconds) if seconds else 0.0
            for name, us in zip(names, served.busy_us, strict=True)
        },
        usd_per_million_tokens=_dollars(cluster, used, seconds, tokens),
        joules_per_token=_joules(cluster, used, served.busy_us, seconds, tokens),
        max_waiting=served.ledger.max_waiting,
        decisions=tuple(served.decisions),
        notes=(*notes, *_saturation(is_saturated, offered, capacity_per_s)),
    )


def _saturation(is_saturated: bool, offered: float, capacity: float) -> tuple[str, ...]:
    if not is_saturated:
        return ()
    return (
        f"past saturation: {offered:.4g} requests a second come and {capacity:.4g} can be served, so the "
        f"queue grows by {offered - capacity:.3g} a second and latencies depend on how long the load lasts",
    )


def _dollars(cluster: Cluster, used: Sequence[int], seconds: float, tokens: float) -> float | None:
    prices = [cluster.devices[d].usd_per_hour for d in used]
    known = [p for p in prices if p is not None]
    if len(known) < len(prices) or not tokens:
        return None
    return sum(known) / 3600.0 * seconds / tokens * 1e6


def _joules(
    cluster: Cluster, used: Sequence[int], busy_us: Sequence[float], seconds: float, tokens: float
) -> float | None:
    total = 0.0
    for device in used:
        watts = cluster.devices[device].tdp_w
        if watts is None:
            return None
        total += watts * (IDLE_SHARE * seconds + (1.0 - IDLE_SHARE) * busy_us[device] * 1e-6)
    return total / tokens if tokens else None


def like(requests: RequestLoad, num: int, times_us: Sequence[float]) -> RequestLoad:
    return requests.chosen(islice(cycle(range(len(requests))), num), times_us)


def house(plan: Plan, requests: RequestLoad) -> int:
    return plan.microbatches * requests.rows


def capacity_per_s(plan: Plan, requests: RequestLoad, truth: Truth | None = None) -> float:
    num = house(plan, requests) * (TURNS + 1)
    served = SimulatedServer([plan], like(requests, num, [0.0] * num), truth).run()
    done = np.sort(np.array(served.ledger.done_us)) * 1e-6
    # While requests waited: from the first completion until the last one was seated.
    first, last = house(plan, requests) // 2, num - house(plan, requests)
    return float((last - first) / (done[last] - done[first])) if done[last] > done[first] else float("inf")


def poisson(rate_per_s: float, num: int, seed: int = 0) -> Arrivals:
    return make_arrivals(f"poisson:{rate_per_s!r}", num, seed)


def point(plan: Plan, requests: RequestLoad, rate_per_s: float, seed: int) -> Point:
    num = max(LEAST, house(plan, requests) * TURNS)
    times = [t * 1e6 for t in poisson(rate_per_s, num, seed).times_s]
    found = measured(SimulatedServer([plan], like(requests, num, times)).run())
    # Little's law: rate times latency requests are present.
    present = rate_per_s * float(np.nanmean(found["latency"]))
    return Point(rate_per_s, float(np.nanmean(found["normalised"])), present)


def capabilities(plans: Sequence[Plan], requests: RequestLoad, seed: int = 0) -> tuple[Capability, ...]:
    """Every plan at the same loads and arrivals, by its own costs."""
    full = [capacity_per_s(plan, requests) for plan in plans]
    rates = sorted({share * capacity for share in LOADS for capacity in full})
    made = []
    for plan, capacity in zip(plans, full, strict=True):
        curve = tuple(point(plan, requests, rate, seed) for rate in rates if rate < capacity)
        made.append(Capability(plan.policy, capacity, curve))
    for _ in range(REFINED):
        made = _refined(plans, made, requests, seed)
    return tuple(made)


def _refined(
    plans: Sequence[Plan], known: list[Capability], requests: RequestLoad, seed: int
) -> list[Capability]:
    """Curves with one more point each where they seem to cross."""
    rate = crossing_per_s(tuple(known))
    if rate is None:
        return known
    made = []
    for plan, old in zip(plans, known, strict=True):
        is_new = rate < old.capacity_per_s and all(abs(p.rate_per_s - rate) > 1e-3 * rate for p in old.curve)
        more = (point(plan, requests, rate, seed),) if is_new else ()
        made.append(replace(old, curve=tuple(sorted((*old.curve, *more)))))
    return made


def alone(plan: Plan, requests: RequestLoad, truth: Truth | None = None) -> dict[str, float]:
    """Metric -> least value on an idle system, of the shortest and the longest request."""
    best = dict.fromkeys(METRICS, float("inf"))
    by_tokens = sorted(range(len(requests)), key=lambda n: requests.tokens[n])
    for number in {by_tokens[0], by_tokens[-1]}:
        one = requests.chosen([number], [0.0])
        for metric, values in measured(SimulatedServer([plan], one, truth).run()).items():
            if not np.isnan(values[0]):
                best[metric] = min(best[metric], float(values[0]))
    return best


def check_limits(
    plans: Sequence[Plan], requests: RequestLoad, limits: Sequence[LatencyLimit], truth: Truth
) -> None:
    if not limits:
        return
    found = [alone(plan, requests, truth) for plan in plans]
    for limit in limits:
        least = min(x[limit.metric] for x in found)
        if not np.isfinite(least):
            message = "no answer has a second token, so there is no time per token"
            raise ArrivalsError(message, "Give lengths, as --lengths geometric:512,128.", "--slo")
        if limit.seconds < least:
            message = (
                f"{limit.metric} of {limit.seconds * 1e3:.4g} ms cannot be met: one request alone takes "
            )
            remedy = f"Allow at least {least * 1e3:.4g} ms, or add faster devices."
            raise ArrivalsError(f"{message}{least * 1e3:.4g} ms (simulated)", remedy, "--slo")
