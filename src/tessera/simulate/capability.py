"""What policies can do, found by simulating them: capacities, latency against load, and one request alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from tessera.adapt import Capability, LaneLoad, Point, crossing_per_s
from tessera.errors import ArrivalsError
from tessera.simulate.arrivals import poisson
from tessera.simulate.metrics import METRICS, Limit, measured
from tessera.simulate.online import ServeConfig, Server
from tessera.simulate.policy import Policy
from tessera.simulate.seats import Demand

# Full houses that pass through a policy while its capacity is measured, and at every load of its curve.
TURNS = 8
# Requests at every load, at least.
LEAST = 1000
# Points added to the curves where they cross.
REFINED = 3
# Loads of a curve, as shares of each policy's capacity.
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def like(demand: Demand, num: int, times_us: Sequence[float]) -> Demand:
    """As many requests with the lengths of a demand, over and over, at other times."""

    def drawn(values: Sequence[float]) -> list[float]:
        return list(islice(cycle(values), num))

    tokens, decodes = (list(map(int, drawn(x))) for x in (demand.tokens, demand.decodes))
    return replace(demand, times_us=times_us, tokens=tokens, decodes=decodes, shares=drawn(demand.shares))


def house(policy: Policy, demand: Demand) -> int:
    """Requests that a policy has seats for."""
    return policy.plan.slots * demand.rows


def capacity_per_s(policy: Policy, demand: Demand) -> float:
    """Requests per second of a policy that always has more waiting than it can take."""
    num = house(policy, demand) * (TURNS + 1)
    server = Server([policy], like(demand, num, [0.0] * num), ServeConfig())
    done = np.sort(np.array(server.run().ledger.done_us)) * 1e-6
    # While requests waited: from the first completion to the time when the last of them was seated.
    first, last = house(policy, demand) // 2, num - house(policy, demand)
    return float((last - first) / (done[last] - done[first])) if done[last] > done[first] else float("inf")


def point(policy: Policy, demand: Demand, rate_per_s: float, seed: int) -> Point:
    """A policy under Poisson arrivals."""
    num = max(LEAST, house(policy, demand) * TURNS)
    times = [t * 1e6 for t in poisson(rate_per_s, num, seed).times_s]
    found = measured(Server([policy], like(demand, num, times), ServeConfig()).run())
    # By Little's law, rate times latency are in the system.
    present = rate_per_s * float(np.nanmean(found["latency"]))
    return Point(rate_per_s, float(np.nanmean(found["normalised"])), present)


def capabilities(policies: Sequence[Policy], demand: Demand, seed: int = 0) -> tuple[Capability, ...]:
    """Every policy at the same loads and the same arrivals."""
    full = [capacity_per_s(policy, demand) for policy in policies]
    rates = sorted({share * capacity for share in LOADS for capacity in full})
    made = []
    for policy, capacity in zip(policies, full, strict=True):
        below = [rate for rate in rates if rate < capacity]
        curve = tuple(point(policy, demand, rate, seed) for rate in below)
        made.append(Capability(policy.name, capacity, curve, lane_loads(policy)))
    for _ in range(REFINED):
        made = _refined(policies, made, demand, seed)
    return tuple(made)


def _refined(
    policies: Sequence[Policy], known: list[Capability], demand: Demand, seed: int
) -> list[Capability]:
    """With one more point of each curve where they seem to cross: that is where it matters."""
    rate = crossing_per_s(tuple(known))
    if rate is None:
        return known
    made = []
    for policy, old in zip(policies, known, strict=True):
        is_new = rate < old.capacity_per_s and all(abs(p.rate_per_s - rate) > 1e-3 * rate for p in old.curve)
        more = (point(policy, demand, rate, seed),) if is_new else ()
        made.append(replace(old, curve=tuple(sorted((*old.curve, *more)))))
    return made


def lane_loads(policy: Policy) -> tuple[LaneLoad, ...]:
    """What one run of each lane keeps busy."""
    return tuple(
        LaneLoad(
            tuple((d, tuple(sorted(kernels.items()))) for d, kernels in sorted(policy.busy_us(lane).items())),
            tuple(sorted(policy.wire_us(lane).items())),
            policy.plan.lanes[lane.index].rate_per_s,
        )
        for lane in policy.lanes
    )


def alone(policy: Policy, demand: Demand) -> dict[str, float]:
    """Metric -> the least that a request can see: the shortest and the longest, each on an idle system."""
    best = dict.fromkeys(METRICS, float("inf"))
    by_tokens = sorted(range(len(demand)), key=lambda n: demand.tokens[n])
    for number in {by_tokens[0], by_tokens[-1]}:
        one = replace(
            demand,
            times_us=[0.0],
            tokens=[demand.tokens[number]],
            decodes=[demand.decodes[number]],
            shares=[demand.shares[number]],
        )
        for metric, values in measured(Server([policy], one, ServeConfig()).run()).items():
            if not np.isnan(values[0]):
                best[metric] = min(best[metric], float(values[0]))
    return best


def check_limits(policies: Sequence[Policy], demand: Demand, limits: Sequence[Limit]) -> None:
    """Refuses a limit that a request misses even when it has all devices for itself."""
    if not limits:
        return
    found = [alone(policy, demand) for policy in policies]
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
