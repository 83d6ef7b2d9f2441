"""Placement on a GPU and its host, where the GPU cannot hold the weights.

Everything runs on the GPU, except launches whose weights stay on a host: those with the least time there per
byte of weights that the GPU need not hold. Launches that share a weight go together, so that no weight is
held twice; launches that touch state, and code that only a GPU runs, stay. Launches of equal price are taken
evenly over the step, of divided products the last parts first, so that GPU and host work at the same time. As
many are moved as memory needs. What joins values of the host runs there too, so that less crosses.

Not handled: several GPUs, which take the mixed-integer program.
"""

from collections import Counter

import numpy as np

from tessera.errors import PlanInfeasible
from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.problem import Problem
from tessera.plan.spread import even_order

# Share of the GPU's memory that is planned.
FILL = 0.94
# Scores within this ratio are equal.
EQUAL = 1.05
# Launches that a refusal names.
NAMED = 4


def has_host(problem: Problem) -> bool:
    """True for one GPU beside CPUs."""
    cards = [d for d in problem.cluster.devices if not d.is_cpu]
    return len(cards) == 1 and problem.num_devices > 1


def host_placement(problem: Problem, microbatches: int) -> Labels:
    """Device of each node; raises PlanInfeasible if it does not fit."""
    card = next(d for d, device in enumerate(problem.cluster.devices) if not device.is_cpu)
    hosts = [d for d in range(problem.num_devices) if d != card]
    order, group_of, host_of = _order(problem, card, hosts)

    def labels(num: int) -> Labels:
        moved = np.isin(group_of, order[:num])
        return np.where(moved, host_of[group_of], card)

    def excess(num: int) -> Floats:
        over = problem.excess_bytes([problem.column(labels(num))], microbatches)
        over[card] += (1.0 - FILL) * problem.memory_bytes[card]
        return over

    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if excess(middle)[card] <= 0 else (middle + 1, high)
    if excess(low).max() > 0:
        raise _too_large(problem, labels(low), excess(low))
    return _with_joins(problem, labels(low), card)


def _too_large(problem: Problem, labels: Labels, excess: Floats) -> PlanInfeasible:
    """Names the device that overflows, and launches with its largest weights."""
    device, weights = int(excess.argmax()), problem.weights
    first = {node: launch for launch, node in reversed([*enumerate(problem.node_of[-1].tolist())])}
    here = {
        int(item): first.get(node)
        for item, node in zip(weights.pin_item, weights.pin_node.tolist(), strict=True)
        if labels[node] == device
    }
    trace, held = problem.unit.graphs[-1].trace, sorted(here, key=lambda item: -weights.num_bytes[item])
    named = [
        f"{'' if (launch := here[item]) is None else trace.kernel_of(launch).name + ' of '}"
        f"{weights.names[item]} {weights.num_bytes[item] / 1e9:.3g} GB"
        for item in held[:NAMED]
    ]
    size = problem.memory_bytes[device]
    return PlanInfeasible(
        f"{problem.cluster.devices[device].name} would hold {(size + excess[device]) / 1e9:.4g} GB and has "
        f"{size / 1e9:.4g} GB; its largest weights: {', '.join(named)}"
    )


def _order(problem: Problem, card: int, hosts: list[int]) -> tuple[Ints, Ints, Ints]:
    """Groups of nodes that may move, best first; node -> group; group -> its host."""
    weights, num = problem.weights, problem.num_nodes
    group_of = _groups(num, weights.pin_item, weights.pin_node)
    size = np.zeros(num)
    first = np.full(len(weights.num_bytes), num)
    np.minimum.at(first, weights.pin_item, weights.pin_node)
    np.add.at(size, group_of[first], weights.num_bytes)
    load = np.zeros((num, problem.num_devices))
    np.add.at(load, group_of, problem.load_us)
    stays = np.zeros(num, dtype=np.bool_)
    stays[group_of[problem.states.pin_node]] = True
    if problem.allowed is not None:
        stays[group_of[~problem.allowed[:, hosts].any(axis=1)]] = True
    number = np.cumsum(np.arange(num) == group_of) - 1
    # Hosts in turn: several NUMA nodes read their weights at the same time.
    host_of = np.array(hosts)[number % len(hosts)]
    added = load[np.arange(num), host_of] - load[:, card] + _crossing_us(problem, group_of, card, hosts[0])
    movable = np.flatnonzero((np.arange(num) == group_of) & (size > 0) & ~stays)
    score = np.log(np.maximum(added[movable], 1e-3) / size[movable]) / np.log(EQUAL)
    even = np.argsort(even_order(len(movable)))
    last_first = -_part_numbers(problem, group_of[first])[movable]
    return movable[np.lexsort((even, last_first, np.round(score)))], group_of, host_of


def _part_numbers(problem: Problem, group: Ints) -> Ints:
    """Group -> number of the part of a divided weight that it has; group[weight]."""
    found, seen = np.zeros(problem.num_nodes, dtype=np.int64), Counter[str]()
    for name, node in sorted(zip(problem.weights.names, group.tolist(), strict=True), key=lambda x: x[1]):
        whole, bracket, _ = name.partition("[")
        found[node] = seen[whole] if bracket else 0
        seen[whole] += 1
    return found


def _with_joins(problem: Problem, labels: Labels, card: int) -> Labels:
    """Nodes without weights whose inputs are on a host already, and larger than their results, go there."""
    values, labels = problem.values, labels.copy()
    reads: dict[int, list[int]] = {}
    makes: dict[int, list[int]] = {}
    for value, node in zip(values.pin_value.tolist(), values.pin_node.tolist(), strict=True):
        reads.setdefault(node, []).append(value)
    for value, node in enumerate(values.producer.tolist()):
        makes.setdefault(node, []).append(value)
    stays = np.zeros(problem.num_nodes, dtype=np.bool_)
    stays[problem.weights.pin_node] = stays[problem.states.pin_node] = True
    is_there = np.zeros((len(values), problem.num_devices), dtype=np.bool_)
    is_there[values.pin_value, labels[values.pin_node]] = True
    for node in range(problem.num_nodes):
        made_on = {int(labels[values.producer[value]]) for value in reads.get(node, [])} - {card}
        host = made_on.pop() if len(made_on) == 1 else card
        if host == card or stays[node] or (problem.allowed is not None and not problem.allowed[node, host]):
            continue
        from_host = [v for v in reads[node] if labels[values.producer[v]] == host]
        is_near = all(v in from_host or is_there[v, host] for v in reads[node])
        less = values.num_bytes[makes.get(node, [])].sum() < values.num_bytes[from_host].sum()
        if is_near and less:
            labels[node] = host
    return labels


def _groups(num: int, items: Ints, nodes: Ints) -> Ints:
    """Node -> smallest node that it shares weights with."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = num + int(items.max(initial=-1)) + 1
    graph = coo_array((np.ones(len(nodes)), (nodes, num + items)), shape=(size, size))
    _, label = connected_components(graph, directed=False)
    smallest = np.full(size, num)
    np.minimum.at(smallest, label[:num], np.arange(num))
    return np.asarray(smallest[label[:num]], dtype=np.int64)


def _crossing_us(problem: Problem, group_of: Ints, card: int, host: int) -> Floats:
    """Group -> time of the transfers that its move adds."""
    values = problem.values
    spent = np.zeros(problem.num_nodes)
    np.add.at(spent, group_of[values.producer], problem.transfer_us[:, host, card])
    np.add.at(spent, group_of[values.pin_node], problem.transfer_us[values.pin_value, card, host])
    return spent
