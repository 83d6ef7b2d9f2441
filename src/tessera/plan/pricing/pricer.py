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
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera.plan.arrays import Floats, Holdings, Ints, Labels
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.pricing.elimination import Elimination
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
