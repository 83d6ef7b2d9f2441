"""lines_of: what a service has chosen, what it expects, and what one more card would add; a line each.

Rates are modelled, at full load: the plan's own simulated one, or where plans were rehearsed the one found
so. Another card of each kind is counted as a copy of the service beside it, which any router can do: a plan
over all of them is at least as good.
"""

from collections import defaultdict

from tessera.ir import Objective, Plan
from tessera.kernels import PAGE
from tessera.serve.planning import Average, Prepared


def lines_of(prepared: Prepared, average: Average) -> tuple[str, str, str]:
    """For people, in this order: chosen, expected, one more."""
    return _chosen(prepared), _expected(prepared, average), _one_more(prepared, average)


def _chosen(prepared: Prepared) -> str:
    shape, plan = prepared.model.shape, prepared.plans[0]
    sizes = ", ".join(f"{size:,}" for size in shape.sizes)
    when = f"captured in {prepared.capture_s:.1f} s" if prepared.capture_s else "as planned before"
    held = shape.slots * prepared.model.state_bytes
    parts = [f"{name} {100 * share:.0f} %" for name, share in _shares(plan).items()]
    where = f"work on {', '.join(parts)}" if len(parts) > 1 else f"all work on {plan.cluster.names[0]}"
    return (
        f"chosen: {shape.slots} x {shape.rows} requests at once, steps of {sizes} tokens ({when}), "
        f"{shape.slots} x {shape.pool_tokens - PAGE:,} tokens in pages ({held / 1e9:.2f} GB), a request "
        f"up to {shape.max_tokens:,}; {where}"
    )


def _expected(prepared: Prepared, average: Average) -> str:
    plan = prepared.plans[0]
    per_s = prepared.rehearsed.get(plan.policy) or _tokens_per_s(prepared, average, plan.simulated_per_s)
    if not per_s:
        return "expected: not modelled"
    held = prepared.model.shape.slots * prepared.model.shape.rows
    return (
        f"expected (modelled, full load, {average.prompt} tokens in and {average.output} out): "
        f"{per_s:,.0f} tokens/s, {1e3 * held / per_s:,.1f} ms a token"
    )


def _one_more(prepared: Prepared, average: Average) -> str:
    plan = prepared.plans[0]
    added = {}
    for number, device in enumerate(plan.cluster.devices):
        us = sum(
            count * sum(costs.us(launch, number) for launch in range(len(costs.costs)))
            for costs, count in zip(plan.costs, plan.unit.counts, strict=True)
        )
        kind = device.gpu or device.name
        if us:
            added[kind] = _tokens_per_s(prepared, average, 1e6 / us)
    if not added:
        return "with one more device: not modelled"
    parts = [f"{kind} adds {per_s:,.0f}" for kind, per_s in added.items()]
    return f"with one more card, as a copy beside these (modelled, tokens/s, at least): {', '.join(parts)}"


def _tokens_per_s(prepared: Prepared, average: Average, units_per_s: float) -> float:
    """A unit is what a microbatch does for all its rows' average requests."""
    return units_per_s * prepared.model.shape.rows * average.output


def _shares(plan: Plan) -> dict[str, float]:
    """Device -> its share of all devices' time at work."""
    busy: dict[str, float] = defaultdict(float)
    for lane in plan.lanes:
        weight = lane.rate_per_s if plan.objective is Objective.THROUGHPUT else 1.0
        for costs, count, places in zip(plan.costs, plan.unit.counts, lane.placement.devices, strict=True):
            for launch, device in enumerate(places):
                busy[plan.cluster.names[device]] += weight * count * costs.us(launch, device)
    total = sum(busy.values())
    return {name: us / total for name, us in busy.items()} if total else {}
