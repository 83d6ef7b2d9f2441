"""Load by the dollar or by the joule: which of the devices are worth having on.

Rent is paid for every device in use, and one that is on draws power while it waits. So sets of the devices
are planned for the load by themselves (of equal devices, how many of them; the eight most promising by busy
time), and the best by the objective is taken; so it is for every coarser policy. On one set, most tokens per
second are most tokens per dollar. By the joule they need not be: of each set its coarser policies and its
plans for throughput are compared.
"""

from collections.abc import Callable
from dataclasses import replace

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.load import LoadConfig
from tessera.plan.load_cells import (
    VariantAt,
    best_of,
    cluster_of,
    plan_load_on_many,
    side_by_side,
    variant_of,
)
from tessera.plan.load_figures import LoadPlan, Target
from tessera.plan.problem import build
from tessera.plan.search import objectives
from tessera.plan.solve import Simulator

# Sets of devices that are planned, the most promising of them by busy time.
MAX_SETS = 8


def plan_load_on_sets(
    variant_at: VariantAt,
    cluster: ir.Cluster,
    target: Target,
    make_simulate: Callable[[], Simulator],
    config: LoadConfig,
    in_parts: Callable[[int, int], ir.Variant] | None = None,
) -> LoadPlan:
    """As `plan_load_on_many`, by the objective of the search."""
    goal = config.objective
    if goal is ir.Objective.THROUGHPUT:
        return plan_load_on_many(variant_at, cluster, target, make_simulate, config, in_parts)
    known: dict[int, ir.Variant] = {}

    def kept(variant: ir.Variant) -> ir.Variant:
        return known.setdefault(id(variant.unit), variant)

    first = kept(variant_at(config.batches[len(config.batches) // 2]))
    problem = build(first.unit, first.costs, cluster)
    sets = sorted(objectives.subsets(problem), key=lambda d: -objectives.bound(problem, goal, d))
    found: list[LoadPlan] = []
    refused: PlanInfeasible | None = None
    for devices in sets[:MAX_SETS]:
        config.advance(f"on {', '.join(cluster.names[d] for d in devices)}")
        own = (cluster_of(cluster, devices), target, make_simulate, config)
        parts = in_parts and _on(devices, kept, in_parts)
        try:
            part = plan_load_on_many(_on(devices, kept, variant_at), *own, parts)
        except PlanInfeasible as error:  # too small for the model, or too slow for the limits
            refused = error
            continue
        found.append(side_by_side(cluster, [(part, (devices,))], known))
    if not found:
        raise refused or PlanInfeasible("there is no device", "Name at least one.")
    best = best_of(found, target)
    return replace(best, plan=replace(best.plan, objective=goal))


def _on(
    devices: objectives.Devices, kept: Callable[[ir.Variant], ir.Variant], make: Callable[..., ir.Variant]
) -> Callable[..., ir.Variant]:
    """What is made, on some of the devices."""
    return lambda *sizes: variant_of(kept(make(*sizes)), devices)
