"""report_of: what requests saw, from a simulation; and limits on it.

    ttft        from arrival to the first token
    tpot        time per token after the first
    latency     from arrival to the last token
    normalised  latency divided by the tokens of the answer

A request that was refused or never served meets no limit. Rent is paid for every device that a policy
may use, for the whole duration, until it is lost; energy by the same model as the planner's: a device that is
on draws a share of its board power when it waits and all of it when it is busy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.errors import ArrivalsError, UnknownName
from tessera.ir import Arrivals, Clock, Cluster, Plan, Quantiles, ServingReport
from tessera.plan.search.objectives import IDLE_SHARE
from tessera.simulate.columns import Wires
from tessera.simulate.online import SimulatedRun

Floats = npt.NDArray[np.float64]
METRICS = ("ttft", "tpot", "latency", "normalised")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """One service-level objective: a metric that may not exceed some seconds."""

    metric: str
    seconds: float


def parse_limits(text: str) -> tuple[LatencyLimit, ...]:
    """Limits as a user writes them: ttft=500ms,tpot=50ms."""
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
            raise ArrivalsError(f"a limit of {value} is none", "Use a time above zero.", "--slo")
        found.append(LatencyLimit(name, seconds))
    return tuple(found)


def measured(served: SimulatedRun) -> dict[str, Floats]:
    """Metric -> seconds of every request; not a number where it has none."""
    first = np.array(served.ledger.first_us)
    done = np.array(served.ledger.done_us)
    came = np.array(served.demand.times_us)
    tokens = np.array(served.demand.tokens, dtype=np.float64)
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
    """Share of all requests within every limit; a request of one token has no time per token to exceed."""
    if not limits or not len(served.demand):
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
    tokens = float(np.array(served.demand.tokens)[done].sum())
    cluster = plans[0].cluster
    names = (*cluster.names, *Wires(cluster).buses)
    offered = arrivals.rate_per_s
    used = sorted({device for plan in plans for device in plan.used})
    is_saturated = bool(math.isfinite(offered) and offered > capacity_per_s)
    return ServingReport(
        clock=Clock.SIMULATED,
        policy=served.policy,
        arrivals=arrivals.name,
        num_requests=len(served.demand),
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
        utilisation=tuple(
            (name, min(1.0, us * 1e-6 / seconds) if seconds else 0.0)
            for name, us in zip(names, served.busy_us, strict=True)
        ),
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
