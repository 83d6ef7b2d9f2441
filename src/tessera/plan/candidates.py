"""Kernel-level candidates: what the linear program and the latency search propose for judgement.

For throughput: the optimum by busy time; where a simulation judges, also
  the optima under several depth limits, without the lanes that few requests would follow,
  the same with the step that takes most time spread evenly by itself: with few requests in flight, devices
  that are evenly busy over a whole request still wait for each other inside a step,
and, where units are small enough to look at many,
  the single columns with the shortest periods and paths,
  splices: two lanes of an optimum joined, the first layers from one and the rest from the other,
  placements that are good in every step by itself, and mixes in which one step is divided and the others stay
  whole.
Which of them are worth a full simulation is found by quick ones. How many are tried depends on the size of
the unit alone, so that the same work gives the same plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from tessera import ir
from tessera.plan import latency, throughput
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Mix, Problem, build, spread_us

MixKey = tuple[tuple[bytes, float], ...]

# Limits that are tried: the depth as a multiple of the number of devices (below one they could not all be
# busy), and how much of the other steps' time the main step may take on a device; None: any. First those in
# the first line, then always the one that is nearest to the best so far.
TRIED: tuple[tuple[float, float | None], ...] = (
    (1.2, None), (1.08, 0.2), (1.35, 0.2),
    (1.02, None), (1.02, 0.2), (1.05, None), (1.05, 0.1), (1.05, 0.2), (1.05, 0.4), (1.08, 0.0), (1.08, 0.4),
    (1.1, None), (1.12, 0.1), (1.12, 0.2), (1.12, 0.3), (1.15, None), (1.15, 0.2), (1.2, 0.0), (1.2, 0.2),
    (1.2, 0.4), (1.28, None), (1.28, 0.0), (1.28, 0.2), (1.28, 0.4), (1.35, None), (1.35, 0.0), (1.35, 0.4),
    (1.42, None), (1.42, 0.0), (1.42, 0.2), (1.42, 0.4), (1.5, None), (1.5, 0.0), (1.5, 0.2), (1.65, None),
    (1.65, 0.2), (2.0, None),
)  # fmt: skip
NUM_FIRST = 3
# How far any share and no limit at all are apart, in depth.
OTHER_SHARE = 0.03
# How many are tried: of large units, and of others so many launches over those of the unit.
FEWEST, TRIED_LAUNCHES, MOST = 4, 40_000, 30
# Where the other steps take less than this share of the time, spreading the main one alone changes nothing.
MIN_OTHER = 0.01
# Single columns that are tried, by period and by path.
NUM_SINGLE = 6
# A lane that fewer requests follow is rare: a scheduler seldom uses it, and a short simulation never sees it.
RARE_SHARE = 1 / 16
# Ways of joining two lanes that are compared, and mixes whose lanes are joined.
MAX_SPLICES, NUM_SPLICED = 32, 8
# Placements of each step that are combined, and combinations that are tried.
NUM_PER_STEP = 4
NUM_COMBINED = 3
MAX_COMBINATIONS = 256
# Mixes that are simulated in full: of small units, of large ones; and single lanes besides.
NUM_FINALISTS = 8, 2
NUM_FINAL_SINGLE = 1


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    """Optima of the linear program and what lies near them; judged by busy time if nothing simulates."""
    best = task.free.mix
    if not task.is_judged or task.problem.num_devices == 1:
        return (best,)
    search = _Search(task)
    _by_limits(task, search)
    if not task.is_large:
        columns = [c for mix in search.sorted()[:NUM_SPLICED] for c in _splices(task, mix)]
        choices = _step_choices(task)
        columns += [*_step_by_step(task, choices), *_single_columns(task)]
        singles = (Mix((c,), (1.0,)) for c in columns)
        for mix in (*_one_step_split(task, choices), best, *singles):
            search.look(mix)
    return search.finalists(NUM_FINALISTS[task.is_large])


def _by_limits(task: Task, search: "_Search") -> None:
    """Looks at the optima under limits, around the best of them."""
    launches = task.problem.unit.num_launches
    num = FEWEST if task.is_large else min(MOST, max(FEWEST, TRIED_LAUNCHES // launches))
    known = _limits(task)
    left = list(known)
    best, center = 0.0, left[0]
    while left and len(known) - len(left) < num:
        is_first = len(known) - len(left) < NUM_FIRST
        limits = left[0] if is_first else min(left, key=lambda x: _distance(x, center))
        left.remove(limits)
        figure = search.look(_without_rare_lanes(throughput.generate(task.pool, limits).mix))
        if figure > best:
            best, center = figure, limits


def _limits(task: Task) -> list[throughput.Limits]:
    """Those of the table, each once; shares only where there is a main step among others."""
    num = task.problem.num_devices
    step, share = _main_step(task.problem)
    found = [
        throughput.Limits(depth * num)
        if spare is None or share > 1 - MIN_OTHER
        else throughput.Limits(depth * num, step, share + spare * (1 - share))
        for depth, spare in TRIED
    ]
    return list(dict.fromkeys(found))


def _distance(one: throughput.Limits, other: throughput.Limits) -> float:
    assert one.depth is not None and other.depth is not None, "all of the table have a depth"
    return abs(one.depth - other.depth) / one.depth + OTHER_SHARE * (one.share != other.share)


def _main_step(problem: Problem) -> tuple[int, float]:
    """(the step that takes most of the time, its share of it) if every step were spread evenly."""
    times = [
        count * spread_us(us) for us, count in zip(problem.cost_us, problem.unit.counts, strict=True)
    ]
    step = int(np.argmax(times))
    return step, times[step] / sum(times)


@dataclass(eq=False)
class _Search:
    """Mixes with their quick figures; what cannot beat the best so far is not looked at."""

    task: Task
    # (figure, mix)
    found: list[tuple[float, Mix]] = field(default_factory=list)
    best: float = 0.0
    _seen: set[MixKey] = field(default_factory=set)

    def look(self, mix: Mix) -> float:
        """The quick figure of a mix; 0 where it could not win or is known."""
        if _key(mix) in self._seen or mix.rate_per_s < self.best:
            return 0.0
        self._seen.add(_key(mix))
        figure = mix.rate_per_s if self.task.glance is None else self.task.glance(mix)
        self.found.append((figure, mix))
        self.best = max(self.best, figure)
        return figure

    def sorted(self) -> list[Mix]:
        """Best first."""
        return [mix for _, mix in sorted(self.found, key=lambda x: -x[0])]

    def finalists(self, num: int) -> tuple[Mix, ...]:
        """The few that deserve a full simulation; a single lane among them, which a quick look sees best."""
        listed = self.sorted()
        single = [mix for mix in listed if len(mix.columns) == 1]
        kept = {id(mix): mix for mix in (*listed[:num], *single[:NUM_FINAL_SINGLE])}
        return tuple(kept.values())


def quick_mixes(task: Task) -> tuple[Mix, ...]:
    """What every coarse policy proposes, and the optimum with as many requests in flight as there are."""
    coarse = [mix for mixes in task.coarse.values() for mix in mixes or ()]
    load = task.problem.load_us
    if coarse and (load == load[:, :1]).all():  # equal devices have nothing to gain beyond
        return tuple(coarse)
    if not task.is_judged or task.problem.num_devices == 1:
        return (*coarse, task.free.mix)
    throughput.seed(task.pool, coarse)
    limits = throughput.Limits(1.1 * task.problem.num_devices)
    mix = throughput.generate(task.pool, limits).mix
    return (*coarse, _without_rare_lanes(mix))


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


def _step_choices(task: Task) -> list[list[tuple[int, ...]]]:
    """[step]: the best placements of the step by itself; empty where the steps are one, or too many."""
    prob = task.problem
    unit = prob.unit
    if len(unit.graphs) < 2 or NUM_PER_STEP ** len(unit.graphs) > MAX_COMBINATIONS:
        return []
    choices: list[list[tuple[int, ...]]] = []
    for graph, costs, count in zip(unit.graphs, prob.costs, unit.counts, strict=True):
        part = build(ir.WorkUnit((graph,), (count,)), (costs,), prob.cluster, prob.wishes)
        alone = Task(part, task.slots)
        mix = alone.free.mix
        tried = sorted(
            {c.key: c for c in (*_splices(alone, mix), *alone.pool.columns)}.values(), key=_period_us
        )
        choices.append([alone.problem.placement(c.labels).devices[0] for c in tried[:NUM_PER_STEP]])
    return choices


def _step_by_step(task: Task, choices: list[list[tuple[int, ...]]]) -> Iterator[Column]:
    """Placements that are good in every step by itself, best first by the sum of the steps' periods."""
    prob = task.problem
    joined = [prob.column(prob.labels(ir.Placement(steps))) for steps in product(*choices) if steps]
    fitting = [c for c in joined if task.pool.fits((c,))]
    yield from sorted(fitting, key=lambda c: max(_period_us(c), float(_step_periods(prob, c).sum())))[
        :NUM_COMBINED
    ]


def _one_step_split(task: Task, choices: list[list[tuple[int, ...]]]) -> Iterator[Mix]:
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
            yield from (mix, _without_rare_lanes(mix))


def _step_periods(problem: Problem, column: Column) -> Floats:
    """Per step: busy time of its busiest device."""
    periods = []
    for nodes, costs, count in zip(problem.node_of, problem.cost_us, problem.unit.counts, strict=True):
        device = column.labels[nodes]
        own = costs[np.arange(len(device)), device]
        periods.append(count * np.bincount(device, weights=own, minlength=problem.num_devices).max())
    return np.array(periods)


def _key(mix: Mix) -> MixKey:
    return tuple(sorted((c.key, round(s, 6)) for c, s in zip(mix.columns, mix.shares, strict=True)))
