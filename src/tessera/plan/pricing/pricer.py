"""Pricing: the cheapest placement at prices of device time, link time, path time and memory.

Cost per request:

    sum over nodes      (device price + path price) x load
    sum over transfers  link price x busy time  +  path price x (latency + wire time)
    sum over residents  memory price x bytes, once per device; state once per request in flight

Two devices: a minimum cut. More: elimination of nodes. Both charge a value once per destination, take

    node_cost[n, d]  node n runs on device d
    move[v, s, d]    value v crosses from device s to device d
    held[i, d]       device d holds weight or state i

and return a placement with a proved lower bound. A resident is a value without a producer (-1).

The cut is exact: a node is on the source's side (device 0) or on the other. A vertex per (value, direction)
charges a value once. Scaled capacities are rounded down to integers: flow / scale is a proved lower bound,
within (edges cut) / scale.

Elimination takes nodes one at a time. A factor is a table of costs over the devices of some nodes, its scope.
Minimising the sum of a node's factors over its devices leaves a factor of its neighbours, exact while no
table exceeds `max_entries`, as for transformers. Wider sums are split, each part with its own minimum: a
lower bound. A value with too many readers is charged to each in equal parts, also a lower bound. The order
(fewest neighbours first) is fixed per problem.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from typing import Any

import numpy as np

from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.problem import Problem

# SciPy adds two opposite 32-bit capacities.
MAX_FLOW = 2**30 - 2
# More than any flow: never cut.
CLIP = MAX_FLOW + 1


class Cut:
    def __init__(self, num_nodes: int, producer: Ints, pin_value: Ints, pin_node: Ints) -> None:
        num_values = len(producer)
        pins = np.bincount(pin_value, minlength=num_values)
        shared = np.flatnonzero(pins > 1)
        aux = np.full(num_values, -1, dtype=np.int64)
        aux[shared] = num_nodes + np.arange(len(shared))
        back_aux = aux + len(shared)
        source = num_nodes + 2 * len(shared)
        sink = source + 1
        out_of = np.where(producer >= 0, producer, source)
        into = np.where(producer >= 0, producer, sink)
        lone = pins[pin_value] == 1
        nodes = np.arange(num_nodes)
        forward_src = np.where(lone, out_of[pin_value], aux[pin_value])
        backward_dst = np.where(lone, into[pin_value], back_aux[pin_value])
        rows = np.concatenate(
            [np.full(num_nodes, source), nodes, forward_src, out_of[shared], pin_node, back_aux[shared]]
        )
        cols = np.concatenate(
            [nodes, np.full(num_nodes, sink), pin_node, aux[shared], backward_dst, into[shared]]
        )
        size = sink + 1
        # Terms of one edge add up.
        keys, self._edge_of = np.unique(rows * size + cols, return_inverse=True)
        self._indptr = np.searchsorted(keys, np.arange(size + 1) * size).astype(np.int32)
        self._indices = (keys % size).astype(np.int32)
        # Value of each term, in either direction.
        self._value = np.concatenate([pin_value, shared])
        self._num_nodes, self._source = num_nodes, source

    def solve(self, node_cost: Floats, move: Floats, held: Floats) -> tuple[Labels, float]:
        from scipy.sparse import csr_array  # slow to import
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        forward, backward = np.append(move[:, 0, 1], held[:, 1]), np.append(move[:, 1, 0], held[:, 0])
        base = node_cost.min(axis=1)
        to_sink, from_source = node_cost[:, 0] - base, node_cost[:, 1] - base
        terms = np.concatenate([from_source, to_sink, forward[self._value], backward[self._value]])
        caps = np.bincount(self._edge_of, weights=terms, minlength=len(self._indices))
        source, sink = self._source, self._source + 1
        # Residents have terms at source and sink.
        limit = min(caps[self._indptr[source] :].sum(), caps[self._indices == sink].sum())
        if limit <= 0:
            scaled, scale = (caps > 0).astype(np.int32), np.inf
        else:
            scale = MAX_FLOW / limit
            scaled = np.minimum(np.floor(caps * scale), CLIP).astype(np.int32)
        graph = csr_array((scaled, self._indices, self._indptr), shape=(sink + 1, sink + 1))
        flow = maximum_flow(graph, source, sink)
        residual = csr_array(graph - flow.flow)
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, source, return_predecessors=False)
        side = np.ones(sink + 1, dtype=np.int64)
        side[reached] = 0
        return side[: self._num_nodes], float(base.sum() + flow.flow_value / scale)


@dataclass(frozen=True, slots=True)
class _Part:
    # (factor, broadcast shape)
    factors: tuple[tuple[int, tuple[int, ...]], ...]
    node_shape: tuple[int, ...]
    # The node's.
    axis: int


class Elimination:
    def __init__(
        self, num_nodes: int, num_devices: int, producer: Ints, pin_value: Ints, pin_node: Ints, widest: int
    ) -> None:
        self._num_devices, self._widest = num_devices, widest
        # (value, factor, order of axes, number of readers, share)
        self._terms: list[tuple[int, int, tuple[int, ...], int, float]] = []
        stops = np.searchsorted(pin_value, np.arange(len(producer) + 1))
        factor_of: dict[tuple[int, ...], int] = {}
        for value, (start, stop) in enumerate(pairwise(stops.tolist())):
            readers = pin_node[start:stop].tolist()
            ends = [int(producer[value])] if producer[value] >= 0 else []
            parts = [readers] if len(ends) + len(readers) <= widest else [[reader] for reader in readers]
            for part in parts:
                nodes = [*ends, *part]
                scope = tuple(sorted(nodes))
                axes = tuple(map(nodes.index, scope))
                factor = factor_of.setdefault(scope, len(factor_of))
                self._terms.append((value, factor, axes, len(part), 1.0 / len(parts)))
        # Factors of values, then those left by parts; nodes ascend.
        self._scopes, self._num_initial = list(factor_of), len(factor_of)
        self._buckets = list(self._eliminated(num_nodes))

    def solve(self, node_cost: Floats, move: Floats, held: Floats) -> tuple[Labels, float]:
        tables = self._tables([*move, *held])
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

    def _tables(self, prices: Sequence[Floats]) -> list[Floats]:
        num = self._num_devices
        tables = [np.zeros((num,) * len(scope)) for scope in self._scopes[: self._num_initial]]
        for value, factor, axes, num_readers, share in self._terms:
            paid = share * prices[value] @ _used(num, num_readers)
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


@dataclass(frozen=True, eq=False)
class Prices:
    """Cost per microsecond."""

    device: Floats
    # [source, destination]
    link: Floats
    path: float = 0.0
    # Per resident byte; requests in flight.
    memory: Floats | None = None
    microbatches: float = 1.0
    tilt: float = 0.0


@dataclass(frozen=True, eq=False)
class Pricer:
    problem: Problem
    config: SearchConfig = FULL

    def cheapest(self, prices: Prices) -> tuple[Labels, float]:
        """(placement, proved lower bound of its cost)."""
        prob = self.problem
        node_cost = (prices.device + prices.path) * prob.load_us
        if prob.num_devices == 1:
            return np.zeros(prob.num_nodes, dtype=np.int64), float(node_cost.sum())
        move = prices.link * prob.wire_us + prices.path * prob.transfer_us
        held = np.zeros((0, prob.num_devices))
        if prices.memory is not None:
            held = prob.resident(prices.microbatches, prices.tilt).num_bytes[:, None] * prices.memory
        if prob.allowed is not None:
            charge = _charge(prob, node_cost, move, held)
            node_cost = node_cost + np.where(prob.allowed, 0.0, charge[:, None])
        return self._solver(prices.memory is not None).solve(node_cost, move, held)

    def _solver(self, has_residents: bool) -> Cut | Elimination:
        num_nodes, num = self.problem.num_nodes, self.problem.num_devices
        most = self.config.max_memory_entries if has_residents else self.config.max_entries

        def make() -> Cut | Elimination:
            edges = _edges(self.problem, has_residents)
            widest = next(n for n in count(1) if num ** (n + 1) > most)
            return Cut(num_nodes, *edges) if num == 2 else Elimination(num_nodes, num, *edges, widest)

        return self.problem.once(("solver", has_residents, most), make)


def _edges(problem: Problem, has_residents: bool) -> tuple[Ints, Ints, Ints]:
    """(producer of every value, value and node of every pin)."""
    values = problem.values
    if not has_residents:
        return values.producer, values.pin_value, values.pin_node
    held = problem.resident(1.0)
    return (
        np.concatenate([values.producer, np.full(len(held.num_bytes), -1)]),
        np.concatenate([values.pin_value, held.pin_item + len(values)]),
        np.concatenate([values.pin_node, held.pin_node]),
    )


def _charge(problem: Problem, node_cost: Floats, move: Floats, held: Floats) -> Floats:
    """For nodes on forbidden devices: above any other cost, no larger than needed, as cuts use integers."""
    values = problem.values
    dearest = move.max(axis=(1, 2)) * (problem.num_devices - 1)
    charge: Floats = 1e-9 + 2 * (node_cost.max(axis=1) - node_cost.min(axis=1))
    np.add.at(charge, values.producer, 2 * dearest)
    np.add.at(charge, values.pin_node, 2 * dearest[values.pin_value])
    if len(held):
        resident = problem.resident(1.0)
        np.add.at(charge, resident.pin_node, 2 * held[resident.pin_item].max(axis=1))
    return charge
