"""Placement of one step, launch by launch, with a Pareto front of schedules.

A row is a partial schedule (columns: see `layout`). A row that is no earlier than another in any column is
dropped, as is one that provably ends no sooner than the best placement so far. This is exact while the front
stays within its width. Beyond it, `search` keeps the most promising rows; `bound_us` merges similar rows,
with the earliest time per column, and returns a lower bound. `joined` joins steps by shared state: the
longest step is placed first or last, the others pay for moving state. Arrays of rows are [column, device,
row].
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.config import SearchConfig
from tessera.plan.latency.layout import NEVER_US, Layout, non_dominated, tails_of
from tessera.plan.problem import Problem

# Lowers bounds by more than the rounding error.
ROUNDING = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    layout: Layout
    # [launch, device]
    cost_us: Floats
    migration_us: Floats
    # [launch, device, 1]: lower bound from start to the end.
    tail_us: Floats

    @property
    def least_us(self) -> float:
        return float(self.tail_us.min(axis=1).max())


def course_of(layout: Layout, migration_us: Floats | None = None, fixed: Ints | None = None) -> Course:
    """`fixed`: devices of launches (-1: free)."""
    cost = layout.costs_us(fixed)
    added = np.zeros_like(cost)
    if migration_us is not None:
        added[:-1] = migration_us
    return Course(layout, cost, added, tails_of(layout.items, cost)[:, :, None])


def search(course: Course, width: int, best_us: float) -> tuple[Ints, float] | None:
    """Devices of a faster placement, and its end."""
    rows = _first(course)
    trail: list[tuple[Ints, Ints]] = []
    for launch in range(len(course.layout.moves) - 1):
        rows, parent, device = _advance(course, launch, rows)
        keep = _kept(rows, _ends(course, launch, rows), best_us)[:width]
        if not len(keep):
            return None
        rows = rows.take(keep, axis=2)
        trail.append((parent[keep], device[keep]))
    last = _last(course, rows)
    at = int(last.argmin())
    end_us = float(last[at])
    devices: list[int] = []
    for parent, device in reversed(trail):
        devices.append(int(device[at]))
        at = int(parent[at])
    return np.array(devices[::-1], dtype=np.int64), end_us


def bound_us(course: Course, width: int, best_us: float) -> float:
    rows = _first(course)
    proved = 0.0
    for launch in range(len(course.layout.moves) - 1):
        rows, _, _ = _advance(course, launch, rows)
        ends = _ends(course, launch, rows)
        keep = _kept(rows, ends, best_us)
        if not len(keep):
            return best_us * (1.0 - ROUNDING)
        rows = rows.take(keep, axis=2)
        proved = max(proved, float(ends[keep[0]]))
        if len(keep) > width:
            rows = _merged(rows, ends[keep], width)
    proved = max(proved, float(_last(course, rows).min()))
    return min(best_us, proved) * (1.0 - ROUNDING)


def _first(course: Course) -> Floats:
    return np.zeros((1, len(course.layout.least_wait_us), 1))


def _last(course: Course, rows: Floats) -> Floats:
    return np.asarray(rows[course.layout.moves[-1].reads[1:]].max(axis=0).min(axis=0))


def _advance(course: Course, launch: int, rows: Floats) -> tuple[Floats, Ints, Ints]:
    """(rows, parent rows, device)."""
    move, added = course.layout.moves[launch], course.migration_us[launch]
    end = rows.take(move.reads, axis=0).max(axis=0) + course.cost_us[launch][:, None]
    device, parent = np.nonzero(end < NEVER_US)
    stop = end[device, parent]
    after = rows.take(move.kept, axis=0).take(parent, axis=2)
    after[0, device, np.arange(len(parent))] = stop
    for column, before in move.folds:
        np.maximum(after[column], rows[before].take(parent, axis=1), out=after[column])
    for column, is_new, wait in move.makes:
        arrival = wait.take(device, axis=1)
        arrival += stop
        if is_new:
            after[column] = arrival
        else:
            np.maximum(after[column], arrival, out=after[column])
    if len(move.raises):
        floor = course.layout.least_wait_us.take(device, axis=1)
        floor += stop
        after[move.raises] = np.maximum(after[move.raises], floor)
    if added.any():
        # A lead in every column persists to the end.
        after += added[device]
    return after, parent, device


def _ends(course: Course, launch: int, rows: Floats) -> Floats:
    move = course.layout.moves[launch]
    after = rows.take(move.column, axis=0)
    after += course.tail_us.take(move.reader, axis=0)
    return np.asarray(after.min(axis=1).max(axis=0))


def _kept(rows: Floats, ends: Floats, best_us: float) -> Ints:
    """Rows that may end before `best_us`; most promising first."""
    keep = np.flatnonzero(ends < best_us * (1.0 - ROUNDING / 2))
    if len(keep) < 2:
        return keep
    flat = rows.reshape(-1, rows.shape[2]).take(keep, axis=1)
    # No row is dominated by a later one.
    order = np.lexsort((np.minimum(flat, NEVER_US).sum(axis=0), ends[keep]))
    return np.asarray(keep[order[non_dominated(flat.take(order, axis=1))]])


def _merged(rows: Floats, ends: Floats, width: int) -> Floats:
    """Each row is no later than the rows it replaces."""
    while (num := rows.shape[2]) > width:
        one, other = _pairs(np.minimum(rows.reshape(-1, num), NEVER_US), ends, num - width)
        rows[:, :, one] = np.minimum(rows[:, :, one], rows[:, :, other])
        ends[one] = np.minimum(ends[one], ends[other])
        rows, ends = np.delete(rows, other, axis=2), np.delete(ends, other)
    return rows


def _pairs(flat: Floats, ends: Floats, num: int) -> tuple[list[int], list[int]]:
    """Disjoint neighbours in some column, ordered by the merged row's bound less the largest loss."""
    order = flat.argsort(axis=1)
    left, right = order[:, :-1].ravel(), order[:, 1:].ravel()
    apart = flat.take(left, axis=1) - flat.take(right, axis=1)
    left_ends = ends[left] - np.maximum(apart.max(axis=0), 0.0)
    right_ends = ends[right] + np.minimum(apart.min(axis=0), 0.0)
    rank = np.argsort(-np.maximum(left_ends, right_ends), kind="stable")
    used: set[int] = set()
    pairs: tuple[list[int], list[int]] = ([], [])
    for one, other in zip(left[rank].tolist(), right[rank].tolist(), strict=True):
        if one not in used and other not in used:
            used |= {one, other}
            pairs[0].append(one)
            pairs[1].append(other)
            if len(pairs[0]) == num:
                break
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class StepBest:
    us: float
    bound_us: float
    width: int
    # None: no placement is faster.
    devices: Ints | None


def best_of_step(layout: Layout, best_us: float, config: SearchConfig) -> StepBest:
    if not layout.num_launches:
        return StepBest(0.0, 0.0, 0, np.zeros(0, dtype=np.int64))
    course = course_of(layout)
    devices: Ints | None = None
    us = best_us
    bound, width = course.least_us * (1 - ROUNDING), 0
    while bound < us * (1 - config.met):
        is_far = bound < us * (1 - config.far)
        wider = _wider(layout, width, is_far, config)
        if wider == width:
            break
        devices, us = search(course, wider, us) or (devices, us)
        width = wider
        bound = max(bound, bound_us(course, width, us))
    return StepBest(us, min(bound, us), width, devices)


def _narrow(layout: Layout, config: SearchConfig) -> int:
    return max(2, config.narrow_rows // layout.problem.num_devices)


def _wider(layout: Layout, width: int, is_far: bool, config: SearchConfig) -> int:
    rows = min(config.wide_rows, config.frontier_rows[is_far] // layout.num_launches)
    most = rows // layout.problem.num_devices
    if not width:
        return _narrow(layout, config)
    return max(width, most if is_far else min(most, 4 * width))


def joined(
    layouts: list[Layout], steps: list[StepBest], price: float, sign: int, config: SearchConfig
) -> Labels | None:
    """The longest step first (sign -1) or last (1)."""
    problem = layouts[0].problem
    labels = np.full(problem.num_nodes, -1, dtype=np.int64)
    homes: dict[str, int] = {}
    counts = problem.unit.counts
    for step in sorted(range(len(steps)), key=lambda s: sign * counts[s] * steps[s].us):
        graph, nodes = problem.unit.graphs[step], problem.node_of[step]
        added = _moving_us(problem, step, homes) * price / counts[step]
        # The first step fixes nodes of several steps.
        fixed = labels[nodes]
        devices = steps[step].devices
        is_own = devices is not None and not added[np.arange(len(devices)), devices].any()
        if devices is None or not is_own or (fixed >= 0).any():
            course = course_of(layouts[step], added, fixed)
            placed = search(course, max(steps[step].width, _narrow(layouts[step], config)), NEVER_US)
            if placed is None:
                return None
            devices = placed[0]
        labels[nodes] = devices
        for name, group in graph.state_groups.items():
            homes.setdefault(name, int(devices[graph.groups[group][0]]))
    return labels


def _moving_us(problem: Problem, step: int, homes: dict[str, int]) -> Floats:
    """[launch, device], charged to the state's first use."""
    graph = problem.unit.graphs[step]
    sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
    charged = np.zeros((len(problem.node_of[step]), problem.num_devices))
    for name, group in graph.state_groups.items():
        if name in homes:
            charged[graph.groups[group][0]] += sizes[name] * problem.us_per_byte[homes[name]]
    return charged
