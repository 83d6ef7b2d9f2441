"""Remarks: what is worth knowing about a plan besides its verdict, in words."""

from collections.abc import Iterator

from tessera import ir


def remarks(plan: ir.Plan) -> Iterator[str]:
    """One sentence each."""
    below = 1.0 - plan.simulated_per_s / plan.bound_per_s
    yield f"The simulated rate is {below:.1%} below the bound that no mix of placements exceeds."
    if plan.variants:
        batches = ", ".join(str(variant.batch) for variant in plan.every_variant)
        yield f"Lanes are of batch {batches}; rates count requests of batch {plan.batch}."
    if plan.lane_table and len(plan.lanes) > 1:
        order = [plan.lane_table[n % len(plan.lane_table)] for n in range(plan.slots)]
        held = ", ".join(f"{order.count(n)}" for n in range(len(plan.lanes)))
        loss = f"{plan.rounding_loss:.2%} of the rate (simulated)"
        yield f"Slots that follow each lane: {held}; rounding to whole slots costs {loss}."
    if plan.by_slots:
        listed = ", ".join(f"{n}: {rate / plan.simulated_per_s:.2f}x" for n, rate in plan.by_slots)
        yield f"With other numbers of requests in flight (simulated): {listed}."
    if plan.max_slots is not None:
        yield f"Memory holds up to {_count(plan.max_slots, 'request')} in flight."
    if plan.robust is not None:
        low, high = (x / plan.simulated_per_s for x in (plan.robust.p10_per_s, plan.robust.p90_per_s))
        yield (
            f"If the costs are as wrong as they may be: {low:.2f}x to {high:.2f}x of the rate in 8 of 10 "
            "samples, "
            f"{plan.robust.regret:.1%} below the best candidate on average (modelled)."
        )
    idle = [x for n, x in enumerate(plan.cluster.names) if n not in plan.used]
    if idle:
        yield f"Not used: {', '.join(idle)}."
    yield from (f"As asked: {wish}." for wish in plan.wishes)


def _count(number: int, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
