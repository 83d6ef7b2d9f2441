"""State of a partial schedule: when devices are free, and when values are available on each device.

Values with the same remaining readers share a column with the latest time. A group (launches with shared
state) is a value available only on its first launch's device. The step's end is one more launch without cost.
A column whose remaining readers all descend from a launch is not used before it ends; `raises` lists such
columns, so that irrelevant differences vanish.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.plan.arrays import Bools, Floats, Ints
from tessera.plan.problem import Problem

# The time on a forbidden device.
NEVER_US = 1e15
MAX_READERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    readers: tuple[int, ...]
    # [producer's device, reader's device]; infinite elsewhere for a group.
    wait_us: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Effect on the columns; column 0: devices free."""

    reads: Ints
    # Column after -> first column before (0: none).
    kept: Ints
    # (column after, other column before): the latest counts.
    folds: tuple[tuple[int, int], ...]
    # (column after, is new, [reader's device, launch's device] wait).
    makes: tuple[tuple[int, bool, Floats], ...]
    # Columns that wait at least for this launch.
    raises: Ints
    # A subset for values with many readers.
    column: Ints
    reader: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One step; the last launch is the end."""

    problem: Problem
    step: int
    # Values of each launch, and groups it starts.
    items: Sequence[Sequence[Item]]
    moves: tuple[Move, ...]
    # [destination, source]: fastest chain of transfers.
    least_wait_us: Floats

    @property
    def num_launches(self) -> int:
        """Without the end."""
        return len(self.items) - 1

    def costs_us(self, fixed: Ints | None = None) -> Floats:
        """[launch, device]; fixed -1: free."""
        problem, cost = self.problem, self.problem.cost_us[self.step]
        if fixed is not None:
            elsewhere = (fixed[:, None] >= 0) & (fixed[:, None] != np.arange(problem.num_devices))
            cost = np.where(elsewhere, NEVER_US, cost)
        if problem.allowed is not None:
            cost = np.where(problem.allowed[problem.node_of[self.step]], cost, NEVER_US)
        return np.concatenate([cost, np.zeros((1, problem.num_devices))])


def layout_of(problem: Problem, step: int) -> Layout:
    items = _items(problem, step)
    least = np.ascontiguousarray(_closure(problem.latency_us).T)
    return Layout(problem, step, items, tuple(_moves(items)), least)


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


def _ancestors(items: Sequence[Sequence[Item]]) -> list[int]:
    above = [0] * len(items)
    for launch, values in enumerate(items):
        inherited = above[launch] | 1 << launch
        for item in values:
            for reader in item.readers:
                above[reader] |= inherited
    return above


def _moves(items: Sequence[Sequence[Item]]) -> Iterator[Move]:
    num, above = len(items), _ancestors(items)
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
        first = {x.readers: x for x in reversed(values) if x.readers not in left}
        raised = _raised(launch, keys, above, rest[launch + 1]) if launch < num - 1 else ()
        pairs = [(i, r) for i, k in enumerate(keys, start=1) for r in k[:MAX_READERS]]
        yield Move(
            reads=_indices([0, *(i for i, readers in enumerate(columns) if i and readers[0] == launch)]),
            kept=_indices([0, *(left.get(k, [0])[0] for k in keys)]),
            folds=tuple((at[k], other) for k, others in left.items() for other in others[1:]),
            makes=tuple((at[x.readers], first.get(x.readers) is x, x.wait_us.T) for x in values),
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
    """Rows that no earlier row dominates; flat[column, row]."""
    is_no_later = _before(flat.shape[1]).copy()
    for column in flat:
        is_no_later &= column[:, None] <= column
    return np.flatnonzero(~is_no_later.any(axis=0))


@cache
def _before(num: int) -> Bools:
    return np.triu(np.ones((num, num), dtype=np.bool_), 1)
