"""Lanes of all loaded plans, and which one the next microbatch takes.

Rule: the lane furthest below its share of the open microbatches, counting the new one; the first of equals.
Shares come from a plan's lane table (entry i is the lane of microbatch i), else from the lanes' rates.

Lanes of all plans ever loaded are numbered consecutively, so that a microbatch can finish on a lane of a
replaced plan; equal steps have one number. Groups of a service have microbatches of their own, so that
devices hold what their groups need; other plans share all.

A step may be queued behind the running one of its microbatch (`can_overlap`). Transfers land in the same
places in every step, so before a device sends in the next step, the receiver must have used what it received
in the last one. A lane queues only if its transfers assure this:

    the sender has heard, in the last step, from behind that use (directly or by way of others), or
    it has heard, in the next step, from a device that knew of it when its share of the last one ended.

Nearly all served lanes qualify: the choice of tokens depends on everything before it. Lanes that move state
between steps, or whose steps use different devices, do not.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, cycle, islice

from tessera.errors import MismatchError
from tessera.execute.lower import homes_of, in_order, lower, outputs_of
from tessera.ir import Costs, DeviceKind, Graph, Lane, Plan, Program, Recv, Run, Send, Trace
from tessera.kernels import BY_ROW, PAGE, is_paged

Pair = tuple[int, int]
ALL = 1 << 62


class LaneShares:
    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self.open = [0] * len(shares)

    def take(self, allowed: Sequence[int] | None = None) -> int:
        lanes = range(len(self._shares)) if allowed is None else allowed
        lane = min(lanes, key=lambda i: ((self.open[i] + 1) / self._shares[i], i))
        self.open[lane] += 1
        return lane

    def give_back(self, lane: int) -> None:
        self.open[lane] -= 1


def shares_of(lanes: Sequence[Lane], table: Sequence[int] = ()) -> list[float]:
    if not table:
        return [lane.rate_per_s for lane in lanes]
    counts = Counter(table)
    return [float(counts[i]) or 1e-9 for i in range(len(lanes))]


@dataclass(frozen=True, slots=True)
class PageBuffer:
    """Its outermost dimension is the page, or the row of a sequence."""

    device: int
    num_pages: int
    page_bytes: int


PageBuffers = Mapping[str, PageBuffer]


@dataclass(frozen=True, slots=True)
class Home:
    number: int
    buffers: PageBuffers


@dataclass(frozen=True, eq=False)
class LoadedLane:
    number: int
    plan: Plan
    # Numbers of the plan, and of the lane within it.
    policy: int
    index: int
    devices: frozenset[str]
    steps: tuple[int, ...]
    # None: each microbatch has its own state.
    home: int | None = None
    # Each microbatch has its own.
    rows: PageBuffers = field(default_factory=dict)
    # Microbatches that can be opened on it.
    microbatches: Sequence[int] = ()

    @property
    def lane(self) -> Lane:
        return self.plan.lanes[self.index]

    @cached_property
    def can_queue(self) -> bool:
        return len(self.devices) == 1 or can_overlap(self.plan, self.lane)

    @property
    def can_give(self) -> bool:
        """True if late inputs may follow a queued step.

        Not over several GPUs: their graphs are launched in one order, and a part launched later breaks it.
        """
        kinds = {d.kind for d in self.plan.cluster.devices if d.name in self.devices}
        return self.can_queue and (len(self.devices) == 1 or DeviceKind.CUDA not in kinds)


class Lanes:
    def __init__(self, plans: Sequence[Plan], microbatches: int | None = None) -> None:
        self._most = microbatches
        self.all: list[LoadedLane] = []
        self.graphs: list[Graph] = []
        self.costs: list[Costs | None] = []
        self.homes: dict[str, Home] = {}
        self.lost: set[str] = set()
        # Number of the first lane of the loaded plans, and the shares of each plan.
        self._first = 0
        self._shares: list[LaneShares] = []
        self._old: dict[int, LoadedLane] = {}
        self._numbers = count()
        self.load(plans)

    def load(self, plans: Sequence[Plan], in_use: Collection[int] = ()) -> tuple[LoadedLane, ...]:
        check_alike([*([self.all[0].plan] if self.all else []), *plans])
        self._add_homes(plans)
        self._old |= {lane.number: lane for lane in self.current}
        self._first = len(self.all)
        self._shares = [LaneShares(shares_of(plan.lanes, plan.lane_table)) for plan in plans]
        for (policy, plan), own in zip(enumerate(plans), shared_out(plans, self._most, in_use), strict=True):
            steps = self._number_steps(plan)
            home = self.homes[plan.home].number if plan.home else None
            for at in range(len(plan.lanes)):
                devices = devices_of(plan, at)
                rows = {} if home is None else _state_buffers(plan, plan.lanes[at])[1]
                self.all.append(LoadedLane(len(self.all), plan, policy, at, devices, steps, home, rows, own))
        return self.current

    @property
    def current(self) -> tuple[LoadedLane, ...]:
        """Lanes of the loaded plans."""
        return tuple(self.all[self._first :])

    def _number_steps(self, plan: Plan) -> tuple[int, ...]:
        numbers: list[int] = []
        for step, graph in enumerate(plan.graphs):
            equal = (
                number
                for number, other in enumerate(self.graphs)
                if number not in numbers and (other is graph or other.trace.digest == graph.trace.digest)
            )
            number = next(equal, len(self.graphs))
            if number == len(self.graphs):
                self.graphs.append(graph)
                self.costs.append(plan.costs[step] if plan.costs else None)
            numbers.append(number)
        return tuple(numbers)

    def drop(self, in_use: Collection[int], homes: Collection[int] = ()) -> list[int]:
        """Drops lanes of replaced plans that are neither `in_use` nor have one of these homes."""
        is_used = {lane.number for lane in self._old.values() if lane.home in homes} | set(in_use)
        gone = [number for number in self._old if number not in is_used]
        for number in gone:
            del self._old[number]
        if gone:
            kept = {lane.home for lane in (*self._old.values(), *self.current)}
            self.homes = {name: home for name, home in self.homes.items() if home.number in kept}
        return gone

    @property
    def replaced(self) -> tuple[Plan, ...]:
        return tuple({id(lane.plan): lane.plan for lane in self._old.values()}.values())

    def _add_homes(self, plans: Sequence[Plan]) -> None:
        """Raises MismatchError if plans of one home differ in pages."""
        homes = dict(self.homes)
        for plan in (plan for plan in plans if plan.home):
            for lane in plan.lanes:
                buffers, _ = _state_buffers(plan, lane)
                if plan.home not in homes:
                    homes[plan.home] = Home(next(self._numbers), buffers)
                if homes[plan.home].buffers != buffers:
                    message = f"plans of home '{plan.home}' have pages of other sizes or on other devices"
                    remedy = "Give lanes with other pages another home."
                    raise MismatchError(message, remedy, f"the {plan.policy} plan")
        self.homes = homes

    def open(self, policy: int | None = None) -> list[LoadedLane]:
        lanes = [lane for lane in self.current if policy in (None, lane.policy)]
        return [lane for lane in lanes if not lane.devices & self.lost]

    def take(self, policy: int) -> LoadedLane | None:
        """A lane of the policy, else of another; None: none is usable."""
        for candidate in (policy, *(p for p in range(len(self._shares)) if p != policy)):
            lanes = {lane.index: lane for lane in self.open(candidate)}
            if lanes:
                return lanes[self._shares[candidate].take(list(lanes))]
        return None

    def give_back(self, number: int) -> None:
        """Lanes of replaced plans are not counted."""
        if number >= self._first:
            lane = self.all[number]
            self._shares[lane.policy].give_back(lane.index)


def num_microbatches(plans: Sequence[Plan]) -> int:
    """As many as groups have, and one with which they are replaced one by one."""
    return max(1 + sum(plan.microbatches for plan in plans if plan.home), *(p.microbatches for p in plans))


def shared_out(plans: Sequence[Plan], most: int | None, in_use: Collection[int] = ()) -> list[Sequence[int]]:
    """Microbatches of each plan, `most` in all (None: what is needed), free ones first."""
    most = most or num_microbatches(plans)
    order = cycle(chain((number for number in range(most) if number not in in_use), sorted(in_use)))
    return [tuple(islice(order, min(p.microbatches, most))) if p.home else range(most) for p in plans]


def devices_of(plan: Plan, index: int) -> frozenset[str]:
    lane, names = plan.lanes[index], plan.cluster.names
    used: set[int] = set()
    for graph, place in zip(plan.graphs, lane.placement.devices, strict=True):
        used |= {*place, *(device for _, device in homes_of(graph, place))}
        used |= {device for _, device in outputs_of(graph, place)}
    return frozenset(names[device] for device in used)


def check_alike(plans: Sequence[Plan]) -> None:
    first = plans[0]
    for plan in plans[1:]:
        if plan.cluster != first.cluster:
            message = f"the {plan.policy} plan is for other devices than the {first.policy} plan"
            raise MismatchError(message, "Plan all policies for the same devices and link.")


def _state_buffers(plan: Plan, lane: Lane) -> tuple[PageBuffers, PageBuffers]:
    """Paged state, and state by row; raises MismatchError for other state."""
    pages, rows = dict[str, PageBuffer](), dict[str, PageBuffer]()
    for graph, place in zip(plan.graphs, lane.placement.devices, strict=True):
        step = graph.trace.step
        for index, device in homes_of(graph, place):
            buffer = graph.trace.buffers[index]
            is_by_row = buffer.name.startswith(BY_ROW)
            if not is_by_row and not is_paged(buffer.name):
                continue
            num = max(step.rows, step.batch) if is_by_row else step.reserve // PAGE
            page = PageBuffer(device, num, buffer.size_bytes // max(1, num))
            is_alike = (rows if is_by_row else pages).setdefault(buffer.name, page) == page
            if num * page.page_bytes != buffer.size_bytes or not is_alike:
                message = f"state '{buffer.name}' is not in pages, or not in the same ones in every step"
                raise MismatchError(message, "Plan without a home.", f"the {plan.policy} plan")
    return pages, rows


@dataclass(frozen=True)
class StepOrder:
    """What devices know of one another in a step. Events of a device are its sends and receives."""

    devices: frozenset[int]
    # [device]: its vector clock at the end of its share, events of each device.
    clocks: tuple[tuple[int, ...], ...]
    # Event of the destination after its last use of what it received.
    needed: dict[Pair, int]
    # Devices that have begun the step when the source first sends to the destination.
    begun: dict[Pair, frozenset[int]]

    def can_precede(self, following: "StepOrder") -> bool:
        return self.devices == following.devices and all(
            max(self.clocks[device][pair[1]] for device in begun) >= self.needed.get(pair, 0)
            for pair, begun in following.begun.items()
        )


def can_overlap(plan: Plan, lane: Lane) -> bool:
    (programs,) = lower(replace(plan, lanes=(lane,)))
    if len(programs) > len(plan.graphs):  # some only move state
        return False
    orders = [order_of(graph.trace, program) for graph, program in zip(plan.graphs, programs, strict=True)]
    return all(one.can_precede(other) for one in orders for other in orders)


def order_of(trace: Trace, program: Program) -> StepOrder:
    num = len(program.instructions)
    clocks = [[0] * num for _ in range(num)]
    begun = [frozenset({device}) for device in range(num)]
    first: dict[Pair, frozenset[int]] = {}
    sent: dict[int, tuple[list[int], frozenset[int]]] = {}
    # (device, buffer) -> events of the device before it last uses the buffer
    used: dict[Pair, int] = {}
    for device, instruction in in_order(program):
        if isinstance(instruction, Run):
            buffers = trace.launches[instruction.launch].buffers
            used.update({(device, buffer): clocks[device][device] for buffer in buffers})
        elif isinstance(instruction, Send):
            clocks[device][device] += 1
            sent[instruction.transfer] = list(clocks[device]), begun[device]
            first.setdefault((device, program.transfers[instruction.transfer].dst), begun[device])
        elif isinstance(instruction, Recv):
            clocks[device][device] += 1
            clock, others = sent[instruction.transfer]
            clocks[device] = [max(pair) for pair in zip(clocks[device], clock, strict=True)]
            begun[device] |= others
    # Outputs are read after the end, and buffers that are sent on by streams of their own.
    lasting = {(device, view.buffer) for device in range(num) for _, view in trace.outputs}
    lasting |= {(transfer.src, transfer.buffer) for transfer in program.transfers}
    needed: dict[Pair, int] = {}
    for transfer in program.transfers:  # received buffers are used where they land
        pair, end = (transfer.src, transfer.dst), (transfer.dst, transfer.buffer)
        after = used.get(end, 0) + 1
        is_lasting = end in lasting or after > clocks[transfer.dst][transfer.dst]
        needed[pair] = max(needed.get(pair, 0), ALL if is_lasting else after)
    for device in range(num):
        clocks[device][device] = ALL
    devices = {device for device, _ in used} | {device for _, device in program.outputs}
    return StepOrder(frozenset(devices), tuple(map(tuple, clocks)), needed, first)
