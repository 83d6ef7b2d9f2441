"""A work unit as arrays: which launches are placed whole, what may have to move, what stays resident.

These are the columns that `problem` computes with. Buffers of one name are one buffer in all steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tessera import ir

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# Node -> device.
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Values:
    """Hyperedges in columns; pins list the reading nodes, without repeats and without the producer."""

    producer: Ints
    num_bytes: Floats
    # How often one request pays it.
    runs: Floats
    # Pin i: value pin_value[i] is read by node pin_node[i]; ascending in pin_value.
    pin_value: Ints
    pin_node: Ints

    def __len__(self) -> int:
        return len(self.producer)


@dataclass(frozen=True, eq=False)
class Holdings:
    """Named buffers that stay on the devices where their nodes run: weights, or state."""

    num_bytes: Floats
    pin_item: Ints
    pin_node: Ints
    names: tuple[str, ...] = ()

    def present(self, labels: Labels, num_devices: int) -> Bools:
        """[item, device]: does the device hold the item?"""
        held = np.zeros((len(self.num_bytes), num_devices), dtype=np.bool_)
        held[self.pin_item, labels[self.pin_node]] = True
        return held

    def bytes_on(self, labels: Labels, num_devices: int) -> Floats:
        """Bytes held by each device."""
        return np.asarray(self.num_bytes @ self.present(labels, num_devices), dtype=np.float64)


def contract(unit: ir.WorkUnit) -> tuple[tuple[Ints, ...], int]:
    """Launches -> nodes, numbered in trace order; in a served unit, state ties launches across steps."""
    starts = np.cumsum([0, *(len(g.trace.launches) for g in unit.graphs)])
    parent = list(range(int(starts[-1])))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    stuck: list[int] = []
    homes: dict[str, list[int]] = {}
    for start, graph in zip(starts.tolist(), unit.graphs, strict=False):
        sets = [[start + x for x in group] for group in graph.groups]
        stuck += [start + i for i, x in enumerate(graph.trace.launches) if x.immovable]
        for members in sets:
            _join(parent, find, members)
        for name, group in graph.state_groups.items() if unit.is_served else ():
            homes.setdefault(name, []).append(start + graph.groups[group][0])
    for members in (stuck, *homes.values()):
        _join(parent, find, members)
    roots = np.array([find(x) for x in range(len(parent))], dtype=np.int64)
    _, first, inverse = np.unique(roots, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    nodes = rank[inverse]
    return tuple(nodes[a:b] for a, b in pairwise(starts.tolist())), len(first)


def _join(parent: list[int], find: Callable[[int], int], members: list[int]) -> None:
    for other in members[1:]:
        a, b = find(members[0]), find(other)
        parent[max(a, b)] = min(a, b)


def wires(cluster: ir.Cluster) -> tuple[Floats, Floats]:
    """([source, destination] microseconds per byte, latency); zero on the diagonal."""
    num = len(cluster.devices)
    us_per_byte, latency = np.zeros((num, num)), np.zeros((num, num))
    place = {name: index for index, name in enumerate(cluster.names)}
    for link in cluster.links:
        ends = place[link.src], place[link.dst]
        us_per_byte[ends], latency[ends] = link.wire_us(1), link.latency_us
    return us_per_byte, latency


def link_rows(cluster: ir.Cluster) -> Ints:
    """[source x devices + destination] -> the row that counts the link's time; one row for a bus."""
    num = len(cluster.devices)
    place = {name: index for index, name in enumerate(cluster.names)}
    rows = np.arange(num * num)
    first: dict[str, int] = {}
    for link in cluster.links:
        if link.group:
            own = place[link.src] * num + place[link.dst]
            rows[own] = first.setdefault(link.group, own)
    return rows


def values_of(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Values:
    """What may have to move: values inside the steps, and state between them."""
    producer: list[int] = []
    num_bytes: list[int] = []
    runs: list[int] = []
    pin_value: list[int] = []
    pin_node: list[int] = []
    for node, size, count, readers in (*_flows(unit, node_of), *_migrations(unit, node_of)):
        if readers:
            pin_value += [len(producer)] * len(readers)
            pin_node += readers
            producer.append(node)
            num_bytes.append(size)
            runs.append(count)
    return Values(
        np.array(producer, dtype=np.int64),
        np.array(num_bytes, dtype=np.float64),
        np.array(runs, dtype=np.float64),
        np.array(pin_value, dtype=np.int64),
        np.array(pin_node, dtype=np.int64),
    )


Flow = tuple[int, int, int, list[int]]


def _flows(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Iterator[Flow]:
    """Values inside the steps: (producer node, bytes, runs, reading nodes)."""
    for graph, nodes, count in zip(unit.graphs, node_of, unit.counts, strict=True):
        node = nodes.tolist()
        for value in graph.values:
            if value.producer is not None:
                home = node[value.producer]
                readers = sorted({node[r] for r in value.readers} - {home})
                yield home, value.num_bytes, count, readers


def _migrations(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Iterator[Flow]:
    """State handed from one step to the next that uses it; what a step leaves in parts, part by part."""
    last: dict[str, tuple[int, int]] = {}
    for graph, nodes in zip(unit.graphs, node_of, strict=True):
        sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
        for name, group in graph.state_groups.items():
            home, size = int(nodes[graph.groups[group][0]]), sizes[name]
            before, part = last.get(name, (home, size))
            if before != home:
                yield before, part, max(1, size // max(1, part)), [home]
            last[name] = home, size


def holdings_of(unit: ir.WorkUnit, node_of: tuple[Ints, ...], kind: ir.BufferKind) -> Holdings:
    """Which nodes need which buffers of one kind.

    Of a buffer that steps have at several sizes (a prefill takes some rows of the state at a time), a device
    holds the largest that it needs: one item is what all of them hold, another what the larger have more.
    """
    needs: dict[str, dict[int, set[int]]] = {}
    for graph, nodes in zip(unit.graphs, node_of, strict=True):
        buffers, node = graph.trace.buffers, nodes.tolist()
        for index, launch in enumerate(graph.trace.launches):
            for access in launch.accesses:
                buffer = buffers[access.buffer]
                if buffer.kind is kind:
                    by_size = needs.setdefault(buffer.name, {})
                    by_size.setdefault(buffer.size_bytes, set()).add(node[index])
    names: list[str] = []
    sizes: list[int] = []
    pins: list[tuple[int, int]] = []
    for name, by_size in needs.items():
        below = 0
        for size in sorted(by_size):
            held = set().union(*(nodes for other, nodes in by_size.items() if other >= size))
            pins += [(len(sizes), node) for node in sorted(held)]
            names.append(f"{name} from {below}" if below else name)
            sizes.append(size - below)
            below = size
    listed = np.array(pins, dtype=np.int64).reshape(-1, 2)
    return Holdings(np.array(sizes, dtype=np.float64), listed[:, 0].copy(), listed[:, 1].copy(), tuple(names))
