"""check_program: a lowered program is proved right before it runs, whatever made it.

The rules, beyond those of `ir.verify`:
  - every launch of the step runs once, on one device
  - every transfer is signalled before it is received and awaited only after it was sent
  - the lists come to an end: nobody waits in a circle
  - every launch and every transfer finds the version it needs on its device
  - every output and state is there, in its last version, when the step ends
  - no two live values overlap in the arena
  - no two users of one buffer are unordered, unless both only read

Versions are checked along one order of the instructions, which stands for all because of the last two rules:
where every two conflicting users of a byte are ordered, every order gives the same result. A transfer takes
place at any time after its send and its signal and before its receive and its wait; without static memory it
has memory of its own. Instructions of one device run in order. Several requests in flight share no arena, so
one request's order is enough.

Not handled: an order that only a third device brings about. A memory is taken to be in use until its own
device has received or awaited, so such a program would be refused and not passed.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from tessera.execute.case import Case, Order
from tessera.execute.check_memory import check_memory
from tessera.ir import (
    BufferKind,
    Free,
    Graph,
    Plan,
    Program,
    Recv,
    Run,
    Send,
    Signal,
    Wait,
    verify,
)

# A version that is not named in the graph's values: state that a program only moves.
GIVEN = -1


def check_programs(plan: Plan, programs: Sequence[Program]) -> None:
    """Raises RuleBroken with the first rule that a program of a lane breaks, and where."""
    for program in programs:
        verify(program)
        _Checker(Case(plan, plan.graphs[program.step], program)).check()


class _Checker:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._num = len(case.program.instructions)

    def check(self) -> None:
        self._check_launches()
        self._check_transfers()
        order = self._find_order()
        self._check_versions(order)
        if self._case.program.places:
            check_memory(self._case, order)

    def _check_launches(self) -> None:
        ran = {i.launch for column in self._case.program.instructions for i in column if isinstance(i, Run)}
        missing = sorted(set(range(len(self._case.graph.trace.launches))) - ran)
        if ran and missing:
            name = self._case.graph.trace.kernel_of(missing[0]).name
            raise self._case.broken("every launch runs once", 0, f"launch {missing[0]} ({name}) does not run")

    def _check_transfers(self) -> None:
        for number, transfer in enumerate(self._case.program.transfers):
            signal, recv = self._case.at.get((Signal, number)), self._case.at[Recv, number]
            if signal is not None and (signal[0] != transfer.dst or signal[1] > recv[1]):
                raise self._case.broken(
                    "a transfer is signalled on its receiver before it is received",
                    transfer.dst,
                    self._case.words(Signal(number)),
                )
            if self._case.program.places and signal is None:
                rule = "every transfer of a program with static memory is signalled"
                raise self._case.broken(rule, transfer.dst, self._case.words(Recv(number)))
            wait, send = self._case.at.get((Wait, number)), self._case.at[Send, number]
            if wait is not None and (wait[0] != transfer.src or wait[1] < send[1]):
                raise self._case.broken(
                    "a transfer is awaited on its sender after it was sent",
                    transfer.src,
                    self._case.words(Wait(number)),
                )

    def _find_order(self) -> Order:
        """Kahn's algorithm over instructions and transfers; raises where it gets stuck."""
        found = Order()
        position = [0] * self._num
        landed: set[int] = set()
        started: dict[int, int] = defaultdict(int)
        needed = {n: 1 + ((Signal, n) in self._case.at) for n in range(len(self._case.program.transfers))}
        ready = deque(range(self._num))
        clock = [[0] * self._num for _ in range(self._num)]
        while ready:
            device = ready.popleft()
            column = self._case.program.instructions[device]
            while position[device] < len(column):
                instruction = column[position[device]]
                if isinstance(instruction, (Recv, Wait)):
                    if instruction.transfer not in landed:
                        break
                    known = found.before[-1, instruction.transfer]
                    clock[device] = [max(a, b) for a, b in zip(clock[device], known, strict=True)]
                found.before[device, position[device]] = list(clock[device])
                found.order.append((device, position[device]))
                position[device] += 1
                clock[device][device] = position[device]
                if isinstance(instruction, (Send, Signal)):
                    number = instruction.transfer
                    started[number] += 1
                    past = found.before.get((-1, number), [0] * self._num)
                    found.before[-1, number] = [max(a, b) for a, b in zip(past, clock[device], strict=True)]
                    if started[number] == needed[number]:
                        landed.add(number)
                        ready += [
                            self._case.program.transfers[number].dst,
                            self._case.program.transfers[number].src,
                        ]
        for device, column in enumerate(self._case.program.instructions):
            if position[device] < len(column):
                what = self._case.words(column[position[device]])
                raise self._case.broken("nobody waits in a circle", device, f"{what} never comes")
        return found

    def _check_versions(self, order: Order) -> None:
        held = _Held(self._case.graph, self._case.program)
        for device, position in order.order:
            instruction = self._case.program.instructions[device][position]
            if isinstance(instruction, Run):
                self._check_run(device, instruction, held)
            elif isinstance(instruction, Send):
                transfer = self._case.program.transfers[instruction.transfer]
                if held.version(device, transfer.buffer) != transfer.value:
                    rule = "every transfer finds the version it moves on its sender"
                    raise self._case.broken(rule, device, self._case.words(instruction))
            elif isinstance(instruction, Recv):
                transfer = self._case.program.transfers[instruction.transfer]
                held.put(device, transfer.buffer, transfer.value)
            elif isinstance(instruction, Free):
                held.drop(device, instruction.buffer)
        self._check_end(held)

    def _check_run(self, device: int, run: Run, held: "_Held") -> None:
        for value in held.reads[run.launch]:
            found = self._case.graph.values[value]
            if found.num_bytes and not self._is_noise(value) and held.version(device, found.buffer) != value:
                name = self._case.graph.trace.buffers[found.buffer].name
                what = f"{self._case.words(run)} reads buffer {found.buffer} ({name})"
                raise self._case.broken("every read finds the version it needs on its device", device, what)
        for value in held.makes[run.launch]:
            held.put(device, self._case.graph.values[value].buffer, value)

    def _is_noise(self, value: int) -> bool:
        """True for what a buffer holds before anybody has written it."""
        kind = self._case.graph.trace.buffers[self._case.graph.values[value].buffer].kind
        is_own = kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        return is_own and self._case.graph.values[value].producer is None

    def _check_end(self, held: "_Held") -> None:
        views = {name: view.buffer for name, view in self._case.graph.trace.outputs}
        last = {v.buffer: n for n, v in enumerate(self._case.graph.values)}
        for name, device in self._case.program.outputs:
            if held.version(device, views[name]) != last.get(views[name], GIVEN):
                rule = "every output is there in its last version when the step ends"
                raise self._case.broken(rule, device, f"output '{name}'")
        for buffer, device in self._case.program.homes:
            if held.version(device, buffer) != last.get(buffer, GIVEN):
                rule = "every state is in its home in its last version when the step ends"
                raise self._case.broken(
                    rule, device, f"state '{self._case.graph.trace.buffers[buffer].name}'"
                )


class _Held:
    """Which version of each buffer every device holds."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self._versions: list[dict[int, int]] = [{} for _ in program.instructions]
        self.reads: list[list[int]] = [[] for _ in graph.trace.launches]
        self.makes: list[list[int]] = [[] for _ in graph.trace.launches]
        given = {v.buffer: n for n, v in enumerate(graph.values) if v.producer is None}
        for number, value in enumerate(graph.values):
            for reader in value.readers:
                self.reads[reader].append(number)
            if value.producer is not None:
                self.makes[value.producer].append(number)
        moves = any(t.value == GIVEN for t in program.transfers)
        homes = list(program.homes) + [(t.buffer, t.src) for t in program.transfers if t.value == GIVEN]
        for buffer, device in homes:
            self._versions[device][buffer] = GIVEN if moves else given.get(buffer, GIVEN)
        for device, weights in enumerate(program.weights):
            self._versions[device] |= {b: given.get(b, GIVEN) for b in weights}
            for buffer in graph.trace.buffers_of(BufferKind.INPUT):
                self._versions[device][buffer] = given.get(buffer, GIVEN)

    def version(self, device: int, buffer: int) -> int | None:
        """The version a device holds; None if it has none."""
        return self._versions[device].get(buffer)

    def put(self, device: int, buffer: int, version: int) -> None:
        """A version has been written."""
        self._versions[device][buffer] = version

    def drop(self, device: int, buffer: int) -> None:
        """A buffer was freed."""
        self._versions[device].pop(buffer, None)
