"""A work unit as arrays, and checks of the inputs.

Buffers with one name are one buffer in all steps. A device holds a temporary from first to last touch, an
input from the start of the step, an output to its end. All microbatches may peak at once. Not counted:
workspace inside kernels, fragmentation, copies in flight, driver memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible
from tessera.ir.graph import joined

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# Node -> device.
Labels = npt.NDArray[np.int64]
# (producer node, bytes, runs, reading nodes)
Flow = tuple[int, int, int, list[int]]

TRANSIENT = (ir.BufferKind.TEMPORARY, ir.BufferKind.INPUT, ir.BufferKind.OUTPUT)


class Values:
    """Hyperedges in columns; pins are reading nodes, unique, without the producer."""

    def __init__(self, unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> None:
        flows = [flow for flow in (*_flows(unit, node_of), *_migrations(unit, node_of)) if flow[-1]]
        table = np.array([flow[:-1] for flow in flows], dtype=np.int64).reshape(-1, 3)
        self.producer: Ints = table[:, 0].copy()
        self.num_bytes, self.runs = table[:, 1].astype(np.float64), table[:, 2].astype(np.float64)
        # Node pin_node[i] reads value pin_value[i]; sorted by value.
        self.pin_value, self.pin_node = _pairs(
            (value, node) for value, (*_, readers) in enumerate(flows) for node in readers
        )

    def __len__(self) -> int:
        return len(self.producer)


@dataclass(frozen=True, eq=False)
class Holdings:
    num_bytes: Floats
    pin_item: Ints
    pin_node: Ints
    names: tuple[str, ...] = ()

    def present(self, labels: Labels, num_devices: int) -> Bools:
        held = np.zeros((len(self.num_bytes), num_devices), dtype=np.bool_)
        held[self.pin_item, labels[self.pin_node]] = True
        return held

    def bytes_on(self, labels: Labels, num_devices: int) -> Floats:
        return np.asarray(self.num_bytes @ self.present(labels, num_devices), dtype=np.float64)


def contract(unit: ir.WorkUnit) -> tuple[tuple[Ints, ...], int]:
    """Launch -> node; in a served unit, state ties launches across steps."""
    starts = np.cumsum([0, *(len(g.trace.launches) for g in unit.graphs)])
    sets: list[list[int]] = [[]]  # first: launches that stay where they are
    homes: dict[str, list[int]] = {}
    for start, graph in zip(starts.tolist(), unit.graphs, strict=False):
        sets[0] += [start + i for i, x in enumerate(graph.trace.launches) if x.immovable]
        sets += [[start + x for x in group] for group in graph.groups]
        for name, (_, launch) in graph.states.items() if unit.is_served else ():
            homes.setdefault(name, []).append(start + launch)
    roots = joined(int(starts[-1]), (*sets, *homes.values()))
    _, first, inverse = np.unique(roots, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    nodes = rank[inverse]
    return tuple(nodes[a:b] for a, b in pairwise(starts.tolist())), len(first)


def first_launch(node_of: tuple[Ints, ...], node: int) -> tuple[int, int]:
    """(step, launch)."""
    step = next(s for s, members in enumerate(node_of) if (members == node).any())
    return step, int(np.flatnonzero(node_of[step] == node)[0])


def wires(cluster: ir.Cluster) -> tuple[Floats, Floats]:
    num = len(cluster.devices)
    us_per_byte, latency = np.zeros((num, num)), np.zeros((num, num))
    place = {name: index for index, name in enumerate(cluster.names)}
    for link in cluster.links:
        ends = place[link.src], place[link.dst]
        us_per_byte[ends], latency[ends] = link.wire_us(1), link.latency_us
    return us_per_byte, latency


def link_rows(cluster: ir.Cluster) -> Ints:
    """[source x devices + destination] -> row of busy time; a bus has one row."""
    num = len(cluster.devices)
    place = {name: index for index, name in enumerate(cluster.names)}
    rows = np.arange(num * num)
    first: dict[str, int] = {}
    for link in cluster.links:
        if link.group:
            row = place[link.src] * num + place[link.dst]
            rows[row] = first.setdefault(link.group, row)
    return rows


def _pairs(pairs: Iterable[tuple[int, int]]) -> tuple[Ints, Ints]:
    rows = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return rows[:, 0].copy(), rows[:, 1].copy()


def _flows(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Iterator[Flow]:
    for graph, nodes, count in zip(unit.graphs, node_of, unit.counts, strict=True):
        node = nodes.tolist()
        for value in graph.values:
            if value.producer is not None:
                home = node[value.producer]
                readers = sorted({node[r] for r in value.readers} - {home})
                yield home, value.num_bytes, count, readers


@dataclass(frozen=True, slots=True)
class Transit:
    # Size in the later step, and of its parts in the earlier one.
    num_bytes: int
    part_bytes: int
    # (step, launch) of the first use.
    source: tuple[int, int]
    target: tuple[int, int]


def transits_of(unit: ir.WorkUnit) -> Iterator[Transit]:
    last: dict[str, tuple[int, tuple[int, int]]] = {}
    for step, graph in enumerate(unit.graphs):
        for name, (size, first) in graph.states.items():
            if name in last:
                yield Transit(size, *last[name], (step, first))
            last[name] = size, (step, first)


def _migrations(unit: ir.WorkUnit, node_of: tuple[Ints, ...]) -> Iterator[Flow]:
    for transit in transits_of(unit):
        before, home = (int(node_of[step][launch]) for step, launch in (transit.source, transit.target))
        if before != home:
            part = transit.part_bytes
            yield before, part, max(1, transit.num_bytes // max(1, part)), [home]


def holdings_of(unit: ir.WorkUnit, node_of: tuple[Ints, ...], kind: ir.BufferKind) -> Holdings:
    """A buffer with several sizes becomes several items: the smallest size, and each increment."""
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
    return Holdings(np.array(sizes, dtype=np.float64), *_pairs(pins), tuple(names))


class Temporaries:
    def __init__(self, graph: ir.Graph, node_of: Ints) -> None:
        buffers = graph.trace.buffers
        self._node_of = node_of
        self._num_bytes = np.array([b.size_bytes for b in buffers], dtype=np.float64)
        self._from_start = np.array([b.kind is ir.BufferKind.INPUT for b in buffers], dtype=np.bool_)
        self._to_end = np.array([b.kind is ir.BufferKind.OUTPUT for b in buffers], dtype=np.bool_)
        counted = [b.kind in TRANSIENT for b in buffers]
        # Sorted by launch.
        self._touch_buffer, self._touch_launch = _pairs(
            (access.buffer, launch)
            for launch, x in enumerate(graph.trace.launches)
            for access in x.accesses
            if counted[access.buffer]
        )

    def peak_bytes(self, labels: Labels, num_devices: int) -> Floats:
        return np.asarray(self.live_bytes(labels, num_devices).max(axis=1, initial=0.0))

    def live_bytes(self, labels: Labels, num_devices: int) -> Floats:
        """[device, launch]."""
        num_launches = len(self._node_of)
        key = self._touch_buffer * num_devices + labels[self._node_of[self._touch_launch]]
        first = np.full(len(self._num_bytes) * num_devices, -1, dtype=np.int64)
        last = first.copy()
        # NumPy keeps the last of repeated assignments.
        last[key] = self._touch_launch
        first[key[::-1]] = self._touch_launch[::-1]
        held = np.flatnonzero(last >= 0)
        buffer, device = held // num_devices, held % num_devices
        begin = np.where(self._from_start[buffer], 0, first[held])
        end = np.where(self._to_end[buffer], num_launches, last[held] + 1)
        width = num_launches + 1
        size = self._num_bytes[buffer]
        change = np.bincount(device * width + begin, weights=size, minlength=width * num_devices)
        change -= np.bincount(device * width + end, weights=size, minlength=width * num_devices)
        return np.asarray(change.reshape(num_devices, width).cumsum(axis=1)[:, :-1])


def check(unit: ir.WorkUnit, costs: tuple[ir.Costs, ...], cluster: ir.Cluster) -> None:
    ir.verify(cluster)
    ir.verify(unit)
    if unit.num_launches == 0:
        raise PlanInfeasible("the work unit has no launches", "Capture a step that launches a kernel.")
    if len(costs) != len(unit.graphs):
        raise MismatchError(f"{len(unit.graphs)} steps but {len(costs)} price lists", "Give one per step.")
    for step, (graph, priced) in enumerate(zip(unit.graphs, costs, strict=True)):
        _check_costs(f"costs of step {step} ({graph.trace.step.kind})", graph.trace, priced, cluster)


def _check_costs(place: str, trace: ir.Trace, costs: ir.Costs, cluster: ir.Cluster) -> None:
    remedy = "Make them again with `tessera profile`."
    if costs.devices != cluster.devices:
        theirs, ours = ", ".join(d.name for d in costs.devices), ", ".join(cluster.names)
        raise MismatchError(f"priced for devices {theirs}; the cluster has {ours}", remedy, place)
    if costs.trace_digest != trace.digest:
        raise MismatchError("these are the costs of another trace", remedy, place)
    if len(costs.costs) != len(trace.launches):
        message = f"{len(costs.costs)} launches are priced; the trace has {len(trace.launches)}"
        raise MismatchError(message, remedy, place)
    ir.verify(costs)


def check_load(load: npt.NDArray[np.float64], cluster: ir.Cluster) -> None:
    if load.min(axis=1).sum() == 0:
        message = f"every launch costs nothing on {' or '.join(cluster.names)}, so no rate is too high"
        raise PlanInfeasible(message, "Price the traces again.")
