"""Latency: one placement with minimal makespan for one request, and a proved bound.

Clock: devices run launches in trace order, one at a time; a value arrives latency + bytes / bandwidth after
its producer; links do not queue. State that moves between steps costs one latency and its bytes per link.

Each step is placed launch by launch, with a Pareto front of schedules. A row is a partial schedule: when
devices are free, and when values are available on each device. Values with the same remaining readers share a
column with the latest time. A group (launches with shared state) is a value on its first launch's device
only. The step's end is one more launch without cost. A column whose remaining readers all descend from a
launch is not used before it ends: `raises` lists such columns, whose differences then vanish.

A row is dropped if it is no earlier than another in any column, or provably ends no sooner than the best
placement. This is exact while the front stays within its width. Beyond it, `search` keeps the most promising
rows; `front_bound_us` merges similar rows, with the earliest time per column, and returns a lower bound.
Arrays of rows are [column, device, row].

Steps are joined by shared state, with free, priced or expensive moves: the longest step is placed first or
last, the others pay for moving state. The bound sums the steps' bounds: it ignores moves of state, memory and
other launch orders.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera import ir
from tessera.ir.graph import ancestors
from tessera.plan.arrays import Floats, Ints, Labels, Transit, transits_of
from tessera.plan.config import SearchConfig
from tessera.plan.problem import Column, Problem

# The time on a forbidden device.
NEVER_US = 1e15
MAX_READERS = 8
# Compared at once with all behind them.
FEW_ROWS = 64
# Lowers bounds by more than the rounding error.
ROUNDING = 1e-8
# Price factors of state moves; the longest step first (-1) or last (1).
JOINED = ((0.0, -1), (1.0, -1), (100.0, -1), (1.0, 1), (100.0, 1))
Allowed = Callable[[Labels], bool]
# Per launch: (producer, bytes).
Reads = list[list[tuple[int, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    readers: tuple[int, ...]
    # [producer's device, reader's device]; infinite elsewhere for a group.
    wait_us: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Effect on the columns; column 0: devices free."""

    reads: Ints
    # Column after -> first column before; new columns begin as column 0: no device reads before it is free.
    kept: Ints
    # (column after, other column before): the latest counts.
    folds: tuple[tuple[int, int], ...]
    # (column after, [reader's device, launch's device] wait).
    makes: tuple[tuple[int, Floats], ...]
    # Columns that wait at least for this launch.
    raises: Ints
    # A subset for values with many readers.
    column: Ints
    reader: Ints


class Layout:
    """One step; the last launch is the end."""

    def __init__(self, problem: Problem, step: int) -> None:
        self.problem, self.step = problem, step
        # Values of each launch, and groups it starts.
        self.items = _items(problem, step)
        self.num_launches = len(self.items) - 1
        self.moves = tuple(_moves(self.items))
        # [destination, source]: fastest chain of transfers.
        self.least_wait_us = np.ascontiguousarray(_closure(problem.latency_us).T)


def _items(problem: Problem, step: int) -> list[list[Item]]:
    graph, nodes = problem.unit.graphs[step], problem.node_of[step].tolist()
    items: list[list[Item]] = [[] for _ in [*nodes, None]]
    num = problem.num_devices
    apart = ~np.eye(num, dtype=np.bool_)
    for value in graph.values:
        if value.producer is not None and value.readers:
            wait_us = (problem.latency_us + value.num_bytes * problem.us_per_byte) * apart
            items[value.producer].append(Item(tuple(sorted(set(value.readers))), wait_us))
    members: dict[int, list[int]] = {}
    for launch, node in enumerate(nodes):
        members.setdefault(node, []).append(launch)
    for first, *others in members.values():
        if others:
            items[first].append(Item(tuple(others), np.where(apart, np.inf, 0.0)))
    for values in items[:-1]:
        if not values:
            values.append(Item((len(nodes),), np.zeros((num, num))))
    return items


def _moves(items: Sequence[Sequence[Item]]) -> Iterator[Move]:
    num = len(items)
    above = ancestors(
        num, ((n, reader) for n, values in enumerate(items) for x in values for reader in x.readers)
    )
    # Common ancestors of all launches from each on.
    rest = [-1] * (num + 1)
    for launch in range(num - 2, -1, -1):
        rest[launch] = rest[launch + 1] & above[launch]
    columns: list[tuple[int, ...]] = [()]

    for launch, values in enumerate(items):
        left: dict[tuple[int, ...], list[int]] = {}
        for index, readers in enumerate(columns[1:], start=1):
            after = readers[1:] if readers[0] == launch else readers
            if after:
                left.setdefault(after, []).append(index)
        keys = [*left, *dict.fromkeys(x.readers for x in values if x.readers not in left)]
        at = {readers: index for index, readers in enumerate(keys, start=1)}
        raised = _raised(launch, keys, above, rest[launch + 1]) if launch < num - 1 else ()
        pairs = [(i, r) for i, k in enumerate(keys, start=1) for r in k[:MAX_READERS]]
        yield Move(
            reads=_indices([0, *(i for i, readers in enumerate(columns) if i and readers[0] == launch)]),
            kept=_indices([0, *(left.get(k, [0])[0] for k in keys)]),
            folds=tuple((at[k], other) for k, others in left.items() for other in others[1:]),
            makes=tuple((at[x.readers], x.wait_us.T) for x in values),
            raises=_indices(raised),
            column=_indices(i for i, _ in pairs),
            reader=_indices(r for _, r in pairs),
        )
        columns = [(), *keys]


def _indices(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def _raised(launch: int, keys: Iterable[tuple[int, ...]], above: Sequence[int], rest: int) -> Iterator[int]:
    if rest >> launch & 1:
        yield 0
    for index, readers in enumerate(keys, start=1):
        # The end waits for no transfer.
        if readers[-1] < len(above) - 1 and all(above[r] >> launch & 1 for r in readers):
            yield index


def tails_of(items: Sequence[Sequence[Item]], cost_us: Floats) -> Floats:
    """[launch, device]: lower bound from start to the end."""
    tails = np.array(cost_us)
    for launch in range(len(tails) - 1, -1, -1):
        after = np.zeros(tails.shape[1])
        for item in items[launch]:
            for reader in item.readers:
                np.maximum(after, (item.wait_us + tails[reader]).min(axis=-1), out=after)
        tails[launch] += after
    return tails


def _closure(latency_us: Floats) -> Floats:
    least = np.array(latency_us)
    for via in range(len(least)):
        least = np.minimum(least, least[:, via, None] + least[None, via])
    return least


def non_dominated(flat: Floats) -> Ints:
    """Rows that no earlier row dominates; flat[column, row]. Mostly the first few dominate most others."""
    left, kept = np.arange(flat.shape[1]), list[Ints]()
    while len(left):
        is_no_later = np.triu(np.ones((min(FEW_ROWS, len(left)), len(left)), dtype=np.bool_), 1)
        for column in flat.take(left, axis=1):
            is_no_later &= column[: len(is_no_later), None] <= column
        stays = np.asarray(~is_no_later.any(axis=0))
        kept.append(left[:FEW_ROWS][stays[:FEW_ROWS]])
        left = left[FEW_ROWS:][stays[FEW_ROWS:]]
    return np.concatenate(kept)


class Course:
    """Times of a step, in which state moves and some launches have their device (`fixed`; -1: free)."""

    def __init__(self, layout: Layout, migration_us: Floats | None = None, fixed: Ints | None = None) -> None:
        self.layout, problem = layout, layout.problem
        num = problem.num_devices
        us = problem.cost_us[layout.step]
        if fixed is not None:
            us = np.where((fixed[:, None] >= 0) & (fixed[:, None] != np.arange(num)), NEVER_US, us)
        if problem.allowed is not None:
            us = np.where(problem.allowed[problem.node_of[layout.step]], us, NEVER_US)
        # [launch, device]
        self.cost_us = np.concatenate([us, np.zeros((1, num))])
        self.migration_us = np.zeros_like(self.cost_us)
        if migration_us is not None:
            self.migration_us[:-1] = migration_us
        # [launch, device, 1]: lower bound from start to the end.
        self.tail_us = tails_of(layout.items, self.cost_us)[:, :, None]


def search(course: Course, width: int, best_us: float) -> tuple[Ints, float] | None:
    """Devices of a faster placement, and its end."""
    rows = _first(course)
    trail: list[tuple[Ints, Ints]] = []
    for launch in range(course.layout.num_launches):
        rows, _, parent, device = _next(course, launch, rows, best_us)
        if not len(device):
            return None
        rows = rows[:, :, :width]
        trail.append((parent[:width], device[:width]))
    last = _last(course, rows)
    at = int(last.argmin())
    end_us = float(last[at])
    devices: list[int] = []
    for parent, device in reversed(trail):
        devices.append(int(device[at]))
        at = int(parent[at])
    return np.array(devices[::-1], dtype=np.int64), end_us


def front_bound_us(course: Course, width: int, best_us: float) -> float:
    rows = _first(course)
    proved = 0.0
    for launch in range(course.layout.num_launches):
        rows, ends, _, _ = _next(course, launch, rows, best_us)
        if not len(ends):
            return best_us * (1.0 - ROUNDING)
        proved = max(proved, float(ends[0]))
        rows = _merged(rows, ends, width)
    proved = max(proved, float(_last(course, rows).min()))
    return min(best_us, proved) * (1.0 - ROUNDING)


def _first(course: Course) -> Floats:
    return np.zeros((1, len(course.layout.least_wait_us), 1))


def _last(course: Course, rows: Floats) -> Floats:
    return np.asarray(rows[course.layout.moves[-1].reads[1:]].max(axis=0).min(axis=0))


def _next(course: Course, launch: int, rows: Floats, best_us: float) -> tuple[Floats, Floats, Ints, Ints]:
    """Rows that may end before `best_us`, most promising first: (rows, least ends, parent rows, device)."""
    rows, parent, device = _advance(course, launch, rows)
    ends = _ends(course, launch, rows)
    keep = _kept(rows, ends, best_us)
    return rows.take(keep, axis=2), ends[keep], parent[keep], device[keep]


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
    for column, wait in move.makes:
        np.maximum(after[column], wait.take(device, axis=1) + stop, out=after[column])
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
    course = Course(layout)
    devices: Ints | None = None
    us, bound = best_us, float(course.tail_us.min(axis=1).max()) * (1 - ROUNDING)
    wide = min(config.wide_rows, config.frontier_rows // layout.num_launches)
    for rows in (config.narrow_rows, max(wide, config.narrow_rows)):
        width = max(2, rows // layout.problem.num_devices)
        devices, us = search(course, width, us) or (devices, us)
        bound = max(bound, front_bound_us(course, width, us))
        if bound >= us * (1 - config.met):
            break
    return StepBest(us, min(bound, us), width, devices)


def joined(
    layouts: list[Layout], steps: list[StepBest], price: float, sign: int, config: SearchConfig
) -> Labels | None:
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
            course = Course(layouts[step], added, fixed)
            placed = search(course, steps[step].width, NEVER_US)
            if placed is None:
                return None
            devices = placed[0]
        labels[nodes] = devices
        for name, (_, first) in graph.states.items():
            homes.setdefault(name, int(devices[first]))
    return labels


def _moving_us(problem: Problem, step: int, homes: dict[str, int]) -> Floats:
    """[launch, device], charged to the state's first use."""
    charged = np.zeros((len(problem.node_of[step]), problem.num_devices))
    for name, (size, first) in problem.unit.graphs[step].states.items():
        if name in homes:
            charged[first] += size * problem.us_per_byte[homes[name]]
    return charged


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
        steps_us = (count * self.step_us(step, labels) for step, count in enumerate(self.problem.unit.counts))
        return sum(steps_us, self._migration_us(labels))

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
        problem = self.problem
        moved = np.zeros((len(problem.node_of), problem.num_devices, problem.num_devices))  # into each step
        for transit in self._transits:
            source, target = (
                labels[problem.node_of[step][launch]] for step, launch in (transit.source, transit.target)
            )
            if source != target:
                moved[transit.target[0], source, target] += transit.num_bytes
        waits = (moved > 0) * problem.latency_us + moved * problem.us_per_byte
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
    layouts = [Layout(problem, step) for step in range(len(problem.node_of))]
    steps = [
        best_of_step(layout, min((clock.step_us(layout.step, x) for x in starts), default=NEVER_US), config)
        for layout in layouts
    ]
    bound = sum(count * x.bound_us for count, x in zip(problem.unit.counts, steps, strict=True))
    best, best_us = _fastest(clock, starts, allowed)
    for price, sign in JOINED if len(steps) > 1 else JOINED[:1]:
        if best_us <= bound * (1 + config.met):
            break
        if (labels := joined(layouts, steps, price, sign, config)) is not None:
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
