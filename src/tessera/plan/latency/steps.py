"""Every step of a work unit alone, by fronts, and the steps joined by the state they share.

A front of the whole step starts narrow and is made wider until plan and bound meet, up to a limit that keeps
the work in proportion to the launches. Joined, the step that takes longest in all is placed first, or last;
the others then pay for state that they would have somewhere else. That is paid one state at a time
(the clock counts one latency a link, and links at once); the clock judges the result.
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.latency.front import ROUNDING, Course, bound_us, course_of, search
from tessera.plan.latency.layout import (
    NEVER_US,
    Layout,
    Outline,
    StepCosts,
    layout_of,
    outline_of,
    tails_of,
    work_of,
)
from tessera.plan.problem import Floats, Ints, Labels, Problem

# A front's rows times devices: at first, at most, and at most over all launches of a step, if plan and bound
# are near each other, or far apart.
NARROW_ROWS = 32
WIDE_ROWS = 512
FRONT_ROWS = 320_000, 1_280_000
# A plan this close to its bound, as a share, is as good as the best: nothing more is tried.
MET = 1e-4
# A plan farther from it than this is given the widest front at once.
FAR = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class StepBest:
    """The fastest placement found of one step alone, and what no placement of it can beat."""

    us: float
    bound_us: float
    width: int
    # Of the launches; None: none was found faster than those known.
    devices: Ints | None

    @property
    def is_met(self) -> bool:
        """Is the placement proved to be the best?"""
        return self.bound_us >= self.us * (1 - MET)


@dataclass(frozen=True, slots=True, eq=False)
class StepFrame:
    """What of a step does not depend on migration."""

    problem: Problem
    step: int
    outline: Outline
    layout: Layout

    @property
    def num_launches(self) -> int:
        """Without the end."""
        return len(self.outline.items) - 1

    @property
    def narrow(self) -> int:
        """Rows of a front at first."""
        return max(2, NARROW_ROWS // self.problem.num_devices)

    def work(self, migration_us: Floats | None, fixed: Ints | None) -> StepCosts:
        """With migration, and devices of some launches given."""
        return work_of(self.problem, self.step, self.outline, migration_us, fixed)


def frame_of(problem: Problem, step: int) -> StepFrame:
    """Of one step."""
    outline = outline_of(problem, step)
    layout = layout_of(outline, tails_of(work_of(problem, step, outline)))
    return StepFrame(problem, step, outline, layout)


def best_of_step(frame: StepFrame, known_us: float, migration_us: Floats | None = None) -> StepBest:
    """By fronts, ever wider until placement and bound meet or the limit is reached."""
    if not frame.num_launches:
        return StepBest(0.0, 0.0, 0, np.zeros(0, dtype=np.int64))
    course = _course(frame, migration_us, None)
    devices: Ints | None = None
    us = known_us
    bound, width = course.least_us * (1 - ROUNDING), 0
    while bound < us * (1 - MET):
        is_far = bound < us * (1 - FAR)
        wider = _wider(frame, width, is_far)
        if wider == width:
            break
        devices, us = search(course, wider, us) or (devices, us)
        width = wider
        bound = max(bound, bound_us(course, width, us))
    return StepBest(us, min(bound, us), width, devices)


def _wider(frame: StepFrame, width: int, is_far: bool) -> int:
    """Four times as many rows, or at once as many as are worth while; the same where these are reached."""
    most = min(WIDE_ROWS, FRONT_ROWS[is_far] // frame.num_launches) // frame.problem.num_devices
    if not width:
        return frame.narrow
    return max(width, most if is_far else min(most, 4 * width))


def placed(frame: StepFrame, width: int, migration_us: Floats, fixed: Ints) -> Ints | None:
    """A good placement with migration and with the devices of some launches (-1: free) given."""
    found = search(_course(frame, migration_us, fixed), max(width, frame.narrow), NEVER_US)
    return found[0] if found else None


def _course(frame: StepFrame, migration_us: Floats | None, fixed: Ints | None) -> Course:
    """The step with migration, and devices of some launches given."""
    work = frame.work(migration_us, fixed)
    return course_of(work, frame.layout, tails_of(work))


def joined(frames: list[StepFrame], steps: list[StepBest], price: float, sign: int = -1) -> Labels | None:
    """The longest step's own best first (sign -1) or last (1); later ones pay for moving the state."""
    problem = frames[0].problem
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    homes: dict[str, int] = {}
    counts = problem.unit.counts
    for step in sorted(range(len(steps)), key=lambda s: sign * counts[s] * steps[s].us):
        graph, nodes = problem.unit.graphs[step], problem.node_of[step]
        added = _moving_us(problem, step, homes) * price / counts[step]
        # Nodes of several steps are where the first of them put them.
        fixed = labels[nodes]
        devices = steps[step].devices
        is_own = devices is not None and not added[np.arange(len(devices)), devices].any()
        if devices is None or not is_own or (fixed >= 0).any():
            devices = placed(frames[step], steps[step].width, added, fixed)
            if devices is None:
                return None
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
