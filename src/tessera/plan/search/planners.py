"""Planners by name: a task in, candidate mixes out (None: does not apply).

    single-placement  one placement for all requests, by a mixed-integer program
    throughput        see `local`
    cost, energy      as throughput; `solve` adds device sets
    latency           see the package `latency`

and the coarse policies of `baselines`.
"""

from collections.abc import Callable

from tessera.errors import check_known
from tessera.plan import latency
from tessera.plan.baselines import COARSE
from tessera.plan.problem import Mix
from tessera.plan.search.local import throughput_mixes
from tessera.plan.search.task import Task

Planner = Callable[[Task], tuple[Mix, ...] | None]


def single_placement(task: Task) -> tuple[Mix, ...] | None:
    columns = [m.columns[0] for m in task.coarse_mixes if len(m.columns) == 1]
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


def _coarse(name: str) -> Planner:
    return lambda task: task.coarse[name]


PLANNERS: dict[str, Planner] = {
    **{name: _coarse(name) for name in COARSE},
    "throughput": throughput_mixes,
    "cost": throughput_mixes,
    "energy": throughput_mixes,
    "single-placement": single_placement,
    "latency": latency_mixes,
}


def planner_named(name: str) -> Planner:
    check_known("policy", name, PLANNERS)
    return PLANNERS[name]
