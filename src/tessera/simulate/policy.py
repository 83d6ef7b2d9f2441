"""Policy: a plan made ready for a machine, timed by what is true and not by what the plan believes.

The truth is a price list of its own: that of the first plan, with every kernel type mispriced on every device
by a factor drawn from the seed, and with devices that became slow. All plans are timed by the same truth,
whatever costs they were made with. Devices are matched by name, so a plan for fewer devices runs on the
same machine.

A request's runs: the head (everything before the decodes: encode, prefill, moves of state) once for the
requests that join a slot together, then the body (a decode) again and again. A work unit that does not end in
a decode has no body: its requests run every step as often as the unit says and leave together. A head takes
time in proportion to the prompt tokens that joined, in sixteenths of the captured one (modelled); a decode
takes what the captured batch and context take, however many rows are in use and wherever they stand.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.errors import MismatchError
from tessera.execute.schedule import LaneTable
from tessera.ir import BufferKind, Cluster, Costs, Placement, Plan, Recv
from tessera.simulate.columns import Script, Scripts, Stretch, Wire, make_column
from tessera.simulate.machine import Work
from tessera.simulate.open_lanes import OpenLanes, Table

# Heads are timed in this many parts of a whole one.
PARTS = 16


@dataclass(frozen=True)
class Truth:
    """What each launch really takes: the costs of a plan, times factors by kernel type and by device."""

    plan: Plan
    noise: float = 0.0
    seed: int = 0
    # (device, factor) of devices that are slower than they should be.
    slow: tuple[tuple[str, float], ...] = ()

    @property
    def cluster(self) -> Cluster:
        """All devices there are."""
        return self.plan.cluster

    def factor(self, kernel: str, device: str) -> float:
        """How many times as long as modelled a kernel type takes on a device; its logarithm is normal."""
        found = math.prod(factor for name, factor in self.slow if name == device)
        if not self.noise:
            return found
        words = [self.seed, zlib.crc32(kernel.encode()), zlib.crc32(device.encode())]
        return found * math.exp(self.noise * float(np.random.default_rng(words).standard_normal()))

    def costs(self) -> tuple[Costs, ...]:
        """The price lists that hold."""
        return tuple(
            scaled_costs(costs, [graph.trace.kernel_of(n).name for n in range(len(costs.costs))], self.factor)
            for graph, costs in zip(self.plan.unit.graphs, self.plan.costs, strict=True)
        )

    def scripts(self) -> Scripts:
        """Makes what devices do of placements on all devices."""
        return Scripts(self.plan.unit, self.costs(), self.cluster)


def scaled_costs(costs: Costs, kernels: list[str], factor: Callable[[str, str], float]) -> Costs:
    """Costs with every time multiplied by factor(kernel, device)."""
    names = [d.name for d in costs.devices]
    known = {(k, d): factor(k, d) for k in set(kernels) for d in names}
    rows = tuple(
        tuple(replace(c, us=c.us * known[kernel, d]) for c, d in zip(row, names, strict=True))
        for row, kernel in zip(costs.costs, kernels, strict=True)
    )
    return replace(costs, costs=rows)


@dataclass(frozen=True, eq=False, slots=True)
class Lane:
    """One lane: what its requests run, and the devices it needs."""

    index: int
    placement: Placement
    head: tuple[Script, ...]
    body: Script | None
    devices: frozenset[str]


@dataclass(eq=False)
class Workshop:
    """What the policies of one machine share: scripts by the truth, and the names of works."""

    truth: Truth
    # Works are named from here on; a workshop that replaces another goes on where that one was.
    next_number: int = 0
    scripts: Scripts = field(init=False)
    _works: dict[tuple[int, float], Work] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scripts = self.truth.scripts()

    def work(self, script: Script, scale: float = 1.0) -> Work:
        """A run of a script; the same one for the same script and factor."""
        key = (id(script), scale)
        if key not in self._works:
            self._works[key] = Work(self.next_number, script, scale)
            self.next_number += 1
        return self._works[key]


@dataclass(eq=False)
class Policy:
    """A plan in a workshop."""

    name: str
    plan: Plan
    shop: Workshop
    lanes: tuple[Lane, ...] = field(init=False)
    _planned: dict[Lane, dict[str, dict[str, float]]] = field(default_factory=dict)
    _true: dict[Lane, dict[str, dict[str, float]]] = field(default_factory=dict)
    # By both lanes, which are kept so that nothing else gets their identity.
    _moves: dict[tuple[Lane, Lane], Script | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = set(self.plan.cluster.names) - set(self.shop.truth.cluster.names)
        if missing:
            message = f"the plan '{self.name}' needs {', '.join(sorted(missing))}, which is not there"
            raise MismatchError(message, "Plan again with the devices there are.")
        if self.plan.unit != self.shop.truth.plan.unit:
            raise MismatchError(f"the plan '{self.name}' is for other work", "Plan the same traces.")
        self.lanes = tuple(self._lane(index) for index in range(len(self.plan.lanes)))

    @property
    def has_body(self) -> bool:
        """True if requests may join and leave between decodes."""
        return self.lanes[0].body is not None

    def table(
        self, without: frozenset[str] = frozenset(), is_shared: bool = False
    ) -> tuple[Table, tuple[Lane, ...]] | None:
        """Who goes where, on lanes that avoid some devices; None if there is no such lane.

        Requests come and go in slots that are shared; else a slot is one request.
        """
        usable = tuple(lane for lane in self.lanes if not lane.devices & without)
        if not usable:
            return None
        kept = [self.plan.lanes[lane.index] for lane in usable]
        order = self.plan.lane_table if len(usable) == len(self.lanes) else ()
        if is_shared and self.has_body:
            return OpenLanes(kept, order), usable
        return LaneTable(kept, self.plan.slots, order), usable

    def body(self, lane: Lane) -> Work:
        """One decode."""
        assert lane.body is not None, "only units that end in a decode have a body"
        return self.shop.work(lane.body)

    def head(self, lane: Lane, share: float) -> list[Work]:
        """What requests that join together run first, for their share of a whole head."""
        scale = _parts(share) / PARTS
        return [self.shop.work(script, scale) for script in lane.head for _ in range(script.count)]

    def handover(self, lane: Lane, new: Lane, share: float) -> Work | None:
        """Moves the state of a slot from one lane to another, of whichever policy; None if it stays."""
        key = (lane, new)
        if key not in self._moves:
            self._moves[key] = self._handover(lane.placement, new.placement)
        script = self._moves[key]
        return None if script is None else self.shop.work(script, _parts(share) / PARTS)

    def busy_us(self, lane: Lane) -> dict[str, dict[str, float]]:
        """Device -> kernel -> microseconds in one run of the body (or of all, without one), as planned."""
        if lane not in self._planned:
            placement = self.plan.lanes[lane.index].placement
            self._planned[lane] = _by_kernel(self.plan, self.plan.costs, placement, lane.body)
        return self._planned[lane]

    def true_us(self, lane: Lane) -> dict[str, dict[str, float]]:
        """The same as it is, and not as planned."""
        if lane not in self._true:
            shop = self.shop
            self._true[lane] = _by_kernel(shop.truth.plan, shop.scripts.costs, lane.placement, lane.body)
        return self._true[lane]

    def wire_us(self, lane: Lane) -> dict[str, float]:
        """Bus -> microseconds in the same."""
        names = bus_names(self.shop.truth.cluster)
        found: dict[str, float] = {}
        for script in lane.head if lane.body is None else (lane.body,):
            for item in (item for column in script.columns for item in column.items):
                for wire in item.sends if isinstance(item, Stretch) else ():
                    found[names[wire.bus]] = found.get(names[wire.bus], 0.0) + wire.wire_us
        return found

    def _lane(self, index: int) -> Lane:
        names = self.plan.cluster.names
        place = [self.shop.truth.cluster.names.index(name) for name in names]
        own = self.plan.lanes[index].placement.devices
        placement = Placement(tuple(tuple([place[d] for d in step]) for step in own))
        scripts = self.shop.scripts.of(placement)
        is_decode = self.plan.unit.graphs[-1].trace.step.kind == "decode"
        head, body = (scripts[:-1], scripts[-1]) if is_decode else (scripts, None)
        used = frozenset(names[d] for step in own for d in step)
        return Lane(index, placement, head, body, used)

    def _handover(self, old: Placement, new: Placement) -> Script | None:
        """State whose home differs goes there, one message a buffer."""
        graph, wires_of = self.plan.unit.graphs[-1], self.shop.scripts.wires.of
        sizes = {b.name: b.size_bytes for b in graph.trace.buffers if b.kind is BufferKind.STATE}
        columns: list[list[Recv | Stretch]] = [[] for _ in self.shop.truth.cluster.devices]
        sends: dict[int, list[Wire]] = {}
        for name, group in sorted(graph.state_groups.items()):
            launch = graph.groups[group][0]
            src, dst = old.devices[-1][launch], new.devices[-1][launch]
            if src != dst:
                number = sum(map(len, sends.values()))
                sends.setdefault(src, []).append(wires_of(number, src, dst, sizes[name]))
                columns[dst].append(Recv(number))
        if not sends:
            return None
        for src, wires in sends.items():
            columns[src].insert(0, Stretch([0.0], 0, 0, tuple(wires)))
        return Script(tuple(make_column(c) for c in columns), 1, 0.0, len(self.plan.unit.graphs) - 1)


def bus_names(cluster: Cluster) -> tuple[str, ...]:
    """The buses, in the order in which scripts count them."""
    return tuple(dict.fromkeys(x.group or f"{x.src} -> {x.dst}" for x in cluster.links))


def _parts(share: float) -> int:
    return max(1, math.ceil(share * PARTS - 1e-9))


def _by_kernel(
    plan: Plan, costs: tuple[Costs, ...], placement: Placement, body: Script | None
) -> dict[str, dict[str, float]]:
    steps = range(len(plan.unit.graphs)) if body is None else [body.step]
    found: dict[str, dict[str, float]] = {}
    for step in steps:
        trace = plan.unit.graphs[step].trace
        for launch, device in enumerate(placement.devices[step]):
            here = found.setdefault(plan.cluster.names[device], {})
            kernel = trace.kernel_of(launch).name
            here[kernel] = here.get(kernel, 0.0) + costs[step].us(launch, device)
    return found
