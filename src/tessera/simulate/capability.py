"""What policies can do, found by simulating them: capacities, latency against load, and one request alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from tessera.adapt.capability import Capability, Point, crossing_per_s
from tessera.errors import ArrivalsError
from tessera.ir import Plan
from tessera.simulate.arrivals import poisson
from tessera.simulate.metrics import METRICS, LatencyLimit, measured
from tessera.simulate.online import SimulatedServer
from tessera.simulate.rows import Demand
from tessera.simulate.stepper import Truth

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


def house(plan: Plan, demand: Demand) -> int:
    """Requests that a plan has places for."""
    return plan.microbatches * demand.rows


def capacity_per_s(plan: Plan, demand: Demand, truth: Truth | None = None) -> float:
    """Requests per second of a plan that always has more waiting than it can take."""
    num = house(plan, demand) * (TURNS + 1)
    served = SimulatedServer([plan], like(demand, num, [0.0] * num), truth).run()
    done = np.sort(np.array(served.ledger.done_us)) * 1e-6
    # While requests waited: from the first completion to the time when the last of them was seated.
    first, last = house(plan, demand) // 2, num - house(plan, demand)
    return float((last - first) / (done[last] - done[first])) if done[last] > done[first] else float("inf")


def point(plan: Plan, demand: Demand, rate_per_s: float, seed: int) -> Point:
    """A plan under Poisson arrivals."""
    num = max(LEAST, house(plan, demand) * TURNS)
    times = [t * 1e6 for t in poisson(rate_per_s, num, seed).times_s]
    found = measured(SimulatedServer([plan], like(demand, num, times)).run())
    # By Little's law, rate times latency are in the system.
    present = rate_per_s * float(np.nanmean(found["latency"]))
    return Point(rate_per_s, float(np.nanmean(found["normalised"])), present)


def capabilities(plans: Sequence[Plan], demand: Demand, seed: int = 0) -> tuple[Capability, ...]:
    """Every plan at the same loads and the same arrivals, by its own costs."""
    full = [capacity_per_s(plan, demand) for plan in plans]
    rates = sorted({share * capacity for share in LOADS for capacity in full})
    made = []
    for plan, capacity in zip(plans, full, strict=True):
        curve = tuple(point(plan, demand, rate, seed) for rate in rates if rate < capacity)
        made.append(Capability(plan.policy, capacity, curve))
    for _ in range(REFINED):
        made = _refined(plans, made, demand, seed)
    return tuple(made)


def _refined(plans: Sequence[Plan], known: list[Capability], demand: Demand, seed: int) -> list[Capability]:
    """With one more point of each curve where they seem to cross: that is where it matters."""
    rate = crossing_per_s(tuple(known))
    if rate is None:
        return known
    made = []
    for plan, old in zip(plans, known, strict=True):
        is_new = rate < old.capacity_per_s and all(abs(p.rate_per_s - rate) > 1e-3 * rate for p in old.curve)
        more = (point(plan, demand, rate, seed),) if is_new else ()
        made.append(replace(old, curve=tuple(sorted((*old.curve, *more)))))
    return made


def alone(plan: Plan, demand: Demand, truth: Truth | None = None) -> dict[str, float]:
    """Metric -> the least that a request can see: the shortest and the longest, each on an idle system."""
    best = dict.fromkeys(METRICS, float("inf"))
    by_tokens = sorted(range(len(demand)), key=lambda n: demand.tokens[n])
    for number in {by_tokens[0], by_tokens[-1]}:
        own = slice(number, number + 1)
        tokens, decodes, shares = demand.tokens[own], demand.decodes[own], demand.shares[own]
        one = replace(demand, times_us=[0.0], tokens=tokens, decodes=decodes, shares=shares)
        for metric, values in measured(SimulatedServer([plan], one, truth).run()).items():
            if not np.isnan(values[0]):
                best[metric] = min(best[metric], float(values[0]))
    return best


def check_limits(plans: Sequence[Plan], demand: Demand, limits: Sequence[LatencyLimit], truth: Truth) -> None:
    """Refuses a limit that a request misses even when it has all devices for itself."""
    if not limits:
        return
    found = [alone(plan, demand, truth) for plan in plans]
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
