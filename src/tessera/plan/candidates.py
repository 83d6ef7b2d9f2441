"""Kernel-level candidates: what the linear program and the latency search propose for judgement.

For throughput: the optimum by busy time; where a simulation judges, also
  the optima under several depth limits, and each without the lanes that few requests would follow,
  splices: two lanes of an optimum joined, the first layers from one and the rest from the other,
  steps balanced each for itself: with few requests in flight, devices that are evenly busy over a whole
  request still wait for each other inside a step,
  mixes in which one step is divided and the others stay whole,
  the single columns with the shortest periods and paths.
Which of them are worth a full simulation is found by quick ones: best hope first, and around the best depth
more depths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from tessera import ir
from tessera.plan import latency, throughput
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Mix, Problem, build

MixKey = tuple[tuple[bytes, float], ...]

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
# Rounds of halving the distance between depths, mixes whose lanes are joined, mixes that are simulated in
# full and how far below the best a quick figure may be for that.
REFINEMENTS = 2
# A figure this close to the rate by busy time is limited by it.
CAPPED = 1e-3
# Quick simulations of one search: the fewest, the most, and in between so many launches over those of a unit.
LOOKS = (8, 40)
LOOKED_LAUNCHES = 60_000
NUM_SPLICED = 8
NUM_FINALISTS = 3
NEAR = 0.02


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    """Optima of the linear program and what lies near them; judged by busy time if nothing simulates."""
    best = task.free.mix
    if not task.is_judged or task.problem.num_devices == 1:
        return (best,)
    search = _Search(task)
    depths = {factor * task.problem.num_devices for factor in DEPTHS} | {float(task.slots)}
    for depth in sorted(depths):
        search.at_depth(depth)
    for _ in range(REFINEMENTS):
        for depth in search.nearby_depths():
            search.at_depth(depth)
    optima = [best, *search.optima()]
    columns = [c for mix in optima[:NUM_SPLICED] for c in _splices(task, mix)]
    choices = _step_choices(task)
    columns += [*_step_by_step(task, choices), *_single_columns(task)]
    singles = (Mix((c,), (1.0,)) for c in columns)
    for mix in _distinct([*_one_step_split(task, choices), best, *singles]):
        search.look(mix)
    return search.finalists()


@dataclass(eq=False)
class _Search:
    """Mixes with their quick figures; what cannot beat the best so far is not looked at."""

    task: Task
    # (figure, mix), best last.
    found: list[tuple[float, Mix]] = field(default_factory=list)
    by_depth: dict[float, float] = field(default_factory=dict)
    _seen: set[MixKey] = field(default_factory=set)

    @property
    def best(self) -> float:
        """The best figure so far."""
        return max((figure for figure, _ in self.found), default=0.0)

    @property
    def most_looks(self) -> int:
        """Fewer where each takes long."""
        few, many = LOOKS
        return min(many, max(few, LOOKED_LAUNCHES // self.task.problem.unit.num_launches))

    def look(self, mix: Mix) -> float:
        """The quick figure of a mix; 0 where it could not win or is known."""
        if _key(mix) in self._seen or mix.rate_per_s < self.best or len(self.found) >= self.most_looks:
            return 0.0
        self._seen.add(_key(mix))
        figure = mix.rate_per_s if self.task.glance is None else self.task.glance(mix)
        self.found.append((figure, mix))
        return figure

    def at_depth(self, depth: float) -> None:
        """Looks at the main lanes of the optimum under a depth limit, and at all of them if that may help."""
        if depth not in self.by_depth:
            mix = throughput.generate(self.task.pool, depth).mix
            main = _without_rare_lanes(mix)
            figure = self.look(main)
            # A short simulation never sees the rare lanes; with them only the limit by busy time is higher.
            if main is mix or figure < main.rate_per_s * (1 - CAPPED):
                self.by_depth[depth] = figure
            else:
                self.by_depth[depth] = max(figure, self.look(mix))

    def nearby_depths(self) -> list[float]:
        """Half way from the best depth to its neighbours."""
        known = sorted(self.by_depth)
        at = known.index(max(known, key=lambda d: self.by_depth[d]))
        return [(known[at] + known[i]) / 2 for i in (at - 1, at + 1) if 0 <= i < len(known)]

    def optima(self) -> list[Mix]:
        """Best first."""
        return [mix for _, mix in sorted(self.found, key=lambda x: -x[0])]

    def finalists(self) -> tuple[Mix, ...]:
        """The few that deserve a full simulation; single lanes among them, which a quick look sees best."""
        near = sorted((x for x in self.found if x[0] >= self.best * (1 - NEAR)), key=lambda x: -x[0])
        single = sorted((x for x in self.found if len(x[1].columns) == 1), key=lambda x: -x[0])
        kept = {id(mix): mix for _, mix in (*near[:NUM_FINALISTS], *single[:NUM_SINGLE])}
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
    mix = throughput.generate(task.pool, 1.1 * task.problem.num_devices).mix
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


def _distinct(mixes: list[Mix]) -> list[Mix]:
    seen: dict[MixKey, Mix] = {}
    for mix in mixes:
        seen.setdefault(_key(mix), mix)
    return list(seen.values())
