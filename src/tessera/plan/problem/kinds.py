"""Kinds of device: devices that are alike share prices, so that pricing needs one label for each kind.

Devices are alike iff every launch costs the same on them, they hold as much, the constraints treat them alike
and their links to everything else are the same. Swapping two of them maps plans to plans of the same rate; so
the mean of an optimum over all swaps is an optimum, and it loads the devices of a kind equally. Splitting a
request between two devices of a kind only adds transfers. Hence the linear program over placements on one
device a kind, with as many devices as the kind has, has the same optimum. Not handled: links that share a
bus; with those every device is its own kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from tessera.plan.problem.arrays import Floats, Ints, Labels
from tessera.plan.problem.problem import Problem, restricted

# Ways of pairing the cards of the kinds that a placement is spread over, at most.
MAX_WAYS = 16


@dataclass(frozen=True, eq=False)
class Kinds:
    """Devices by kind."""

    members: tuple[tuple[int, ...], ...]
    # Device -> kind.
    kind_of: Ints
    # The problem on the first device of each kind.
    part: Problem

    @property
    def limits(self) -> Floats:
        """Busy time that a kind and the links between two kinds have per unit of time."""
        counts = np.array([len(m) for m in self.members], dtype=np.float64)
        return np.concatenate([counts, np.outer(counts, counts).ravel()])

    def spread(self, labels: Labels) -> Iterator[Labels]:
        """The placement on real devices: the cards of each kind take turns, all equally often."""
        counts = [len(self.members[k]) for k in np.unique(labels).tolist()]
        product = int(np.prod(counts))
        ways = product if product <= MAX_WAYS else lcm(*counts)
        for way in range(ways):
            yield np.array([m[d] for m, d in zip(self.members, self._cards(way, ways, labels), strict=True)])[
                labels
            ]

    def _cards(self, way: int, ways: int, labels: Labels) -> list[int]:
        """Which card of each kind; as digits of a number where every pairing is used."""
        used = set(np.unique(labels).tolist())
        cards = []
        rest = way
        is_product = ways == int(np.prod([len(self.members[k]) for k in used]))
        for kind, members in enumerate(self.members):
            if kind not in used:
                cards.append(0)
            elif is_product:
                cards.append(rest % len(members))
                rest //= len(members)
            else:
                cards.append(way % len(members))
        return cards


def kinds_of(problem: Problem) -> Kinds | None:
    """The kinds of a problem's devices; None if no two are alike, or links share a bus."""
    num = problem.num_devices
    if num < 3 or (problem.link_row != np.arange(num * num)).any():
        return None
    members: list[list[int]] = []
    for device in range(num):
        for kind in members:
            if _alike(problem, kind[0], device):
                kind.append(device)
                break
        else:
            members.append([device])
    if len(members) == num:
        return None
    kind_of = np.zeros(num, dtype=np.int64)
    for number, kind in enumerate(members):
        kind_of[kind] = number
    part = restricted(problem, [kind[0] for kind in members])
    assert part is not None, "what a device may run, one of its kind may"
    return Kinds(tuple(tuple(kind) for kind in members), kind_of, part)


def _alike(problem: Problem, a: int, b: int) -> bool:
    """May two devices change places?"""
    num = problem.num_devices
    swapped = np.arange(num)
    swapped[[a, b]] = b, a
    wired = all(
        np.array_equal(table, table[np.ix_(swapped, swapped)])
        for table in (problem.us_per_byte, problem.latency_us)
    )
    wished = problem.allowed is None or bool((problem.allowed[:, a] == problem.allowed[:, b]).all())
    same = problem.memory_bytes[a] == problem.memory_bytes[b]
    return wired and wished and bool(same) and np.array_equal(problem.load_us[:, a], problem.load_us[:, b])
