"""Lanes of services: one placement for all requests.

On a lane over several devices each crossing is a wait that other microbatches must fill, so a placement that
only balances busy times can run at half of its bound. A coarse placement (attention-ffn) crosses rarely, but
is not balanced. `Spread` moves segments of its busiest device (consecutive launches between two crossings
that touch no state) to its least busy one, in an order that is even over the step and the same for all step
sizes, so that few weights are held twice. The simulated rate decides how many; the bound by busy time
excludes most numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.config import SearchConfig
from tessera.plan.constraints import compiled_launches
from tessera.plan.host import FETCH, even_order, has_host, host_placements
from tessera.plan.problem import build
from tessera.plan.search.task import Simulator, Task
from tessera.plan.solve import planner_named

# By kernels; with few crossings, see `spread`.
SINGLE_PLACEMENT, FEW_CROSSINGS = "single-placement", ("layer-pipeline", "attention-ffn")
SERVED_PLANNERS = {"kernel-level": SINGLE_PLACEMENT}
# Less is within the error of costs.
FETCH_GAIN = 1.03

Place = tuple[int, ...]
# Runs of one step per second.
StepRate = Callable[[int, Place], float]
Fits = Callable[[ir.Placement], bool]


@dataclass(frozen=True)
class Spread:
    unit: ir.WorkUnit
    costs: tuple[ir.Costs, ...]
    rate: StepRate
    fits: Fits = lambda placement: True

    def best_of(self, placements: Iterable[ir.Placement]) -> ir.Placement:

        def seconds(steps: list[tuple[float, Place]]) -> float:
            return sum(num / rate for num, (rate, _) in zip(self.unit.counts, steps, strict=True))

        options = []
        for start in placements:
            best = [self._best(step, start) for step in range(len(start.devices))]
            if not self.fits(ir.Placement(tuple(place for _, place in best))):  # weights held twice
                best = [(self.rate(step, place), place) for step, place in enumerate(start.devices)]
            options.append(best)
        return ir.Placement(tuple(place for _, place in min(options, key=seconds)))

    def _best(self, step: int, start: ir.Placement) -> tuple[float, Place]:
        busy_us, place = self.costs[step].busy_us, start.devices[step]
        variants = [place, *variants_of(self.unit.graphs[step], place, busy_us(place))]
        bounds = [(1e6 / max(busy_us(variant)), variant) for variant in variants]
        best = 0.0, place
        for bound, variant in sorted(bounds, reverse=True):
            if bound <= best[0]:
                break
            if self.fits(ir.Placement((*start.devices[:step], variant, *start.devices[step + 1 :]))):
                best = max(best, (self.rate(step, variant), variant))
        return best


def variants_of(graph: ir.Graph, place: Place, busy_us: Sequence[float]) -> Iterator[Place]:
    """Moves 1, 2, ... segments."""
    used = sorted(set(place), key=lambda device: busy_us[device])
    trace, least, busiest = graph.trace, used[0], used[-1]
    states = set(trace.buffers_of(ir.BufferKind.STATE))
    bound = {n for n, x in enumerate(trace.launches) if any(a.buffer in states for a in x.accesses)}
    runs = [list(run) for device, run in groupby(range(len(place)), place.__getitem__) if device == busiest]
    segments = [run for run in runs if bound.isdisjoint(run)]
    moved = list(place)
    for number in even_order(len(segments)) if least != busiest else ():
        for launch in segments[number]:
            moved[launch] = least
        yield tuple(moved)


def place(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    policy: str,
    microbatches: int,
    config: SearchConfig,
    rate: Simulator,
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
        if len(candidates) == 1:
            return candidates[0]
        rates = [rate(lane_plan(unit, costs, cluster, x, microbatches, "")) for x in candidates]
        return candidates[0 if FETCH_GAIN * rates[0] >= max(rates) else rates.index(max(rates))]

    fewest = 1 if memory_share is None else microbatches
    task = Task(problem, microbatches, is_served=True, policy=planner, config=config, fewest=fewest)

    def placements_by(names: Sequence[str]) -> list[ir.Placement]:
        options = [[m for m in planner_named(x)(task) or () if len(m.columns) == 1] for x in names]
        best = [max(mixes, key=task.upper_bound_per_s) for mixes in options if mixes]
        return [problem.placement(mix.columns[0].labels) for mix in best]

    is_spread = planner == SINGLE_PLACEMENT
    placements = (is_spread and placements_by(FEW_CROSSINGS)) or placements_by([planner])
    if not placements:
        raise PlanInfeasible(f"the policy '{policy}' does not apply to this work or does not fit")
    if not is_spread:
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
