"""The planning problem as arrays: nodes to place, values to move, memory.

A node is a set of launches that share a device: one launch, a group with shared state, or all immovable
launches. A value is a hyperedge from a node to its readers, paid once per (value, destination) and run; state
shared by consecutive steps is paid once per request. Links of a bus share a row of busy time. A device holds
its weights once, and per microbatch its state and the temporaries of the largest step. Step inputs and
outputs are free.

Devices are alike if costs, memory, rent, power, constraints and links are equal. Swapping them preserves
rates, so some optimum loads them equally, and the linear program over one device per kind has the same
optimum. Not handled: buses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice, product
from math import gcd, lcm, prod
from typing import Any, TypeVar

import numpy as np

from tessera import ir
from tessera.plan import arrays
from tessera.plan.arrays import Bools, Floats, Holdings, Ints, Labels, Temporaries, Values
from tessera.plan.constraints import Constraint, allowed, layers_of

Result = TypeVar("Result")
MESSAGE_US = 1.0
# Price changes in `spread_us`.
SPREAD_ROUNDS = 39

# Devices of each copy of a part.
Cells = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Column:
    # Bytes of the labels: columns with equal labels are equal.
    key: bytes
    labels: Labels = field(compare=False)
    # Devices, then links (row-major, source first).
    busy_us: Floats = field(compare=False)
    # Launches and transfers in sequence, with latencies.
    path_us: float = field(compare=False)
    num_messages: float = field(compare=False)


@dataclass(frozen=True)
class Mix:
    """Shares sum to one."""

    columns: tuple[Column, ...]
    shares: tuple[float, ...]
    # Per column; empty: by `microbatch_counts`.
    microbatches: tuple[int, ...] = ()

    @cached_property
    def busy_us(self) -> Floats:
        rows = np.array([c.busy_us for c in self.columns])
        return np.asarray(np.array(self.shares) @ rows, dtype=np.float64)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(np.unique(np.concatenate([c.labels for c in self.columns])).tolist())

    @property
    def rate_per_s(self) -> float:
        return 1e6 / float(self.busy_us.max())

    @property
    def num_messages(self) -> float:
        return sum(share * c.num_messages for share, c in zip(self.shares, self.columns, strict=True))


def by_speed(columns: Sequence[Column]) -> Mix:
    """For columns that share no device."""
    speeds = [1.0 / float(c.busy_us.max()) for c in columns]
    return Mix(tuple(columns), tuple(s / sum(speeds) for s in speeds))


@dataclass(frozen=True, eq=False)
class Problem:
    unit: ir.WorkUnit
    costs: tuple[ir.Costs, ...]
    cluster: ir.Cluster
    # node_of[step][launch]
    node_of: tuple[Ints, ...]
    # cost_us[step][launch, device] per run.
    cost_us: tuple[Floats, ...]
    # load_us[node, device] per request.
    load_us: Floats
    values: Values
    weights: Holdings
    states: Holdings
    # [source, destination].
    us_per_byte: Floats
    latency_us: Floats
    memory_bytes: Floats
    temporaries: tuple[Temporaries, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    # [node, device]; None: all.
    allowed: Bools | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.load_us)

    @property
    def num_devices(self) -> int:
        return len(self.cluster.devices)

    @cached_property
    def layer_of_node(self) -> tuple[Ints, int] | None:
        layers = layers_of(self.unit)
        return None if layers is None else (self.vote(*layers), layers[1])

    def vote(self, marks: Sequence[Ints], num: int) -> Ints:
        """Node -> mark with most of its work; marks[step][launch]."""
        votes = np.zeros((self.num_nodes, num))
        for nodes, mark, costs, count in zip(
            self.node_of, marks, self.cost_us, self.unit.counts, strict=True
        ):
            np.add.at(votes, (nodes, mark), count * (costs.mean(axis=1) + 1e-9))
        return np.asarray(votes.argmax(axis=1), dtype=np.int64)

    @cached_property
    def link_row(self) -> Ints:
        return arrays.link_rows(self.cluster)

    @cached_property
    def wire_us(self) -> Floats:
        """[value, source, destination] per request."""
        return self._per_message(np.full_like(self.latency_us, MESSAGE_US))

    @cached_property
    def transfer_us(self) -> Floats:
        return self._per_message(self.latency_us)

    def _per_message(self, fixed_us: Floats) -> Floats:
        one = self.values.num_bytes[:, None, None] * self.us_per_byte + fixed_us
        paid = self.values.runs[:, None, None] * one
        paid[:, range(self.num_devices), range(self.num_devices)] = 0.0
        return paid

    def column(self, labels: Labels) -> Column:
        num = self.num_devices
        nodes = np.arange(self.num_nodes)
        node_us = self.load_us[nodes, labels]
        value, src, dst = self.crossings(labels)
        rows = self.link_row[src * num + dst]
        links = np.bincount(rows, weights=self.wire_us[value, src, dst], minlength=num * num)
        busy = np.concatenate([np.bincount(labels, weights=node_us, minlength=num), links])
        path = float(node_us.sum() + self.transfer_us[value, src, dst].sum())
        return Column(labels.tobytes(), labels, busy, path, float(self.values.runs[value].sum()))

    def alone(self, device: int) -> Column:
        return self.column(np.full(self.num_nodes, device, dtype=np.int64))

    def crossings(self, labels: Labels) -> tuple[Ints, Ints, Ints]:
        """(value, source, destination) of every transfer."""
        vals = self.values
        needed = np.zeros((len(vals), self.num_devices), dtype=np.bool_)
        needed[vals.pin_value, labels[vals.pin_node]] = True
        home = labels[vals.producer]
        needed[np.arange(len(vals)), home] = False
        value, dst = np.nonzero(needed)
        return value, home[value], dst

    def placement(self, labels: Labels) -> ir.Placement:
        return ir.Placement(tuple(tuple(labels[nodes].tolist()) for nodes in self.node_of))

    def labels(self, placement: ir.Placement) -> Labels:
        """The placement must not split nodes."""
        labels = np.zeros(self.num_nodes, dtype=np.int64)
        for nodes, devices in zip(self.node_of, placement.devices, strict=True):
            labels[nodes] = devices
        return labels

    def excess_bytes(self, columns: Iterable[Column], microbatches: int | Sequence[int]) -> Floats:
        """Weights count once. `microbatches`: per column, or one number for the largest."""
        fixed, each = self.footprints(columns)
        if isinstance(microbatches, int):
            return np.asarray(fixed + microbatches * each.max(axis=0) - self.memory_bytes)
        return np.asarray(fixed + np.asarray(microbatches) @ each - self.memory_bytes)

    def footprints(self, columns: Iterable[Column]) -> tuple[Floats, Floats]:
        """(weights per device, [column, device] per request)."""
        num = self.num_devices
        held = np.zeros((len(self.weights.num_bytes), num), dtype=np.bool_)
        each: list[Floats] = []
        for column in columns:
            if column not in self._held:
                present = self.weights.present(column.labels, num)
                self._held[column] = present, self.microbatch_bytes(column.labels)
            present, per_microbatch = self._held[column]
            held |= present
            each.append(per_microbatch)
        return np.asarray(self.weights.num_bytes @ held, dtype=np.float64), np.array(each).reshape(-1, num)

    def once(self, key: object, make: Callable[[], Result]) -> Result:
        """Makes it for the first pool that asks: pools differ in microbatches."""
        if key not in self._results:
            self._results[key] = make()
        result: Result = self._results[key]
        return result

    @cached_property
    def _results(self) -> dict[object, Any]:
        return {}

    @cached_property
    def _held(self) -> dict[Column, tuple[Bools, Floats]]:
        return {}

    def resident(self, microbatches: float, tilt: float = 0.0) -> Holdings:
        """Charged per byte; `tilt` raises prices towards the last launches."""
        weights, states = self.weights, self.states
        num_bytes = np.concatenate([weights.num_bytes, microbatches * states.num_bytes])
        item = np.concatenate([weights.pin_item, states.pin_item + len(weights.num_bytes)])
        node = np.concatenate([weights.pin_node, states.pin_node])
        if tilt:
            first = np.full(len(num_bytes), self.num_nodes)
            np.minimum.at(first, item, node)
            num_bytes = num_bytes * (1 + tilt * (2 * first / self.num_nodes - 1))
        return Holdings(num_bytes, item, node)

    def microbatch_bytes(self, labels: Labels) -> Floats:
        num = self.num_devices
        peaks = [step.peak_bytes(labels, num) for step in self.temporaries]
        return np.asarray(self.states.bytes_on(labels, num) + np.max([np.zeros(num), *peaks], axis=0))

    @cached_property
    def most_temporary_bytes(self) -> float:
        # A device that runs everything holds each buffer longest.
        whole = np.zeros(self.num_nodes, dtype=np.int64)
        return max((float(step.peak_bytes(whole, 1)[0]) for step in self.temporaries), default=0.0)

    def microbatches_that_fit(self, mix: Mix, microbatches: int = 1) -> int | None:
        """None: unlimited."""
        fixed, each = self.footprints(mix.columns)
        held = each[list(microbatch_table(mix, microbatches))].cumsum(axis=0)  # by the first of the table
        left, turn = self.memory_bytes - fixed, held[-1]
        if not turn.any():
            return None
        turns = max(0, int((left[turn > 0] // turn[turn > 0]).min()))
        return turns * len(held) + int((held <= left - turns * turn).all(axis=1).sum())

    def is_allowed(self, labels: Labels) -> bool:
        return self.allowed is None or bool(self.allowed[np.arange(len(labels)), labels].all())

    def fits(self, columns: Iterable[Column], microbatches: int | Sequence[int]) -> bool:
        candidates = list(columns)
        return all(self.is_allowed(c.labels) for c in candidates) and bool(
            (self.excess_bytes(candidates, microbatches) <= 0).all()
        )


def build(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    constraints: tuple[Constraint, ...] = (),
    memory_share: float = 1.0,
) -> Problem:
    """Unmatched constraints are allowed."""
    arrays.check(unit, costs, cluster)
    node_of, num_nodes = arrays.contract(unit)
    cost_us = tuple(np.array([[c.us for c in row] for row in x.costs], dtype=np.float64) for x in costs)
    load = np.zeros((num_nodes, len(cluster.devices)))
    for nodes, us, count in zip(node_of, cost_us, unit.counts, strict=True):
        np.add.at(load, nodes, us * count)
    arrays.check_load(load, cluster)
    us_per_byte, latency = arrays.wires(cluster)
    return Problem(
        unit=unit,
        costs=costs,
        cluster=cluster,
        node_of=node_of,
        cost_us=cost_us,
        load_us=load,
        values=Values(unit, node_of),
        weights=arrays.holdings_of(unit, node_of, ir.BufferKind.WEIGHT),
        states=arrays.holdings_of(unit, node_of, ir.BufferKind.STATE),
        us_per_byte=us_per_byte,
        latency_us=latency,
        memory_bytes=memory_share * np.array([d.memory_bytes for d in cluster.devices], dtype=np.float64),
        temporaries=tuple(Temporaries(g, n) for g, n in zip(unit.graphs, node_of, strict=True)),
        constraints=constraints,
        allowed=allowed(unit, node_of, num_nodes, constraints, cluster.devices),
    )


def spread_us(load: Floats, rounds: int = SPREAD_ROUNDS) -> float:
    """Lower bound of the busiest device's time over fractional assignments; load[row, device]."""
    # Any prices that sum to one prove a bound.
    num = load.shape[1]
    prices = 1.0 / np.maximum(load.sum(axis=0), 1e-12)
    prices /= prices.sum()
    best = 0.0
    for round_number in range(1, rounds + 1):
        priced = load * prices
        best = max(best, float(priced.min(axis=1).sum()))
        choice = priced.argmin(axis=1)
        busy = np.bincount(choice, weights=load[np.arange(len(choice)), choice], minlength=num)
        prices = prices * np.exp((busy / max(busy.max(), 1e-12) - 0.5) / round_number)
        prices /= prices.sum()
    return best


def cluster_of(cluster: ir.Cluster, devices: Sequence[int]) -> ir.Cluster:
    kept = tuple(cluster.devices[d] for d in devices)
    names = {d.name for d in kept}
    return ir.Cluster(kept, tuple(x for x in cluster.links if x.src in names and x.dst in names))


def costs_on(costs: Sequence[ir.Costs], devices: Sequence[int]) -> tuple[ir.Costs, ...]:
    return tuple(
        ir.Costs(
            priced.trace_digest,
            tuple(priced.devices[d] for d in devices),
            tuple(tuple(row[d] for d in devices) for row in priced.costs),
        )
        for priced in costs
    )


def restricted(problem: Problem, devices: Sequence[int]) -> Problem | None:
    """None if the constraints forbid it."""
    at = list(devices)
    places = None if problem.allowed is None else problem.allowed[:, at]
    if places is not None and not places.any(axis=1).all():
        return None
    cluster = cluster_of(problem.cluster, devices)
    return replace(
        problem,
        cluster=cluster,
        costs=costs_on(problem.costs, devices),
        cost_us=tuple(us[:, at] for us in problem.cost_us),
        load_us=problem.load_us[:, at],
        us_per_byte=problem.us_per_byte[np.ix_(at, at)],
        latency_us=problem.latency_us[np.ix_(at, at)],
        memory_bytes=problem.memory_bytes[at],
        allowed=places,
    )


def mix_of(problem: Problem, plan: ir.Plan) -> Mix:
    columns = tuple(problem.column(problem.labels(lane.placement)) for lane in plan.lanes)
    rates = [lane.rate_per_s for lane in plan.lanes]
    mix = Mix(columns, tuple(rate / sum(rates) for rate in rates))
    return replace(mix, microbatches=plan.followers or microbatch_counts(mix, plan.microbatches))


def microbatch_table(mix: Mix, microbatches: int) -> tuple[int, ...]:
    """Spread evenly; with too few microbatches, the busiest lanes once each."""
    counts = microbatch_counts(mix, microbatches)
    if len(counts) > microbatches:
        return tuple(np.argsort(-np.array(mix.shares), kind="stable").tolist())
    return tuple(islice(ir.lane_sequence(counts), sum(counts)))


def microbatch_counts(mix: Mix, microbatches: int) -> tuple[int, ...]:
    """Share x path time (Little's law), by largest remainder."""
    if mix.microbatches:
        return mix.microbatches
    held = np.array([s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True)])
    return tuple(rounded(held / held.sum(), max(microbatches, len(held))).tolist())


def rounded(shares: Floats, length: int) -> Ints:
    exact = shares * length
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while counts.sum() < length:
        counts[int((exact - counts).argmax())] += 1
    while counts.sum() > length:
        spare = np.where(counts > 1, counts - exact, -np.inf)
        counts[int(spare.argmax())] -= 1
    return counts


@dataclass(frozen=True, eq=False)
class Kinds:
    members: tuple[tuple[int, ...], ...]
    kind_of: Ints
    # On one device of each kind.
    part: Problem

    @property
    def limits(self) -> Floats:
        """Capacity of kinds and of links between kinds."""
        counts = np.array([len(m) for m in self.members], dtype=np.float64)
        return np.concatenate([counts, np.outer(counts, counts).ravel()])

    def spread(self, labels: Labels, max_pairings: int) -> Iterator[Labels]:
        """Devices of a kind take equal turns: in all pairings or, if too many, all kinds in step."""
        used = np.unique(labels)
        members = [self.members[kind] for kind in used.tolist()]
        counts = [len(kind) for kind in members]
        in_step = islice(zip(*map(cycle, members), strict=False), lcm(*counts))
        device_of = np.zeros(len(self.members), dtype=np.int64)
        for way in product(*members) if prod(counts) <= max_pairings else in_step:
            device_of[used] = way
            yield device_of[labels]


def alike_devices(problem: Problem) -> list[list[int]]:
    members: list[list[int]] = []
    for device in range(problem.num_devices):
        kind = next((kind for kind in members if _alike(problem, kind[0], device)), None)
        if kind is None:
            members.append([device])
        else:
            kind.append(device)
    return members


def kinds_of(problem: Problem) -> Kinds | None:
    """None if all differ, or links share a bus."""
    num, members = problem.num_devices, alike_devices(problem)
    if num < 3 or len(members) == num or (problem.link_row != np.arange(num * num)).any():
        return None
    kind_of = np.zeros(num, dtype=np.int64)
    for number, kind in enumerate(members):
        kind_of[kind] = number
    part = restricted(problem, [kind[0] for kind in members])
    assert part is not None, "what a device may run, one of its kind may"
    return Kinds(tuple(tuple(kind) for kind in members), kind_of, part)


def _alike(problem: Problem, a: int, b: int) -> bool:
    one, other = (problem.cluster.devices[d] for d in (a, b))
    swapped = np.arange(problem.num_devices)
    swapped[[a, b]] = b, a
    columns = [problem.load_us] if problem.allowed is None else [problem.load_us, problem.allowed]
    return (
        (one.memory_bytes, one.usd_per_hour, one.tdp_w)
        == (other.memory_bytes, other.usd_per_hour, other.tdp_w)
        and all(np.array_equal(x[:, a], x[:, b]) for x in columns)
        and all(
            np.array_equal(x, x[np.ix_(swapped, swapped)]) for x in (problem.us_per_byte, problem.latency_us)
        )
    )


def cells_of(members: Sequence[Sequence[int]], copies: int) -> Cells:
    """Each has as many devices of a kind, at the same places."""
    sizes = [len(kind) // copies for kind in members]
    return tuple(
        tuple(d for kind, n in zip(members, sizes, strict=True) for d in kind[at * n : (at + 1) * n])
        for at in range(copies)
    )


def partitions(members: Sequence[Sequence[int]]) -> Iterator[tuple[Cells, ...]]:
    """Equal copies of one cell; and one device of each kind, with the rest."""
    counts = [len(kind) for kind in members]
    if gcd(*counts) > 1:
        yield (cells_of(members, gcd(*counts)),)
    least = min(counts)
    if len(counts) > 1 and max(counts) > least:
        pairs = tuple(tuple(kind[at] for kind in members) for at in range(least))
        rest = (tuple((d,) for d in kind[least:]) for kind in members if len(kind) > least)
        yield (pairs, *rest)
