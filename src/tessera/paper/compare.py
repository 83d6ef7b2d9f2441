"""compare: all policies of one case, made by the planner's own code and judged by the same simulation.

The throughput plan and the coarse policies come from one planning run. The single placement is the published
mixed-integer program (HiGHS, with a time limit), the latency policy one more planning run; both are judged as
the others are, by requests per second with the same number of batches in flight.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import PlanInfeasible
from tessera.flow import price
from tessera.ir import Cluster, Costs, Objective, Plan, WorkUnit
from tessera.paper.library import Library
from tessera.paper.records import Case, Outcome
from tessera.plan import PlanConfig, solve
from tessera.plan.baselines import COARSE
from tessera.plan.problem import build
from tessera.plan.search.judge import Judge
from tessera.plan.search.planners import single_placement
from tessera.plan.search.task import Task
from tessera.simulate import SteadyRates


def compare(library: Library, case: Case) -> Outcome:
    """Plans and simulates; a case that does not fit its devices has an outcome that says so."""
    started = time.process_time()
    unit, cluster = library.unit(case.workload), case.cluster()
    planner = _Planner(unit, price(unit, cluster), cluster, case.slots)
    try:
        plan = planner.coarse() if case.effort.is_coarse else planner.plan(Objective.THROUGHPUT)
    except PlanInfeasible as error:
        none = {"throughput": None} if not case.effort.is_coarse else {}
        spent = time.process_time() - started
        return Outcome(none, None, None, "", 0, rent(cluster), sources_of(planner.costs), spent, str(error))
    rates: dict[str, float | None] = {b.name: b.throughput_per_s for b in plan.baselines}
    busy, note = None, ""
    if not case.effort.is_coarse:
        rates = {"throughput": plan.simulated_per_s, **rates}
    if case.effort.milp_s is not None:
        rates["single-placement"], busy, note = planner.single_placement(case.effort.milp_s)
    if case.effort.has_latency:
        rates["latency"] = planner.plan(Objective.LATENCY).simulated_per_s
    batch = case.workload.batch
    return Outcome(
        {name: None if rate is None else batch * rate for name, rate in rates.items()},
        batch * plan.bound_per_s,
        None if busy is None else batch * busy,
        note,
        len(plan.lanes),
        rent(cluster),
        sources_of(planner.costs),
        time.process_time() - started,
    )


@dataclass(frozen=True, eq=False)
class _Planner:
    """One case's planning runs."""

    unit: WorkUnit
    costs: tuple[Costs, ...]
    cluster: Cluster
    slots: int

    def plan(self, objective: Objective, policy: str | None = None) -> Plan:
        """By the objective's own policy, or a named one, with all coarse ones beside it."""
        config = PlanConfig(objective, self.slots, policy, shown_slots=())
        rates = SteadyRates()
        return solve(self.unit, self.costs, self.cluster, config, rates, rates.glance)

    def coarse(self) -> Plan:
        """Any coarse policy, for the sake of all of them."""
        for name in COARSE:
            try:
                return self.plan(Objective.THROUGHPUT, name)
            except PlanInfeasible as error:
                refused = error
        raise refused

    def single_placement(self, limit_s: float) -> tuple[float | None, float | None, str]:
        """(simulated rate, rate by busy time, how sure it is the best) of one placement for all requests."""
        task = Task(build(self.unit, self.costs, self.cluster), self.slots, True)
        judge = Judge(task, Objective.THROUGHPUT, "single-placement", SteadyRates())
        started = time.monotonic()
        mixes = single_placement(task, limit_s)
        spent = time.monotonic() - started
        if not mixes:
            return None, None, "no placement fits"
        mix = judge.best(mixes)
        note = "best found in the time limit" if spent >= limit_s else "solved"
        return judge.rate_per_s(mix), mix.rate_per_s, f"{note}, {limit_s:g} s"


def rent(cluster: Cluster) -> float | None:
    """Dollars an hour of all devices; None where one has no price."""
    prices = [d.usd_per_hour for d in cluster.devices]
    return None if None in prices else sum(p for p in prices if p is not None)


def sources_of(costs: Sequence[Costs]) -> dict[str, float]:
    """Share of the time, over all launches and devices, that has a price from each source."""
    counted: Counter[str] = Counter()
    for priced in costs:
        for row in priced.costs:
            for cost in row:
                counted[cost.source.value] += cost.us  # type: ignore[assignment]
    total = sum(counted.values())
    return {name: us / total for name, us in counted.most_common()} if total else {}
