"""Pricing for three or more devices by eliminating nodes one at a time.

A factor is a table of costs over the devices of some nodes, its scope. Minimising the sum of a node's factors
over its devices leaves a factor of its neighbours: exact while no table exceeds `max_entries`, as for
transformer traces. Wider sums are split, each part with its own minimum: a proved lower bound, and a start
for swaps. A value with too many readers is charged to each in equal parts, also a lower bound. The order
(fewest neighbours first) is fixed per problem.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from typing import Any

import numpy as np

from tessera.plan.arrays import Floats, Labels, Values


@dataclass(frozen=True, slots=True)
class _Part:
    # (factor, broadcast shape)
    factors: tuple[tuple[int, tuple[int, ...]], ...]
    node_shape: tuple[int, ...]
    # The node's.
    axis: int


class Elimination:
    def __init__(self, num_nodes: int, num_devices: int, values: Values, max_entries: int) -> None:
        self._num_devices = num_devices
        self._widest = next(n for n in count(1) if num_devices ** (n + 1) > max_entries)
        # (value, factor, order of axes, share)
        self._terms: list[tuple[int, int, tuple[int, ...], float]] = []
        stops = np.searchsorted(values.pin_value, np.arange(len(values) + 1))
        factor_of: dict[tuple[int, ...], int] = {}
        for value, (start, stop) in enumerate(pairwise(stops.tolist())):
            readers = values.pin_node[start:stop].tolist()
            parts = [readers] if len(readers) < self._widest else [[reader] for reader in readers]
            for part in parts:
                nodes = (int(values.producer[value]), *part)
                scope = tuple(sorted(nodes))
                axes = tuple(map(nodes.index, scope))
                factor = factor_of.setdefault(scope, len(factor_of))
                self._terms.append((value, factor, axes, 1.0 / len(parts)))
        # Factors of values, then those left by parts; nodes ascend.
        self._scopes, self._num_initial = list(factor_of), len(factor_of)
        self._buckets = list(self._eliminated(num_nodes))

    def solve(self, node_cost: Floats, move: Floats) -> tuple[Labels, float]:
        """(placement, proved lower bound of the cost); move[value, source, destination]."""
        tables = self._tables(move)
        for node, parts in self._buckets:
            for number, part in enumerate(parts):
                summands = [tables[factor].reshape(shape) for factor, shape in part.factors]
                if number == 0:
                    summands.append(node_cost[node].reshape(part.node_shape))
                tables.append(np.asarray(sum(summands[1:], start=summands[0]).min(axis=part.axis)))
        # All other nodes of a node's factors are chosen before it.
        chosen: list[Any] = [slice(None)] * len(node_cost)
        for node, parts in reversed(self._buckets):
            factors = (factor for part in parts for factor, _ in part.factors)
            costs = [tables[f][tuple(chosen[n] for n in self._scopes[f])] for f in factors]
            chosen[node] = int(sum(costs, start=node_cost[node]).argmin())
        return np.array(chosen, dtype=np.int64), sum(float(table) for table in tables if not table.ndim)

    def _tables(self, move: Floats) -> list[Floats]:
        num = self._num_devices
        tables = [np.zeros((num,) * len(scope)) for scope in self._scopes[: self._num_initial]]
        for value, factor, axes, share in self._terms:
            paid = share * move[value] @ _used(num, len(axes) - 1)
            tables[factor] += paid.reshape((num,) * len(axes)).transpose(axes)
        return tables

    def _eliminated(self, num_nodes: int) -> Iterable[tuple[int, list[_Part]]]:
        held: list[set[int]] = [set() for _ in range(num_nodes)]
        for factor in range(self._num_initial):
            for node in self._scopes[factor]:
                held[node].add(factor)
        heap = [(len(self._nodes(factors)), node) for node, factors in enumerate(held)]
        heapq.heapify(heap)
        while heap:
            width, node = heapq.heappop(heap)
            around = self._nodes(held[node])
            if width != len(around):  # done, or changed since
                continue
            used, num_before = list(held[node]), len(self._scopes)
            yield node, [self._part(node, group) for group in self._packed(used) or [[]]]
            for factor in used:
                for other in self._scopes[factor]:
                    held[other].discard(factor)
            for factor in range(num_before, len(self._scopes)):
                for other in self._scopes[factor]:
                    held[other].add(factor)
            for other in around - {node}:
                heapq.heappush(heap, (len(self._nodes(held[other])), other))

    def _nodes(self, factors: Iterable[int]) -> set[int]:
        return set().union(*(self._scopes[factor] for factor in factors))

    def _packed(self, factors: list[int]) -> list[list[int]]:
        groups: list[tuple[set[int], list[int]]] = []
        for factor in sorted(factors, key=lambda f: (-len(self._scopes[f]), self._scopes[f])):
            scope = set(self._scopes[factor])
            fitting = [group for group in groups if len(group[0] | scope) <= self._widest]
            if not fitting:
                groups.append((scope, [factor]))
                continue
            nodes, packed = min(fitting, key=lambda group: len(scope - group[0]))
            nodes.update(scope)
            packed.append(factor)
        return [packed for _, packed in groups]

    def _part(self, node: int, factors: list[int]) -> _Part:
        line, num = sorted(self._nodes(factors) | {node}), self._num_devices
        shapes = [tuple(num if n in self._scopes[f] else 1 for n in line) for f in factors]
        self._scopes.append(tuple(n for n in line if n != node))
        node_shape = tuple(num if n == node else 1 for n in line)
        return _Part(tuple(zip(factors, shapes, strict=True)), node_shape, line.index(node))


@cache
def _used(num_devices: int, num_readers: int) -> Floats:
    """[device, placement of the readers]: 1 where a reader is on the device."""
    choices = np.indices((num_devices,) * num_readers).reshape(num_readers, -1)
    used = np.zeros((num_devices, choices.shape[1]))
    for row in choices:
        used[row, np.arange(len(row))] = 1.0
    return used
