"""Kernel-level candidates: what the linear program and the latency search propose for judgement.

For throughput: the optimum by busy time; where a simulation judges, also
  the optima under several limits (`limits`), without the lanes that few requests would follow, and their two
  main lanes joined to one. Limits are of depth, and such that the step that takes most time is spread evenly
  by itself, because with few requests in flight devices that are evenly busy over a whole request still wait
  for each other inside a step,
  teams of the placements found so far: which slots follow which (`teams`),
  and, where units are small enough to look at many, their single placements and what can be joined from them
  (`joined`).
Which of them are worth a full simulation is found by quick ones. How many are tried depends on the size of
the unit alone, so that the same work gives the same plan.
"""

from dataclasses import dataclass, field

from tessera.plan import latency, milp, throughput
from tessera.plan.joined import (
    one_step_split,
    period_us,
    splices,
    step_by_step,
    step_choices,
    without_rare_lanes,
)
from tessera.plan.lanes import slot_counts
from tessera.plan.limits import NUM_FIRST, distance, limits_of
from tessera.plan.policies import Task
from tessera.plan.problem import Mix
from tessera.plan.teams import filled, is_filled, neighbours, pairs

MixKey = tuple[tuple[bytes, int, float], ...]

# Limits that are tried: at least so many, so many launches over those of a small unit, at most so many; of
# large units, which have more time, one for so many launches, at most so many.
FEWEST, TRIED_LAUNCHES, MOST = 2, 36_000, 15
LAUNCHES_A_TRY, MOST_LARGE = 1_700, 6
# Pairs at a depth: of large units, of others; and the depths, as multiples of the best limit's.
NUM_PAIRS = 1, 4
PAIR_DEPTHS = 1.0, 1.2
# Teams with slots that stay on a device: of large units, of others.
NUM_FILLED = 1, 24
# Rounds in which the best mixes' neighbours are looked at; how many mixes, how many new neighbours of each,
# and how many are gone through to find those.
ROUNDS, NUM_CLIMBING, NUM_NEIGHBOURS, MAX_NEIGHBOURS = 4, 3, 3, 20
# Single placements that are tried, by period and by path.
NUM_SINGLE = 4
# Mixes that are simulated in full: of small units, of large ones.
NUM_FINALISTS = 6, 2


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    """Optima of the linear program and what lies near them; judged by busy time if nothing simulates."""
    best = task.free.mix
    if not task.is_judged or task.problem.num_devices == 1:
        return (best,)
    search = _Search(task)
    depth = _by_limits(task, search)
    for factor in PAIR_DEPTHS[:1] if task.is_large else PAIR_DEPTHS:
        for mix in pairs(task, factor * depth, NUM_PAIRS[not task.is_large]):
            search.look(mix)
    for mix in () if task.is_served else filled(task, NUM_FILLED[not task.is_large]):
        search.look(mix)
    if not task.is_large:
        _by_joining(task, search)
        search.look(best)
        for _ in range(ROUNDS):
            _climb(task, search, max(PAIR_DEPTHS) * depth)
    return search.finalists(NUM_FINALISTS[task.is_large])


def _by_limits(task: Task, search: "_Search") -> float:
    """Looks at the optima under limits, around the best of them; gives the depth of the best."""
    launches = task.problem.unit.num_launches
    if task.is_large:
        num = min(MOST_LARGE, max(FEWEST, launches // LAUNCHES_A_TRY))
    else:
        num = min(MOST, max(FEWEST, TRIED_LAUNCHES // launches))
    known = limits_of(task)
    left = list(known)
    best, center = 0.0, left[0]
    while left and len(known) - len(left) < num:
        is_first = len(known) - len(left) < NUM_FIRST
        limits = left[0] if is_first else min(left, key=lambda x: distance(x, center))
        left.remove(limits)
        mix = without_rare_lanes(throughput.generate(task.pool, limits).mix)
        joined = (task.pool.held_by((c,)) for c in splices(task, mix))
        figure = max(search.look(x) for x in (mix, *joined) if x is not None)
        if figure > best:
            best, center = figure, limits
    assert center.depth is not None, "all of the table have a depth"
    return center.depth


def _by_joining(task: Task, search: "_Search") -> None:
    """Looks at single placements and at what can be joined."""
    choices = step_choices(task)
    columns = list(step_by_step(task, choices))
    columns += sorted(task.pool.columns, key=period_us)[:NUM_SINGLE]
    columns += sorted(task.pool.columns, key=lambda c: c.path_us)[:NUM_SINGLE]
    for mix in (*one_step_split(task, choices), *(task.pool.held_by((c,)) for c in columns)):
        if mix is not None:
            search.look(mix)


def _climb(task: Task, search: "_Search", depth: float) -> None:
    """Looks at new neighbours of the best mixes."""
    for mix in search.sorted()[:NUM_CLIMBING]:
        num = 0
        for other in neighbours(task, mix, depth, MAX_NEIGHBOURS):
            num += search.look(other) > 0.0
            if num == NUM_NEIGHBOURS:
                break


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
        if self.task.is_served and is_filled(self.task, mix):
            return 0.0
        if not self.task.pool.fits(mix.columns, slot_counts(mix, self.task.slots)):
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
        """The few that deserve a full simulation."""
        return tuple(self.sorted()[:num])


def single_placement(task: Task, time_limit_s: float = milp.TIME_LIMIT_S) -> tuple[Mix, ...] | None:
    """One placement for all requests: the best by the mixed-integer program or among those known."""
    known = [m.columns[0] for mixes in task.coarse.values() for m in mixes or () if len(m.columns) == 1]
    found = milp.best_placement(task.problem, time_limit_s, task.slots)
    columns = (*known, *(() if found is None else (found[0],)))
    mixes = [mix for c in columns if (mix := task.pool.held_by((c,))) is not None]
    return (max(mixes, key=lambda m: m.rate_per_s),) if mixes else None


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
    few = without_rare_lanes(mix)
    return (*coarse, few if task.pool.fits(few.columns, slot_counts(few, task.slots)) else mix)


def latency_mixes(task: Task) -> tuple[Mix, ...]:
    """The fastest placement for one request alone."""
    prob, pool = task.problem, task.pool
    throughput.seed(pool, [mix for mixes in task.coarse.values() for mix in mixes or ()])
    found = latency.solve(prob, pool.columns, lambda x: not pool.is_tight or pool.able(prob.column(x)))
    mix = pool.held_by((prob.column(found.labels),))
    assert mix is not None, "it was made to fit"
    return (mix,)


def _key(mix: Mix) -> MixKey:
    slots = mix.slots or (0,) * len(mix.columns)
    return tuple(
        sorted((c.key, n, round(s, 6)) for c, n, s in zip(mix.columns, slots, mix.shares, strict=True))
    )
