"""Exact placement on any number of devices where values form a forest: dynamic programming, leaves first.

Applies iff every value has one reading node and the pairs (producer, reader), taken without direction
and merged where equal, contain no cycle. Chains are the common case.
"""

from dataclasses import dataclass

import numpy as np

from tessera.plan.problem import Floats, Ints, Labels, Values


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes in an order with every parent before its children."""

    order: Ints
    # Per node: its parent (-1 for a root) and the pair of nodes that joins them.
    parent: Ints
    # Value -> child end of its pair, and whether the producer is the child.
    child_of: Ints
    from_child: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    def solve(self, own: Floats, move: Floats) -> tuple[Labels, float]:
        """(placement, its cost): exact. move[value, source, destination]."""
        joined = np.zeros((len(own), own.shape[1], own.shape[1]))  # [child, parent's device, own device]
        oriented = np.where(self.from_child[:, None, None], move.transpose(0, 2, 1), move)
        np.add.at(joined, self.child_of, oriented)
        best = own.copy()
        choice = np.zeros((len(own), own.shape[1]), dtype=np.int64)
        for node in self.order[::-1]:
            if self.parent[node] >= 0:
                options = joined[node] + best[node]
                choice[node] = options.argmin(axis=1)
                best[self.parent[node]] += options.min(axis=1)
        labels = np.zeros(len(own), dtype=np.int64)
        total = 0.0
        for node in self.order:
            if self.parent[node] >= 0:
                labels[node] = choice[node, labels[self.parent[node]]]
            else:
                labels[node] = best[node].argmin()
                total += float(best[node].min())
        return labels, total


def forest(num_nodes: int, values: Values) -> Forest | None:
    """The forest of a problem's values, or None if they do not form one."""
    if len(values.pin_value) != len(values):
        return None
    ends = np.sort(np.stack([values.producer, values.pin_node], axis=1), axis=1)
    neighbours: list[set[int]] = [set() for _ in range(num_nodes)]
    for a, b in np.unique(ends, axis=0).tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    parent = np.full(num_nodes, -2, dtype=np.int64)
    order: list[int] = []
    for root in range(num_nodes):
        if parent[root] != -2:
            continue
        parent[root] = -1
        stack = [root]
        while stack:
            node = stack.pop()
            order.append(node)
            for other in neighbours[node]:
                if other == parent[node]:
                    continue
                if parent[other] != -2:
                    return None
                parent[other] = node
                stack.append(other)
    producer_is_child = parent[values.producer] == values.pin_node
    child = np.where(producer_is_child, values.producer, values.pin_node)
    return Forest(np.array(order, dtype=np.int64), parent, child, producer_is_child)
