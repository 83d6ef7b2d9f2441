"""Latency: one placement with minimal makespan for one request.

Clock: devices run launches in trace order, one at a time; a value arrives latency + bytes / bandwidth after
its producer; links do not queue. State that moves between steps costs one latency and its bytes per link.

Each step is placed by a Pareto front (`frontier`), which also proves a bound. Steps are joined with free,
priced or expensive state moves. The bound sums the steps' bounds and the
minimum cost of moving state; it ignores memory and other launch orders.

State in the bound: a request waits for at least one of the links that move state into a step, here the one
used most when every step is at its best. The time of state g on that link is split between two steps: the
other step pays for moving to or from g's home h in the longer step, and the longer step gets back the maximum
overcharge if it chooses another home. The sum of the steps' minima with these costs is a lower bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Labels, Transit, transits_of
from tessera.plan.config import SearchConfig
from tessera.plan.latency.frontier import best_of_step, joined
from tessera.plan.latency.layout import NEVER_US, Layout, layout_of
from tessera.plan.problem import Column, Problem

# Price factors of state moves, and which step comes first.
JOINED = ((0.0, -1), (1.0, -1), (100.0, -1), (1.0, 1), (100.0, 1))
# Splits of state moves between two steps.
MIGRATION_SHARES = (1.0, 0.5)
Allowed = Callable[[Labels], bool]
# Per launch: (producer, bytes).
Reads = list[list[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Fastest:
    labels: Labels
    latency_us: float
    bound_us: float


@dataclass(frozen=True, eq=False)
class RequestTimer:
    problem: Problem

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        return tuple(_reads(g) for g in self.problem.unit.graphs)

    def makespan_us(self, labels: Labels) -> float:
        prob = self.problem
        total = self._migration_us(labels)
        for step, count in enumerate(prob.unit.counts):
            total += count * self.step_us(step, labels)
        return total

    def step_us(self, step: int, labels: Labels) -> float:
        prob = self.problem
        placed = labels[prob.node_of[step]]
        own = prob.cost_us[step][np.arange(len(placed)), placed]
        if len(placed) and (placed == placed[0]).all():
            return float(own.sum())
        device, cost = placed.tolist(), own.tolist()
        per_byte, latency = prob.us_per_byte.tolist(), prob.latency_us.tolist()
        free = [0.0] * prob.num_devices
        end: list[float] = []
        for launch, inputs in enumerate(self.reads[step]):
            here = device[launch]
            start = free[here]
            for producer, size in inputs:
                there = device[producer]
                ready = end[producer]
                if there != here:
                    ready += latency[there][here] + size * per_byte[there][here]
                start = max(start, ready)
            free[here] = start + cost[launch]
            end.append(free[here])
        return max(end, default=0.0)

    def _migration_us(self, labels: Labels) -> float:
        moved = _moved_bytes(self.problem, self._transits, labels)
        waits = (moved > 0) * self.problem.latency_us + moved * self.problem.us_per_byte
        return float(waits.max(axis=(1, 2)).sum())

    @cached_property
    def _transits(self) -> list[Transit]:
        return list(transits_of(self.problem.unit))


def _reads(graph: ir.Graph) -> Reads:
    reads: Reads = [[] for _ in graph.trace.launches]
    for value in graph.values:
        if value.producer is not None:
            for reader in value.readers:
                reads[reader].append((value.producer, value.num_bytes))
    return reads


def solve(problem: Problem, extra: Sequence[Column], allowed: Allowed, config: SearchConfig) -> Fastest:
    """`extra` are further starts."""
    clock = RequestTimer(problem)
    known = [*_alone(problem), *(c.labels for c in extra)]
    best, best_us, bound = _by_frontiers(problem, clock, known, allowed, config)
    return Fastest(best, best_us, min(bound, best_us))


def bound_us(problem: Problem, config: SearchConfig) -> float:
    return _by_frontiers(problem, RequestTimer(problem), _alone(problem), lambda _: True, config)[2]


def _by_frontiers(
    problem: Problem, clock: RequestTimer, known: list[Labels], allowed: Allowed, config: SearchConfig
) -> tuple[Labels, float, float]:
    kept = [x for x in known if problem.is_allowed(x)]
    layouts = [layout_of(problem, step) for step in range(len(problem.node_of))]
    steps = [
        best_of_step(layout, min((clock.step_us(layout.step, x) for x in kept), default=NEVER_US), config)
        for layout in layouts
    ]
    bound = sum(count * x.bound_us for count, x in zip(problem.unit.counts, steps, strict=True))
    best, best_us = _fastest(clock, kept, allowed)
    met = 1 + config.met
    is_met = all(x.bound_us >= x.us * (1 - config.met) for x in steps)
    shares = list(MIGRATION_SHARES) if len(steps) > 1 and is_met else []
    unmoved: Labels | None = None  # each step at its best, free state moves
    for number, (price, sign) in enumerate(JOINED if len(steps) > 1 else JOINED[:1]):
        # Worth computing after state moves are priced.
        while number > 1 and shares and unmoved is not None and bound * met < best_us < np.inf:
            share = shares.pop(0)
            bound = max(bound, _with_migration_us(clock, layouts, (best, unmoved), share, config))
        if best_us <= bound * met:
            break
        labels = joined(layouts, steps, price, sign, config)
        unmoved = labels if number == 0 else unmoved
        if labels is not None:
            better, better_us = _fastest(clock, [labels], allowed)
            best, best_us = (better, better_us) if better_us < best_us else (best, best_us)
    return best, best_us, bound


def _with_migration_us(
    clock: RequestTimer,
    layouts: list[Layout],
    plans: tuple[Labels, Labels],
    share: float,
    config: SearchConfig,
) -> float:
    problem = clock.problem
    plan, free = plans
    counts = problem.unit.counts
    step_us = [clock.step_us(step, plan) for step in range(len(counts))]
    runs_us = [n * us for n, us in zip(counts, step_us, strict=True)]
    moved = migration_costs(problem, plan, free, runs_us, share)
    total = -moved.excess_us
    for step, (count, us, added) in enumerate(zip(counts, step_us, moved.migration_us, strict=True)):
        paid = float(added[np.arange(len(added)), plan[problem.node_of[step]]].sum())
        total += count * best_of_step(layouts[step], us + paid, config, added).bound_us
    return total


def _fastest(clock: RequestTimer, among: Sequence[Labels], allowed: Allowed) -> tuple[Labels, float]:
    unique = {x.tobytes(): x for x in among if clock.problem.is_allowed(x) and allowed(x)}
    timed = ((clock.makespan_us(x), n, x) for n, x in enumerate(unique.values()))
    none = (np.inf, -1, np.zeros(0, dtype=np.int64))
    us, _, labels = min(timed, key=lambda x: x[:2], default=none)
    return labels, us


def _alone(problem: Problem) -> list[Labels]:
    return [problem.alone(device).labels for device in range(problem.num_devices)]


@dataclass(frozen=True, slots=True, eq=False)
class MigrationCosts:
    """[launch, device] per run, never negative; the total overcharge."""

    migration_us: tuple[Floats, ...]
    excess_us: float


def migration_costs(
    problem: Problem, plan: Labels, free: Labels, step_us: Sequence[float], share: float
) -> MigrationCosts:
    """Homes as in `plan`, links as in `free`; `share` below 1 splits the rest with the steps' roles
    exchanged.
    """
    transits = list(transits_of(problem.unit))
    used = _used_links(problem, transits, free)
    costs = tuple(np.zeros_like(x) for x in problem.cost_us)
    for transit in transits:
        wait = transit.num_bytes * problem.us_per_byte * used[transit.target[0]]
        ends = [(transit.source, wait), (transit.target, wait.T)]
        # [home in this step, home in the other]
        (short, paid), (long, back) = sorted(ends, key=lambda x: step_us[x[0][0]])
        for one, other, table, part in ((short, long, paid, share), (long, short, back, 1.0 - share)):
            home = _home(problem, plan, other)
            costs[one[0]][one[1]] += part * table[:, home]
            costs[other[0]][other[1]] += part * (table - table[:, home, None]).min(axis=0)
    least = [np.minimum(x.min(axis=1, keepdims=True), 0.0) for x in costs]
    counts = problem.unit.counts
    raised = tuple((x - low) / count for x, low, count in zip(costs, least, counts, strict=True))
    return MigrationCosts(raised, -float(sum(low.sum() for low in least)))


def _home(problem: Problem, labels: Labels, at: tuple[int, int]) -> int:
    return int(labels[problem.node_of[at[0]][at[1]]])


def _moved_bytes(problem: Problem, transits: list[Transit], labels: Labels) -> Floats:
    """[step, source, destination], into each step."""
    num = problem.num_devices
    moved = np.zeros((len(problem.node_of), num, num))
    for transit in transits:
        source, target = (_home(problem, labels, at) for at in (transit.source, transit.target))
        if source != target:
            moved[transit.target[0], source, target] += transit.num_bytes
    return moved


def _used_links(problem: Problem, transits: list[Transit], labels: Labels) -> Floats:
    """1 at the link that delivers a step's state last."""
    waits = _moved_bytes(problem, transits, labels) * problem.us_per_byte
    used = np.zeros_like(waits)
    for step, wait in enumerate(waits):
        used[step].flat[int(wait.argmax())] = 1.0
    return used
