"""lower: Plan -> Programs.

Each lane becomes a list of programs in the order a request runs them: every step once with its count, and
between two steps whose state lives on different devices a program that only moves the state.
Within a program every device keeps trace order; see `ir.program` for why that cannot deadlock.
"""

from collections import defaultdict

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
    verify,
)


def lower(plan: Plan) -> tuple[tuple[Program, ...], ...]:
    """programs[lane] in running order, each verified."""
    return tuple(lower_lane(plan, lane) for lane in range(len(plan.lanes)))


def lower_lane(plan: Plan, lane: int) -> tuple[Program, ...]:
    """The programs of one lane in the order a request runs them."""
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
    return Program(
        lane,
        plan.first_step(chosen) + step,
        unit.counts[step],
        tuple(tuple(column) for column in lists),
        transfers,
        _weights(graph.trace, place, num_devices),
        homes_of(graph, place),
        outputs_of(graph, place),
    )


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
    frees = _frees(graph, place, transfers)
    lists: list[list[Instruction]] = [[] for _ in range(num_devices)]
    for launch, device in enumerate(place):
        lists[device] += [Recv(number) for number in recvs[launch]]
        lists[device].append(Run(launch))
        lists[device] += [Send(number) for number in sends[launch]]
        lists[device] += [Free(buffer) for buffer in frees[launch]]
    return lists


def _frees(graph: Graph, place: tuple[int, ...], transfers: tuple[Transfer, ...]) -> dict[int, list[int]]:
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
    wanted = _state_homes(graphs[step], placement[step])
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


def _state_homes(graph: Graph, place: tuple[int, ...]) -> dict[str, int]:
    return {graph.trace.buffers[buffer].name: device for buffer, device in homes_of(graph, place)}


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
