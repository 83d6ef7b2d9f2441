"""Kernel-level candidates: what the linear program and the latency search propose for judgement.

For throughput: the optimum by busy time; where a simulation judges, also the optima under several depth
limits, the single columns with the shortest periods and paths, and splices: two lanes of an optimum
joined into one placement, the first layers from one and the rest from the other.
"""

from collections.abc import Iterator

import numpy as np

from tessera.plan import latency, throughput
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Mix

# Depth limits that are tried, as multiples of the requests in flight.
DEPTHS = (4.0, 2.0, 1.5, 1.0, 0.75, 0.5)
# Single columns that are tried, by period and by path.
NUM_SINGLE = 3
MAX_SPLICES = 32


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    """Optima of the linear program and what lies near them; judged by busy time if nothing simulates."""
    best = task.free.mix
    if not task.is_judged:
        return (best,)
    mixes = [best]
    for factor in DEPTHS:
        mixes.append(throughput.generate(task.pool, factor * task.slots).mix)
    for mix in tuple(mixes):
        mixes += [Mix((c,), (1.0,)) for c in _splices(task, mix)]
    return tuple(_distinct([*mixes, *_single_columns(task)]))


def latency_mixes(task: Task) -> tuple[Mix, ...]:
    """The fastest placement for one request alone."""
    prob, pool = task.problem, task.pool
    extra = [c for mixes in task.coarse.values() for m in mixes or () for c in m.columns]
    throughput.seed(pool, [])
    found = latency.solve(prob, [*extra, *pool.columns], lambda labels: pool.fits((prob.column(labels),)))
    return (Mix((prob.column(found.labels),), (1.0,)),)


def _single_columns(task: Task) -> Iterator[Mix]:
    by_period = sorted(task.pool.columns, key=lambda c: float(c.busy_us.max()))
    by_path = sorted(task.pool.columns, key=lambda c: c.path_us)
    for column in (*by_period[:NUM_SINGLE], *by_path[:NUM_SINGLE]):
        yield Mix((column,), (1.0,))


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
        yield min(fitting, key=lambda c: (float(c.busy_us.max()), c.path_us))


def _distinct(mixes: list[Mix]) -> list[Mix]:
    seen: dict[tuple[tuple[bytes, float], ...], Mix] = {}
    for mix in mixes:
        key = tuple((c.key, round(s, 6)) for c, s in zip(mix.columns, mix.shares, strict=True))
        seen.setdefault(tuple(sorted(key)), mix)
    return list(seen.values())
