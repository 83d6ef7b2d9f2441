"""Latency: one placement with minimal makespan for one request.

Clock: devices run launches in trace order, one at a time; a value arrives latency + bytes / bandwidth after
its producer; links do not queue. State that moves between steps costs one latency and its bytes per link.

Each step is placed by a Pareto front (`frontier`), which also proves a bound. Steps are joined with free,
priced or expensive state moves. The bound sums the steps' bounds: it ignores moves of state, memory and other
launch orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Labels, Transit, transits_of
from tessera.plan.config import SearchConfig
from tessera.plan.latency.frontier import best_of_step, joined
from tessera.plan.latency.layout import NEVER_US, layout_of
from tessera.plan.problem import Column, Problem

# Price factors of state moves, and which step comes first.
JOINED = ((0.0, -1), (1.0, -1), (100.0, -1), (1.0, 1), (100.0, 1))
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
        launch_us = prob.cost_us[step][np.arange(len(placed)), placed]
        if len(placed) and (placed == placed[0]).all():
            return float(launch_us.sum())
        device_of, cost = placed.tolist(), launch_us.tolist()
        per_byte, latency = prob.us_per_byte.tolist(), prob.latency_us.tolist()
        free = [0.0] * prob.num_devices
        end: list[float] = []
        for launch, inputs in enumerate(self.reads[step]):
            device = device_of[launch]
            start = free[device]
            for producer, size in inputs:
                source = device_of[producer]
                ready = end[producer]
                if source != device:
                    ready += latency[source][device] + size * per_byte[source][device]
                start = max(start, ready)
            free[device] = start + cost[launch]
            end.append(free[device])
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
    starts = [problem.alone(device).labels for device in range(problem.num_devices)]
    starts = [x for x in (*starts, *(c.labels for c in extra)) if problem.is_allowed(x)]
    layouts = [layout_of(problem, step) for step in range(len(problem.node_of))]
    steps = [
        best_of_step(layout, min((clock.step_us(layout.step, x) for x in starts), default=NEVER_US), config)
        for layout in layouts
    ]
    bound = sum(count * x.bound_us for count, x in zip(problem.unit.counts, steps, strict=True))
    best, best_us = _fastest(clock, starts, allowed)
    for price, sign in JOINED if len(steps) > 1 else JOINED[:1]:
        if best_us <= bound * (1 + config.met):
            break
        labels = joined(layouts, steps, price, sign, config)
        if labels is not None:
            better, better_us = _fastest(clock, [labels], allowed)
            best, best_us = (better, better_us) if better_us < best_us else (best, best_us)
    return Fastest(best, best_us, min(bound, best_us))


def bound_us(problem: Problem, config: SearchConfig) -> float:
    return solve(problem, (), lambda _: True, config).bound_us


def _fastest(clock: RequestTimer, among: Sequence[Labels], allowed: Allowed) -> tuple[Labels, float]:
    unique = {x.tobytes(): x for x in among if clock.problem.is_allowed(x) and allowed(x)}
    timed = ((clock.makespan_us(x), n, x) for n, x in enumerate(unique.values()))
    none = (np.inf, -1, np.zeros(0, dtype=np.int64))
    us, _, labels = min(timed, key=lambda x: x[:2], default=none)
    return labels, us


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
