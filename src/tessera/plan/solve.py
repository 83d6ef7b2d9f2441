"""solve: work, prices and devices in, a plan out.

Candidates come from the planners by name; the judge compares them by one figure. The plan's
`simulated_per_s` and every baseline's `throughput_per_s` are that same figure, while the plan's
`throughput_per_s` and `bound_per_s` always speak of busy time. So
  bound_per_s >= throughput_per_s >= simulated_per_s >= every baseline's throughput_per_s
for plans of the throughput objective. Plans of the cost and energy objectives are never below a baseline
in work per dollar or joule, and their bound is that of the devices they use. Candidates that are near the
best are told apart by how they keep when the costs are wrong, then by fewer lanes and transfers, but never
below a baseline. Under the latency objective candidates are compared by one request's makespan.

`latency_us` is one request alone on an idle system: the mean over lanes, weighted by their shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.baselines import COARSE
from tessera.plan.constraints import Constraint, check_constraints
from tessera.plan.problem import Cells, Column, Mix, build, microbatch_counts, partitions, restricted
from tessera.plan.search.judge import MICROBATCHES_SHOWN, Judge, Simulator
from tessera.plan.search.planners import PLANNERS, planner_named
from tessera.plan.search.task import Task

__all__ = ["PlanConfig", "Simulator", "solve"]

# Requests in flight that are tried besides the number asked for, where memory is short.
FEWER_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What to plan for."""

    objective: ir.Objective
    # Requests in flight, at most.
    microbatches: int = 4
    # Name of a policy in PLANNERS; None: the objective's own.
    policy: str | None = None
    # What the user wants where.
    constraints: tuple[Constraint, ...] = ()
    # Requests come over time and a microbatch decodes for ever: then none may live on what other microbatches
    # leave free.
    is_served: bool = False
    # Requests in flight that the chosen plan is simulated with besides.
    shown_microbatches: tuple[int, ...] = MICROBATCHES_SHOWN

    @property
    def name(self) -> str:
        """Of the planner."""
        return self.policy or self.objective.value


@dataclass(frozen=True, eq=False)
class Solution:
    """A plan, and what was found on the way to it."""

    plan: ir.Plan
    task: Task
    # The mix that the plan is of.
    chosen: Mix


def solve(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulator | None = None,
) -> ir.Plan:
    """The best plan for the objective, verified, with what every coarse policy would reach."""
    return work_out(unit, costs, cluster, config, simulate).plan


def work_out(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulator | None = None,
) -> Solution:
    """As `solve`, with what was found on the way.

    Where memory is short, fewer requests in flight may leave room for a better placement: those are tried.
    """
    if config.microbatches < 1:
        raise PlanInfeasible(
            f"{config.microbatches} requests in flight do no work", "Give at least one (--microbatches)."
        )
    planner_named(config.name)
    check_constraints(unit, config.constraints)
    problem = build(unit, costs, cluster, config.constraints)

    def at(microbatches: int) -> Solution:
        task = Task(problem, microbatches, simulate is not None, config.is_served or unit.is_served)
        judge = Judge(task, config.objective, config.name, simulate)
        return decide(task, judge, replace(config, microbatches=microbatches))

    most = at(config.microbatches)
    if not most.task.pool.is_tight or config.objective is ir.Objective.LATENCY:
        return most
    fewer = [at(microbatches) for microbatches in FEWER_MICROBATCHES if microbatches < config.microbatches]
    return max([most, *fewer], key=lambda s: objective_figure(s.plan, config.objective))


def objective_figure(plan: ir.Plan, goal: ir.Objective) -> float:
    """What an objective makes of a plan's own figures; more is better."""
    if goal is ir.Objective.LATENCY:
        return 1.0 / plan.latency_us
    if goal is ir.Objective.COST and plan.usd_per_1k_units:
        return 1.0 / plan.usd_per_1k_units
    if goal is ir.Objective.ENERGY and plan.joules_per_unit:
        return 1.0 / plan.joules_per_unit
    return plan.simulated_per_s


def decide(task: Task, judge: Judge, config: PlanConfig) -> Solution:
    """The best of what the planner of a task and the coarse policies propose."""
    name = config.name
    planner = planner_named(name)
    coarse = {kind: judge.best(mixes) if (mixes := task.coarse[kind]) else None for kind in COARSE}
    task.quick = judge.quick_rate
    mixes = planner(task)
    if not mixes:
        constraints = " with these placement constraints" if config.constraints else ""
        raise PlanInfeasible(f"the policy '{name}' does not apply to this work{constraints}", _remedy(name))
    others = [m for m in coarse.values() if m is not None]
    others += _cells(task, judge, config)
    is_free = name == config.objective.value and config.objective is not ir.Objective.LATENCY
    chosen = judge.lasting(lambda: judge.simplest(mixes, others) if is_free else judge.best(mixes))
    baselines = tuple(judge.baseline(kind, mix) for kind, mix in coarse.items())
    plan = judge.finished(chosen, baselines, [*others, *mixes], config.shown_microbatches)
    ir.verify(plan)
    return Solution(plan, task, chosen)


def _cells(task: Task, judge: Judge, config: PlanConfig) -> list[Mix]:
    """Plans for fewer devices side by side, where devices are alike; as coarse policies, a floor.

    A search over all devices at once looks at more, and at each of it less closely: it may be better, and
    with these among its candidates it is never worse.
    """
    kinds = task.pool.kinds
    if kinds is None or config.name != ir.Objective.THROUGHPUT.value or task.variants:
        return []
    found = []
    for parts in partitions(kinds.members):
        try:
            mix = _side_by_side(task, judge, parts, config)
        except PlanInfeasible:  # a part that is too small for the model
            continue
        if mix is not None and task.pool.fits(mix.columns, mix.microbatches):
            found.append(mix)
    return found


def _side_by_side(task: Task, judge: Judge, parts: Sequence[Cells], config: PlanConfig) -> Mix | None:
    """Every part planned once, its lanes copied to the devices of every copy, with microbatches of their own.

    Parts share nothing, so the whole is worth what they are together. None: fewer microbatches than cells.
    """
    problem = task.problem
    columns: list[Column] = []
    rates: list[float] = []
    held: list[int] = []
    for copies in parts:
        each = task.microbatches * len(copies[0]) // problem.num_devices
        if each < 1:
            return None
        part = restricted(problem, copies[0])
        if part is None:
            raise PlanInfeasible("the placement constraints leave a launch nowhere to run there")
        inner = Task(part, each, task.is_judged, task.is_served)
        judged = Judge(inner, ir.Objective.THROUGHPUT, config.name, judge.simulate)
        found = decide(inner, judged, replace(config, microbatches=each, shown_microbatches=()))
        for devices in copies:
            place = np.array(devices, dtype=np.int64)
            columns += [problem.column(place[column.labels]) for column in found.chosen.columns]
            rates += [share * found.plan.simulated_per_s for share in found.chosen.shares]
            held += microbatch_counts(found.chosen, each)
    mix = Mix(tuple(columns), tuple(rate / sum(rates) for rate in rates), tuple(held))
    judge.know(mix, min(sum(rates), mix.rate_per_s))
    return mix


def _remedy(name: str) -> str:
    return f"Use one of: {', '.join(sorted(x for x in PLANNERS if x != name))}."
