"""Placements of one step, launch by launch, as a Pareto frontier of schedules.

A row of the frontier is a schedule so far, described by its columns (see `layout`). If a row is no later
than another in every column, nothing that follows can make it end later, and the other is dropped; so is a
row that provably ends no sooner than a known placement. While the frontier stays narrow this is exact.
Beyond its limit it is narrowed in one of two ways: `search` keeps the most promising rows and returns a
placement; `bound_us` merges similar rows, each column taking its earliest time, and returns a lower bound.

`best_of_step` starts narrow and widens until plan and bound meet, up to a limit in proportion to the
launches. `joined` joins steps by the state they share: the longest step is placed first, or last, and the
others pay for state that they would have elsewhere. Each state is paid by itself (the clock counts one
latency per link, and links in parallel); the clock judges the result.

Costs of migration (see `placement`) are part of all times from the launch that pays them on, never negative.
Arrays of rows are [column, device, row].
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.config import SearchConfig
from tessera.plan.latency.layout import NEVER_US, Layout, floored, non_dominated, tails_of
from tessera.plan.problem import Problem

# Weights of devices in the bound by remaining work: each alone, and mixtures.
MIXTURES = 9
# Bounds are lowered by more than what rounding may add up to.
ROUNDING = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """A step to place, with bounds on its remaining launches."""

    layout: Layout
    # [launch, device]
    cost_us: Floats
    migration_us: Floats
    # [launch, device, 1]: from the launch's start there to the end, no placement takes less.
    tail_us: Floats
    # Weights of the devices, [mixture, device]; every row sums to one.
    weights: Floats
    # [launch, mixture, 1]: what the launches from each on add to the weighted sum of the devices' times.
    rest_us: Floats

    @property
    def least_us(self) -> float:
        """No placement takes less, by the tails alone."""
        return float(self.tail_us.min(axis=1).max())


def course_of(layout: Layout, migration_us: Floats | None = None, fixed: Ints | None = None) -> Course:
    """With times of migration [launch, device], and devices of some launches (-1: free) given."""
    cost = layout.costs_us(fixed)
    added = np.zeros_like(cost)
    if migration_us is not None:
        added[:-1] = floored(migration_us, layout.grid_us)
    tail_us = tails_of(layout.items, cost)
    num = cost.shape[1]
    mixed = np.random.default_rng(0).dirichlet(np.ones(num), size=MIXTURES)
    if num == 2:
        share = np.linspace(0.1, 0.9, MIXTURES)
        mixed = np.stack([share, 1.0 - share], axis=1)
    weights = np.concatenate([np.eye(num), mixed])
    least = (cost[:, None, :] * weights[None]).min(axis=2)
    rest = np.concatenate([least[::-1].cumsum(axis=0)[::-1], np.zeros((1, len(weights)))])
    return Course(layout, cost, added, tail_us[:, :, None], weights, rest[:, :, None])


def search(course: Course, width: int, known_us: float) -> tuple[Ints, float] | None:
    """Devices of the launches of a placement faster than a known one, and when it ends."""
    rows = _first(course)
    trail: list[tuple[Ints, Ints]] = []
    for launch in range(len(course.layout.moves) - 1):
        rows, parent, device = _advance(course, launch, rows)
        keep = _kept(rows, _ends(course, launch, rows), known_us)[:width]
        if not len(keep):
            return None
        rows = rows.take(keep, axis=2)
        trail.append((parent[keep], device[keep]))
    last = _last(course, rows)
    at = int(last.argmin())
    found_us = float(last[at])
    devices: list[int] = []
    for parent, device in reversed(trail):
        devices.append(int(device[at]))
        at = int(parent[at])
    return np.array(devices[::-1], dtype=np.int64), found_us


def bound_us(course: Course, width: int, known_us: float) -> float:
    """No placement of the step ends before this; `known_us` is when some placement does."""
    rows = _first(course)
    proved = 0.0
    for launch in range(len(course.layout.moves) - 1):
        rows, _, _ = _advance(course, launch, rows)
        ends = _ends(course, launch, rows)
        keep = _kept(rows, ends, known_us)
        if not len(keep):
            return known_us * (1.0 - ROUNDING)
        rows = rows.take(keep, axis=2)
        proved = max(proved, float(ends[keep[0]]))
        if len(keep) > width:
            rows = _merged(rows, ends[keep], width)
    proved = max(proved, float(_last(course, rows).min()))
    return min(known_us, proved) * (1.0 - ROUNDING)


def _first(course: Course) -> Floats:
    return np.zeros((1, len(course.layout.least_wait_us), 1))


def _last(course: Course, rows: Floats) -> Floats:
    """When all that the step's end waits for has ended."""
    return np.asarray(rows[course.layout.moves[-1].reads[1:]].max(axis=0).min(axis=0))


def _advance(course: Course, launch: int, rows: Floats) -> tuple[Floats, Ints, Ints]:
    """Every row with the launch on every device it may run on: (rows, which row before, device)."""
    move, added = course.layout.moves[launch], course.migration_us[launch]
    end = rows.take(move.reads, axis=0).max(axis=0) + course.cost_us[launch][:, None]
    device, parent = np.nonzero(end < NEVER_US)
    stop = end[device, parent]
    after = rows.take(move.kept, axis=0).take(parent, axis=2)
    after[0, device, np.arange(len(parent))] = stop
    for column, before in move.folds:
        np.maximum(after[column], rows[before].take(parent, axis=1), out=after[column])
    for column, is_new, wait in move.makes:
        there = wait.take(device, axis=1)
        there += stop
        if is_new:
            after[column] = there
        else:
            np.maximum(after[column], there, out=after[column])
    if len(move.raises):
        floor = course.layout.least_wait_us.take(device, axis=1)
        floor += stop
        after[move.raises] = np.maximum(after[move.raises], floor)
    if added.any():
        # A clock that is ahead by some time in every column ends ahead by as much.
        after += added[device]
    return after, parent, device


def _ends(course: Course, launch: int, rows: Floats) -> Floats:
    """No way to go on from a row ends before this."""
    move = course.layout.moves[launch]
    after = rows.take(move.column, axis=0)
    after += course.tail_us.take(move.reader, axis=0)
    paths = after.min(axis=1).max(axis=0)
    # A device that will not be used again counts only up to a time that the step surely lasts.
    free = np.minimum(rows[0], paths)
    spread = (course.weights @ free + course.rest_us[launch + 1]).max(axis=0)
    return np.asarray(np.maximum(paths, spread))


def _kept(rows: Floats, ends: Floats, known_us: float) -> Ints:
    """Rows that may end before the known placement and are not as late as another; most promising first."""
    keep = np.flatnonzero(ends < known_us * (1.0 - ROUNDING / 2))
    if len(keep) < 2:
        return keep
    flat = rows.reshape(-1, rows.shape[2]).take(keep, axis=1)
    # No row is dropped for one that comes after it: a row that is no later has no greater figure, nor sum.
    order = np.lexsort((np.minimum(flat, NEVER_US).sum(axis=0), ends[keep]))
    return np.asarray(keep[order[non_dominated(flat.take(order, axis=1))]])


def _merged(rows: Floats, ends: Floats, width: int) -> Floats:
    """At most `width` rows, each no later than those it stands for."""
    while (num := rows.shape[2]) > width:
        one, other = _pairs(np.minimum(rows.reshape(-1, num), NEVER_US), ends, num - width)
        rows[:, :, one] = np.minimum(rows[:, :, one], rows[:, :, other])
        ends[one] = np.minimum(ends[one], ends[other])
        rows, ends = np.delete(rows, other, axis=2), np.delete(ends, other)
    return rows


def _pairs(flat: Floats, ends: Floats, num: int) -> tuple[list[int], list[int]]:
    """Up to so many pairs of rows that lose little by being merged; no row is in two.

    Pairs are neighbours in some column. A merged row still ends no sooner than either row's own figure less
    the most that a column loses: pairs for which that is latest come first.
    """
    order = flat.argsort(axis=1)
    left, right = order[:, :-1].ravel(), order[:, 1:].ravel()
    apart = flat.take(left, axis=1) - flat.take(right, axis=1)
    left_ends = ends[left] - np.maximum(apart.max(axis=0), 0.0)
    right_ends = ends[right] + np.minimum(apart.min(axis=0), 0.0)
    rank = np.argsort(-np.maximum(left_ends, right_ends), kind="stable")
    taken: set[int] = set()
    found: tuple[list[int], list[int]] = ([], [])
    for one, other in zip(left[rank].tolist(), right[rank].tolist(), strict=True):
        if one not in taken and other not in taken:
            taken |= {one, other}
            found[0].append(one)
            found[1].append(other)
            if len(found[0]) == num:
                break
    return found


@dataclass(frozen=True, slots=True, eq=False)
class StepBest:
    """The fastest placement found of one step alone, and what no placement of it can beat."""

    us: float
    bound_us: float
    width: int
    # Devices of the launches; None: none was found faster than those known.
    devices: Ints | None


def best_of_step(
    layout: Layout, known_us: float, config: SearchConfig, migration_us: Floats | None = None
) -> StepBest:
    """By frontiers, ever wider until placement and bound meet or the limit is reached."""
    if not layout.num_launches:
        return StepBest(0.0, 0.0, 0, np.zeros(0, dtype=np.int64))
    course = course_of(layout, migration_us)
    devices: Ints | None = None
    us = known_us
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
    """Rows of a frontier at first."""
    return max(2, config.narrow_rows // layout.problem.num_devices)


def _wider(layout: Layout, width: int, is_far: bool, config: SearchConfig) -> int:
    """Four times as many rows, or the most at once; unchanged at the limit."""
    rows = min(config.wide_rows, config.frontier_rows[is_far] // layout.num_launches)
    most = rows // layout.problem.num_devices
    if not width:
        return _narrow(layout, config)
    return max(width, most if is_far else min(most, 4 * width))


def joined(
    layouts: list[Layout], steps: list[StepBest], price: float, sign: int, config: SearchConfig
) -> Labels | None:
    """The longest step's own best first (sign -1) or last (1); later ones pay for moving the state."""
    problem = layouts[0].problem
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
    """[launch, device]: what it takes to move the state there, charged to the first launch that uses it."""
    graph = problem.unit.graphs[step]
    sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
    charged = np.zeros((len(problem.node_of[step]), problem.num_devices))
    for name, group in graph.state_groups.items():
        if name in homes:
            charged[graph.groups[group][0]] += sizes[name] * problem.us_per_byte[homes[name]]
    return charged
