"""Scripts: worker programs (`execute.lower`) with modelled times, for the simulator.

A script has a column per device: receives, and segments of launches that end in sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera.execute.lower import Fetched, LoweredRun, TransferPoint, UnitLowering, lower_moves
from tessera.execute.schedule import until_wait
from tessera.ir import Cluster, Costs, Link, Placement, Recv, Transfer, WorkUnit

Ints = npt.NDArray[np.int64]
FETCHED = " (weights)"


@dataclass(frozen=True, slots=True)
class TransferWire:
    number: int
    src: int
    dst: int
    num_bytes: int
    bus: int
    wire_us: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class LaunchSegment:
    """Consecutive launches [start, stop) on one device, then transfers that leave at their end.

    Launch i of the step ends at ends_us[i + 1].
    """

    ends_us: list[float]
    start: int
    stop: int
    sends: tuple[TransferWire, ...] = ()

    @property
    def us(self) -> float:
        return self.ends_us[self.stop] - self.ends_us[self.start]


@dataclass(frozen=True, slots=True)
class DeviceColumn:
    """Time until a possible wait from each position."""

    items: tuple[Recv | LaunchSegment, ...]
    until_wait_us: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Script:
    columns: tuple[DeviceColumn, ...]
    count: int
    busy_us: float
    step: int

    @cached_property
    def num_items(self) -> int:
        return sum(len(column.items) for column in self.columns)

    @cached_property
    def device_us(self) -> tuple[float, ...]:
        return tuple(sum(x.us for x in c.items if isinstance(x, LaunchSegment)) for c in self.columns)


# Moves of state before each step, and the step.
ScriptedSteps = tuple[tuple[tuple[Script, ...], Script], ...]


def make_column(items: Sequence[Recv | LaunchSegment]) -> DeviceColumn:
    return DeviceColumn(tuple(items), until_wait(items, lambda x: x.us))


@dataclass(frozen=True)
class Wires:
    cluster: Cluster

    @cached_property
    def buses(self) -> tuple[str, ...]:
        """A bus carries one transfer at a time."""
        cpus = {d.name for d in self.cluster.devices if d.is_cpu}
        # Weights are fetched by a kernel, values by copies, so neither waits for the other.
        fetching = (_bus(x) + FETCHED for x in self.cluster.links if x.src in cpus)
        return tuple(dict.fromkeys([*map(_bus, self.cluster.links), *fetching]))

    @cached_property
    def _links(self) -> dict[tuple[int, int], tuple[Link, int]]:
        place = self.cluster.names.index
        return {(place(x.src), place(x.dst)): (x, self.buses.index(_bus(x))) for x in self.cluster.links}

    def slowdown(self, src: int, dst: int) -> float:
        return self._links[src, dst][0].fetch_slowdown

    def of(self, number: int, src: int, dst: int, num_bytes: int, is_fetched: bool = False) -> TransferWire:
        link, bus = self._links[src, dst]
        if is_fetched:
            bus, us = self.buses.index(_bus(link) + FETCHED), link.fetch_us(num_bytes)
            return TransferWire(number, src, dst, num_bytes, bus, us, 0.0)
        return TransferWire(number, src, dst, num_bytes, bus, link.wire_us(num_bytes), link.latency_us)


def _bus(link: Link) -> str:
    return link.group or f"{link.src} -> {link.dst}"


class Scripts:
    def __init__(self, unit: WorkUnit, costs: tuple[Costs, ...], cluster: Cluster) -> None:
        self.unit, self.costs, self.cluster = unit, costs, cluster
        self.wires = Wires(cluster)
        self._scripts: dict[object, Script] = {}
        self._lowering = UnitLowering(unit, len(cluster.devices))
        self._us = [np.array([[c.us for c in row] for row in x.costs]) for x in costs]

    def of(self, placement: Placement) -> tuple[Script, ...]:
        """With moves of state between steps."""
        return tuple(script for moves, step in self.steps(placement) for script in (*moves, step))

    def steps(self, placement: Placement) -> ScriptedSteps:
        moves, places = self._lowering.moves(placement), enumerate(placement.devices)
        return tuple(
            (
                tuple(self._script(source, (), tuple(transfers)) for source, transfers in moves[step]),
                self._script(step, place, fetched=placement.fetched),
            )
            for step, place in places
        )

    def _script(
        self, step: int, place: tuple[int, ...], moves: tuple[Transfer, ...] = (), fetched: Fetched = ()
    ) -> Script:
        """Without a placement, the moves alone."""
        key = (step, place, moves, fetched)
        if key not in self._scripts:
            num = len(self.cluster.devices)
            run = self._lowering.steps[step].run(place, fetched) if place else lower_moves(moves, num)
            self._scripts[key] = self._make(step, np.array(place, dtype=np.int64), run)
        return self._scripts[key]

    def _make(self, step: int, place: Ints, run: LoweredRun) -> Script:
        us = self._us[step][np.arange(len(place)), place]
        first = len(run.transfers) - len(run.fetches)
        for src, dst in {(x.src, x.dst) for x in run.transfers[first:]}:
            us = np.where(place == src, self.wires.slowdown(src, dst) * us, us)
        wires = [self.wires.of(n, t.src, t.dst, t.num_bytes, n >= first) for n, t in enumerate(run.transfers)]
        columns = []
        for device, points in enumerate(run.points):
            ends = np.concatenate([[0.0], np.cumsum(np.where(place == device, us, 0.0))]).tolist()
            columns.append(column_of(ends, points, wires))
        return Script(tuple(columns), self.unit.counts[step] if len(place) else 1, float(us.sum()), step)


def column_of(
    ends: list[float], points: Sequence[TransferPoint], wires: Sequence[TransferWire]
) -> DeviceColumn:
    items: list[Recv | LaunchSegment] = []
    done = 0  # launches before this one are in the column
    for launch, is_send, number in points:
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
