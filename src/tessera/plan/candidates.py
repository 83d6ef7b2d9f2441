"""Kernel-level candidates: what the linear program and the latency search propose for judgement.

For throughput: the optimum by busy time; where a simulation judges, also
  the optima under several depth limits, and each without the lanes that few requests would follow,
  splices: two lanes of an optimum joined, the first layers from one and the rest from the other,
  steps balanced each for itself: with few requests in flight, devices that are evenly busy over a whole
  request still wait for each other inside a step,
  the single columns with the shortest periods and paths.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from tessera import ir
from tessera.plan import latency, throughput
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Mix, Problem, build

# Depth limits that are tried, as multiples of the number of devices: below one they could not all be busy.
DEPTHS = (1.02, 1.1, 1.35, 1.5, 1.75, 2.0)
# Single columns that are tried, by period and by path.
NUM_SINGLE = 2
# A lane that fewer requests follow is rare: a scheduler seldom uses it, and a short simulation never sees it.
RARE_SHARE = 1 / 16
MAX_SPLICES = 32
# Placements of each step that are combined, and combinations that are tried.
NUM_PER_STEP = 4
NUM_COMBINED = 3
MAX_COMBINATIONS = 256


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    """Optima of the linear program and what lies near them; judged by busy time if nothing simulates."""
    best = task.free.mix
    if not task.is_judged or task.problem.num_devices == 1:
        return (best,)
    depths = {factor * task.problem.num_devices for factor in DEPTHS} | {float(task.slots)}
    optima = [best, *(throughput.generate(task.pool, depth).mix for depth in sorted(depths))]
    optima += [_without_rare_lanes(mix) for mix in optima]
    columns = [c for mix in _distinct(optima) for c in _splices(task, mix)]
    columns += [*_step_by_step(task), *_single_columns(task)]
    return tuple(_distinct([*optima, *(Mix((c,), (1.0,)) for c in columns)]))


def latency_mixes(task: Task) -> tuple[Mix, ...]:
    """The fastest placement for one request alone."""
    prob, pool = task.problem, task.pool
    throughput.seed(pool, [mix for mixes in task.coarse.values() for mix in mixes or ()])
    found = latency.solve(prob, pool.columns, lambda x: not pool.is_tight or pool.fits((prob.column(x),)))
    return (Mix((prob.column(found.labels),), (1.0,)),)


def _without_rare_lanes(mix: Mix) -> Mix:
    """The mix of its main lanes alone, in the same proportions."""
    kept = [(c, s) for c, s in zip(mix.columns, mix.shares, strict=True) if s >= RARE_SHARE]
    if not kept or len(kept) == len(mix.columns):
        return mix
    total = sum(share for _, share in kept)
    return Mix(tuple(c for c, _ in kept), tuple(share / total for _, share in kept))


def _single_columns(task: Task) -> Iterator[Column]:
    yield from sorted(task.pool.columns, key=_period_us)[:NUM_SINGLE]
    yield from sorted(task.pool.columns, key=lambda c: c.path_us)[:NUM_SINGLE]


def _period_us(column: Column) -> float:
    return float(column.busy_us.max())


def _splices(task: Task, mix: Mix) -> Iterator[Column]:
    """The best placement with its first layers from one of the two main lanes, the rest from the other."""
    if len(mix.columns) < 2:
        return
    prob = task.problem
    found = task.layer_of_node
    rank, num = (np.arange(prob.num_nodes), prob.num_nodes) if found is None else found
    order = np.argsort([-s for s in mix.shares], kind="stable")
    first, second = (mix.columns[i].labels for i in order[:2])
    cuts = np.unique(np.linspace(1, num - 1, MAX_SPLICES).astype(np.int64))
    joined = (
        prob.column(np.where(rank < cut, a, b)) for cut in cuts for a, b in ((first, second), (second, first))
    )
    fitting = [c for c in joined if task.pool.fits((c,))]
    if fitting:
        yield min(fitting, key=lambda c: (_period_us(c), c.path_us))


def _step_by_step(task: Task) -> Iterator[Column]:
    """Placements that are good in every step by itself, best first by the sum of the steps' periods."""
    prob = task.problem
    unit = prob.unit
    if len(unit.graphs) < 2 or NUM_PER_STEP ** len(unit.graphs) > MAX_COMBINATIONS:
        return
    choices: list[list[tuple[int, ...]]] = []
    for graph, costs, count in zip(unit.graphs, prob.costs, unit.counts, strict=True):
        alone = Task(build(ir.WorkUnit((graph,), (count,)), (costs,), prob.cluster), task.slots)
        mix = alone.free.mix
        tried = sorted(
            {c.key: c for c in (*_splices(alone, mix), *alone.pool.columns)}.values(), key=_period_us
        )
        choices.append([alone.problem.placement(c.labels).devices[0] for c in tried[:NUM_PER_STEP]])
    joined = [prob.column(prob.labels(ir.Placement(steps))) for steps in product(*choices)]
    fitting = [c for c in joined if task.pool.fits((c,))]
    yield from sorted(fitting, key=lambda c: max(_period_us(c), float(_step_periods(prob, c).sum())))[
        :NUM_COMBINED
    ]


def _step_periods(problem: Problem, column: Column) -> Floats:
    """Per step: busy time of its busiest device."""
    periods = []
    for nodes, costs, count in zip(problem.node_of, problem.cost_us, problem.unit.counts, strict=True):
        device = column.labels[nodes]
        own = costs[np.arange(len(device)), device]
        periods.append(count * np.bincount(device, weights=own, minlength=problem.num_devices).max())
    return np.array(periods)


def _distinct(mixes: list[Mix]) -> list[Mix]:
    seen: dict[tuple[tuple[bytes, float], ...], Mix] = {}
    for mix in mixes:
        key = tuple((c.key, round(s, 6)) for c, s in zip(mix.columns, mix.shares, strict=True))
        seen.setdefault(tuple(sorted(key)), mix)
    return list(seen.values())
