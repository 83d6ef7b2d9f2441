"""solve: a plan for a work unit, its costs and a cluster.

Planners propose candidates; the judge compares them by one figure: the plan's `simulated_per_s` and each
baseline's `throughput_per_s`. The plan's `throughput_per_s` and `bound_per_s` are by busy time. For the
throughput objective

    bound_per_s >= throughput_per_s >= simulated_per_s >= throughput_per_s of every baseline.

Cost and energy plans are never below a baseline in their own figure. Near the best, the most robust candidate
wins, then the one with fewer lanes and transfers. The latency objective compares makespans of single
requests. Plans for parts of the cluster, copied to all devices, are candidates too.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.constraints import Constraint, check_constraints, compiled_launches
from tessera.plan.host import FETCH, has_host, host_placements
from tessera.plan.problem import Cells, Column, Mix, alike_devices, build, partitions, restricted
from tessera.plan.search import objectives
from tessera.plan.search.judge import Judge
from tessera.plan.search.planners import PLANNERS, planner_named
from tessera.plan.search.task import Simulator, Task
from tessera.plan.spread import Spread

# By kernels; with few crossings, see `spread`.
SINGLE_PLACEMENT, FEW_CROSSINGS = "single-placement", ("layer-pipeline", "attention-ffn")
SERVED_PLANNERS = {"kernel-level": SINGLE_PLACEMENT}
# Less is within the error of costs.
FETCH_GAIN = 1.03
MICROBATCHES_SHOWN = (1, 2, 4, 8, 16)


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
    if most < 1:
        raise PlanInfeasible(f"{most} requests in flight do no work", "Give at least one (--microbatches).")
    planner_named(config.planner)
    check_constraints(unit, config.constraints)
    problem = build(unit, costs, cluster, config.constraints, config.memory_share)
    is_served = config.is_served or unit.is_served

    def task_of(num: int) -> Task:
        return Task(problem, num, simulate, is_served, config.objective, config.planner, config.search)

    task = task_of(most)
    plans = [decide(Judge(task), config.shown_microbatches)]
    if task.pool.is_tight and config.objective is not ir.Objective.LATENCY:
        fewer = [num for num in config.search.fewer_microbatches if num < most]
        plans += [decide(Judge(task_of(num)), config.shown_microbatches) for num in fewer]
    return max(plans, key=lambda plan: objective_figure(plan, config.objective))


def baselines(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulator | None = None,
) -> tuple[ir.Baseline, ...]:
    problem = build(unit, costs, cluster, config.constraints, config.memory_share)
    judge = Judge(
        Task(problem, config.microbatches, simulate, config.is_served, config.objective, config=config.search)
    )
    return tuple(judge.baseline(kind, mix) for kind, mix in _coarse(judge).items())


def _coarse(judge: Judge) -> dict[str, Mix | None]:
    return {kind: judge.best(mixes) if mixes else None for kind, mixes in judge.task.coarse.items()}


def place(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    policy: str,
    microbatches: int,
    config: SearchConfig = FULL,
    rate: Simulator | None = None,
    memory_share: float | None = None,
) -> ir.Placement:
    """One placement for all requests: by busy time, kernel by kernel also by simulated rate.

    `memory_share` None: microbatches share state, which the caller counts.
    """
    problem = build(unit, costs, cluster, memory_share=memory_share or 1.0)
    planner = SERVED_PLANNERS.get(policy, policy)
    if planner == FETCH and not has_host(problem):
        raise PlanInfeasible("weights are fetched to one GPU beside CPUs only")
    if planner in (SINGLE_PLACEMENT, FETCH) and has_host(problem):
        candidates = host_placements(problem, microbatches, planner == FETCH)
        if len(candidates) == 1 or rate is None:
            return candidates[0]
        rates = [rate(lane_plan(unit, costs, cluster, x, microbatches, "")) for x in candidates]
        return candidates[0 if FETCH_GAIN * rates[0] >= max(rates) else rates.index(max(rates))]

    fewest = 1 if memory_share is None else microbatches
    task = Task(problem, microbatches, is_served=True, policy=planner, config=config, fewest=fewest)

    def placements_by(names: Sequence[str]) -> list[ir.Placement]:
        options = [[m for m in planner_named(x)(task) or () if len(m.columns) == 1] for x in names]
        best = [max(mixes, key=task.upper_bound_per_s) for mixes in options if mixes]
        return [task.draft(mix).lanes[0].placement for mix in best]

    is_judged = planner == SINGLE_PLACEMENT and rate is not None
    placements = (is_judged and placements_by(FEW_CROSSINGS)) or placements_by([planner])
    if not placements:
        raise PlanInfeasible(f"the policy '{policy}' does not apply to this work or does not fit")
    if planner != SINGLE_PLACEMENT or rate is None:
        return placements[0]

    alone = steps_alone(lane_plan(unit, costs, cluster, placements[0], microbatches, ""))

    def step_rate(step: int, devices: tuple[int, ...]) -> float:
        plan = alone[step]
        return rate(replace(plan, lanes=(replace(plan.lanes[0], placement=ir.Placement((devices,))),)))

    def fits(placement: ir.Placement) -> bool:
        return task.pool.fits((problem.column(problem.labels(placement)),), fewest)

    return Spread(unit, costs, step_rate, fits).best_of(placements)


def steps_alone(plan: ir.Plan) -> list[ir.Plan]:
    lane = plan.lanes[0]
    each = zip(plan.graphs, plan.costs, lane.placement.devices, strict=True)
    plans = []
    for graph, costs, devices in each:
        alone = replace(lane, placement=ir.Placement((devices,)))
        plans.append(replace(plan, unit=ir.WorkUnit((graph,), (1,)), costs=(costs,), lanes=(alone,)))
    return plans


def lane_plan(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    placement: ir.Placement,
    microbatches: int,
    home: str,
) -> ir.Plan:
    """The rate is that of the busiest device."""
    for graph, devices in zip(unit.graphs, placement.devices, strict=True):
        if any(cluster.devices[d].is_cpu for d in {devices[n] for n in compiled_launches(graph.trace)}):
            raise PlanInfeasible("compiled kernels run on GPUs only", "Add a GPU.")
    each = zip(unit.counts, costs, placement.devices, strict=True)
    busy_us = np.sum([count * np.array(cost.busy_us(devices)) for count, cost, devices in each], axis=0)
    per_s = 1e6 / float(busy_us.max())
    plan = ir.Plan(
        unit=unit,
        cluster=cluster,
        costs=costs,
        objective=ir.Objective.THROUGHPUT,
        policy=SINGLE_PLACEMENT,
        lanes=(ir.Lane(placement, per_s),),
        microbatches=microbatches,
        throughput_per_s=per_s,
        simulated_per_s=per_s,
        bound_per_s=per_s,
        latency_us=float(busy_us.sum()),
        lane_table=(0,),
        home=home,
    )
    ir.verify(plan)
    return plan


def objective_figure(plan: ir.Plan, objective: ir.Objective) -> float:
    if objective is ir.Objective.LATENCY:
        return 1.0 / plan.latency_us
    if objective is ir.Objective.COST and plan.usd_per_1k_units:
        return 1.0 / plan.usd_per_1k_units
    if objective is ir.Objective.ENERGY and plan.joules_per_unit:
        return 1.0 / plan.joules_per_unit
    return plan.simulated_per_s


def decide(judge: Judge, shown_microbatches: Sequence[int] = ()) -> ir.Plan:
    """A named policy may be below the coarse ones."""
    coarse = _coarse(judge)
    chosen, rivals = _chosen(judge, coarse)
    rated = tuple(judge.baseline(kind, mix) for kind, mix in coarse.items())
    plan = judge.finished(chosen, rated, rivals, shown_microbatches)
    ir.verify(plan)
    return plan


def _chosen(judge: Judge, coarse: dict[str, Mix | None], is_part: bool = False) -> tuple[Mix, list[Mix]]:
    """(the best mix, all that it was compared with)."""
    task = judge.task
    mixes = planner_named(task.policy)(task)
    if not mixes:
        limits = " with these placement constraints" if task.problem.constraints else ""
        remedy = f"Use one of: {', '.join(sorted(x for x in PLANNERS if x != task.policy))}."
        raise PlanInfeasible(f"the policy '{task.policy}' does not apply to this work{limits}", remedy)
    floors = [m for m in coarse.values() if m is not None]
    floors += [] if is_part else _from_parts(judge)
    is_free = task.policy == task.objective.value and task.objective is not ir.Objective.LATENCY
    chosen = judge.lasting(lambda: judge.simplest(mixes, floors) if is_free else judge.best(mixes))
    return chosen, [*floors, *mixes]


def _from_parts(judge: Judge) -> list[Mix]:
    task = judge.task
    splits: Iterable[tuple[Cells, ...]] = ()
    if task.policy == task.objective.value:
        if task.objective in (ir.Objective.COST, ir.Objective.ENERGY):
            splits = (((devices,),) for devices in _worthwhile(task))
        elif task.objective is ir.Objective.THROUGHPUT and task.pool.kinds is not None:
            splits = partitions(task.pool.kinds.members)
    mixes = []
    for parts in splits:
        with suppress(PlanInfeasible):  # part too small
            mix = _copied(judge, parts)
            if mix is not None and task.pool.fits(mix.columns, mix.microbatches):
                mixes.append(mix)
    return mixes


def _copied(judge: Judge, parts: Sequence[Cells]) -> Mix | None:
    """None with fewer microbatches than cells."""
    task, problem = judge.task, judge.task.problem
    is_split = sum(len(cells) for cells in parts) > 1
    lanes: list[tuple[Column, float, int]] = []
    simulated, is_whole = 0.0, True
    for cells in parts:
        each = task.microbatches * len(cells[0]) // problem.num_devices if is_split else task.microbatches
        if each < 1:
            return None
        part = restricted(problem, cells[0])
        if part is None:
            raise PlanInfeasible("the placement constraints leave a launch nowhere to run there")
        inner = Judge(replace(task, problem=part, microbatches=each, _spans={}))
        mix, _ = _chosen(inner, _coarse(inner), is_part=not is_split)
        counts = inner.task.followers(mix)
        is_whole &= all(counts)
        simulated += len(cells) * inner.rate_per_s(mix)
        for cell in cells:
            rows = zip(mix.columns, mix.shares, counts, strict=True)
            columns = ((problem.column(np.array(cell)[c.labels]), share, num) for c, share, num in rows)
            lanes += [(column, share * mix.rate_per_s, num) for column, share, num in columns if num]
    columns, rates, counts = zip(*lanes, strict=True)
    mix = Mix(columns, tuple(rate / sum(rates) for rate in rates), counts)
    if is_whole:
        judge.know(mix, min(simulated, mix.rate_per_s))
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
