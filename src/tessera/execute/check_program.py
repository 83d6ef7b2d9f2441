"""check_program: a lowered program is proved right before it runs, whatever made it.

The rules, beyond those of `ir.verify`:
  - every launch of the step runs once, on one device
  - the lists come to an end: nobody waits in a circle
  - every launch and every transfer finds the version it needs on its device
  - nothing is used after it is freed
  - every output and state is there, in its last version, when the step ends

One order of the instructions stands for all: a device's list runs in order, a send takes its bytes and a
receive puts them down, so what a device holds at a place of its list does not depend on who is fast or slow.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from tessera.errors import RuleBroken
from tessera.execute.blame import describe
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
    verify,
)

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

    def check(self) -> None:
        self._check_launches()
        held = _Held(self._graph, self._program)
        for device, instruction in self._in_order():
            transfer = None
            if isinstance(instruction, (Send, Recv)):
                transfer = self._program.transfers[instruction.transfer]
            if isinstance(instruction, Run):
                self._check_run(device, instruction, held)
            elif isinstance(instruction, Free):
                held.free(device, instruction.buffer)
            elif isinstance(instruction, Recv) and transfer is not None:
                self._check_not_freed(device, instruction, transfer.buffer, held)
                held.put(device, transfer.buffer, transfer.value)
            elif transfer is not None and held.version(device, transfer.buffer) != transfer.value:
                rule = "every transfer finds the version it moves on its sender"
                raise self._broken(rule, device, self._words(instruction))
        self._check_end(held)

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

    def _check_run(self, device: int, run: Run, held: "_Held") -> None:
        for value in held.reads[run.launch]:
            found = self._graph.values[value]
            if found.num_bytes and not self._is_noise(value) and held.version(device, found.buffer) != value:
                name = self._graph.trace.buffers[found.buffer].name
                what = f"{self._words(run)} reads buffer {found.buffer} ({name})"
                raise self._broken("every read finds the version it needs on its device", device, what)
        for access in self._graph.trace.launches[run.launch].accesses:
            self._check_not_freed(device, run, access.buffer, held)
        for value in held.makes[run.launch]:
            held.put(device, self._graph.values[value].buffer, value)

    def _check_not_freed(self, device: int, user: Instruction, buffer: int, held: "_Held") -> None:
        if held.is_freed(device, buffer):
            what = f"{self._words(user)} uses buffer {buffer}"
            raise self._broken("nothing is used after it is freed", device, what)

    def _is_noise(self, value: int) -> bool:
        """True for what a buffer holds before anybody has written it."""
        kind = self._graph.trace.buffers[self._graph.values[value].buffer].kind
        is_own = kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        return is_own and self._graph.values[value].producer is None

    def _check_end(self, held: "_Held") -> None:
        views = {name: view.buffer for name, view in self._graph.trace.outputs}
        last = {v.buffer: n for n, v in enumerate(self._graph.values)}
        for name, device in self._program.outputs:
            if held.version(device, views[name]) != last.get(views[name], GIVEN):
                rule = "every output is there in its last version when the step ends"
                raise self._broken(rule, device, f"output '{name}'")
        for buffer, device in self._program.homes:
            if held.version(device, buffer) != last.get(buffer, GIVEN):
                rule = "every state is in its home in its last version when the step ends"
                raise self._broken(rule, device, f"state '{self._graph.trace.buffers[buffer].name}'")

    def _broken(self, rule: str, device: int, what: str) -> RuleBroken:
        name = self._plan.cluster.devices[device].name
        place = f"lane {self._program.lane}, step {self._program.step}, device {name}"
        return RuleBroken(f"program breaks the rule: {rule}: {what}", "Please report this plan.", place)

    def _words(self, instruction: Instruction) -> str:
        return describe(self._graph, self._program, instruction)


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
        self._versions[device][buffer] = version

    def free(self, device: int, buffer: int) -> None:
        self._versions[device][buffer] = FREED

    def is_freed(self, device: int, buffer: int) -> bool:
        return self._versions[device].get(buffer) == FREED
