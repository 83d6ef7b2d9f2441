"""What policies can do, read off their plans: for the monitor, with no simulation when a service starts.

A plan says how fast it is with some numbers of slots in flight (simulated when it was made), and a slot is a
unit of work for `rows` requests. By Little's law, s slots at a rate of r units a second hold each request for
s / r seconds; with hardly any load it is the latency of one unit. Between these the monitor interpolates. All
figures are modelled: they decide between policies, and promise nothing.
"""

from collections.abc import Sequence

from tessera.adapt import Capability, Point
from tessera.ir import Plan

# A load at which a request is alone.
ALONE = 1e-3
# Share of the capacity that counts as all of it.
ENOUGH = 0.99


def capabilities_of(plans: Sequence[Plan], rows: int) -> tuple[Capability, ...]:
    """One a plan, in requests per second; empty if a plan was never simulated in flight."""
    if not all(any(slots <= plan.slots and rate for slots, rate in plan.by_slots) for plan in plans):
        return ()
    return tuple(_capability(plan, rows) for plan in plans)


def _capability(plan: Plan, rows: int) -> Capability:
    tokens = plan.unit.counts[-1] + 1
    least_s = plan.latency_us * 1e-6
    there = sorted((slots, rate) for slots, rate in plan.by_slots if slots <= plan.slots)
    capacity = rows * max(rate for _, rate in there)
    first = ALONE * capacity
    points = [Point(first, least_s / tokens, first * least_s)]
    for slots, rate in there:
        load = rows * rate
        # The curve ends below the capacity: more slots than bring a gain only bring waiting.
        if points[-1].rate_per_s < load < ENOUGH * capacity:
            points.append(Point(load, max(slots / rate, least_s) / tokens, float(slots * rows)))
    return Capability(plan.policy, capacity, tuple(points))
