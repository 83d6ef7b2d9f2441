"""lower: Plan -> Programs.

Each lane becomes a list of programs in the order a request runs them: every step once with its count, and
between two steps whose state lives on different devices a program that only moves the state.
Within a program every device keeps trace order; see `ir.plan` for why that cannot deadlock.

`check_programs` proves a program right before it runs, whatever made it. The rules, beyond those of
`ir.verify`:
  - every launch of the step runs once, on one device
  - the lists come to an end: nobody waits in a circle
  - every launch and every transfer finds the version it needs on its device
  - nothing is used after it is freed
  - every output and state is there, in its last version, when the step ends
One order of the instructions stands for all: a device's list runs in order, a send takes its bytes and a
receive puts them down, so what a device holds at a place of its list does not depend on who is fast or slow.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from tessera.errors import RuleBroken
from tessera.ir import (
    BufferKind,
    Free,
    Graph,
    Instruction,
    Plan,
    Program,
    Recv,
    Run,
    Send,
    Trace,
    Transfer,
    Value,
    need_whole_prefills,
    verify,
)


def lower(plan: Plan) -> tuple[tuple[Program, ...], ...]:
    """programs[lane] in running order, each verified."""
    return tuple(lower_lane(plan, lane) for lane in range(len(plan.lanes)))


def lower_lane(plan: Plan, lane: int) -> tuple[Program, ...]:
    """The programs of one lane in the order a request runs them."""
    need_whole_prefills(plan, "a run")
    programs: list[Program] = []
    for step in range(len(plan.unit_of(plan.lanes[lane]).graphs)):
        if step > 0:
            programs += _migration(plan, lane, step)
        programs.append(_lower_step(plan, lane, step))
    for program in programs:
        verify(program)
    return tuple(programs)


def _lower_step(plan: Plan, lane: int, step: int) -> Program:
    chosen = plan.lanes[lane]
    unit, place = plan.unit_of(chosen), chosen.placement.devices[step]
    graph = unit.graphs[step]
    num_devices = len(plan.cluster.devices)
    transfers = _transfers(graph, place)
    lists = _instructions(graph, place, transfers, num_devices)
    weights, columns = _weights(graph.trace, place, num_devices), tuple(tuple(column) for column in lists)
    ends = (homes_of(graph, place), outputs_of(graph, place))
    number, count = plan.first_step(chosen) + step, unit.counts[step]
    return Program(lane, number, count, columns, transfers, weights, *ends)


def _transfers(graph: Graph, place: tuple[int, ...]) -> tuple[Transfer, ...]:
    """One per (value, destination that reads it and did not make it), in trace order."""
    found = []
    for index, value in enumerate(graph.values):
        if value.producer is None or value.num_bytes == 0:
            continue
        src = place[value.producer]
        for dst in sorted({place[r] for r in value.readers} - {src}):
            found.append(Transfer(index, value.buffer, value.start, value.stop, src, dst))
    return tuple(sorted(found, key=lambda t: (_producer(graph, t), t.dst)))


def _producer(graph: Graph, transfer: Transfer) -> int:
    producer = graph.values[transfer.value].producer
    assert producer is not None, "only values that a launch made are sent"
    return producer


def _instructions(
    graph: Graph, place: tuple[int, ...], transfers: tuple[Transfer, ...], num_devices: int
) -> list[list[Instruction]]:
    sends: dict[int, list[int]] = defaultdict(list)
    recvs: dict[int, list[int]] = defaultdict(list)
    for number, transfer in enumerate(transfers):
        value = graph.values[transfer.value]
        sends[_producer(graph, transfer)].append(number)
        recvs[min(r for r in value.readers if place[r] == transfer.dst)].append(number)
    frees = _frees(graph, place)
    lists: list[list[Instruction]] = [[] for _ in range(num_devices)]
    for launch, device in enumerate(place):
        lists[device] += [Recv(number) for number in recvs[launch]]
        lists[device].append(Run(launch))
        lists[device] += [Send(number) for number in sends[launch]]
        lists[device] += [Free(buffer) for buffer in frees[launch]]
    return lists


def _frees(graph: Graph, place: tuple[int, ...]) -> dict[int, list[int]]:
    """Launch -> buffers that its device needs no more once the launch has run and sent."""
    temporary = set(graph.trace.buffers_of(BufferKind.TEMPORARY))
    last: dict[tuple[int, int], int] = {}  # (device, buffer) -> last launch that touches it there
    for launch, device in enumerate(place):
        for access in graph.trace.launches[launch].accesses:
            if access.buffer in temporary:
                last[device, access.buffer] = launch
    frees: dict[int, list[int]] = defaultdict(list)
    for (_, buffer), launch in sorted(last.items()):
        frees[launch].append(buffer)
    return frees


def _weights(trace: Trace, place: tuple[int, ...], num_devices: int) -> tuple[tuple[int, ...], ...]:
    kinds = [b.kind for b in trace.buffers]
    held: list[set[int]] = [set() for _ in range(num_devices)]
    for launch, device in enumerate(place):
        for access in trace.launches[launch].accesses:
            if kinds[access.buffer] is BufferKind.WEIGHT:
                held[device].add(access.buffer)
    for _, view in trace.outputs:
        if kinds[view.buffer] is BufferKind.WEIGHT:  # returned as it is, by the first device
            held[0].add(view.buffer)
    return tuple(tuple(sorted(h)) for h in held)


def homes_of(graph: Graph, place: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where each state buffer lives: with the launches that touch it, or on device 0 if none does."""
    home = dict.fromkeys(graph.trace.buffers_of(BufferKind.STATE), 0)
    for launch, device in enumerate(place):
        for access in graph.trace.launches[launch].accesses:
            if access.buffer in home:
                home[access.buffer] = device
    return tuple(sorted(home.items()))


def outputs_of(graph: Graph, place: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Output name -> device that holds its final version."""
    final: dict[int, Value] = {v.buffer: v for v in graph.values if v.is_final}
    homes = dict(homes_of(graph, place))
    found = []
    for name, view in graph.trace.outputs:
        value = final.get(view.buffer)
        made_by = value.producer if value is not None else None
        found.append((name, place[made_by] if made_by is not None else homes.get(view.buffer, 0)))
    return tuple(found)


def _migration(plan: Plan, lane: int, step: int) -> list[Program]:
    """State that an earlier step left on one device and this step wants on another; empty if none."""
    placement, graphs = plan.lanes[lane].placement.devices, plan.unit_of(plan.lanes[lane]).graphs
    buffers = graphs[step].trace.buffers
    wanted = {buffers[buffer].name: home for buffer, home in homes_of(graphs[step], placement[step])}
    programs = []
    for before in range(step - 1, -1, -1):  # the last step that had it is where it lives
        graph = graphs[before]
        transfers = []
        for buffer, device in homes_of(graph, placement[before]):
            name = graph.trace.buffers[buffer].name
            home = wanted.pop(name, device)
            if home != device:
                transfers.append(
                    Transfer(-1, buffer, 0, graph.trace.buffers[buffer].size_bytes, device, home)
                )
        if transfers:
            programs.append(_moves(plan, lane, before, transfers))
    return programs


def _moves(plan: Plan, lane: int, step: int, transfers: list[Transfer]) -> Program:
    """A program of sends and receives only."""
    lists: list[list[Instruction]] = [[] for _ in plan.cluster.devices]
    for number, transfer in enumerate(transfers):
        lists[transfer.src].append(Send(number))
    for number, transfer in enumerate(transfers):
        lists[transfer.dst].append(Recv(number))
    none: tuple[tuple[int, ...], ...] = tuple(() for _ in plan.cluster.devices)
    columns = tuple(tuple(column) for column in lists)
    number = plan.first_step(plan.lanes[lane]) + step
    return Program(lane, number, 1, columns, tuple(transfers), none, (), ())


# A version that is not named in the graph's values: state that a program only moves.
GIVEN = -1
# In place of a version: the buffer was freed.
FREED = -2


def check_programs(plan: Plan, programs: Sequence[Program]) -> None:
    """Raises RuleBroken with the first rule that a program of a lane breaks, and where."""
    for program in programs:
        verify(program)
        _Checker(plan, program).check()


class _Checker:
    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan, self._graph, self._program = plan, plan.graphs[program.step], program
        graph = self._graph
        # Launch -> numbers of the versions that it reads, and that it makes.
        self._reads: dict[int, list[int]] = defaultdict(list)
        self._makes: dict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(graph.values):
            for reader in value.readers:
                self._reads[reader].append(number)
            if value.producer is not None:
                self._makes[value.producer].append(number)
        given = {v.buffer: n for n, v in enumerate(graph.values) if v.producer is None}
        there = {buffer: given.get(buffer, GIVEN) for buffer in graph.trace.buffers_of(BufferKind.INPUT)}
        # [device]: which version of each buffer it holds.
        self._held = [there | {b: given.get(b, GIVEN) for b in weights} for weights in program.weights]
        moved = [(t.buffer, t.src) for t in program.transfers if t.value == GIVEN]
        for buffer, device in (*program.homes, *moved):
            self._held[device][buffer] = GIVEN if moved else given.get(buffer, GIVEN)

    def check(self) -> None:
        self._check_launches()
        for device, instruction in self._in_order():
            held = self._held[device]
            match instruction:
                case Run():
                    self._check_run(device, instruction)
                case Free(buffer):
                    held[buffer] = FREED
                case Recv(number):
                    transfer = self._program.transfers[number]
                    self._check_not_freed(device, instruction, transfer.buffer)
                    held[transfer.buffer] = transfer.value
                case Send(number):
                    transfer = self._program.transfers[number]
                    if held.get(transfer.buffer) != transfer.value:
                        rule = "every transfer finds the version it moves on its sender"
                        raise self._broken(rule, device, self._words(instruction))
        self._check_end()

    def _check_launches(self) -> None:
        ran = {i.launch for column in self._program.instructions for i in column if isinstance(i, Run)}
        missing = sorted(set(range(len(self._graph.trace.launches))) - ran)
        if ran and missing:
            name = self._graph.trace.kernel_of(missing[0]).name
            raise self._broken("every launch runs once", 0, f"launch {missing[0]} ({name}) does not run")

    def _in_order(self) -> Iterator[tuple[int, Instruction]]:
        """Every device's instructions in an order that can be; raises where it gets stuck."""
        lists = self._program.instructions
        position = [0] * len(lists)
        sent: set[int] = set()
        ready = deque(range(len(lists)))
        while ready:
            device = ready.popleft()
            for instruction in lists[device][position[device] :]:
                if isinstance(instruction, Recv) and instruction.transfer not in sent:
                    break
                position[device] += 1
                yield device, instruction
                if isinstance(instruction, Send):
                    sent.add(instruction.transfer)
                    ready.append(self._program.transfers[instruction.transfer].dst)
        for device, column in enumerate(lists):
            if position[device] < len(column):
                what = self._words(column[position[device]])
                raise self._broken("nobody waits in a circle", device, f"{what} never comes")

    def _check_run(self, device: int, run: Run) -> None:
        trace, values, held = self._graph.trace, self._graph.values, self._held[device]
        for value in self._reads[run.launch]:
            found = values[value]
            buffer = trace.buffers[found.buffer]
            # What a buffer holds before anybody has written it is noise.
            is_noise = buffer.kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT) and found.producer is None
            if found.num_bytes and not is_noise and held.get(found.buffer) != value:
                what = f"{self._words(run)} reads buffer {found.buffer} ({buffer.name})"
                raise self._broken("every read finds the version it needs on its device", device, what)
        for access in trace.launches[run.launch].accesses:
            self._check_not_freed(device, run, access.buffer)
        held.update((values[value].buffer, value) for value in self._makes[run.launch])

    def _check_not_freed(self, device: int, user: Instruction, buffer: int) -> None:
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
            if self._held[device].get(buffer) != last.get(buffer, GIVEN):
                raise self._broken(f"{rule} in its last version when the step ends", device, what)

    def _broken(self, rule: str, device: int, what: str) -> RuleBroken:
        name = self._plan.cluster.devices[device].name
        place = f"lane {self._program.lane}, step {self._program.step}, device {name}"
        return RuleBroken(f"program breaks the rule: {rule}: {what}", "Please report this plan.", place)

    def _words(self, instruction: Instruction) -> str:
        return describe(self._graph, self._program, instruction)


def describe(graph: Graph, program: Program, instruction: Instruction) -> str:
    match instruction:
        case Run(launch):
            return f"run of launch {launch} ({graph.trace.kernel_of(launch).name})"
        case Free(buffer):
            return f"free of buffer {buffer} ({graph.trace.buffers[buffer].name})"
        case _:
            transfer = program.transfers[instruction.transfer]
            name = graph.trace.buffers[transfer.buffer].name
            word = type(instruction).__name__.lower()
            return f"{word} of transfer {instruction.transfer} (buffer {transfer.buffer}, {name})"
