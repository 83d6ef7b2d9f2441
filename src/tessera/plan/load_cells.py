"""Load on many devices: loads of fewer devices side by side, where devices are alike.

Four H20 and four L40S are four times one of each, three and five are three pairs and two cards more. Each
part is planned for the load by itself, with batches and microbatches of its own, and copied to the devices of
every copy; so are the policies it is compared with. Parts share nothing: the whole gives what they give
together. All devices at once are searched where there are few, at the batches that were best for the parts.

By the dollar or by the joule: which of the devices are worth having on. Rent is paid for every device in use,
and one that is on draws power while it waits. So sets of the devices are planned for the load by themselves
(of equal devices, how many of them; the eight most promising by busy time), and the best by the objective is
taken; so it is for every coarser policy. On one set, most tokens per second are most tokens per dollar. By
the joule they need not be: of each set its coarser policies and its plans for throughput are compared.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.load import LoadConfig, PricedLoad, plan_at_once
from tessera.plan.load_figures import LoadPlan, Option, Target, against, together
from tessera.plan.problem import Cells, build, kinds_of, partitions, spread_us
from tessera.plan.search import objectives

# Up to so many devices are also searched at once.
MAX_AT_ONCE = 3
# Sets of devices that are planned, the most promising of them by busy time.
MAX_SETS = 8


def plan_load(load: PricedLoad, config: LoadConfig) -> LoadPlan:
    """Batch, microbatches and placement for a load, the best by the objective of the search."""
    goal, cluster = config.objective, load.cluster
    if goal is ir.Objective.THROUGHPUT:
        return _on_all(load, config)
    first = load.at(config.batches[len(config.batches) // 2])
    problem = build(first.unit, first.costs, cluster)
    sets = sorted(objectives.subsets(problem), key=lambda d: -objectives.bound(problem, goal, d))
    found: list[LoadPlan] = []
    refused: PlanInfeasible | None = None
    for devices in sets[:MAX_SETS]:
        config.advance(f"on {', '.join(cluster.names[d] for d in devices)}")
        try:
            part = _on_all(load.on(devices), config)
        except PlanInfeasible as error:  # too small for the model, or too slow for the limits
            refused = error
            continue
        found.append(side_by_side(load, [(part, (devices,))]))
    if not found:
        raise refused or PlanInfeasible("there is no device", "Name at least one.")
    best = best_of(found, load.target)
    return replace(best, plan=replace(best.plan, objective=goal))


def _on_all(load: PricedLoad, config: LoadConfig) -> LoadPlan:
    """On all devices; of alike ones, never below what their cells give."""
    cluster = load.cluster
    first = load.at(config.batches[0])
    problem = build(first.unit, first.costs, cluster)
    kinds = kinds_of(problem)
    # What no device holds by itself fills a cell: its batches say nothing of what all devices could take.
    is_large = float(problem.weights.num_bytes.sum()) > float(problem.memory_bytes.max())
    if kinds is None or (is_large and len(cluster.devices) <= MAX_AT_ONCE):
        return plan_at_once(load, config)

    found = []
    for parts in partitions(kinds.members):
        try:
            found.append(side_by_side(load, _planned(load, parts, config)))
        except PlanInfeasible:  # a cell that is too small for the model
            continue
    if not found:
        return plan_at_once(load, config)
    if len(cluster.devices) <= MAX_AT_ONCE:
        tried = {max(o.batch.values()) for one in found for o in (one.chosen, *one.baselines)}
        with suppress(PlanInfeasible):  # none of them may keep to the limits on all devices together
            found.append(plan_at_once(load, replace(config, batches=sorted(tried), near=())))
    return best_of(found, load.target)


def _planned(load: PricedLoad, parts: Sequence[Cells], config: LoadConfig) -> list[tuple[LoadPlan, Cells]]:
    """Every part once; a card that is left over and cannot take part by itself stays idle."""
    cluster, most = load.cluster, config.max_microbatches
    found: list[tuple[LoadPlan, Cells]] = []
    for cells in parts:
        devices = cells[0]
        config.advance(f"a cell of {', '.join(cluster.names[d] for d in devices)}")
        share = most and max(1, most * len(devices) // len(cluster.devices))
        try:
            found.append((_on_all(load.on(devices), replace(config, max_microbatches=share)), cells))
        except PlanInfeasible:
            if not found:
                raise
    return found


def best_of(found: Sequence[LoadPlan], target: Target) -> LoadPlan:
    """The best plan, with each policy at its best in any of them."""
    goal = found[0].objective
    best = max(found, key=lambda one: one.chosen.figure(goal))
    policies: dict[str, Option] = {}
    for option in (o for one in found for o in one.baselines):
        known = policies.get(option.policy)
        if known is None or option.figure(goal) > known.figure(goal):
            policies[option.policy] = option
    options = tuple(o for one in found for o in one.options)
    baselines = tuple(policies.values())
    return LoadPlan(against(best.plan, baselines, target), best.chosen, baselines, options, goal)


def side_by_side(load: PricedLoad, parts: Sequence[tuple[LoadPlan, Cells]]) -> LoadPlan:
    """One plan of all copies of all parts of a load, and what the policies give in the same parts."""
    cluster, goal = load.cluster, parts[0][0].objective
    plan = _copied(load, parts)
    name = "plan" if plan.policy == ir.Objective.THROUGHPUT.value else plan.policy
    chosen = _together(cluster, name, [(part.chosen, cells) for part, cells in parts])
    baselines = [
        max((_of_policy(part, policy) for part, _ in parts), key=lambda o: o.figure(goal))
        if policy == "single"
        else _together(cluster, policy, [(_of_policy(part, policy), cells) for part, cells in parts])
        for policy in dict.fromkeys(o.policy for o in parts[0][0].baselines)
    ]
    return LoadPlan(plan, chosen, tuple(baselines), (*baselines, chosen), goal)


def _of_policy(part: LoadPlan, policy: str) -> Option:
    """What a policy gives in one part; a card that is left over is alone."""
    return next((o for o in part.baselines if o.policy == policy), part.chosen)


def _together(cluster: ir.Cluster, policy: str, rows: Sequence[tuple[Option, Cells]]) -> Option:
    """The option of every part on all of its copies."""
    names = cluster.names

    def copied(by_device: dict[str, int], devices: Sequence[int], first: Sequence[int]) -> dict[str, int]:
        return {names[devices[first.index(names.index(name))]]: batch for name, batch in by_device.items()}

    copies = [
        replace(
            o,
            batch=copied(o.batch, devices, cells[0]),
            prefill_batch=copied(o.prefill_batch, devices, cells[0]),
        )
        for o, cells in rows
        for devices in cells
    ]
    return together(copies, policy)


def _copied(load: PricedLoad, parts: Sequence[tuple[LoadPlan, Cells]]) -> ir.Plan:
    """The lanes of every part on the devices of every copy, each with the microbatches it had."""
    cluster, whole = load.cluster, load.variants
    units = list(dict.fromkeys(id(v.unit) for part, _ in parts for v in part.plan.every_variant))
    variants = [whole[key] for key in units]
    numbers = {key: number for number, key in enumerate(units)}
    first = variants[0]
    lanes: list[ir.Lane] = []
    table: list[int] = []
    for part, cells in parts:
        plan = part.plan
        own = plan.lane_table or tuple(
            islice(ir.lane_sequence([x.rate_per_s for x in plan.lanes]), plan.microbatches)
        )
        microbatches = [own[n % len(own)] for n in range(plan.microbatches)]
        for devices in cells:
            table += [len(lanes) + lane for lane in microbatches]
            lanes += [
                ir.Lane(_moved(x.placement, devices), x.rate_per_s, numbers[id(plan.unit_of(x))])
                for x in plan.lanes
            ]
    rows = [(part.plan, len(cells), part.plan.batch / first.batch) for part, cells in parts]
    simulated = sum(plan.simulated_per_s * num * weight for plan, num, weight in rows)
    joules = [(plan.joules_per_unit, plan.simulated_per_s * num) for plan, num, _ in rows]
    known = [(each, rate) for each, rate in joules if each is not None]
    made = ir.Plan(
        unit=first.unit,
        cluster=cluster,
        costs=first.costs,
        objective=ir.Objective.THROUGHPUT,
        policy=_policy([part.plan for part, _ in parts]),
        lanes=tuple(lanes),
        microbatches=len(table),
        throughput_per_s=sum(plan.throughput_per_s * num * weight for plan, num, weight in rows),
        simulated_per_s=simulated,
        bound_per_s=max(_bound_rows_per_s(v, cluster) for v in variants) / first.batch,
        latency_us=max(plan.latency_us for plan, _, _ in rows),
        lane_table=tuple(table),
        max_microbatches=len(table),
        joules_per_unit=sum(e * r for e, r in known) / simulated if len(known) == len(rows) else None,
        variants=tuple(variants[1:]),
    )
    ir.verify(made)
    return made


def _policy(plans: Sequence[ir.Plan]) -> str:
    """That of all parts; where every lane stays on one device, data-parallel."""
    used = [{d for step in lane.placement.devices for d in step} for plan in plans for lane in plan.lanes]
    if len(used) > 1 and all(len(devices) == 1 for devices in used):
        return "data-parallel"
    names = {plan.policy for plan in plans}
    return names.pop() if len(names) == 1 else ir.Objective.THROUGHPUT.value


def _bound_rows_per_s(variant: ir.Variant, cluster: ir.Cluster) -> float:
    """No mix of placements of this batch does more, even with transfers for nothing."""
    return variant.batch * 1e6 / spread_us(build(variant.unit, variant.costs, cluster).load_us)


def _moved(placement: ir.Placement, devices: Sequence[int]) -> ir.Placement:
    return ir.Placement(tuple(tuple(devices[d] for d in step) for step in placement.devices))
