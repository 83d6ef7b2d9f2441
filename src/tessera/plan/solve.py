"""solve: a plan for a work unit, its costs and a cluster.

Planners propose candidates, tuples of mixes:

    single-placement  one placement for all requests, by a mixed-integer program
    throughput        see `search.local`
    cost, energy      as throughput, also on sets of devices
    latency           see `latency`

and the coarse policies of `baselines`. The task compares candidates by one figure: the plan's
`simulated_per_s` and each baseline's `throughput_per_s`. The plan's `throughput_per_s` and `bound_per_s` are
by busy time. For the throughput objective

    bound_per_s >= throughput_per_s >= simulated_per_s >= throughput_per_s of every baseline.

Cost and energy plans are never below a baseline in their figure. Near the best, the most robust candidate
wins, then the one with fewer lanes and transfers. The latency objective compares makespans of single
requests. Plans for parts of the cluster, copied to all devices, are candidates too.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible, check_known
from tessera.plan import latency
from tessera.plan.baselines import COARSE
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.constraints import Constraint, check_constraints
from tessera.plan.problem import Cells, Column, Mix, alike_devices, build, partitions, restricted
from tessera.plan.search import objectives
from tessera.plan.search.local import throughput_mixes
from tessera.plan.search.task import Simulator, Task

Planner = Callable[[Task], tuple[Mix, ...] | None]
MICROBATCHES_SHOWN = (1, 2, 4, 8, 16)


def single_placement(task: Task) -> tuple[Mix, ...] | None:
    coarse = (mix for mixes in task.coarse.values() for mix in mixes or ())
    columns = [mix.columns[0] for mix in coarse if len(mix.columns) == 1]
    from tessera.plan.pricing import milp  # slow to import

    solved = milp.best_placement(task.problem, task.microbatches)
    columns += [] if solved is None else [solved[0]]
    mixes = [mix for c in columns if (mix := task.pool.held_by((c,))) is not None]
    return (max(mixes, key=lambda m: m.rate_per_s),) if mixes else None


def latency_mixes(task: Task) -> tuple[Mix, ...]:
    prob, pool = task.problem, task.seeded
    fits = lambda x: not pool.is_tight or pool.able(prob.column(x))  # noqa: E731
    fastest = latency.solve(prob, pool.columns, fits, task.config)
    mix = pool.held_by((prob.column(fastest.labels),))
    assert mix is not None, "it was made to fit"
    return (mix,)


def _coarse_planner(name: str) -> Planner:
    return lambda task: task.coarse[name]


PLANNERS: dict[str, Planner] = {
    **{name: _coarse_planner(name) for name in COARSE},
    "throughput": throughput_mixes,
    "cost": throughput_mixes,
    "energy": throughput_mixes,
    "single-placement": single_placement,
    "latency": latency_mixes,
}


def planner_named(name: str) -> Planner:
    check_known("policy", name, PLANNERS)
    return PLANNERS[name]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    objective: ir.Objective
    microbatches: int = 4
    # None: the objective's own.
    policy: str | None = None
    constraints: tuple[Constraint, ...] = ()
    # No microbatch may depend on device time that others leave idle.
    is_served: bool = False
    shown_microbatches: tuple[int, ...] = MICROBATCHES_SHOWN
    search: SearchConfig = FULL
    memory_share: float = 1.0

    @property
    def planner(self) -> str:
        return self.policy or self.objective.value


def solve(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulator | None = None,
) -> ir.Plan:
    """Where memory is short, fewer requests in flight are tried too."""
    most = config.microbatches
    planner_named(config.planner)
    check_constraints(unit, config.constraints)
    task, objective = task_of(unit, costs, cluster, config, simulate), config.objective
    plans = [decide(task, config.shown_microbatches)]
    if task.pool.is_tight and objective is not ir.Objective.LATENCY:
        fewer = [num for num in config.search.fewer_microbatches if num < most]
        plans += [decide(replace(task, microbatches=num), config.shown_microbatches) for num in fewer]
    return max(plans, key=lambda x: objective.figure(x.simulated_per_s, x.usd_per_hour, x.joules_per_unit))


def task_of(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulator | None = None,
) -> Task:
    problem = build(unit, costs, cluster, config.constraints, config.memory_share)
    is_served = config.is_served or unit.is_served
    return Task(
        problem, config.microbatches, simulate, is_served, config.objective, config.planner, config.search
    )


def decide(task: Task, shown_microbatches: Sequence[int] = ()) -> ir.Plan:
    """A named policy may be below the coarse ones."""
    chosen, rivals = _chosen(task)
    plan = task.finished(chosen, rivals, shown_microbatches)
    ir.verify(plan)
    return plan


def _chosen(task: Task, is_part: bool = False) -> tuple[Mix, list[Mix]]:
    """(the best mix, all that it was compared with)."""
    floors = [m for m in task.best_coarse.values() if m is not None]
    mixes = planner_named(task.policy)(task)
    if not mixes:
        limits = " with these placement constraints" if task.problem.constraints else ""
        remedy = f"Use one of: {', '.join(sorted(x for x in PLANNERS if x != task.policy))}."
        raise PlanInfeasible(f"the policy '{task.policy}' does not apply to this work{limits}", remedy)
    floors += [] if is_part else _from_parts(task)
    is_free = task.policy == task.objective.value and task.objective is not ir.Objective.LATENCY
    chosen = task.lasting(lambda: task.simplest(mixes, floors) if is_free else task.best(mixes))
    return chosen, [*floors, *mixes]


def _from_parts(task: Task) -> list[Mix]:
    splits: Iterable[tuple[Cells, ...]] = ()
    if task.policy == task.objective.value:
        if task.objective in (ir.Objective.COST, ir.Objective.ENERGY):
            splits = (((devices,),) for devices in _worthwhile(task))
        elif task.objective is ir.Objective.THROUGHPUT and task.pool.kinds is not None:
            splits = partitions(task.pool.kinds.members)
    mixes = []
    for parts in splits:
        with suppress(PlanInfeasible):  # part too small
            mix = _copied(task, parts)
            if mix is not None and task.pool.fits(mix.columns, mix.microbatches):
                mixes.append(mix)
    return mixes


def _copied(task: Task, parts: Sequence[Cells]) -> Mix | None:
    """None with fewer microbatches than cells."""
    problem = task.problem
    is_split = sum(len(cells) for cells in parts) > 1
    columns: list[Column] = []
    rates: list[float] = []
    counts: list[int] = []
    simulated, is_whole = 0.0, True
    for cells in parts:
        each = task.microbatches * len(cells[0]) // problem.num_devices if is_split else task.microbatches
        if each < 1:
            return None
        part = restricted(problem, cells[0])
        if part is None:
            raise PlanInfeasible("the placement constraints leave a launch nowhere to run there")
        inner = replace(task, problem=part, microbatches=each)
        mix, _ = _chosen(inner, is_part=not is_split)
        followers = inner.followers(mix)
        lanes = [lane for lane in zip(mix.columns, mix.shares, followers, strict=True) if lane[2]]
        is_whole &= len(lanes) == len(followers)
        simulated += len(cells) * inner.rate_per_s(mix)
        for cell in cells:
            columns += [problem.column(np.array(cell)[column.labels]) for column, _, _ in lanes]
            rates += [share * mix.rate_per_s for _, share, _ in lanes]
            counts += [num for _, _, num in lanes]
    mix = Mix(tuple(columns), tuple(rate / sum(rates) for rate in rates), tuple(counts))
    if is_whole:
        task.know(mix, min(simulated, mix.rate_per_s))
    return mix


def _worthwhile(task: Task) -> list[objectives.Devices]:
    """Proper subsets with the best figures by busy time."""
    config, problem, objective = task.config, task.problem, task.objective
    solved: list[tuple[float, objectives.Devices]] = []
    best = 0.0
    sets = objectives.sets_of(alike_devices(problem))
    bounds = ((objectives.bound(problem, objective, devices), devices) for devices in sets)
    for bound, devices in sorted(bounds, key=lambda x: -x[0]):
        if len(solved) >= config.max_solved or bound < config.worth * best:
            break
        part = restricted(problem, devices) if len(devices) < problem.num_devices else None
        if part is None:
            continue
        try:
            mix = Task(part, task.microbatches, config=config).free.mix
        except PlanInfeasible:
            continue
        solved.append((objectives.figure(part, objective, mix, mix.rate_per_s), devices))
        best = max(best, solved[-1][0])
    ranked = sorted(solved, key=lambda x: -x[0])[: config.max_planned_sets]
    return [devices for value, devices in ranked if value >= config.worth * best]
