"""PreparedPlanner: makes other plans for a service that runs, from what it was prepared from.

Around devices that fail again and again; and at costs as they were measured (`adapt`), beside the running
plans. There both are rehearsed at the corrected costs; a new plan that is not clearly better is left, and the
old one stays, with costs that are right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tessera.adapt import LEAST_GAIN, Action, Factors, reshared, widened
from tessera.ir import Costs, Objective, Plan, verify
from tessera.serve.keeper import Plans
from tessera.serve.planning import Average, Prepared
from tessera.serve.rehearse import rehearse

AVERAGE = Average()


class PreparedPlanner:
    """A planner for what a service was prepared from."""

    def __init__(self, prepared: Prepared, average: Average = AVERAGE) -> None:
        self._prepared, half = prepared, prepared.model.shape.capacity // 2
        self._average = Average(min(average.prompt, half), min(average.output, half))

    def without(self, lost: Iterable[str]) -> Plans:
        """Planned for the others, and put back among all devices."""
        made = self._prepared.without(sorted(lost))
        cluster, costs = self._prepared.cluster, self._prepared.costs
        found = tuple(widened(plan, cluster, costs) for plan in made.plans)
        for plan in found:
            verify(plan)
        return found

    def corrected(self, plans: Sequence[Plan], factors: Factors) -> Plans:
        """Each plan, or a better one, with the costs as they were measured."""
        prepared = self._prepared
        costs = factors.apply(prepared.unit, plans[0].costs)
        made = prepared.at(costs).plans
        self._prepared = replace(prepared, costs=costs)
        return tuple(self._better(old, made, costs) for old in plans)

    def rebalanced(self, plan: Plan, action: Action) -> Plan | None:
        """The same lanes in the shares that the monitor wants, if a simulation agrees."""
        assert action.factors is not None, "a rebalance comes with factors"
        new = reshared(plan, action.rates_per_s)
        costs = action.factors.apply(plan.unit, plan.costs)
        return new if self._gain(plan, new, costs) >= LEAST_GAIN else None

    def _better(self, old: Plan, made: Sequence[Plan], costs: tuple[Costs, ...]) -> Plan:
        new = next((plan for plan in made if plan.objective is old.objective), None)
        if new is not None and new.lanes != old.lanes and self._gain(old, new, costs) >= LEAST_GAIN:
            return replace(new, policy=old.policy)
        return replace(old, costs=costs)

    def _gain(self, old: Plan, new: Plan, costs: tuple[Costs, ...]) -> float:
        """How many times as good a new plan is: for one client if it is for latency, else for many."""
        plans = [replace(plan, costs=costs) for plan in (old, new)]
        clients = 1 if old.objective is Objective.LATENCY else None
        before, after = rehearse(plans, self._prepared.model.shape, self._average, clients)
        return after / before
