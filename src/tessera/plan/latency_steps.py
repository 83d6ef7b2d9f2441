"""Every step of a work unit alone, by fronts, and the steps joined by the state they share.

A front starts narrow and is made wider only while placement and bound do not meet, up to a limit that keeps
the work in proportion to the launches. Joined, the step that takes longest in all is placed first, or last;
the others then pay a toll for state that they would have somewhere else. Tolls are paid one state at a time
(the clock counts one latency a link, and links at once); the clock judges the result.
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.latency_front import bound_us, search
from tessera.plan.latency_layout import NEVER_US, layout_of
from tessera.plan.problem import Problem

# A front's rows times devices: at first, at most, and at most over all launches of a step.
NARROW_ROWS = 32
WIDE_ROWS = 512
FRONT_ROWS = 320_000
# A plan this close to its bound, as a share, is as good as the best: nothing more is tried.
MET = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class StepBest:
    """The fastest placement found of one step alone, and what no placement of it can beat."""

    us: float
    bound_us: float
    width: int
    # Of the launches; None: no front found a placement faster than those known.
    devices: Ints | None

    @property
    def is_met(self) -> bool:
        """Is the placement proved to be the best?"""
        return self.bound_us >= self.us * (1 - MET)


def best_of_step(
    problem: Problem, step: int, known_us: float, toll_us: Floats | None = None, least: int = 0
) -> StepBest:
    """By fronts, ever wider until they meet or the limit is reached; none narrower than `least`."""
    layout = layout_of(problem, step, toll_us)
    bound, width, devices = 0.0, least, None
    for width in (w for w in _widths(problem, step) if w >= least):
        found = search(layout, width, known_us)
        if found:
            devices, known_us = found
        bound = max(bound, bound_us(layout, width, known_us))
        if bound >= known_us * (1 - MET):
            break
    return StepBest(known_us, bound, width, devices)


def _widths(problem: Problem, step: int) -> list[int]:
    num, launches = problem.num_devices, len(problem.node_of[step])
    if not launches:
        return []
    narrow = max(2, NARROW_ROWS // num)
    most = min(WIDE_ROWS, FRONT_ROWS // launches) // num
    return [narrow, *(w for w in (4 * narrow, 16 * narrow) if w < most), *([most] if most > narrow else [])]


def joined(problem: Problem, steps: list[StepBest], price: float, sign: int = -1) -> Labels | None:
    """The longest step's own best first (sign -1) or last (1); later ones pay for moving the state."""
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    homes: dict[str, int] = {}
    counts = problem.unit.counts
    for step in sorted(range(len(steps)), key=lambda s: sign * counts[s] * steps[s].us):
        graph, nodes = problem.unit.graphs[step], problem.node_of[step]
        toll = _moving_us(problem, step, homes) * price / counts[step]
        # Nodes of several steps are where the first of them put them.
        fixed = labels[nodes]
        devices = steps[step].devices
        if devices is None or toll.any() or (fixed >= 0).any():
            found = search(layout_of(problem, step, toll, fixed), steps[step].width, NEVER_US)
            if found is None:
                return None
            devices = found[0]
        labels[nodes] = devices
        for name, group in graph.state_groups.items():
            homes.setdefault(name, int(devices[graph.groups[group][0]]))
    return labels


def _moving_us(problem: Problem, step: int, homes: dict[str, int]) -> Floats:
    """[launch, device]: what it takes to move the state there, charged to the first launch that uses it."""
    graph = problem.unit.graphs[step]
    sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
    charged = np.zeros((len(problem.node_of[step]), problem.num_devices))
    for name, group in graph.state_groups.items():
        if name in homes:
            charged[graph.groups[group][0]] += sizes[name] * problem.us_per_byte[homes[name]]
    return charged
