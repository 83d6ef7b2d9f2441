"""Every step of a work unit alone, by fronts, and the steps joined by the state they share.

What lies between the gates of a step (`latency_gates`) gives a bound and a placement; where they do not meet,
a front of the whole step starts narrow and is made wider, up to a limit that keeps the work in proportion to
the launches. Joined, the step that takes longest in all is placed first, or last; the others then pay a toll
for state that they would have somewhere else. Tolls are paid one state at a time (the clock counts one
latency a link, and links at once); the clock judges the result.
"""

from dataclasses import dataclass, replace

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.latency_front import ROUNDING, Course, bound_us, course_of, search
from tessera.plan.latency_gates import gates_of, put_together, tails_of
from tessera.plan.latency_layout import (
    GROUP,
    NEVER_US,
    Layout,
    Outline,
    Work,
    layout_of,
    outline_of,
    work_of,
)
from tessera.plan.latency_stretch import Stretch, are_worthwhile, crossings_of, stretches_of
from tessera.plan.problem import Problem

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
    """What of a step does not depend on tolls."""

    problem: Problem
    step: int
    outline: Outline
    layout: Layout
    stretches: list[Stretch]
    # Of each launch: producers of what it reads, with the waits [producer's device][reader's device].
    reads: list[list[tuple[int, list[list[float]]]]]

    @property
    def num_launches(self) -> int:
        """Without the end."""
        return len(self.outline.items) - 1

    @property
    def narrow(self) -> int:
        """Rows of a front at first."""
        return max(2, NARROW_ROWS // self.problem.num_devices)

    def work(self, toll_us: Floats | None, fixed: Ints | None) -> Work:
        """With tolls, and devices of some launches given."""
        return work_of(self.problem, self.step, self.outline, toll_us, fixed)


def frame_of(problem: Problem, step: int) -> StepFrame:
    """Of one step."""
    outline = outline_of(problem, step)
    work = work_of(problem, step, outline)
    layout = layout_of(outline, tails_of(work, (), ()))
    stretches = stretches_of(outline, gates_of(outline, problem.cost_us[step]))
    if not are_worthwhile(work, stretches):
        stretches = []
    reads: list[list[tuple[int, list[list[float]]]]] = [[] for _ in outline.items]
    waits: dict[int, list[list[float]]] = {}
    for producer, made in enumerate(outline.items):
        for item in made:
            wait = waits.setdefault(item.num_bytes, item.wait_us.tolist())
            for reader in item.readers:
                reads[reader].append((producer, wait))
    return StepFrame(problem, step, outline, layout, stretches, reads)


def best_of_step(frame: StepFrame, known_us: float, toll_us: Floats | None = None) -> StepBest:
    """By gates, then by fronts, ever wider until placement and bound meet or the limit is reached."""
    if not frame.num_launches:
        return StepBest(0.0, 0.0, 0, np.zeros(0, dtype=np.int64))
    course, devices, us = _by_gates(frame, known_us, toll_us, None)
    bound, width = course.least_us * (1 - ROUNDING), 0
    while bound < us * (1 - MET):
        is_far = bound < us * (1 - FAR)
        wider = _wider(frame, width, is_far)
        if wider == width:
            break
        # Close to its bound, what gates give is no worse than what a narrow front gives.
        if width or is_far or not frame.stretches:
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


def placed(frame: StepFrame, width: int, toll_us: Floats, fixed: Ints) -> Ints | None:
    """A good placement with tolls and with the devices of some launches (-1: free) given."""
    course, devices, us = _by_gates(frame, NEVER_US, toll_us, fixed)
    if us > course.least_us * (1 + MET):
        found = search(course, max(width, frame.narrow), us)
        devices = found[0] if found else devices
    return devices


def _by_gates(
    frame: StepFrame, known_us: float, toll_us: Floats | None, fixed: Ints | None
) -> tuple[Course, Ints | None, float]:
    """What to go on with, and a placement, if one faster than those known is found, with its time."""
    work = frame.work(toll_us, fixed)
    crossings = crossings_of(work, frame.stretches)
    tails = tails_of(work, frame.stretches, crossings)
    course = course_of(work, frame.layout, tails)
    if not frame.stretches or course.least_us >= known_us * (1 - MET):
        return course, None, known_us
    between = put_together(frame.stretches, crossings, tails)
    _let_go(frame.outline, between)
    if fixed is not None:
        between = np.where(fixed >= 0, fixed, between)
    found = _earliest(frame, work, between)
    if found is None or found[1] > course.least_us * (1 + MET):
        # All other launches go where they do best for the whole, not just for themselves.
        held = replace(course, work=frame.work(toll_us, between))
        found = search(held, frame.narrow, found[1] if found else NEVER_US) or found
    if found is None or found[1] >= known_us:
        return course, None, known_us
    return course, *found


def _let_go(outline: Outline, devices: Ints) -> None:
    """Groups that reach over several stretches, which do not agree on a device, are given none."""
    for launch, made in enumerate(outline.items):
        for item in made:
            members = [launch, *item.readers]
            if item.num_bytes == GROUP and len(set(devices[members].tolist())) > 1:
                devices[members] = -1


def _earliest(frame: StepFrame, work: Work, fixed: Ints) -> tuple[Ints, float] | None:
    """In trace order, launches that are not given a device go where they end first; and when all end."""
    free = [0.0] * work.cost_us.shape[1]
    end: list[float] = []
    device: list[int] = []
    paid = 0.0
    rows = zip(work.cost_us.tolist(), work.toll_us.tolist(), fixed.tolist(), frame.reads, strict=False)
    for cost, toll, given, reads in rows:
        options = []
        for here in range(len(free)) if given < 0 else (given,):
            start = free[here]
            for producer, wait in reads:
                start = max(start, end[producer] + wait[device[producer]][here])
            options.append((start + cost[here] + toll[here], here))
        stop, here = min(options)
        stop -= toll[here]
        if stop >= NEVER_US:
            return None
        paid += toll[here]
        free[here] = stop
        end.append(stop)
        device.append(here)
    return np.array(device, dtype=np.int64), max(end) + paid


def joined(frames: list[StepFrame], steps: list[StepBest], price: float, sign: int = -1) -> Labels | None:
    """The longest step's own best first (sign -1) or last (1); later ones pay for moving the state."""
    problem = frames[0].problem
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    homes: dict[str, int] = {}
    counts = problem.unit.counts
    for step in sorted(range(len(steps)), key=lambda s: sign * counts[s] * steps[s].us):
        graph, nodes = problem.unit.graphs[step], problem.node_of[step]
        toll = _moving_us(problem, step, homes) * price / counts[step]
        # Nodes of several steps are where the first of them put them.
        fixed = labels[nodes]
        devices = steps[step].devices
        is_own = devices is not None and not toll[np.arange(len(devices)), devices].any()
        if devices is None or not is_own or (fixed >= 0).any():
            devices = placed(frames[step], steps[step].width, toll, fixed)
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
