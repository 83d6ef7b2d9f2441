"""Plans around devices that are lost: made for those that are left, and put back among all of them.

A running system knows one cluster; a plan that uses fewer of its devices is still a plan for that cluster.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera.errors import PlanInfeasible
from tessera.ir import Cluster, Costs, Placement, Plan


def without_devices(
    cluster: Cluster, costs: Sequence[Costs], without: Collection[str]
) -> tuple[Cluster, tuple[Costs, ...]]:
    kept = [index for index, name in enumerate(cluster.names) if name not in without]
    if not kept:
        raise PlanInfeasible("no device is left")
    devices = tuple(cluster.devices[d] for d in kept)
    links = tuple(x for x in cluster.links if x.src not in without and x.dst not in without)
    prices = tuple(
        Costs(c.trace_digest, devices, tuple(tuple(row[d] for d in kept) for row in c.costs)) for c in costs
    )
    return Cluster(devices, links), prices


def widened(plan: Plan, cluster: Cluster, costs: Sequence[Costs]) -> Plan:
    """A plan for some devices of a cluster as one for all of them, with their price lists."""
    place = [cluster.names.index(name) for name in plan.cluster.names]
    lanes = tuple(
        replace(
            lane,
            placement=Placement(tuple(tuple([place[d] for d in step]) for step in lane.placement.devices)),
        )
        for lane in plan.lanes
    )
    return replace(plan, cluster=cluster, costs=tuple(costs), lanes=lanes)
