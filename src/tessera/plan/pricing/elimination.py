"""Pricing for three or more devices by eliminating nodes one at a time.

A node's bucket holds all terms with the node. Minimising over its devices leaves a table over its neighbours:
exact while no table exceeds `max_entries`, as for transformer traces. Wider buckets are split, each part with
its own minimum: a proved lower bound, and a start for swaps. A value with too many readers is charged to each
in equal parts, also a lower bound. The order (smallest bucket first) is fixed per problem.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tessera.plan.arrays import Floats, Ints, Labels, Values

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    # (factor, broadcast shape)
    factors: tuple[tuple[int, tuple[int, ...]], ...]
    has_own: bool
    # -1: a constant.
    result: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    node: int
    parts: tuple[_Part, ...]


@dataclass(frozen=True, eq=False)
class Elimination:
    num_devices: int
    buckets: tuple[_Bucket, ...]
    # Last eliminated first.
    scopes: tuple[Scope, ...]
    # By number of readers: (values, factors, axis orders).
    exact: tuple[tuple[Ints, tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
    # Values with many readers: (value, factor, producer first, share).
    shared: tuple[tuple[int, int, bool, float], ...]

    def solve(self, own: Floats, move: Floats) -> tuple[Labels, float]:
        """(placement, proved lower bound of the cost); move[value, source, destination]."""
        tables = self._tables(move)
        total = 0.0
        for bucket in self.buckets:
            for part in bucket.parts:
                shapes = [tables[f].reshape(shape) for f, shape in part.factors]
                if part.has_own:
                    shapes.append(own[bucket.node])
                least = sum(shapes[1:], start=shapes[0]).min(axis=-1)
                if part.result >= 0:
                    tables[part.result] = least
                else:
                    total += float(least)
        return self._read_back(own, tables), total

    def _read_back(self, own: Floats, tables: list[Floats]) -> Labels:
        labels = np.zeros(len(own), dtype=np.int64)
        chosen = labels.tolist()
        for bucket in reversed(self.buckets):
            cost = own[bucket.node]
            for part in bucket.parts:
                for factor, _ in part.factors:
                    at = tuple(chosen[n] for n in self.scopes[factor][:-1])
                    cost = cost + tables[factor][at]
            chosen[bucket.node] = int(cost.argmin())
        return np.array(chosen, dtype=np.int64)

    def _tables(self, move: Floats) -> list[Floats]:
        num = self.num_devices
        tables: list[Floats] = [np.zeros(0)] * len(self.scopes)
        for readers, (values, factors, axes) in enumerate(self.exact):
            if not len(values):
                continue
            choices = np.indices((num,) * readers).reshape(readers, -1)
            used = np.zeros((choices.shape[1], num))
            for row in choices:
                used[np.arange(len(row)), row] = 1.0
            paid = (move[values] @ used.T).reshape(len(values), *(num,) * (readers + 1))
            for table, factor, order in zip(paid, factors, axes, strict=True):
                known = tables[factor]
                turned = table.transpose(order)
                tables[factor] = known + turned if known.size else turned
        for value, factor, is_producer_first, share in self.shared:
            pair = share * (move[value] if is_producer_first else move[value].T)
            tables[factor] = tables[factor] + pair if tables[factor].size else pair
        return tables


def elimination(num_nodes: int, num_devices: int, values: Values, max_entries: int) -> Elimination:
    stops = np.searchsorted(values.pin_value, np.arange(len(values) + 1))
    reads = [values.pin_node[a:b].tolist() for a, b in pairwise(stops.tolist())]
    most = 1
    while num_devices ** (most + 2) <= max_entries:
        most += 1
    terms: list[tuple[int, Scope, float]] = []  # (value, producer and readers, share)
    for value, (producer, readers) in enumerate(zip(values.producer.tolist(), reads, strict=True)):
        if len(readers) <= most:
            terms.append((value, (producer, *readers), 1.0))
        else:
            terms += [(value, (producer, r), 1.0 / len(readers)) for r in readers]
    sets = {frozenset(scope) for _, scope, _ in terms}
    order, parts = _order(num_nodes, num_devices, sets, max_entries)
    return _laid_out(num_devices, terms, order, parts, most)


Parts = list[list[list[frozenset[int]]]]


def _order(
    num_nodes: int, num_devices: int, sets: set[frozenset[int]], max_entries: int
) -> tuple[list[int], Parts]:
    widest = 1
    while num_devices ** (widest + 1) <= max_entries:
        widest += 1
    holds: list[set[frozenset[int]]] = [set() for _ in range(num_nodes)]
    for scope in sets:
        for node in scope:
            holds[node].add(scope)
    heap = [(_width(holds[n]), n) for n in range(num_nodes)]
    heapq.heapify(heap)
    order: list[int] = []
    parts: Parts = []
    gone = [False] * num_nodes
    while heap:
        width, node = heapq.heappop(heap)
        if gone[node] or width != _width(holds[node]):
            continue
        gone[node] = True
        groups = _packed(sorted(holds[node], key=lambda s: (-len(s), sorted(s))), widest)
        order.append(node)
        parts.append(groups)
        touched: set[int] = set()
        for scope in list(holds[node]):
            for other in scope:
                holds[other].discard(scope)
                touched.add(other)
        for group in groups:
            left = frozenset().union(*group) - {node}
            for other in left:
                holds[other].add(left)
        touched.discard(node)
        for other in touched:
            heapq.heappush(heap, (_width(holds[other]), other))
    return order, parts


def _width(sets: set[frozenset[int]]) -> int:
    return len(frozenset().union(*sets)) if sets else 0


def _packed(sets: Sequence[frozenset[int]], widest: int) -> list[list[frozenset[int]]]:
    groups: list[tuple[set[int], list[frozenset[int]]]] = []
    for scope in sets:
        fitting = [g for g in groups if len(g[0] | scope) <= widest]
        if fitting:
            best = min(fitting, key=lambda g: len(g[0] | scope) - len(g[0]))
            best[0].update(scope)
            best[1].append(scope)
        else:
            groups.append((set(scope), [scope]))
    return [listed for _, listed in groups]


@dataclass(eq=False)
class _Layout:
    rank: dict[int, int]
    num_devices: int
    scopes: list[Scope] = field(default_factory=list)
    live: dict[frozenset[int], list[int]] = field(default_factory=dict)

    def add(self, nodes: frozenset[int]) -> int:
        self.scopes.append(self.line(nodes))
        self.live.setdefault(nodes, []).append(len(self.scopes) - 1)
        return len(self.scopes) - 1

    def line(self, nodes: frozenset[int]) -> Scope:
        """Last eliminated first."""
        return tuple(sorted(nodes, key=lambda n: -self.rank[n]))

    def part(self, node: int, group: list[frozenset[int]], has_own: bool) -> _Part:
        nodes = frozenset().union(*group) | {node}
        line = self.line(nodes)
        used = [
            (f, tuple(self.num_devices if n in scope else 1 for n in line))
            for scope in group
            for f in self.live.pop(scope)
        ]
        left = nodes - {node}
        return _Part(tuple(used), has_own, self.add(left) if left else -1)


def _laid_out(
    num_devices: int, terms: list[tuple[int, Scope, float]], order: list[int], parts: Parts, most: int
) -> Elimination:
    layout = _Layout({node: at for at, node in enumerate(order)}, num_devices)
    groups: list[tuple[list[int], list[int], list[tuple[int, ...]]]] = [([], [], []) for _ in range(most + 1)]
    shared = []
    for value, scope, share in terms:
        nodes = frozenset(scope)
        index = layout.live[nodes][0] if nodes in layout.live else layout.add(nodes)
        line = layout.scopes[index]
        if share == 1.0:
            held = groups[len(scope) - 1]
            held[0].append(value)
            held[1].append(index)
            held[2].append(tuple(scope.index(n) for n in line))
        else:
            shared.append((value, index, line[0] == scope[0], share))
    buckets = tuple(
        _Bucket(node, tuple(layout.part(node, group, at == 0) for at, group in enumerate(listed or [[]])))
        for node, listed in zip(order, parts, strict=True)
    )
    exact = tuple((np.array(v, dtype=np.int64), tuple(f), tuple(a)) for v, f, a in groups)
    return Elimination(num_devices, buckets, tuple(layout.scopes), exact, tuple(shared))
