"""Pricing: the cheapest placement at prices of device time, link time, path time and memory.

Cost per request:

    sum over nodes      (device price + path price) x load
    sum over transfers  link price x busy time  +  path price x (latency + wire time)
    sum over residents  memory price x bytes, once per device; state once per request in flight

Two devices: an exact minimum cut. More: node elimination, then exact cuts between pairs of devices until no
pair helps. "Paid once per destination" stays exact. With memory prices and more than two devices the bound
ignores memory.

Terms of a cut, where every item takes side 0 (source) or 1:

    item_cost[i, s]  item i takes side s
    forward[v]       value v's producer takes side 0 and some reader side 1
    backward[v]      value v's producer takes side 1 and some reader side 0

An outside producer (-1) pays forward[v] if some reader takes side 1 and backward[v] if some takes side 0. One
auxiliary node per (value, direction) charges a value once. Scaled capacities are rounded down to integers:
flow / scale is a proved lower bound, within (edges cut) / scale.

Elimination takes nodes one at a time. A factor is a table of costs over the devices of some nodes, its scope.
Minimising the sum of a node's factors over its devices leaves a factor of its neighbours: exact while no
table exceeds `max_entries`, as for transformer traces. Wider sums are split, each part with its own minimum:
a proved lower bound, and a start for swaps. A value with too many readers is charged to each in equal parts,
also a lower bound. The order (fewest neighbours first) is fixed per problem.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.plan.arrays import Floats, Holdings, Ints, Labels, Values
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.problem import Problem

# SciPy adds two opposite 32-bit capacities.
MAX_FLOW = 2**30 - 2
# More than any flow: never cut.
CLIP = MAX_FLOW + 1


@dataclass(frozen=True, eq=False)
class Network:
    num_items: int
    # Terms with edge_of[t] == e add up.
    edge_of: Ints
    indptr: Ints
    indices: Ints
    term_value: Ints
    term_forward: npt.NDArray[np.bool_]
    num_network_nodes: int

    def solve(self, item_cost: Floats, forward: Floats, backward: Floats) -> tuple[Ints, float]:
        """(side of every item, proved lower bound of the cost)."""
        from scipy.sparse import csr_array  # slow to import
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        base = item_cost.min(axis=1) if self.num_items else np.zeros(0)
        to_sink, from_source = item_cost[:, 0] - base, item_cost[:, 1] - base
        terms = np.where(self.term_forward, forward[self.term_value], backward[self.term_value])
        caps = np.bincount(
            self.edge_of, weights=np.concatenate([from_source, to_sink, terms]), minlength=len(self.indices)
        )
        source, sink = self.num_network_nodes - 2, self.num_network_nodes - 1
        # Outside producers have terms at source and sink.
        limit = min(caps[self.indptr[source] :].sum(), caps[self.indices == sink].sum())
        if limit <= 0:
            scaled, scale = (caps > 0).astype(np.int32), np.inf
        else:
            scale = MAX_FLOW / limit
            scaled = np.minimum(np.floor(caps * scale), CLIP).astype(np.int32)
        shape = (self.num_network_nodes, self.num_network_nodes)
        graph = csr_array((scaled, self.indices.astype(np.int32), self.indptr.astype(np.int32)), shape=shape)
        flow = maximum_flow(graph, source, sink)
        residual = csr_array(graph - flow.flow)
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, source, return_predecessors=False)
        side = np.ones(self.num_network_nodes, dtype=np.int64)
        side[reached] = 0
        return side[: self.num_items], float(base.sum() + flow.flow_value / scale)


def network(num_items: int, producer: Ints, pin_value: Ints, pin_item: Ints) -> Network:
    num_values = len(producer)
    pins = np.bincount(pin_value, minlength=num_values)
    shared = np.flatnonzero(pins > 1)
    aux = np.full(num_values, -1, dtype=np.int64)
    aux[shared] = num_items + np.arange(len(shared))
    source = num_items + 2 * len(shared)
    sink = source + 1
    out_of = np.where(producer >= 0, producer, source)
    into = np.where(producer >= 0, producer, sink)
    lone = pins[pin_value] == 1
    back_aux = aux + len(shared)
    items = np.arange(num_items)
    forward_src = np.where(lone, out_of[pin_value], aux[pin_value])
    backward_dst = np.where(lone, into[pin_value], back_aux[pin_value])
    rows = np.concatenate(
        [np.full(num_items, source), items, forward_src, out_of[shared], pin_item, back_aux[shared]]
    )
    cols = np.concatenate(
        [items, np.full(num_items, sink), pin_item, aux[shared], backward_dst, into[shared]]
    )
    half = len(pin_value) + len(shared)
    term_forward = np.arange(2 * half) < half
    term_value = np.tile(np.concatenate([pin_value, shared]), 2)
    size = sink + 1
    keys, edge_of = np.unique(rows * size + cols, return_inverse=True)
    indptr = np.searchsorted(keys, np.arange(size + 1) * size)
    return Network(num_items, edge_of, indptr, keys % size, term_value, term_forward, size)


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
class PricedChoices:
    # [node, device]
    node_cost: Floats
    # [value, source, destination]
    move: Floats
    memory: Floats | None = None
    resident: Holdings | None = None

    def cost(self, problem: Problem, labels: Labels) -> float:
        total = self.node_cost[np.arange(len(labels)), labels].sum()
        total += self.move[problem.crossings(labels)].sum()
        if self.memory is not None and self.resident is not None:
            total += self.memory @ self.resident.bytes_on(labels, problem.num_devices)
        return float(total)


@dataclass(frozen=True, eq=False)
class Pricer:
    problem: Problem
    config: SearchConfig = FULL
    _networks: dict[bool, Network] = field(default_factory=dict)

    def cheapest(self, prices: Prices, starts: Sequence[Labels] = ()) -> tuple[Labels, float]:
        """The cheapest placement and its lower bound; `starts` help with more than two devices."""
        prob = self.problem
        node_cost = (prices.device + prices.path) * prob.load_us
        if prob.num_devices == 1:
            return np.zeros(prob.num_nodes, dtype=np.int64), float(node_cost.sum())
        move = prices.link * prob.wire_us + prices.path * prob.transfer_us
        resident = None if prices.memory is None else prob.resident(prices.microbatches, prices.tilt)
        choices = PricedChoices(node_cost, move, prices.memory, resident)
        if prob.allowed is not None:
            choices = replace(choices, node_cost=node_cost + _refusals(prob, choices))
            node_cost = choices.node_cost
        if prob.num_devices == 2:
            return self.swapped(np.zeros(prob.num_nodes, dtype=np.int64), choices, (0, 1))
        if prices.memory is not None:
            return self._by_swaps(choices, starts), float(node_cost.min(axis=1).sum())
        labels, bound = self._elimination.solve(node_cost, move)
        if choices.cost(prob, labels) <= bound * (1 + self.config.exact):
            return labels, bound
        return self._by_swaps(choices, (labels, *starts)), bound

    @cached_property
    def _elimination(self) -> Elimination:
        prob = self.problem
        return Elimination(prob.num_nodes, prob.num_devices, prob.values, self.config.max_entries)

    def _by_swaps(self, choices: PricedChoices, starts: Sequence[Labels]) -> Labels:
        prob = self.problem
        candidates: list[Labels] = [*starts, choices.node_cost.argmin(axis=1)]
        best = min(candidates, key=lambda labels: choices.cost(prob, labels))
        cost = choices.cost(prob, best)
        pairs = [(a, b) for b in range(prob.num_devices) for a in range(b)]
        for _ in range(self.config.max_sweeps):
            before = cost
            for pair in pairs:
                labels, _ = self.swapped(best, choices, pair)
                labels_cost = choices.cost(prob, labels)
                if labels_cost < cost:
                    best, cost = labels, labels_cost
            if cost >= before * (1 - 1e-9):
                break
        return best

    def swapped(self, labels: Labels, choices: PricedChoices, pair: tuple[int, int]) -> tuple[Labels, float]:
        """The best exchange of nodes between two devices, with its lower bound."""
        problem, (a, b) = self.problem, pair
        free = np.flatnonzero((labels == a) | (labels == b))
        item = np.full(problem.num_nodes, -1, dtype=np.int64)
        item[free] = np.arange(len(free))
        move = choices.move
        costs = choices.node_cost[free][:, [a, b]].copy()
        vals = problem.values
        home = labels[vals.producer]
        # Readers elsewhere: the producer pays for each such device.
        needed = np.zeros((len(vals), problem.num_devices), dtype=np.bool_)
        needed[vals.pin_value, labels[vals.pin_node]] = True
        needed[:, [a, b]] = False
        at = item[vals.producer]
        mine = at >= 0
        for side, device in enumerate(pair):
            paid = (move[:, device, :] * needed).sum(axis=1)
            np.add.at(costs[:, side], at[mine], paid[mine])
        # Readers on the two devices: a cut.
        forward = np.where(mine, move[:, a, b], move[np.arange(len(vals)), home, b])
        backward = np.where(mine, move[:, b, a], move[np.arange(len(vals)), home, a])
        kept = item[vals.pin_node] >= 0
        producer, pin_value, pin_item = at, vals.pin_value[kept], item[vals.pin_node[kept]]
        if choices.memory is not None and (held := choices.resident) is not None:
            producer, pin_value, pin_item = _with_residents(held, item, producer, pin_value, pin_item)
            forward = np.concatenate([forward, choices.memory[b] * held.num_bytes])
            backward = np.concatenate([backward, choices.memory[a] * held.num_bytes])
        is_all = len(free) == problem.num_nodes
        with_memory = choices.memory is not None
        shape = self._networks.get(with_memory) if is_all else None
        if shape is None:
            shape = network(len(free), producer, pin_value, pin_item)
            if is_all:
                self._networks[with_memory] = shape
        side_of, bound = shape.solve(costs, forward, backward)
        moved = labels.copy()
        moved[free] = np.array(pair)[side_of]
        return moved, bound


def _refusals(problem: Problem, choices: PricedChoices) -> Floats:
    """Charges for forbidden devices: above any other cost, no larger than needed, as cuts use integers."""
    assert problem.allowed is not None
    vals, node_cost = problem.values, choices.node_cost
    dearest = choices.move.max(axis=(1, 2)) * (problem.num_devices - 1)
    charge = 1e-9 + 2 * (node_cost.max(axis=1) - node_cost.min(axis=1))
    np.add.at(charge, vals.producer, 2 * dearest)
    np.add.at(charge, vals.pin_node, 2 * dearest[vals.pin_value])
    if choices.memory is not None and (held := choices.resident) is not None:
        np.add.at(charge, held.pin_node, 2 * held.num_bytes[held.pin_item] * choices.memory.max())
    return np.where(problem.allowed, 0.0, charge[:, None])


def _with_residents(
    held: Holdings, item: Ints, producer: Ints, pin_value: Ints, pin_item: Ints
) -> tuple[Ints, Ints, Ints]:
    kept = item[held.pin_node] >= 0
    return (
        np.concatenate([producer, np.full(len(held.num_bytes), -1)]),
        np.concatenate([pin_value, held.pin_item[kept] + len(producer)]),
        np.concatenate([pin_item, item[held.pin_node[kept]]]),
    )
