"""Placements on a GPU and its host, where the GPU cannot hold the weights.

Launches with the least host time per byte of weights run on the host, as many as memory needs; those that
share a weight together. Those that touch state, or need a GPU, stay. Launches of equal price are taken evenly
over the step, of divided products the last parts first, so that both devices work at the same time. Launches
that join values of the host run there.

Other launches, those slowest on the host per byte, evenly over the step, may fetch their weights each run,
into places that count as GPU memory. The link works while the devices compute, so a step takes the longer of
both. Not handled: several GPUs.
"""

from bisect import bisect_left
from collections import Counter, defaultdict

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.ir import units
from tessera.ir.graph import joined
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.problem import Problem

FETCH = "fetch all that does not fit"
FILL = 0.94
# Scores within this ratio are equal.
EQUAL = 1.05
NAMED = 4
# The smallest weights are fetched, from so many times the bytes needed; much smaller ones stay.
ENOUGH, LEAST = 1.5, 1.0 / 64.0
# Relative to the share at which link and devices are equally busy.
TRIED = (0.4, 0.6, 0.75, 0.9, 1.0)
# To fetch all that is missing, until its places fit too.
MORE = np.linspace(1.0, 2.0, 26)


def has_host(problem: Problem) -> bool:
    cards = [d for d in problem.cluster.devices if not d.is_cpu]
    return len(cards) == 1 and problem.num_devices > 1


def host_placements(problem: Problem, microbatches: int, is_fetching: bool = False) -> list[ir.Placement]:
    """Fewest fetched weights first; `is_fetching`: fetch all that does not fit."""
    moves = _Moves(problem, microbatches)
    missing = max(0.0, float(moves.excess(0, 0.0)[moves.card]))
    sizes = (more * missing for more in MORE.tolist())
    all_fetched = (0, next((size for size in sizes if moves.excess(0, size).max() <= 0), missing))
    if is_fetching:
        return [moves.placement(*all_fetched)]
    balanced = moves.balanced_bytes(missing) if missing else 0.0
    tried = dict.fromkeys((0.0, *(share * balanced for share in TRIED)))
    candidates = [*((moves.needed(size), size) for size in tried), all_fetched]
    fitting = [each for each in candidates if moves.excess(*each).max() <= 0]
    return list(dict.fromkeys(moves.placement(*each) for each in fitting or candidates[:1]))


class _Moves:
    """Placements of the first `num` groups on the host, with `fetched_bytes` of weights of others fetched."""

    def __init__(self, problem: Problem, microbatches: int) -> None:
        self._problem, self._microbatches = problem, microbatches
        self.card = next(d for d, device in enumerate(problem.cluster.devices) if not device.is_cpu)
        hosts = [d for d in range(problem.num_devices) if d != self.card]
        self._host = hosts[0]
        weights, num = problem.weights, problem.num_nodes
        # Node -> group of nodes that share weights, named by its smallest node; bytes of each group.
        self._group_of = group_of = _groups(num, weights.pin_item, weights.pin_node)
        self._size = size = np.zeros(num)
        first = np.full(len(weights.num_bytes), num)
        np.minimum.at(first, weights.pin_item, weights.pin_node)
        np.add.at(size, group_of[first], weights.num_bytes)
        is_group = np.arange(num) == group_of
        # In turn: several NUMA nodes read their weights at the same time.
        self._host_of = np.array(hosts)[(np.cumsum(is_group) - 1) % len(hosts)]
        # Class of host time per byte; infinite: no host may run it.
        load = np.zeros((num, problem.num_devices))
        np.add.at(load, group_of, problem.load_us)
        crossing_us = _crossing_us(problem, group_of, self.card, self._host)
        added = load[np.arange(num), self._host_of] - load[:, self.card] + crossing_us
        added[group_of[problem.states.pin_node]] = np.inf
        if problem.allowed is not None:
            added[group_of[~problem.allowed[:, hosts].any(axis=1)]] = np.inf
        self._score = np.round(np.log(np.maximum(added, 1e-3) / np.maximum(size, 1.0)) / np.log(EQUAL))
        # Groups with weights, best first.
        movable = np.flatnonzero(is_group & (size > 0))
        even = np.argsort(even_order(len(movable)))
        last_first = -_part_numbers(problem, group_of[first])[movable]
        self._order = movable[np.lexsort((even, last_first, self._score[movable]))]

    def placement(self, num: int, fetched_bytes: float) -> ir.Placement:
        excess = self.excess(num, fetched_bytes)
        labels, fetched = self._labels(num, fetched_bytes)
        if excess.max() > 0:
            raise _too_large(self._problem, labels, excess)
        weights = self._problem.weights
        items = np.unique(weights.pin_item[np.isin(self._group_of[weights.pin_node], fetched)])
        placed = self._problem.placement(_with_joins(self._problem, labels, self.card))
        return ir.Placement(placed.devices, tuple((weights.names[n], self._host) for n in items.tolist()))

    def needed(self, fetched_bytes: float) -> int:
        """Groups on the host until the GPU's memory suffices."""
        is_enough = lambda num: self.excess(num, fetched_bytes)[self.card] <= 0  # noqa: E731
        return bisect_left(range(len(self._order)), True, key=is_enough)

    def balanced_bytes(self, missing: float) -> float:
        """The part of the missing bytes at whose fetching link and devices are equally busy."""
        (host_us, _), (card_us, link_us) = (self._busy_us(size) for size in (0.0, missing))
        return missing * min(1.0, host_us / max(1e-9, host_us - card_us + link_us))

    def _busy_us(self, fetched_bytes: float) -> tuple[float, float]:
        """(launches, link)."""
        labels, fetched = self._labels(self.needed(fetched_bytes), fetched_bytes)
        link = self._problem.cluster.link(self._host, self.card)
        us = link.fetch_us(float(self._size[fetched].sum())) if link is not None else np.inf
        return self._problem.column(labels).path_us, sum(self._problem.unit.counts) * us

    def excess(self, num: int, fetched_bytes: float) -> Floats:
        labels, fetched = self._labels(num, fetched_bytes)
        over = self._problem.excess_bytes([self._problem.column(labels)], self._microbatches)
        size = self._size[fetched]
        over[self.card] += (1.0 - FILL) * self._problem.memory_bytes[self.card] - size.sum()
        over[self.card] += self._microbatches * ir.SLOTS * size.max(initial=0.0)
        over[self._host] += size.sum()
        return over

    def _labels(self, num: int, fetched_bytes: float) -> tuple[Labels, Ints]:
        """Device of each node; fetched groups."""
        fetched = self._fetched(fetched_bytes)
        rest = self._order[~np.isin(self._order, fetched) & (self._score[self._order] < np.inf)]
        computed = np.isin(self._group_of, rest[:num])
        return np.where(computed, self._host_of[self._group_of], self.card), fetched

    def _fetched(self, left: float) -> Ints:
        fetched: list[int] = []
        sizes = np.sort(self._size[self._order])
        enough = int(np.searchsorted(sizes.cumsum(), ENOUGH * left))
        most = sizes[min(enough, len(sizes) - 1)]
        small = self._order[(self._size[self._order] <= most) & (self._size[self._order] >= LEAST * most)]
        for score in np.unique(self._score[small])[::-1]:
            alike = np.sort(small[self._score[small] == score])
            part = min(1.0, left / self._size[alike].sum())
            chosen_bytes = 0.0
            for group, until in zip(alike.tolist(), part * self._size[alike].cumsum(), strict=True):
                if chosen_bytes + self._size[group] / 2 <= until:
                    fetched.append(group)
                    chosen_bytes += self._size[group]
            left = max(0.0, left - chosen_bytes)
        return np.array(fetched, dtype=np.int64)


def _too_large(problem: Problem, labels: Labels, excess: Floats) -> PlanInfeasible:
    device = int(excess.argmax())
    weights, trace = problem.weights, problem.unit.graphs[-1].trace
    first = {node: launch for launch, node in reversed([*enumerate(problem.node_of[-1].tolist())])}
    pins = zip(weights.pin_item.tolist(), weights.pin_node.tolist(), strict=True)
    launch_of = {item: first.get(node) for item, node in pins if labels[node] == device}
    largest = []
    for item in sorted(launch_of, key=lambda item: -weights.num_bytes[item])[:NAMED]:
        launch = launch_of[item]
        reader = "" if launch is None else f"{trace.kernel_of(launch).name} of "
        largest.append(f"{reader}{weights.names[item]} {units.size(weights.num_bytes[item])}")
    size = problem.memory_bytes[device]
    weights_text = ", ".join(largest) or "none, only state and temporaries"
    return PlanInfeasible(
        f"{problem.cluster.devices[device].name} would hold {units.size(size + excess[device])} and has "
        f"{units.size(size)}; its largest weights: {weights_text}"
    )


def _part_numbers(problem: Problem, group: Ints) -> Ints:
    """Group -> number of its part of a divided weight."""
    numbers = np.zeros(problem.num_nodes, dtype=np.int64)
    seen = Counter[str]()
    for name, node in sorted(zip(problem.weights.names, group.tolist(), strict=True), key=lambda x: x[1]):
        whole, bracket, _ = name.partition("[")
        numbers[node] = seen[whole] if bracket else 0
        seen[whole] += 1
    return numbers


def _with_joins(problem: Problem, labels: Labels, card: int) -> Labels:
    """Nodes without weights go to the host of their inputs, where these are larger than the results."""
    values, labels = problem.values, labels.copy()
    reads: dict[int, list[int]] = defaultdict(list)
    makes: dict[int, list[int]] = defaultdict(list)
    for value, node in zip(values.pin_value.tolist(), values.pin_node.tolist(), strict=True):
        reads[node].append(value)
    for value, node in enumerate(values.producer.tolist()):
        makes[node].append(value)
    stays = np.zeros(problem.num_nodes, dtype=np.bool_)
    stays[problem.weights.pin_node] = stays[problem.states.pin_node] = True
    is_there = np.zeros((len(values), problem.num_devices), dtype=np.bool_)
    is_there[values.pin_value, labels[values.pin_node]] = True
    for node in range(problem.num_nodes):
        made_on = {int(labels[values.producer[value]]) for value in reads[node]} - {card}
        host = made_on.pop() if len(made_on) == 1 else card
        if host == card or stays[node] or (problem.allowed is not None and not problem.allowed[node, host]):
            continue
        from_host = [v for v in reads[node] if labels[values.producer[v]] == host]
        is_near = all(v in from_host or is_there[v, host] for v in reads[node])
        less = values.num_bytes[makes[node]].sum() < values.num_bytes[from_host].sum()
        if is_near and less:
            labels[node] = host
    return labels


def _groups(num: int, items: Ints, nodes: Ints) -> Ints:
    """Node -> smallest node that it shares weights with."""
    label = np.array(joined(num, [nodes[items == item].tolist() for item in np.unique(items)]))
    smallest = np.full(num, num)
    np.minimum.at(smallest, label, np.arange(num))
    return np.asarray(smallest[label], dtype=np.int64)


def _crossing_us(problem: Problem, group_of: Ints, card: int, host: int) -> Floats:
    values = problem.values
    spent = np.zeros(problem.num_nodes)
    np.add.at(spent, group_of[values.producer], problem.transfer_us[:, host, card])
    np.add.at(spent, group_of[values.pin_node], problem.transfer_us[values.pin_value, card, host])
    return spent


def even_order(num: int) -> list[int]:
    """The first numbers of any count are spread evenly: bits reversed."""
    bits = max(1, (num - 1).bit_length())
    return [n for n in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)) if n < num]
