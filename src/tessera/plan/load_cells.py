"""Load on many devices: parts of the cluster planned alone and copied.

Equal devices: four H20 and four L40S are four pairs; three and five are three pairs and two single cards.
Each part is planned once, as are its baselines; rates add up. Small clusters are also planned at once, at the
parts' best batches.

Cost and energy: device sets are planned in order of their bound, and the best by the objective is kept, for
the plan and for every baseline.
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
    """The best plan for a load by the configured objective."""
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
        except PlanInfeasible as error:  # too small, or too slow for the limits
            refused = error
            continue
        found.append(_joined(load, [(part, (devices,))]))
    if not found:
        raise refused or PlanInfeasible("there is no device", "Name at least one.")
    best = best_of(found, load.target)
    return replace(best, plan=replace(best.plan, objective=goal))


def _on_all(load: PricedLoad, config: LoadConfig) -> LoadPlan:
    """All devices; never below a partition into equal cells."""
    cluster = load.cluster
    first = load.at(config.batches[0])
    problem = build(first.unit, first.costs, cluster)
    kinds = kinds_of(problem)
    # A model larger than a device fills its cell: the cell's batches do not transfer.
    is_large = float(problem.weights.num_bytes.sum()) > float(problem.memory_bytes.max())
    if kinds is None or (is_large and len(cluster.devices) <= config.search.max_at_once):
        return plan_at_once(load, config)

    found = []
    for parts in partitions(kinds.members):
        try:
            found.append(_joined(load, _planned(load, parts, config)))
        except PlanInfeasible:  # cell too small
            continue
    if not found:
        return plan_at_once(load, config)
    if len(cluster.devices) <= config.search.max_at_once:
        tried = {max(o.batch.values()) for one in found for o in (one.chosen, *one.baselines)}
        with suppress(PlanInfeasible):  # limits missed on all devices
            found.append(plan_at_once(load, replace(config, batches=sorted(tried), near=())))
    return best_of(found, load.target)


def _planned(load: PricedLoad, parts: Sequence[Cells], config: LoadConfig) -> list[tuple[LoadPlan, Cells]]:
    """Each part once; a left-over device that cannot serve the load stays idle."""
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
    """The best plan, with the best option of each policy."""
    goal = found[0].objective
    best = max(found, key=lambda one: one.chosen.figure(goal))
    policies: dict[str, Option] = {}
    for option in (o for one in found for o in one.baselines):
        known = policies.get(option.policy)
        if known is None or option.figure(goal) > known.figure(goal):
            policies[option.policy] = option
    options = tuple(o for one in found for o in one.options)
    baselines = tuple(policies.values())
    plan = against(best.plan, baselines, target)
    return LoadPlan(plan.policy, best.chosen, baselines, goal, plan=plan, options=options)


def _joined(load: PricedLoad, parts: Sequence[tuple[LoadPlan, Cells]]) -> LoadPlan:
    """All copies of all parts as one plan, and the policies on the same parts."""
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
    return LoadPlan(plan.policy, chosen, tuple(baselines), goal, plan=plan, options=(*baselines, chosen))


def _of_policy(part: LoadPlan, policy: str) -> Option:
    """The policy's option in one part; a single device has only one."""
    return next((o for o in part.baselines if o.policy == policy), part.chosen)


def _together(cluster: ir.Cluster, policy: str, rows: Sequence[tuple[Option, Cells]]) -> Option:
    """Options copied to all cells and added up."""
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
    """`side_by_side` of the parts, bounded by freely spread launches."""
    plans = [(part.plan, cells) for part, cells in parts]
    shapes = dict.fromkeys(shape_of(v) for plan, _ in plans for v in plan.every_variant)
    variants = [load.at(*shape) for shape in shapes]
    problems = [build(v.unit, v.costs, load.cluster) for v in variants]
    rows_per_s = max(p.unit.batch * 1e6 / spread_us(p.load_us) for p in problems)
    plan = side_by_side(load.cluster, variants, plans)
    return replace(plan, bound_per_s=max(plan.bound_per_s, rows_per_s / variants[0].batch))
