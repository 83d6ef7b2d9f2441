"""Lowering: a plan becomes programs, one instruction list per device.

Each lane becomes a list of programs in running order: every step once, and between two steps whose state
lives on different devices a program that only moves the state. Within a program every device keeps trace
order; `ir.plan` says why that cannot deadlock.

Programs and the simulator's scripts (`simulate.columns`) come from one `LoweredRun`, so it times what
workers run.

`check_programs` proves a program before it runs. The rules, beyond those of `ir.verify`:
  - every launch of the step runs once, on one device
  - the lists end: no circular wait
  - every launch and transfer finds the version it needs on its device
  - nothing is used after it is freed
  - weights are fetched in the order of their launches, and into places whose launch has run
  - every output and state is present, in its last version, at the end of the step
One order stands for all: lists run in order and transfers copy, so what a device holds at a position of its
list does not depend on timing.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.errors import RuleBroken

# Version of a buffer before a step, and of state that a program only moves.
INITIAL = -1
FREED = -2

# (launch, 0: received before it or 1: sent after it, transfer)
TransferPoint = tuple[int, int, int]
# (state buffer, last launch that touches it)
StateLaunches = tuple[tuple[int, int | None], ...]
Fetched = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class LoweredRun:
    """Transfers of a step's run, or of a move of state, and their points among the launches."""

    transfers: tuple[ir.Transfer, ...]
    points: tuple[tuple[TransferPoint, ...], ...]
    # Launches whose weights the last transfers fetch: begun by the reading device, ahead of the launch.
    fetches: tuple[int, ...] = ()


class StepLowering:
    def __init__(self, graph: ir.Graph, num_devices: int) -> None:
        self.graph, self.num_devices = graph, num_devices
        values = [
            (n, v) for n, v in enumerate(graph.values) if v.producer is not None and v.num_bytes and v.readers
        ]
        self._values = [n for n, _ in values]
        self._producers = np.array([v.producer for _, v in values], dtype=np.int64)
        pins = [(row, reader) for row, (_, v) in enumerate(values) for reader in v.readers]
        self._pins = np.array(pins, dtype=np.int64).reshape(-1, 2).T.copy()
        self._state = _state_launches(graph.trace)
        self._weights = [
            (n, graph.trace.buffers[b].name, b)
            for n, launch in enumerate(graph.trace.launches)
            for b in sorted({access.buffer for access in launch.accesses})
            if graph.trace.buffers[b].kind is ir.BufferKind.WEIGHT
        ]

    def homes(self, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(state buffer, device): where its launches are, or device 0 if none touches it."""
        return _homes(self._state, place)

    def run(self, place: Sequence[int], fetched: Fetched = ()) -> LoweredRun:
        """One transfer per value and reading device, in trace order."""
        num = self.num_devices
        rows, readers = self._pins
        devices = np.array(place, dtype=np.int64)
        targets = devices[readers]
        crossing = targets != devices[self._producers][rows]
        # The first pin of a (value, device) is its first reader.
        pairs, first = np.unique(rows[crossing] * num + targets[crossing], return_index=True)
        row, dst, reader = pairs // num, pairs % num, readers[crossing][first]
        producer = self._producers[row]
        order = np.lexsort((dst, producer))
        transfers: list[ir.Transfer] = []
        points: list[list[TransferPoint]] = [[] for _ in range(num)]
        columns = (x[order].tolist() for x in (row, producer, reader, dst))
        for at, launch, first_reader, target in zip(*columns, strict=True):
            number = self._values[at]
            src = place[launch]
            points[src].append((launch, 1, len(transfers)))
            points[target].append((first_reader, 0, len(transfers)))
            value = self.graph.values[number]
            transfers.append(ir.Transfer(number, value.buffer, value.start, value.stop, src, target))
        run = LoweredRun(tuple(transfers), tuple(tuple(sorted(x)) for x in points))
        return self._with_fetches(run, place, dict(fetched)) if fetched else run

    def _with_fetches(self, run: LoweredRun, place: Sequence[int], hosts: Mapping[str, int]) -> LoweredRun:
        transfers, fetches, points = list(run.transfers), list[int](), [list(x) for x in run.points]
        ahead: list[list[int]] = [[] for _ in points]
        for launch, name, buffer in self._weights:
            device = place[launch]
            if hosts.get(name, device) == device:
                continue
            if launch not in ahead[device][-1:]:
                ahead[device].append(launch)
            after = ahead[device][-1 - ir.SLOTS] if len(ahead[device]) > ir.SLOTS else -1
            points[device] += [(after, 1, len(transfers)), (launch, 0, len(transfers))]
            size = self.graph.trace.buffers[buffer].size_bytes
            transfers.append(ir.Transfer(INITIAL, buffer, 0, size, hosts[name], device))
            fetches.append(launch)
        return LoweredRun(tuple(transfers), tuple(tuple(sorted(x)) for x in points), tuple(fetches))


def lower_moves(moves: Sequence[ir.Transfer], num_devices: int) -> LoweredRun:
    points: list[list[TransferPoint]] = [[] for _ in range(num_devices)]
    for number, move in enumerate(moves):
        points[move.src].append((-1, 1, number))
        points[move.dst].append((0, 0, number))
    return LoweredRun(tuple(moves), tuple(tuple(sorted(x)) for x in points))


def _state_launches(trace: ir.Trace) -> StateLaunches:
    last: dict[int, int | None] = dict.fromkeys(trace.buffers_of(ir.BufferKind.STATE))
    for index, launch in enumerate(trace.launches):
        last.update({access.buffer: index for access in launch.accesses if access.buffer in last})
    return tuple(sorted(last.items()))


class UnitLowering:
    def __init__(self, unit: ir.WorkUnit, num_devices: int) -> None:
        self.steps = [StepLowering(graph, num_devices) for graph in unit.graphs]

    def moves(self, placement: ir.Placement) -> list[list[tuple[int, list[ir.Transfer]]]]:
        """For every step: (earlier step, its state that this step wants elsewhere)."""
        # Name -> (last step that had it, its buffer there, its device, its bytes)
        last: dict[str, tuple[int, int, int, int]] = {}
        by_step = []
        for step, (lowering, place) in enumerate(zip(self.steps, placement.devices, strict=True)):
            moves: dict[int, list[ir.Transfer]] = defaultdict(list)
            buffers = lowering.graph.trace.buffers
            for buffer, device in lowering.homes(place):
                name, size = buffers[buffer].name, buffers[buffer].size_bytes
                before, held, src, held_bytes = last.get(name, (step, buffer, device, size))
                if src != device:
                    moves[before].append(ir.Transfer(INITIAL, held, 0, min(size, held_bytes), src, device))
                last[name] = (step, buffer, device, size)
            by_step.append(sorted(moves.items(), reverse=True))
        return by_step


def lower(plan: ir.Plan) -> tuple[tuple[ir.Program, ...], ...]:
    unit = UnitLowering(plan.unit, len(plan.cluster.devices))
    return tuple(_lower_lane(plan, n, unit) for n in range(len(plan.lanes)))


def _lower_lane(plan: ir.Plan, number: int, unit: UnitLowering) -> tuple[ir.Program, ...]:
    lane, num_devices = plan.lanes[number], len(plan.cluster.devices)
    programs: list[ir.Program] = []
    steps = zip(unit.moves(lane.placement), lane.placement.devices, strict=True)
    for step, (moves, place) in enumerate(steps):
        for source, transfers in moves:
            run = lower_moves(transfers, num_devices)
            columns, nothing = _columns(run, (), ()), ((),) * num_devices
            programs.append(ir.Program(number, source, 1, columns, run.transfers, nothing, (), ()))
        graph, fetched = unit.steps[step].graph, lane.placement.fetched
        run = unit.steps[step].run(place, fetched=fetched)
        columns = _columns(run, place, _frees(graph, place))
        weights = _weights(graph.trace, place, num_devices, dict(fetched))
        ends = (unit.steps[step].homes(place), outputs_of(graph, place))
        sent = run.transfers[: len(run.transfers) - len(run.fetches)]
        programs.append(ir.Program(number, step, plan.unit.counts[step], columns, sent, weights, *ends))
    return tuple(programs)


def _columns(
    run: LoweredRun, place: Sequence[int], frees: Sequence[tuple[int, int, int]]
) -> tuple[tuple[ir.Instruction, ...], ...]:
    """Per launch: receives, the launch, sends, frees, fetches."""
    num = len(run.transfers) - len(run.fetches)
    listed: list[list[tuple[int, int, ir.Instruction]]] = [[] for _ in run.points]
    for device, points in enumerate(run.points):
        listed[device] += [(at, 0, ir.Recv(n)) for at, is_send, n in points if n < num and not is_send]
        listed[device] += [(at, 2, ir.Send(n)) for at, is_send, n in points if n < num and is_send]
        begun = {run.fetches[n - num]: at for at, is_send, n in points if is_send and n >= num}
        listed[device] += [(at, 4, ir.Fetch(launch)) for launch, at in begun.items()]
    for launch, device in enumerate(place):
        listed[device].append((launch, 1, ir.Run(launch)))
    for device, launch, buffer in frees:
        listed[device].append((launch, 3, ir.Free(buffer)))
    return tuple(tuple(x for _, _, x in sorted(column, key=lambda x: x[:2])) for column in listed)


def _frees(graph: ir.Graph, place: Sequence[int]) -> list[tuple[int, int, int]]:
    """(device, launch, buffer): unused there after the launch and its sends."""
    temporary = set(graph.trace.buffers_of(ir.BufferKind.TEMPORARY))
    last: dict[tuple[int, int], int] = {}
    for launch, device in enumerate(place):
        for access in graph.trace.launches[launch].accesses:
            if access.buffer in temporary:
                last[device, access.buffer] = launch
    return [(device, launch, buffer) for (device, buffer), launch in sorted(last.items())]


def _weights(
    trace: ir.Trace, place: Sequence[int], num_devices: int, hosts: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    weights = set(trace.buffers_of(ir.BufferKind.WEIGHT))
    held: list[set[int]] = [set() for _ in range(num_devices)]
    for launch, device in zip(trace.launches, place, strict=True):
        for buffer in weights.intersection(access.buffer for access in launch.accesses):
            held[hosts.get(trace.buffers[buffer].name, device)].add(buffer)
    # A weight returned unchanged comes from the first device.
    held[0] |= weights.intersection(view.buffer for _, view in trace.outputs)
    return tuple(tuple(sorted(h)) for h in held)


def fetched_by(trace: ir.Trace, program: ir.Program, device: int, launch: int) -> list[int]:
    """Weights that a launch reads and its device does not hold."""
    named = {access.buffer for access in trace.launches[launch].accesses}
    weights = {b for b in named if trace.buffers[b].kind is ir.BufferKind.WEIGHT}
    return sorted(weights.difference(program.weights[device]))


def homes_of(graph: ir.Graph, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return _homes(_state_launches(graph.trace), place)


def _homes(state: StateLaunches, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((buffer, 0 if launch is None else place[launch]) for buffer, launch in state)


def outputs_of(graph: ir.Graph, place: Sequence[int]) -> tuple[tuple[str, int], ...]:
    final: dict[int, ir.Value] = {v.buffer: v for v in graph.values if v.is_final}
    homes = dict(homes_of(graph, place))
    places = []
    for name, view in graph.trace.outputs:
        value = final.get(view.buffer)
        producer = value.producer if value is not None else None
        places.append((name, place[producer] if producer is not None else homes.get(view.buffer, 0)))
    return tuple(places)


def in_order(program: ir.Program) -> Iterator[tuple[int, ir.Instruction]]:
    """Instructions and their devices in one possible order, without those that wait for ever."""
    lists, sent = program.instructions, set[int]()
    position = [0] * len(lists)
    ready = deque(range(len(lists)))
    while ready:
        device = ready.popleft()
        for instruction in lists[device][position[device] :]:
            if isinstance(instruction, ir.Recv) and instruction.transfer not in sent:
                break
            position[device] += 1
            yield device, instruction
            if isinstance(instruction, ir.Send):
                sent.add(instruction.transfer)
                ready.append(program.transfers[instruction.transfer].dst)


def check_programs(plan: ir.Plan, programs: Sequence[ir.Program]) -> None:
    for program in programs:
        ir.verify(program)
        _Checker(plan, program).check()


class _Checker:
    def __init__(self, plan: ir.Plan, program: ir.Program) -> None:
        self._plan, self._graph, self._program = plan, plan.graphs[program.step], program
        graph = self._graph
        self._reads: dict[int, list[int]] = defaultdict(list)
        self._makes: dict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(graph.values):
            for reader in value.readers:
                self._reads[reader].append(number)
            if value.producer is not None:
                self._makes[value.producer].append(number)
        initial = {v.buffer: n for n, v in enumerate(graph.values) if v.producer is None}
        inputs = {b: initial.get(b, INITIAL) for b in graph.trace.buffers_of(ir.BufferKind.INPUT)}
        self._held = [inputs | {b: initial.get(b, INITIAL) for b in weights} for weights in program.weights]
        moved = [(t.buffer, t.src) for t in program.transfers if t.value == INITIAL]
        for buffer, device in (*program.homes, *moved):
            self._held[device][buffer] = INITIAL if moved else initial.get(buffer, INITIAL)
        self._initial = initial
        # [device]: launches whose weights are in its places.
        self._fetched: list[deque[int]] = [deque() for _ in program.instructions]

    def check(self) -> None:
        self._check_all_run()
        num_run = [0] * len(self._program.instructions)
        for device, instruction in in_order(self._program):
            num_run[device] += 1
            self._check_instruction(device, instruction)
        for device, column in enumerate(self._program.instructions):
            if num_run[device] < len(column):
                what = self._words(column[num_run[device]])
                raise self._broken("no circular wait", device, f"{what} never comes")
        self._check_end()

    def _check_all_run(self) -> None:
        ran = {i.launch for column in self._program.instructions for i in column if isinstance(i, ir.Run)}
        missing = sorted(set(range(len(self._graph.trace.launches))) - ran)
        if ran and missing:
            name = self._graph.trace.kernel_of(missing[0]).name
            raise self._broken("every launch runs once", 0, f"launch {missing[0]} ({name}) does not run")

    def _check_instruction(self, device: int, instruction: ir.Instruction) -> None:
        held, fetched, transfers = self._held[device], self._fetched[device], self._program.transfers
        match instruction:
            case ir.Run():
                self._check_run(device, instruction)
            case ir.Free(buffer):
                held[buffer] = FREED
            case ir.Fetch(launch):
                fetched.append(launch)
                if len(fetched) > ir.SLOTS:
                    rule = "a place has been used when the next weights come"
                    raise self._broken(rule, device, self._words(instruction))
            case ir.Recv(number):
                self._check_not_freed(device, instruction, transfers[number].buffer)
                held[transfers[number].buffer] = transfers[number].value
            case ir.Send(number):
                if held.get(transfers[number].buffer) != transfers[number].value:
                    rule = "every transfer finds the version it moves on its sender"
                    raise self._broken(rule, device, self._words(instruction))

    def _check_run(self, device: int, run: ir.Run) -> None:
        trace, values, held = self._graph.trace, self._graph.values, self._held[device]
        fetched: list[int] = []
        if run.launch in self._fetched[device]:
            if self._fetched[device].popleft() != run.launch:
                raise self._broken("weights are fetched in order", device, self._words(run))
            fetched = fetched_by(trace, self._program, device, run.launch)
            held |= {b: self._initial.get(b, INITIAL) for b in fetched}
        for number in self._reads[run.launch]:
            value = values[number]
            buffer = trace.buffers[value.buffer]
            # Memory that no launch has written has no version.
            is_noise = (
                buffer.kind in (ir.BufferKind.TEMPORARY, ir.BufferKind.OUTPUT) and value.producer is None
            )
            if value.num_bytes and not is_noise and held.get(value.buffer) != number:
                what = f"{self._words(run)} reads buffer {value.buffer} ({buffer.name})"
                raise self._broken("every read finds the version it needs on its device", device, what)
        for access in trace.launches[run.launch].accesses:
            self._check_not_freed(device, run, access.buffer)
        held.update((values[number].buffer, number) for number in self._makes[run.launch])
        for weight in fetched:
            del held[weight]

    def _check_not_freed(self, device: int, user: ir.Instruction, buffer: int) -> None:
        if self._held[device].get(buffer) == FREED:
            what = f"{self._words(user)} uses buffer {buffer}"
            raise self._broken("nothing is used after it is freed", device, what)

    def _check_end(self) -> None:
        trace = self._graph.trace
        views = {name: view.buffer for name, view in trace.outputs}
        last = {v.buffer: n for n, v in enumerate(self._graph.values)}
        outputs = [
            ("every output is there", views[n], at, f"output '{n}'") for n, at in self._program.outputs
        ]
        states = [
            ("every state is in its home", buffer, at, f"state '{trace.buffers[buffer].name}'")
            for buffer, at in self._program.homes
        ]
        for rule, buffer, device, what in (*outputs, *states):
            is_empty = not trace.buffers[buffer].size_bytes
            if not is_empty and self._held[device].get(buffer) != last.get(buffer, INITIAL):
                raise self._broken(f"{rule} in its last version when the step ends", device, what)

    def _broken(self, rule: str, device: int, what: str) -> RuleBroken:
        name = self._plan.cluster.devices[device].name
        place = f"lane {self._program.lane}, step {self._program.step}, device {name}"
        return RuleBroken(f"program breaks the rule: {rule}: {what}", "Please report this plan.", place)

    def _words(self, instruction: ir.Instruction) -> str:
        return describe(self._graph, self._program, instruction)


def describe(graph: ir.Graph, program: ir.Program, instruction: ir.Instruction) -> str:
    match instruction:
        case ir.Run(launch):
            return f"run of launch {launch} ({graph.trace.kernel_of(launch).name})"
        case ir.Free(buffer):
            return f"free of buffer {buffer} ({graph.trace.buffers[buffer].name})"
        case ir.Fetch(launch):
            return f"fetch of the weights of launch {launch} ({graph.trace.kernel_of(launch).name})"
        case _:
            transfer = program.transfers[instruction.transfer]
            name = graph.trace.buffers[transfer.buffer].name
            word = type(instruction).__name__.lower()
            return f"{word} of transfer {instruction.transfer} (buffer {transfer.buffer}, {name})"
