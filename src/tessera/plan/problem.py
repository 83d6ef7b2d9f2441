"""The planning problem as arrays: nodes that are placed whole, values that may have to move, memory.

A node is a set of launches that must share a device: one launch, or a group that shares state, or all
immovable launches of the unit together. Placing node n on device d keeps d busy for load_us[n, d] per
request (launch costs times the runs of their step). A value is a hyperedge from one node to the others
that read it; it is paid once per (value, destination device), in every run of its step. State that two
consecutive steps share is one more value, paid once per request, from its home in the first step to its
home in the next.

Free of charge: what a step starts with (weights are resident where read, inputs are broadcast, state
begins where it lives) and what it returns. Not handled: the memory of temporaries, and links that share
a bus.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.plan.check import check, check_load

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# Node -> device.
Labels = npt.NDArray[np.int64]

# What one message costs its link beyond the bytes: setting up a copy engine or a send.
MESSAGE_US = 1.0


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

    def present(self, labels: Labels, num_devices: int) -> npt.NDArray[np.bool_]:
        """[item, device]: does the device hold the item?"""
        held = np.zeros((len(self.num_bytes), num_devices), dtype=np.bool_)
        held[self.pin_item, labels[self.pin_node]] = True
        return held

    def bytes_on(self, labels: Labels, num_devices: int) -> Floats:
        """Bytes held by each device."""
        return np.asarray(self.num_bytes @ self.present(labels, num_devices), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Column:
    """A placement with what one request that follows it costs."""

    labels: Labels
    # Busy microseconds of every device, then of every link (row-major, source first; the diagonal is zero).
    busy_us: Floats
    # All launches and all transfers one after the other, latencies included.
    path_us: float
    # Transfers of one request.
    num_messages: float

    @cached_property
    def key(self) -> bytes:
        """Equal placements, equal keys."""
        return self.labels.tobytes()


@dataclass(frozen=True, eq=False)
class Mix:
    """Columns and the share of the requests that follows each; shares sum to one."""

    columns: tuple[Column, ...]
    shares: tuple[float, ...]

    @cached_property
    def busy_us(self) -> Floats:
        """Busy time of every device and link per average request."""
        rows = np.array([c.busy_us for c in self.columns])
        return np.asarray(np.array(self.shares) @ rows, dtype=np.float64)

    @property
    def rate_per_s(self) -> float:
        """Requests per second with the busiest device or link fully busy."""
        return 1e6 / float(self.busy_us.max())

    @property
    def num_messages(self) -> float:
        """Transfers per average request."""
        return sum(share * c.num_messages for share, c in zip(self.shares, self.columns, strict=True))


@dataclass(frozen=True, eq=False)
class Problem:
    """A work unit, its prices and a cluster, as arrays."""

    unit: ir.WorkUnit
    costs: tuple[ir.Costs, ...]
    cluster: ir.Cluster
    # node_of[step][launch]
    node_of: tuple[Ints, ...]
    # cost_us[step][launch, device], of one run.
    cost_us: tuple[Floats, ...]
    # load_us[node, device], of one request.
    load_us: Floats
    values: Values
    weights: Holdings
    states: Holdings
    # [source, destination]; zero on the diagonal.
    us_per_byte: Floats
    latency_us: Floats
    memory_bytes: Floats

    @property
    def num_nodes(self) -> int:
        """Things to place."""
        return len(self.load_us)

    @property
    def num_devices(self) -> int:
        """Places."""
        return len(self.cluster.devices)

    @cached_property
    def wire_us(self) -> Floats:
        """[value, source, destination]: how long one request keeps the link busy with the value."""
        return self._per_message(np.full_like(self.latency_us, MESSAGE_US))

    @cached_property
    def transfer_us(self) -> Floats:
        """[value, source, destination]: how long one request would wait for the value."""
        return self._per_message(self.latency_us)

    def _per_message(self, fixed_us: Floats) -> Floats:
        one = self.values.num_bytes[:, None, None] * self.us_per_byte + fixed_us
        paid = self.values.runs[:, None, None] * one
        paid[:, range(self.num_devices), range(self.num_devices)] = 0.0
        return paid

    def column(self, labels: Labels) -> Column:
        """A placement with its loads."""
        num = self.num_devices
        nodes = np.arange(self.num_nodes)
        own = self.load_us[nodes, labels]
        value, src, dst = self.crossings(labels)
        links = np.bincount(src * num + dst, weights=self.wire_us[value, src, dst], minlength=num * num)
        busy = np.concatenate([np.bincount(labels, weights=own, minlength=num), links])
        path = float(own.sum() + self.transfer_us[value, src, dst].sum())
        return Column(labels, busy, path, float(self.values.runs[value].sum()))

    def crossings(self, labels: Labels) -> tuple[Ints, Ints, Ints]:
        """(value, source, destination) of every transfer that a placement needs."""
        vals = self.values
        needed = np.zeros((len(vals), self.num_devices), dtype=np.bool_)
        needed[vals.pin_value, labels[vals.pin_node]] = True
        home = labels[vals.producer]
        needed[np.arange(len(vals)), home] = False
        value, dst = np.nonzero(needed)
        return value, home[value], dst

    def placement(self, labels: Labels) -> ir.Placement:
        """Back to launches."""
        return ir.Placement(tuple(tuple(labels[nodes].tolist()) for nodes in self.node_of))

    def labels(self, placement: ir.Placement) -> Labels:
        """From launches to nodes; the placement must keep nodes whole."""
        found = np.zeros(self.num_nodes, dtype=np.int64)
        for nodes, devices in zip(self.node_of, placement.devices, strict=True):
            found[nodes] = devices
        return found

    def excess_bytes(self, columns: Iterable[Column], slots: int) -> Floats:
        """Bytes by which each device would overflow if it served all these columns (<= 0: it fits).

        Weights are those of any of the columns; state is that of `slots` requests in flight, all of them
        on the column that needs the device most.
        """
        listed = list(columns)
        held = np.zeros((len(self.weights.num_bytes), self.num_devices), dtype=np.bool_)
        state = np.zeros(self.num_devices)
        for column in listed:
            held |= self.weights.present(column.labels, self.num_devices)
            state = np.maximum(state, self.states.bytes_on(column.labels, self.num_devices))
        return np.asarray(self.weights.num_bytes @ held + slots * state - self.memory_bytes)

    def fits(self, columns: Iterable[Column], slots: int) -> bool:
        """Do weights and state fit everywhere?"""
        return bool((self.excess_bytes(columns, slots) <= 0).all())


def build(unit: ir.WorkUnit, costs: tuple[ir.Costs, ...], cluster: ir.Cluster) -> Problem:
    """Checks the inputs and turns them into arrays."""
    check(unit, costs, cluster)
    node_of, num_nodes = _contract(unit)
    cost_us = tuple(np.array([[c.us for c in row] for row in x.costs], dtype=np.float64) for x in costs)
    load = np.zeros((num_nodes, len(cluster.devices)))
    for nodes, us, count in zip(node_of, cost_us, unit.counts, strict=True):
        np.add.at(load, nodes, us * count)
    check_load(load, cluster)
    us_per_byte, latency = _wires(cluster)
    memory = np.array([d.memory_bytes for d in cluster.devices], dtype=np.float64)
    values = _values(unit, node_of)
    weights = _holdings(unit, node_of, ir.BufferKind.WEIGHT)
    states = _holdings(unit, node_of, ir.BufferKind.STATE)
    return Problem(
        unit, costs, cluster, node_of, cost_us, load, values, weights, states, us_per_byte, latency, memory
    )


def _contract(unit: ir.WorkUnit) -> tuple[tuple[Ints, ...], int]:
    """Launches -> nodes, numbered in trace order."""
    starts = np.cumsum([0, *(len(g.trace.launches) for g in unit.graphs)])
    parent = list(range(int(starts[-1])))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    stuck: list[int] = []
    for start, graph in zip(starts.tolist(), unit.graphs, strict=False):
        sets = [[start + x for x in group] for group in graph.groups]
        stuck += [start + i for i, x in enumerate(graph.trace.launches) if x.immovable]
        for members in sets:
            _join(parent, find, members)
    _join(parent, find, stuck)
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


def _wires(cluster: ir.Cluster) -> tuple[Floats, Floats]:
    num = len(cluster.devices)
    us_per_byte, latency = np.zeros((num, num)), np.zeros((num, num))
    for src in range(num):
        for dst in range(num):
            link = cluster.link(src, dst)
            if link is not None:
                us_per_byte[src, dst], latency[src, dst] = link.wire_us(1), link.latency_us
    return us_per_byte, latency


def _values(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Values:
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
    """State handed from one step to the next that uses it."""
    last: dict[str, int] = {}
    for graph, nodes in zip(unit.graphs, node_of, strict=True):
        sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is ir.BufferKind.STATE}
        for name, group in graph.state_groups.items():
            home = int(nodes[graph.groups[group][0]])
            before = last.get(name, home)
            if before != home:
                yield before, sizes[name], 1, [home]
            last[name] = home


def _holdings(unit: ir.WorkUnit, node_of: tuple[Ints, ...], kind: ir.BufferKind) -> Holdings:
    """Which nodes need which buffers of one kind; buffers of one name are one buffer."""
    item_of: dict[str, int] = {}
    sizes: list[int] = []
    pins: set[tuple[int, int]] = set()
    for graph, nodes in zip(unit.graphs, node_of, strict=True):
        buffers, node = graph.trace.buffers, nodes.tolist()
        for index, launch in enumerate(graph.trace.launches):
            for access in launch.accesses:
                buffer = buffers[access.buffer]
                if buffer.kind is kind:
                    item = item_of.setdefault(buffer.name, len(sizes))
                    if item == len(sizes):
                        sizes.append(0)
                    sizes[item] = max(sizes[item], buffer.size_bytes)
                    pins.add((item, node[index]))
    listed = np.array(sorted(pins), dtype=np.int64).reshape(-1, 2)
    return Holdings(np.array(sizes, dtype=np.float64), listed[:, 0].copy(), listed[:, 1].copy())


def spread_us(cost_us: Floats) -> float:
    """No assignment of rows, even of fractions of them, keeps all devices below this."""
    # Any prices that sum to one prove such a figure; the best of some is returned.
    num = cost_us.shape[1]
    weights = np.full(num, 1.0 / num)
    best = 0.0
    for round_number in range(1, 40):
        priced = cost_us * weights
        best = max(best, float(priced.min(axis=1).sum()))
        choice = priced.argmin(axis=1)
        own = cost_us[np.arange(len(choice)), choice]
        busy = np.bincount(choice, weights=own, minlength=num)
        # Busier devices become dearer, by steps that shrink.
        weights = weights * np.exp((busy / max(busy.max(), 1e-12) - 0.5) / round_number)
        weights /= weights.sum()
    return best
