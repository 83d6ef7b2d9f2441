"""Planners by name: a planner takes a task and returns candidate mixes, or None where it does not apply.

single-placement           kernel-level, one placement for all requests, by a mixed-integer program
throughput, latency        kernel-level, see `local` and the package `latency`
quick                      the coarse policies and one kernel-level optimum, for those who ask often
cost, energy               throughput on the devices worth having on, see `objectives`

and the coarse policies of `baselines`. `solve` judges the candidates.
"""

from collections.abc import Callable

from tessera import ir
from tessera.errors import UnknownName
from tessera.plan import latency
from tessera.plan.baselines import COARSE
from tessera.plan.pricing import milp, throughput
from tessera.plan.problem import Mix, microbatch_counts
from tessera.plan.search import objectives
from tessera.plan.search.local import throughput_mixes, without_rare_lanes
from tessera.plan.search.task import Task

Planner = Callable[[Task], tuple[Mix, ...] | None]


def single_placement(task: Task, time_limit_s: float = milp.TIME_LIMIT_S) -> tuple[Mix, ...] | None:
    """One placement for all requests: the best by the mixed-integer program or among those known."""
    known = [m.columns[0] for m in task.coarse_mixes if len(m.columns) == 1]
    found = milp.best_placement(task.problem, time_limit_s, task.microbatches)
    columns = (*known, *(() if found is None else (found[0],)))
    mixes = [mix for c in columns if (mix := task.pool.held_by((c,))) is not None]
    return (max(mixes, key=lambda m: m.rate_per_s),) if mixes else None


def quick_mixes(task: Task) -> tuple[Mix, ...]:
    """What every coarse policy proposes, and the optimum with as many requests in flight as there are."""
    coarse = task.coarse_mixes
    load = task.problem.load_us
    if coarse and (load == load[:, :1]).all():  # equal devices have nothing to gain beyond
        return tuple(coarse)
    if not task.is_judged or task.problem.num_devices == 1:
        return (*coarse, task.free.mix)
    task.seed()
    mix = throughput.generate(task.pool, 1.1 * task.problem.num_devices).mix
    few = without_rare_lanes(mix)
    return (*coarse, few if task.pool.fits(few.columns, microbatch_counts(few, task.microbatches)) else mix)


def latency_mixes(task: Task) -> tuple[Mix, ...]:
    """The fastest placement for one request alone."""
    prob, pool = task.problem, task.pool
    task.seed()
    found = latency.solve(prob, pool.columns, lambda x: not pool.is_tight or pool.able(prob.column(x)))
    mix = pool.held_by((prob.column(found.labels),))
    assert mix is not None, "it was made to fit"
    return (mix,)


def _coarse(name: str) -> Planner:
    return lambda task: task.coarse[name]


PLANNERS: dict[str, Planner] = {
    **{name: _coarse(name) for name in COARSE},
    "throughput": throughput_mixes,
    "single-placement": single_placement,
    "latency": latency_mixes,
    "cost": objectives.planner(ir.Objective.COST),
    "energy": objectives.planner(ir.Objective.ENERGY),
    "quick": quick_mixes,
}


def planner_named(name: str) -> Planner:
    """UnknownName lists the known ones."""
    if name not in PLANNERS:
        raise UnknownName("policy", name, PLANNERS)
    return PLANNERS[name]
