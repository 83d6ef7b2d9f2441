"""Joined placements: parts of good placements put together.

  splices        two lanes of an optimum joined, the first layers from one and the rest from the other
  step by step   placements that are good in every step by itself
  one step split mixes in which one step is divided and the others stay whole
Nothing here is judged; what does not fit the devices' memory is left out.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from tessera import ir
from tessera.plan import throughput
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Ints, Labels, Mix, Problem, build

# Places to join two lanes at that are compared, links included.
NUM_CUTS = 3
# Placements of each step that are combined, and combinations that are tried.
NUM_PER_STEP = 4
NUM_COMBINED = 3
MAX_COMBINATIONS = 256
# A lane that fewer requests follow is rare: a scheduler seldom uses it, and a short simulation never sees it.
RARE_SHARE = 1 / 16

# [step]: some placements of the step's launches.
Choices = list[list[tuple[int, ...]]]


def without_rare_lanes(mix: Mix) -> Mix:
    """The mix of its main lanes alone, in the same proportions."""
    kept = [i for i, share in enumerate(mix.shares) if share >= RARE_SHARE]
    if not kept or len(kept) == len(mix.columns):
        return mix
    total = sum(mix.shares[i] for i in kept)
    slots = tuple(mix.slots[i] for i in kept) if mix.slots else ()
    return Mix(tuple(mix.columns[i] for i in kept), tuple(mix.shares[i] / total for i in kept), slots)


def period_us(column: Column) -> float:
    """Busy time of its busiest device or link."""
    return float(column.busy_us.max())


def splices(task: Task, mix: Mix) -> Iterator[Column]:
    """The best placement with its first layers from one of the two main lanes, the rest from the other."""
    if len(mix.columns) < 2:
        return
    prob = task.problem
    found = task.layer_of_node
    rank, num = (np.arange(prob.num_nodes), prob.num_nodes) if found is None else found
    order = np.argsort([-s for s in mix.shares], kind="stable")
    first, second = (mix.columns[i].labels for i in order[:2])
    joined = [
        prob.column(np.where(rank < cut, a, b))
        for a, b in ((first, second), (second, first))
        for cut in _even_cuts(prob, rank, num, a, b)
    ]
    fitting = [c for c in joined if task.pool.able(c)]
    if fitting:
        yield min(fitting, key=lambda c: (period_us(c), c.path_us))


def _even_cuts(problem: Problem, rank: Ints, num: int, first: Labels, second: Labels) -> list[int]:
    """Where to change over from one placement to another so that the devices are evenly busy; best first."""
    done = np.zeros((num, problem.num_devices))
    left = np.zeros((num, problem.num_devices))
    nodes = np.arange(problem.num_nodes)
    np.add.at(done, (rank, first), problem.load_us[nodes, first])
    np.add.at(left, (rank, second), problem.load_us[nodes, second])
    # Cut c: ranks below c from the first, the others from the second.
    busy = np.cumsum(done, axis=0)[:-1] + left.sum(axis=0) - np.cumsum(left, axis=0)[:-1]
    return [int(c) + 1 for c in np.argsort(busy.max(axis=1), kind="stable")[:NUM_CUTS]]


def step_choices(task: Task) -> Choices:
    """[step]: the best placements of the step by itself; empty where the steps are one, or too many."""
    prob = task.problem
    unit = prob.unit
    if len(unit.graphs) < 2 or NUM_PER_STEP ** len(unit.graphs) > MAX_COMBINATIONS:
        return []
    choices: Choices = []
    for graph, costs, count in zip(unit.graphs, prob.costs, unit.counts, strict=True):
        part = build(ir.WorkUnit((graph,), (count,)), (costs,), prob.cluster, prob.wishes)
        alone = Task(part, task.slots)
        mix = alone.free.mix
        tried = sorted(
            {c.key: c for c in (*splices(alone, mix), *alone.pool.columns)}.values(), key=period_us
        )
        choices.append([alone.problem.placement(c.labels).devices[0] for c in tried[:NUM_PER_STEP]])
    return choices


def step_by_step(task: Task, choices: Choices) -> Iterator[Column]:
    """Placements that are good in every step by itself, best first by the sum of the steps' periods."""
    prob = task.problem
    joined = [prob.column(prob.labels(ir.Placement(steps))) for steps in product(*choices) if steps]
    fitting = [c for c in joined if task.pool.able(c)]
    yield from sorted(fitting, key=lambda c: max(period_us(c), float(_step_periods(prob, c).sum())))[
        :NUM_COMBINED
    ]


def one_step_split(task: Task, choices: Choices) -> Iterator[Mix]:
    """Mixes in which one step of a request is divided and each of the others stays on one device.

    Requests in different steps then seldom wait for one another: a device always has whole steps to do.
    """
    prob = task.problem
    whole = [
        [(d,) * len(g.trace.launches) for d in range(prob.num_devices)] for g in prob.unit.graphs if choices
    ]
    if not choices or NUM_PER_STEP * prob.num_devices ** (len(choices) - 1) > MAX_COMBINATIONS:
        return
    for split in range(len(choices)):
        options = [choices[s] + whole[s] if s == split else whole[s] for s in range(len(choices))]
        placements = (ir.Placement(steps) for steps in product(*options))
        mix = throughput.balanced(task.pool, [prob.column(prob.labels(p)) for p in placements])
        if mix is not None:
            yield from (mix, without_rare_lanes(mix))


def _step_periods(problem: Problem, column: Column) -> Floats:
    """Per step: busy time of its busiest device."""
    periods = []
    for nodes, costs, count in zip(problem.node_of, problem.cost_us, problem.unit.counts, strict=True):
        device = column.labels[nodes]
        own = costs[np.arange(len(device)), device]
        periods.append(count * np.bincount(device, weights=own, minlength=problem.num_devices).max())
    return np.array(periods)
