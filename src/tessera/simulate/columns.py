"""What a device goes through in one run of a program: receives, and segments of launches that end in sends.

`Scripts` makes this straight from a placement, with work that grows with the transfers and not with the
launches; a test holds it against the programs that workers run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera.execute.schedule import until_wait
from tessera.ir import BufferKind, Cluster, Costs, Graph, Link, Placement, Recv, WorkUnit

Ints = npt.NDArray[np.int64]
# State on its way: source, destination, bytes.
Moved = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TransferWire:
    """One transfer: which bus it occupies for how long, and when it is there after that."""

    number: int
    src: int
    dst: int
    num_bytes: int
    bus: int
    wire_us: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class LaunchSegment:
    """Launches in a row on one device, then transfers that leave at their end.

    Launch i of the segment's list ends at ends_us[i + 1]; this segment is [start, stop) of it.
    """

    ends_us: list[float]
    start: int
    stop: int
    sends: tuple[TransferWire, ...] = ()

    @property
    def us(self) -> float:
        """How long it takes undisturbed."""
        return self.ends_us[self.stop] - self.ends_us[self.start]


@dataclass(frozen=True, slots=True)
class DeviceColumn:
    """One device's list, and from each place in it the time until it may have to wait."""

    items: tuple[Recv | LaunchSegment, ...]
    until_wait_us: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Script:
    """One program: what every device does in one run, how often a request runs it, how long it is busy."""

    columns: tuple[DeviceColumn, ...]
    count: int
    busy_us: float
    # The step whose launches these are.
    step: int

    @cached_property
    def num_items(self) -> int:
        return sum(len(column.items) for column in self.columns)

    @cached_property
    def device_us(self) -> tuple[float, ...]:
        return tuple(sum(x.us for x in c.items if isinstance(x, LaunchSegment)) for c in self.columns)


def make_column(items: Sequence[Recv | LaunchSegment]) -> DeviceColumn:
    return DeviceColumn(tuple(items), until_wait(items, lambda x: x.us))


@dataclass(frozen=True)
class Wires:
    """The links of a cluster by their ends, and the bus that each is on."""

    cluster: Cluster

    @cached_property
    def buses(self) -> tuple[str, ...]:
        """Things that carry one transfer at a time, by name."""
        return tuple(dict.fromkeys(map(_bus, self.cluster.links)))

    @cached_property
    def _links(self) -> dict[tuple[int, int], tuple[Link, int]]:
        place = self.cluster.names.index
        return {(place(x.src), place(x.dst)): (x, self.buses.index(_bus(x))) for x in self.cluster.links}

    def of(self, number: int, src: int, dst: int, num_bytes: int) -> TransferWire:
        link, bus = self._links[src, dst]
        return TransferWire(number, src, dst, num_bytes, bus, link.wire_us(num_bytes), link.latency_us)


def _bus(link: Link) -> str:
    return link.group or f"{link.src} -> {link.dst}"


@dataclass(frozen=True)
class _Flows:
    """The values of one step that a launch made and others read, in columns."""

    producer: Ints
    num_bytes: Ints
    pin_value: Ints
    pin_reader: Ints


@dataclass
class Scripts:
    """Makes scripts of placements on one cluster; a step's script is made once a placement."""

    unit: WorkUnit
    costs: tuple[Costs, ...]
    cluster: Cluster
    _known: dict[tuple[int, tuple[int, ...], tuple[Moved, ...]], Script] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wires = Wires(self.cluster)
        self._flows = [_flows(g) for g in self.unit.graphs]
        self._us = [np.array([[c.us for c in row] for row in x.costs]) for x in self.costs]
        self._homes = [_state_launches(g) for g in self.unit.graphs]

    def of(self, placement: Placement) -> tuple[Script, ...]:
        """The scripts of a request in running order: steps, and moves of state between them."""
        return tuple(script for move, step in self.steps(placement) for script in (move, step) if script)

    def steps(self, placement: Placement) -> tuple[tuple[Script | None, Script], ...]:
        """Of every step: the move of state that it wants when it follows the one before it, and the step.

        What a prefill leaves in parts is moved part by part: at the end of each run of its own.
        """
        moved = [*self._moved(placement), ()]
        if self.unit.is_in_parts:
            each = enumerate(placement.devices)
            return tuple((None, self._step(step, place, moved[step + 1])) for step, place in each)
        return tuple(
            (self._migration(step, moved[step]), self._step(step, place))
            for step, place in enumerate(placement.devices)
        )

    def _moved(self, placement: Placement) -> Iterator[tuple[Moved, ...]]:
        """Of every step: state that lives elsewhere than the step wants it."""
        last: dict[str, tuple[int, int]] = {}
        for homes, place in zip(self._homes, placement.devices, strict=True):
            wanted = {name: (place[launch], size) for name, (launch, size) in homes.items()}
            ends = [(last.get(name, to), to) for name, to in wanted.items()]
            yield tuple((src, dst, min(size, part)) for (src, size), (dst, part) in ends if src != dst)
            last |= wanted

    def _step(self, step: int, place: tuple[int, ...], leaving: tuple[Moved, ...] = ()) -> Script:
        key = (step, place, leaving)
        if key not in self._known:
            self._known[key] = self._make(step, np.array(place, dtype=np.int64), leaving)
        return self._known[key]

    def _make(self, step: int, place: Ints, leaving: tuple[Moved, ...]) -> Script:
        flows, num = self._flows[step], len(self.cluster.devices)
        home, there = place[flows.producer], place[flows.pin_reader]
        crossing = there != home[flows.pin_value]
        pairs = flows.pin_value[crossing] * num + there[crossing]
        # Pins are sorted by value and reader, so the first of a (value, device) is its first reader.
        unique, first = np.unique(pairs, return_index=True)
        value, dst, reader = unique // num, unique % num, flows.pin_reader[crossing][first]
        producer = flows.producer[value]
        order = np.lexsort((dst, producer))
        own = self._us[step][np.arange(len(place)), place]
        events: list[list[tuple[int, int, int]]] = [[] for _ in range(num)]
        wires: list[TransferWire] = []
        rows = zip(*(x[order].tolist() for x in (value, producer, reader, dst)), strict=True)
        for number, (index, made, read, to) in enumerate(rows):
            src = int(place[made])
            wires.append(self.wires.of(number, src, to, int(flows.num_bytes[index])))
            events[src].append((made, 1, number))
            events[to].append((read, 0, number))
        for number, (src, to, size) in enumerate(leaving, start=len(wires)):
            wires.append(self.wires.of(number, src, to, size))
            events[src].append((len(place) - 1, 1, number))
            events[to].append((len(place), 0, number))
        ends = [
            np.concatenate([[0.0], np.cumsum(np.where(place == d, own, 0.0))]).tolist() for d in range(num)
        ]
        columns = tuple(column_of(ends[d], sorted(events[d]), wires) for d in range(num))
        return Script(columns, self.unit.counts[step], float(own.sum()), step)

    def _migration(self, step: int, moved: tuple[Moved, ...]) -> Script | None:
        """A script that moves state and does nothing else."""
        if not moved:
            return None
        by_source: dict[int, list[TransferWire]] = {}
        columns: list[list[Recv | LaunchSegment]] = [[] for _ in self.cluster.devices]
        for number, (src, dst, size) in enumerate(moved):
            by_source.setdefault(src, []).append(self.wires.of(number, src, dst, size))
        for src, wires in by_source.items():
            columns[src].append(LaunchSegment([0.0], 0, 0, tuple(wires)))
        for wires in by_source.values():
            for wire in wires:
                columns[wire.dst].append(Recv(wire.number))
        return Script(tuple(make_column(c) for c in columns), 1, 0.0, step)


def _flows(graph: Graph) -> _Flows:
    made = [v for v in graph.values if v.producer is not None and v.num_bytes and v.readers]
    pins = [(n, r) for n, v in enumerate(made) for r in v.readers]
    listed = np.array(pins, dtype=np.int64).reshape(-1, 2)
    return _Flows(
        np.array([v.producer for v in made], dtype=np.int64),
        np.array([v.num_bytes for v in made], dtype=np.int64),
        listed[:, 0].copy(),
        listed[:, 1].copy(),
    )


def _state_launches(graph: Graph) -> dict[str, tuple[int, int]]:
    """State buffer -> (a launch that touches it, its bytes)."""
    sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is BufferKind.STATE}
    return {name: (graph.groups[g][0], sizes[name]) for name, g in graph.state_groups.items()}


def column_of(
    ends: list[float], events: Sequence[tuple[int, int, int]], wires: Sequence[TransferWire]
) -> DeviceColumn:
    """Events are (launch, 1: sent after it or 0: received before it, transfer), in trace order."""
    items: list[Recv | LaunchSegment] = []
    done = 0  # launches before this one are in the column
    for launch, is_send, number in events:
        at = launch + is_send
        has_work = ends[at] > ends[done]
        last = items[-1] if items else None
        if not is_send:
            items += [LaunchSegment(ends, done, at), Recv(number)] if has_work else [Recv(number)]
        elif not has_work and isinstance(last, LaunchSegment):
            items[-1] = LaunchSegment(ends, last.start, last.stop, (*last.sends, wires[number]))
        else:
            items.append(LaunchSegment(ends, done, at, (wires[number],)))
        done = at
    if ends[-1] > ends[done]:
        items.append(LaunchSegment(ends, done, len(ends) - 1))
    return make_column(items)
