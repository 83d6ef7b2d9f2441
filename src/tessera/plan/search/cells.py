"""Cells: plans for fewer devices, side by side, as one plan for all of them.

Devices that are alike come in numbers: four H20 and four L40S are four times one of each, three and five are
three pairs and two cards more. Each part is planned by itself, and its lanes are copied to the devices of
every copy, with microbatches of their own; so parts share nothing, and the whole is worth what they are
together. A search over all devices at once looks at more, and at each of it less closely: it may be better,
and with these among its candidates it is never worse.
"""

from collections.abc import Callable, Iterator, Sequence
from math import gcd

import numpy as np

from tessera.errors import PlanInfeasible
from tessera.plan.problem import Column, Mix, Problem, microbatch_counts

# Devices of the problem, and microbatches -> the best mix on these alone, and its rate.
SolvePart = Callable[[Sequence[int], int], tuple[Mix, float]]
# Copies of one part: the devices of each.
Cells = tuple[tuple[int, ...], ...]


def cell_mixes(
    problem: Problem, members: Sequence[Sequence[int]], microbatches: int, solve: SolvePart
) -> list[tuple[Mix, float]]:
    """A mix for every way to make cells of devices that are alike, and its rate: that of all cells together.

    `members` are the devices of each kind.
    """
    found = []
    for parts in partitions(members):
        try:
            mix = _side_by_side(problem, parts, microbatches, solve)
        except PlanInfeasible:  # a part that is too small for the model
            continue
        if mix is not None:
            found.append(mix)
    return found


def partitions(members: Sequence[Sequence[int]]) -> Iterator[tuple[Cells, ...]]:
    """Equal copies of one cell; and pairs of one device of each kind, with what is left over."""
    counts = [len(kind) for kind in members]
    copies = gcd(*counts)
    if copies > 1:
        sizes = [count // copies for count in counts]
        cells = (
            tuple(d for kind, n in zip(members, sizes, strict=True) for d in kind[at * n : (at + 1) * n])
            for at in range(copies)
        )
        yield (tuple(cells),)
    least = min(counts)
    if len(counts) > 1 and max(counts) > least:
        pairs = tuple(tuple(kind[at] for kind in members) for at in range(least))
        rest = (tuple((d,) for d in kind[least:]) for kind in members if len(kind) > least)
        yield (pairs, *rest)


def _side_by_side(
    problem: Problem, parts: Sequence[Cells], microbatches: int, solve: SolvePart
) -> tuple[Mix, float] | None:
    """Every part solved once and copied; None if there are fewer microbatches than cells."""
    num_devices = problem.num_devices
    columns: list[Column] = []
    shares: list[float] = []
    held: list[int] = []
    for copies in parts:
        each = microbatches * len(copies[0]) // num_devices
        if each < 1:
            return None
        mix, rate = solve(copies[0], each)
        counts = microbatch_counts(mix, each)
        for devices in copies:
            place = np.array(devices, dtype=np.int64)
            columns += [problem.column(place[column.labels]) for column in mix.columns]
            shares += [share * rate for share in mix.shares]
            held += counts
    total = sum(shares)
    return Mix(tuple(columns), tuple(share / total for share in shares), tuple(held)), total
