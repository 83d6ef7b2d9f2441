"""Latency: one placement of least makespan for one request alone.

The clock: devices run their launches in trace order, one at a time; a value arrives latency + bytes /
bandwidth after its producer ends; links do not queue. A step's runs follow one another, and state that
changes its home crosses between them, one latency and all its bytes per link.

`solve` is exact on chains: there the makespan is the sum of costs and transfers, which a minimum cut
(two devices) or dynamic programming (more) minimises. Elsewhere it is the best of several starts (each
device alone, cuts that price waiting more or less, a greedy earliest finish, the tracks of the bound)
improved by local search. The bound: the longest path when every launch may choose its device anew for
each reader, or the work spread freely over the devices, whichever is more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from tessera import ir
from tessera.plan.pricing import Pricer, Prices
from tessera.plan.problem import Column, Labels, Problem, spread_us

# Local search stops after this many launches have been timed, so that its work does not depend on the clock.
SEARCH_LAUNCHES = 400_000
MIN_TRIALS = 8
# How much of a transfer's wait is charged by the cuts that give starts.
WAIT_SHARES = (1.0, 0.5, 0.2)

# May this placement be used?
Allowed = Callable[[Labels], bool]
# Of each launch: (producer, bytes) of what it reads.
Reads = list[list[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Fastest:
    """A placement, how long one request takes on it, and what no placement can beat."""

    labels: Labels
    latency_us: float
    bound_us: float


@dataclass(frozen=True, eq=False)
class Clock:
    """Times one request on a placement."""

    problem: Problem

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """Per step and launch."""
        return tuple(_reads(g) for g in self.problem.unit.graphs)

    def makespan_us(self, labels: Labels) -> float:
        """One request alone, start to end."""
        prob = self.problem
        total = self._migration_us(labels)
        for step, count in enumerate(prob.unit.counts):
            total += count * self._step_us(step, labels)
        return total

    def _step_us(self, step: int, labels: Labels) -> float:
        prob = self.problem
        device = labels[prob.node_of[step]].tolist()
        cost = prob.cost_us[step][np.arange(len(device)), device].tolist()
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
        """State that moves between steps, over all links at once."""
        prob = self.problem
        last: dict[str, int] = {}
        total = 0.0
        for graph, nodes in zip(prob.unit.graphs, prob.node_of, strict=True):
            sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
            moved = np.zeros((prob.num_devices, prob.num_devices))
            for name, group in graph.state_groups.items():
                home = int(labels[nodes[graph.groups[group][0]]])
                moved[last.get(name, home), home] += sizes[name]
                last[name] = home
            np.fill_diagonal(moved, 0.0)
            waits = (moved > 0) * prob.latency_us + moved * prob.us_per_byte
            total += float(waits.max())
        return total


def _reads(graph: ir.Graph) -> Reads:
    reads: Reads = [[] for _ in graph.trace.launches]
    for value in graph.values:
        if value.producer is not None:
            for reader in value.readers:
                reads[reader].append((value.producer, value.num_bytes))
    return reads


def solve(problem: Problem, extra: Sequence[Column], allowed: Allowed) -> Fastest:
    """The fastest placement found; `extra` are further starts, `allowed` says what fits."""
    clock = Clock(problem)
    tracks, bound = _bound(problem, clock)
    starts = [*_starts(problem, clock), *tracks, *(c.labels for c in extra)]
    unique = {s.tobytes(): s for s in starts if allowed(s)}
    timed = sorted(((clock.makespan_us(s), n, s) for n, s in enumerate(unique.values())), key=lambda x: x[:2])
    if not timed:
        return Fastest(np.zeros(0, dtype=np.int64), np.inf, bound)
    best_us, _, best = timed[0]
    if best_us > bound * (1 + 1e-9):
        best, best_us = _search(problem, clock, best, best_us, allowed)
    return Fastest(best, best_us, min(bound, best_us))


def _starts(problem: Problem, clock: Clock) -> Iterator[Labels]:
    num = problem.num_devices
    for device in range(num):
        yield np.full(problem.num_nodes, device, dtype=np.int64)
    pricer = Pricer(problem)
    alone = [np.full(problem.num_nodes, d, dtype=np.int64) for d in range(num)]
    for share in WAIT_SHARES:
        # The path price charges launches and waits alike; less of it and more device price: cheaper waits.
        prices = Prices(np.full(num, 1.0 - share), np.zeros((num, num)), share)
        yield pricer.cheapest(prices, alone).labels
    yield _greedy(problem, clock)


def _greedy(problem: Problem, clock: Clock) -> Labels:
    """In trace order, every launch goes where it would end first."""
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    per_byte, latency = problem.us_per_byte.tolist(), problem.latency_us.tolist()
    for nodes, costs, reads in zip(problem.node_of, problem.cost_us, clock.reads, strict=True):
        free = [0.0] * problem.num_devices
        end: list[tuple[float, int]] = []
        for node, cost, inputs in zip(nodes.tolist(), costs.tolist(), reads, strict=True):
            options: list[tuple[float, int]] = []
            for here in range(problem.num_devices) if labels[node] < 0 else (int(labels[node]),):
                start = free[here]
                for producer, size in inputs:
                    ready, there = end[producer]
                    if there != here:
                        ready += latency[there][here] + size * per_byte[there][here]
                    start = max(start, ready)
                options.append((start + cost[here], here))
            stop, device = min(options)
            labels[node], free[device] = device, stop
            end.append((stop, device))
    return labels


def _bound(problem: Problem, clock: Clock) -> tuple[list[Labels], float]:
    """Placements that follow the longest path's wishes, and the lower bound."""
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    total = 0.0
    for step, count in enumerate(problem.unit.counts):
        reach = _reach(problem, step, clock.reads[step])
        longest = max((min(row) for row in reach), default=0.0)
        total += count * max(longest, spread_us(problem.cost_us[step]))
        _follow(problem, step, clock.reads[step], reach, labels)
    return [labels], total


def bound_us(problem: Problem, clock: Clock) -> float:
    """No placement serves one request alone faster than this."""
    return _bound(problem, clock)[1]


def _waits(problem: Problem, size: int) -> list[list[float]]:
    waits = problem.latency_us + size * problem.us_per_byte
    np.fill_diagonal(waits, 0.0)
    rows: list[list[float]] = waits.T.tolist()  # [destination][source]
    return rows


def _reach(problem: Problem, step: int, reads: Reads) -> list[list[float]]:
    """[launch][device]: the launch cannot end on the device before this."""
    waits = {size: _waits(problem, size) for inputs in reads for _, size in inputs}
    reach: list[list[float]] = []
    for cost, inputs in zip(problem.cost_us[step].tolist(), reads, strict=True):
        row = cost
        if inputs:
            row = [
                own
                + max(
                    min(a + b for a, b in zip(reach[producer], waits[size][here], strict=True))
                    for producer, size in inputs
                )
                for here, own in enumerate(cost)
            ]
        reach.append(row)
    return reach


def _follow(problem: Problem, step: int, reads: Reads, reach: list[list[float]], labels: Labels) -> None:
    """Backwards through the step: every producer goes where its last reader would have it."""
    waits = {size: _waits(problem, size) for inputs in reads for _, size in inputs}
    nodes = problem.node_of[step].tolist()
    for launch in range(len(reads) - 1, -1, -1):
        node = nodes[launch]
        if labels[node] < 0:
            labels[node] = int(np.argmin(reach[launch]))
        for producer, size in reads[launch]:
            if labels[nodes[producer]] < 0:
                ready = np.add(reach[producer], waits[size][int(labels[node])])
                labels[nodes[producer]] = int(np.argmin(ready))


def _search(
    problem: Problem, clock: Clock, labels: Labels, us: float, allowed: Allowed
) -> tuple[Labels, float]:
    """First improvement over moves of runs, their ends and lone nodes, within a fixed budget."""
    trials = max(MIN_TRIALS, SEARCH_LAUNCHES // problem.unit.num_launches)
    improved = True
    while improved and trials > 0:
        improved = False
        for moved in _moves(problem, labels):
            trials -= 1
            if trials < 0:
                break
            moved_us = clock.makespan_us(moved) if allowed(moved) else np.inf
            if moved_us < us * (1 - 1e-9):
                labels, us, improved = moved, moved_us, True
                break
    return labels, us


def _moves(problem: Problem, labels: Labels) -> Iterator[Labels]:
    """Runs of neighbouring nodes on one device, the ends of runs, and nodes that send or receive."""
    cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    spans = [(a, b) for a, b in pairwise(cuts) if b - a < len(labels)]
    ends = [(x, x + 1) for a, b in spans if b - a > 1 for x in (a, b - 1)]
    # Heavy nodes first: they are what another device might do meanwhile.
    heavy = np.argsort(-problem.load_us.max(axis=1), kind="stable").tolist()
    for start, stop in (*spans, *ends, *((x, x + 1) for x in heavy)):
        for device in range(problem.num_devices):
            if device != labels[start]:
                moved = labels.copy()
                moved[start:stop] = device
                yield moved
