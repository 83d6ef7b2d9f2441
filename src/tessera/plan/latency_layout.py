"""What has to be remembered of a step's first launches to time the rest, launch by launch.

A schedule's past matters to its future only through times: when each device is free, and when what later
launches read is there, on each device. Values with the same remaining readers share one column: only the
later of them counts. A group (launches that share state) is a value as well: it is there on the device of
the group's first launch when that ends (the device is busy until then), and never elsewhere.

The step's end is one more launch, which costs nothing, anywhere, and waits for what nobody else reads.
A column whose remaining readers all descend from a launch cannot be of use before that launch has ended;
`raises` lists such columns, so that differences that cannot matter any more are forgotten.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tessera.plan.arrays import Floats, Ints
from tessera.plan.problem import Problem

# Later than any real time, on devices where a group's launches may not run.
NEVER_US = 1e15


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """How one launch changes the columns; column 0 holds the times at which devices are free."""

    # Of one run on each device; NEVER_US where wishes forbid it.
    cost_us: Floats
    # What running on each device adds to the step's time, whatever runs meanwhile.
    toll_us: Floats
    # Columns that the launch waits for.
    reads: tuple[int, ...]
    # Each column after the launch: columns before it, of which the latest counts.
    folds: tuple[tuple[int, ...], ...]
    # [new value][device of the launch, reader's device]: the wait from the launch's end.
    makes: Floats
    # Each column after the launch: new values that fold into it.
    made: tuple[tuple[int, ...], ...]
    # Columns after the launch that wait at least for the launch itself.
    raises: tuple[int, ...]
    # (column after the launch, reader) pairs; not all where many launches read one value.
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A step, ready to be timed launch by launch."""

    moves: tuple[Move, ...]
    # tail_us[launch, device]: from the launch's start there to the step's end, no placement takes less.
    tail_us: Floats
    # [source, destination]: no chain of transfers between the two is faster.
    least_wait_us: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """Something that later launches wait for."""

    readers: tuple[int, ...]
    # [producer's device, reader's device]
    wait_us: Floats


def layout_of(
    problem: Problem, step: int, toll_us: Floats | None = None, fixed: Ints | None = None
) -> Layout:
    """The columns of a step; with tolls [launch, device], and devices of some launches (-1: free) given."""
    items = _items(problem, step)
    cost = _costs(problem, step, fixed)
    toll = np.zeros_like(cost)
    if toll_us is not None:
        toll[:-1] = toll_us
    above = _ancestors(len(cost), items)
    return Layout(tuple(_moves(cost, toll, items, above)), _tails(cost, items), _closure(problem.latency_us))


def _costs(problem: Problem, step: int, fixed: Ints | None) -> Floats:
    cost = problem.cost_us[step]
    if fixed is not None:
        elsewhere = (fixed[:, None] >= 0) & (fixed[:, None] != np.arange(problem.num_devices))
        cost = np.where(elsewhere, NEVER_US, cost)
    if problem.allowed is not None:
        cost = np.where(problem.allowed[problem.node_of[step]], cost, NEVER_US)
    return np.concatenate([cost, np.zeros((1, problem.num_devices))])


def _items(problem: Problem, step: int) -> list[list[_Item]]:
    """Of each launch: the values it makes, and the groups it is the first of."""
    graph, nodes = problem.unit.graphs[step], problem.node_of[step].tolist()
    items: list[list[_Item]] = [[] for _ in [*nodes, None]]
    for value in graph.values:
        if value.producer is not None and value.readers:
            wait = problem.latency_us + value.num_bytes * problem.us_per_byte
            np.fill_diagonal(wait, 0.0)
            items[value.producer].append(_Item(tuple(sorted(set(value.readers))), wait))
    members: dict[int, list[int]] = {}
    for launch, node in enumerate(nodes):
        members.setdefault(node, []).append(launch)
    num = problem.num_devices
    for first, *others in members.values():
        if others:
            items[first].append(_Item(tuple(others), NEVER_US * (1.0 - np.eye(num))))
    for made in items[:-1]:
        if not made:
            made.append(_Item((len(nodes),), np.zeros((num, num))))
    return items


def _ancestors(num: int, items: list[list[_Item]]) -> list[int]:
    """Bit sets: which launches each launch waits for, directly or not."""
    above = [0] * num
    for launch, made in enumerate(items):
        own = above[launch] | 1 << launch
        for item in made:
            for reader in item.readers:
                above[reader] |= own
    return above


def _moves(cost: Floats, toll: Floats, items: list[list[_Item]], above: list[int]) -> Iterator[Move]:
    num = len(cost)
    # What all launches from each on, but the end, wait for.
    rest = [-1] * (num + 1)
    for launch in range(num - 2, -1, -1):
        rest[launch] = rest[launch + 1] & above[launch]
    columns: list[tuple[int, ...]] = [()]
    for launch, made in enumerate(items):
        left: dict[tuple[int, ...], list[int]] = {}
        for index, readers in enumerate(columns[1:], start=1):
            after = readers[1:] if readers[0] == launch else readers
            if after:
                left.setdefault(after, []).append(index)
        new: dict[tuple[int, ...], list[int]] = {}
        for index, item in enumerate(made):
            new.setdefault(item.readers, []).append(index)
        keys = [*left, *(k for k in new if k not in left)]
        yield Move(
            cost_us=cost[launch],
            toll_us=toll[launch],
            reads=tuple(i for i, readers in enumerate(columns) if i and readers[0] == launch),
            folds=((0,), *(tuple(left.get(k, ())) for k in keys)),
            makes=np.array([item.wait_us for item in made]).reshape(len(made), cost.shape[1], cost.shape[1]),
            made=((), *(tuple(new.get(k, ())) for k in keys)),
            raises=tuple(_raised(launch, keys, above, rest[launch + 1])) if launch < num - 1 else (),
            pairs=tuple((i, r) for i, k in enumerate(keys, start=1) for r in k[:8]),
        )
        columns = [(), *keys]


def _raised(launch: int, keys: Iterable[tuple[int, ...]], above: list[int], rest: int) -> Iterator[int]:
    if rest >> launch & 1:
        yield 0
    for index, readers in enumerate(keys, start=1):
        # The end waits for no transfer.
        if readers[-1] < len(above) - 1 and all(above[r] >> launch & 1 for r in readers):
            yield index


def _tails(cost: Floats, items: list[list[_Item]]) -> Floats:
    tails = np.array(cost)
    for launch in range(len(cost) - 1, -1, -1):
        after = np.zeros(cost.shape[1])
        for item in items[launch]:
            for reader in item.readers:
                after = np.maximum(after, (item.wait_us + tails[reader]).min(axis=1))
        tails[launch] += after
    return tails


def _closure(latency_us: Floats) -> Floats:
    least = np.array(latency_us)
    for via in range(len(least)):
        least = np.minimum(least, least[:, via, None] + least[None, via])
    return least
