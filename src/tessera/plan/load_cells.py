"""Load on many devices: parts of the cluster planned by themselves.

Equal devices: four H20 and four L40S are four times one of each; three and five are three pairs and two more
cards. Each part is planned for the load once, with batches and microbatches of its own, and copied to the
devices of every copy; so are the baselines. Parts share nothing: rates add up. Few devices are also searched
all at once, at the batches that were best for the parts.

Cost and energy: sets of the devices (of equal devices, how many) are planned for the load, most promising
by busy time first, and the best by the objective is taken, for the plan and for every baseline. On one set,
most tokens per second are most tokens per dollar; per joule they need not be: the set's baselines and
throughput plans are compared.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.load import LoadConfig, PricedLoad, plan_at_once
from tessera.plan.load_figures import LoadPlan, Option, Target, against, together
from tessera.plan.problem import Cells, build, kinds_of, partitions, shape_of, spread_us
from tessera.plan.search import objectives
from tessera.plan.solve import side_by_side


def plan_load(load: PricedLoad, config: LoadConfig) -> LoadPlan:
    """Batch, microbatches and placement for a load, the best by the objective of the search."""
    goal, cluster = config.objective, load.cluster
    if goal is ir.Objective.THROUGHPUT:
        return _on_all(load, config)
    first = load.at(config.batches[len(config.batches) // 2])
    problem = build(first.unit, first.costs, cluster)
    found: list[LoadPlan] = []
    refused: PlanInfeasible | None = None
    for devices in islice(objectives.subsets(problem, goal), config.search.max_load_sets):
        config.advance(f"on {', '.join(cluster.names[d] for d in devices)}")
        try:
            part = _on_all(load.on(devices), config)
        except PlanInfeasible as error:  # too small for the model, or too slow for the limits
            refused = error
            continue
        found.append(_joined(load, [(part, (devices,))]))
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
    if kinds is None or (is_large and len(cluster.devices) <= config.search.max_at_once):
        return plan_at_once(load, config)

    found = []
    for parts in partitions(kinds.members):
        try:
            found.append(_joined(load, _planned(load, parts, config)))
        except PlanInfeasible:  # a cell that is too small for the model
            continue
    if not found:
        return plan_at_once(load, config)
    if len(cluster.devices) <= config.search.max_at_once:
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


def _joined(load: PricedLoad, parts: Sequence[tuple[LoadPlan, Cells]]) -> LoadPlan:
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
    """`side_by_side` of the parts' plans, with a bound: every launch spread freely, transfers free."""
    plans = [(part.plan, cells) for part, cells in parts]
    shapes = dict.fromkeys(shape_of(v) for plan, _ in plans for v in plan.every_variant)
    variants = [load.at(*shape) for shape in shapes]
    problems = [build(v.unit, v.costs, load.cluster) for v in variants]
    rows_per_s = max(p.unit.batch * 1e6 / spread_us(p.load_us) for p in problems)
    plan = side_by_side(load.cluster, variants, plans)
    return replace(plan, bound_per_s=max(plan.bound_per_s, rows_per_s / variants[0].batch))
