"""What moving state between steps adds to the bound.

A request waits for the slowest of the links that move state into a step; so it waits at least for any one
link, here the one that a plan with every step at its own best would use most. What state g takes on that
link depends on two steps, a and b, that the bound treats alone; so it is divided between them as costs. With
h the home of g in the longer step of a plan, the other step pays what moving to or from h would take. The
longer step, should it choose another home, is given back the most that the other could have paid too much.
The sum of the steps' least times with these costs is a lower bound whatever plan the homes were taken from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.problem import Floats, Labels, Problem


@dataclass(frozen=True, slots=True)
class Transit:
    """State that one step leaves and a later one takes up."""

    num_bytes: int
    # (step, launch): the first launch of the group that uses the state.
    source: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class MigrationCosts:
    """By step: [launch, device], of one run and never negative; and what they are too high by, in all."""

    migration_us: tuple[Floats, ...]
    excess_us: float


def transits_of(problem: Problem) -> Iterator[Transit]:
    """All that may have to move between steps."""
    last: dict[str, tuple[int, int]] = {}
    for step, graph in enumerate(problem.unit.graphs):
        sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
        for name, group in graph.state_groups.items():
            own = step, graph.groups[group][0]
            if name in last:
                yield Transit(sizes[name], last[name], own)
            last[name] = own


def migration_costs(
    problem: Problem, plan: Labels, wished: Labels, step_us: Sequence[float], share: float
) -> MigrationCosts:
    """Homes as in `plan`, links as in `wished`; `step_us` is what all runs of each step take.

    A share of 1 is as said above; below it, the rest is divided with the two steps' parts exchanged.
    """
    transits = list(transits_of(problem))
    used = _used_links(problem, transits, wished)
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


def _used_links(problem: Problem, transits: list[Transit], labels: Labels) -> list[Floats]:
    """Of each step: 1 at the link that brings its state last, else 0."""
    num = problem.num_devices
    moved = np.zeros((len(problem.node_of), num, num))
    for transit in transits:
        ends = _home(problem, labels, transit.source), _home(problem, labels, transit.target)
        moved[transit.target[0]][ends] += transit.num_bytes
    used = []
    for bytes_moved in moved:
        waits = bytes_moved * problem.us_per_byte
        one = np.zeros((num, num))
        one.flat[int(waits.argmax())] = 1.0
        used.append(one)
    return used
