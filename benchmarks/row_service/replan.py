"""Replanner: new plans for a running system, at corrected costs or without lost devices.

Services, simulations and the command line pass how a plan is made (`make`) and two are compared (`gain`). A
corrected plan replaces the old one only if it is better by `LEAST_GAIN` at the corrected costs; else the old
one stays, with these costs. Plans around lost devices are not compared. All plans cover the same cluster,
also if they use fewer devices.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tessera.adapt.capability import Capability
from tessera.adapt.controller import Change, Replanned
from tessera.adapt.drift import Factors
from tessera.errors import PlanInfeasible
from tessera.flow import make_plan
from tessera.ir import Cluster, Costs, Load, Plan, verify
from tessera.plan import FULL, PlanConfig, SearchConfig
from tessera.serve.policies import LEAST_GAIN

# (plan to replace, devices, costs) -> a plan for the same steps and objective.
MakePlan = Callable[[Plan, Cluster, tuple[Costs, ...]], Plan]


@dataclass(frozen=True)
class Replanner:
    make: MakePlan
    # Ratio of the second plan to the first; more is better.
    gain: Callable[[Plan, Plan], float]
    rate: Callable[[tuple[Plan, ...]], Sequence[Capability]]

    def corrected(self, plans: tuple[Plan, ...], factors: Factors) -> tuple[Plan, ...]:
        """Each plan, or a better one, at corrected costs."""
        costs = factors.apply(plans[0].unit, plans[0].costs)
        return tuple(self._better(replace(plan, costs=costs)) for plan in plans)

    def _better(self, old: Plan) -> Plan:
        new = replace(self.make(old, old.cluster, old.costs), policy=old.policy)
        return new if new.lanes != old.lanes and self.gain(old, new) >= LEAST_GAIN else old

    def replan(self, plans: tuple[Plan, ...], change: Change) -> Replanned[Plan]:
        """Plans of steps are made for no load."""
        if isinstance(change, Factors):
            plans = self.corrected(plans, change)
        elif not isinstance(change, Load):
            plans = self.without(plans, change)
        return Replanned(plans, self.rate(plans))

    def without(self, plans: tuple[Plan, ...], lost: Collection[str]) -> tuple[Plan, ...]:
        """Plans for the other devices, over the whole cluster."""
        new = []
        for plan in plans:
            cluster, costs = without_devices(plan.cluster, plan.costs, lost)
            new.append(replace(widened(self.make(plan, cluster, costs), plan), policy=plan.policy))
            verify(new[-1])
        return tuple(new)


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


def widened(plan: Plan, whole: Plan) -> Plan:
    """A plan for some devices, extended to the other plan's whole cluster and costs."""
    place = [whole.cluster.names.index(name) for name in plan.cluster.names]
    lanes = tuple(replace(lane, placement=lane.placement.renumbered(place)) for lane in plan.lanes)
    return replace(plan, cluster=whole.cluster, costs=whole.costs, lanes=lanes)


def replan(plan: Plan, cluster: Cluster, costs: tuple[Costs, ...], search: SearchConfig = FULL) -> Plan:
    """A plan for the same work and objective on other devices or at other costs; see `Replanner`."""
    config = PlanConfig(plan.objective, plan.microbatches, is_served=True, search=search)
    return make_plan(plan.unit, costs, cluster, config)
