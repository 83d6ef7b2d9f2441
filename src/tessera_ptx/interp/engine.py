"""Runs the blocks of a batch until all lanes exit.

Lanes at the same block of the same frame form a group; the group with the lowest rank (see `decode`) runs
first. Lanes wait at a block barrier for all living lanes of their block or the given count, and at a warp
collective for all living lanes of the member mask. Every 1,024 blocks the longest waiting group runs:
spinning lanes must not block writers. If all groups wait, Deadlock names the line. A frame belongs to a chain
of call sites and is shared by its lanes, each with its own registers and local memory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera_ptx.errors import Deadlock, InterpreterFault, OutOfBounds, UnknownInstruction
from tessera_ptx.interp.decode import Decoder, Get, Put, Unknown
from tessera_ptx.interp.memory import FRAMES, BadAccess
from tessera_ptx.interp.rules.warp import member_getter, per_lane, warp_bits
from tessera_ptx.interp.state import Active, CodeBlock, DecodedFunction, Frame, InterpState
from tessera_ptx.interp.types import PRED, U32, U64, Array, narrow
from tessera_ptx.syntax import Args, Instruction, Operand, Reg, Sym

Move = tuple[Frame, int, Array]


@dataclass(frozen=True, slots=True)
class Barrier:
    number: Get | None  # None: the cluster's barrier
    count: Get | None  # None: the whole block
    waits: bool
    reduction: str  # "", and, or, popc
    predicate: Get | None
    result: Put | None
    arrives: bool = True


@dataclass(frozen=True, slots=True)
class CallInfo:
    target: str  # "": computed
    address: Get | None
    arguments: tuple[str | Get, ...]
    results: tuple[str | Put, ...]


def describe(block: CodeBlock, decoder: Decoder) -> None:
    """Undecodable steps are refused when executed."""
    try:
        if block.kind == "collective":
            block.info = member_getter(block.body[0], decoder)
        elif block.end is not None and block.kind == "brx":
            block.info = decoder.get(block.end.operands[0], U32)
        elif block.end is not None and block.kind == "barrier":
            block.info = _barrier(block.end, decoder)
        elif block.end is not None and block.kind == "call":
            block.info = _call(block.end, decoder)
    except Unknown:
        block.info = None


def _barrier(ins: Instruction, decoder: Decoder) -> Barrier:
    mods, operands = ins.op.mods, list(ins.operands)
    if "cluster" in mods:
        return Barrier(None, None, "wait" in mods, "", None, None, arrives="arrive" in mods)
    if "red" not in mods:
        gets = [decoder.get(o, U32) for o in operands]
        waits = "arrive" not in mods
        return Barrier(gets[0], gets[1] if len(gets) > 1 else None, waits, "", None, None)
    name = next(m for m in mods if m in ("and", "or", "popc"))
    result = decoder.put(operands[0], U32 if name == "popc" else PRED)
    count = decoder.get(operands[2], U32) if len(operands) == 4 else None
    return Barrier(decoder.get(operands[1], U32), count, True, name, decoder.predicate(operands[-1]), result)


def _call(ins: Instruction, decoder: Decoder) -> CallInfo:
    operands = list(ins.operands)
    results = _list(operands)
    target = operands.pop(0)
    arguments = _list(operands)
    known = isinstance(target, Sym)
    return CallInfo(
        target.name if isinstance(target, Sym) else "",
        None if known else decoder.get(target, U64),
        tuple(_argument(o, decoder) for o in arguments),
        tuple(_result(o, decoder) for o in results),
    )


def _list(operands: list[Operand]) -> tuple[Operand, ...]:
    if operands and isinstance(operands[0], Args):
        first = operands.pop(0)
        assert isinstance(first, Args)
        return first.items
    return ()


def _argument(operand: Operand, decoder: Decoder) -> "str | Get":
    return operand.name if isinstance(operand, Sym) else decoder.get(operand, U64)


def _result(operand: Operand, decoder: Decoder) -> "str | Put":
    if isinstance(operand, Sym):
        return operand.name
    if not isinstance(operand, Reg):
        raise Unknown("a result that is no register")
    return decoder.put(operand, U64)


MAX_DEPTH = 64


def make_frame(machine: InterpState, code: DecodedFunction, parent: Frame | None, call_block: int) -> Frame:
    regs = [np.zeros(machine.num_lanes, dtype) for dtype in code.dtypes]
    prefix = () if parent is None else (*parent.prefix, parent.code.blocks[call_block].rank)
    frame = Frame(machine, code, regs, parent, call_block, prefix, {})
    for name, (size, align) in code.sizes.items():
        if not (code.is_entry and name in code.params):
            frame.places[name] = machine.reserve(size, max(align, 8))
    return frame


def enter(
    frames: dict[tuple[int, int, str], Frame], caller: Frame, block: int, call: CallInfo, mask: Array
) -> list[Move]:
    """KeyError names a function without a body."""
    moves = []
    for name, lanes in _targets(caller, call, mask):
        code = caller.machine.codes.get(name)
        if code is None:
            raise KeyError(f"'{name}', whose body is not in this module")
        if len(caller.prefix) >= MAX_DEPTH:
            raise KeyError(f"'{name}' more than {MAX_DEPTH} calls deep")
        key = id(caller), block, name
        if key not in frames:
            frames[key] = make_frame(caller.machine, code, caller, block)
        _pass_arguments(caller, frames[key], call, lanes)
        moves.append((frames[key], 0, lanes))
    return moves


def _targets(caller: Frame, call: CallInfo, mask: Array) -> list[tuple[str, Array]]:
    if call.address is None:
        return [(call.target, mask)]
    address = np.broadcast_to(call.address(caller), mask.shape)
    found = []
    for value in np.unique(address[mask]):
        name = caller.machine.functions.get(int(value))
        if name is None:
            raise KeyError(f"address {int(value):#x}, where no function is")
        found.append((name, mask & (address == value)))
    return found


def _pass_arguments(caller: Frame, callee: Frame, call: CallInfo, mask: Array) -> None:
    if len(call.arguments) != len(callee.code.params):
        raise KeyError(f"'{callee.code.name}' with {len(call.arguments)} arguments")
    index = np.flatnonzero(mask)
    for given, formal in zip(call.arguments, callee.code.params, strict=True):
        size = callee.code.sizes[formal][0]
        if formal in callee.code.slots and not isinstance(given, str):
            slot, raw = callee.code.slots[formal]
            callee.regs[slot] = np.where(mask, given(caller).astype(raw), callee.regs[slot])
        elif isinstance(given, str):
            _copy(caller, caller.places[given], callee.places[formal], size, index)
        else:
            value = np.broadcast_to(given(caller), mask.shape)[index]
            at = np.full(index.shape, callee.places[formal], np.uint64)
            caller.machine.frames.store(index, at, value.astype(f"u{size}"), size)


def leave(frame: Frame, mask: Array) -> None:
    caller = frame.parent
    assert caller is not None
    call: CallInfo = caller.code.blocks[frame.call_block].info
    index = np.flatnonzero(mask)
    for wanted, formal in zip(call.results, frame.code.returns, strict=False):
        size = frame.code.sizes[formal][0]
        if formal in frame.code.slots and not isinstance(wanted, str):
            wanted(caller, Active(mask), frame.regs[frame.code.slots[formal][0]].astype(np.uint64))
        elif isinstance(wanted, str):
            _copy(caller, frame.places[formal], caller.places[wanted], size, index)
        else:
            at = np.full(index.shape, frame.places[formal], np.uint64)
            value = np.zeros(mask.shape, np.uint64)
            value[index] = frame.machine.frames.load(index, at, size)
            wanted(caller, Active(mask), narrow(value, U64))


def _copy(frame: Frame, source: int, target: int, size: int, index: Array) -> None:
    rows = frame.machine.frames.data.reshape(frame.machine.num_lanes, -1)
    source, target = source - FRAMES, target - FRAMES
    rows[index, target : target + size] = rows[index, source : source + size]


CLUSTER = -1


class Barriers:
    """Numbers 0 to 15 per block, CLUSTER per cluster."""

    def __init__(self, machine: InterpState) -> None:
        self.machine = machine
        self.arrived: dict[int, Array] = {}
        self.expected: dict[int, Array] = {}
        self.votes: dict[int, Array] = {}
        # Lanes that arrived at a cluster barrier and have not waited.
        self.passed: Array = np.zeros(machine.num_lanes, bool)
        self.waiting: list[tuple[tuple[Frame, int, Barrier], int, Array, Instruction]] = []

    def arrive(self, barrier: Barrier, frame: Frame, after: int, mask: Array, ins: Instruction) -> list[Move]:
        """Returns lanes that may continue."""
        moves: list[Move] = []
        if barrier.number is None:
            numbers: Any = np.full(mask.shape, CLUSTER)
            if not barrier.arrives:
                through = mask & self.passed
                self.passed = self.passed & ~through
                if through.any():
                    moves.append((frame, after, through))
                mask = mask & ~through
        else:
            numbers = np.broadcast_to(barrier.number(frame), mask.shape).astype(np.int64)
        for number in np.unique(numbers[mask]):
            self._arrive_at(int(number), barrier, frame, after, mask & (numbers == number), ins)
        if not barrier.waits:
            moves.append((frame, after, mask))
        return moves + self.release()

    def _arrive_at(
        self, number: int, barrier: Barrier, frame: Frame, after: int, mask: Array, ins: Instruction
    ) -> None:
        none = np.zeros(mask.shape, bool)
        if barrier.arrives:
            self.arrived[number] = self.arrived.get(number, none) | mask
        if barrier.count is not None:
            counts = np.broadcast_to(barrier.count(frame), mask.shape)
            zero = np.zeros(mask.shape, np.int64)
            self.expected[number] = np.where(mask, counts, self.expected.get(number, zero))
        if barrier.predicate is not None:
            vote = mask & barrier.predicate(frame)
            self.votes[number] = self.votes.get(number, none) | vote
        if barrier.waits:
            self.waiting.append(((frame, after, barrier), number, mask, ins))

    def release(self) -> list[Move]:
        moves: list[Move] = []
        for number in list(self.arrived):
            done = self._complete(number)
            if done.any():
                moves += self._let_go(number, done)
        return moves

    def _complete(self, number: int) -> Array:
        machine = self.machine
        width = machine.threads * (machine.cluster if number == CLUSTER else 1)
        arrived = self.arrived[number].reshape(-1, width)
        needed = machine.alive.reshape(-1, width)
        done = arrived.any(axis=1) & ~(needed & ~arrived).any(axis=1)
        expected = self.expected.get(number)
        if expected is not None:
            counts = expected.reshape(-1, width).max(axis=1)
            done = np.where(counts > 0, arrived.sum(axis=1) >= counts, done)
        return np.repeat(done, width)

    def _let_go(self, number: int, done: Array) -> list[Move]:
        moves: list[Move] = []
        kept = []
        for (frame, after, barrier), which, mask, ins in self.waiting:
            going = mask & done if which == number else np.zeros_like(mask)
            if going.any():
                self._result(barrier, number, frame, going)
                moves.append((frame, after, going))
            staying = mask & ~going
            if staying.any():
                kept.append(((frame, after, barrier), which, staying, ins))
        self.waiting = kept
        if number == CLUSTER:
            gone = np.logical_or.reduce([m for _, _, m in moves]) if moves else np.zeros_like(done)
            self.passed = self.passed | (self.arrived[number] & done & ~gone)
        self.arrived[number] = self.arrived[number] & ~done
        for table in (self.expected, self.votes):
            if number in table:
                table[number] = np.where(done, table[number].dtype.type(0), table[number])
        if not self.arrived[number].any():
            del self.arrived[number]
        return moves

    def _result(self, barrier: Barrier, number: int, frame: Frame, going: Array) -> None:
        if barrier.result is None:
            return
        width = self.machine.threads
        votes, arrived = self.votes[number].reshape(-1, width), self.arrived[number].reshape(-1, width)
        if barrier.reduction == "popc":
            value: Any = votes.sum(axis=1).astype(np.uint32)
        elif barrier.reduction == "or":
            value = votes.any(axis=1)
        else:
            value = ~(arrived & ~votes).any(axis=1)
        barrier.result(frame, Active(going), np.repeat(value, width))


Place = tuple[Frame, int]
FAIR_EVERY = 1024


class Interpreter:
    def __init__(self, machine: InterpState, max_steps: int) -> None:
        self.machine, self.steps_left = machine, max_steps
        self.groups: dict[Place, Array] = {}
        self.stuck: set[Place] = set()
        self.last_run: dict[Place, int] = {}
        self.barriers = Barriers(machine)
        self.frames: dict[tuple[int, int, str], Frame] = {}
        self.tick = 0
        self.everyone = int(machine.exists.sum())

    def run(self, entry: Frame) -> None:
        self._arrive((entry, 0, self.machine.exists))
        with np.errstate(all="ignore"):
            while True:
                place = self._choose()
                if place is None:
                    break
                self._run_group(place, self.groups.pop(place))
        if self.groups or self.barriers.waiting:
            raise self._deadlock()

    def _arrive(self, move: Move) -> None:
        place, mask = move[:2], move[2]
        known = self.groups.get(place)
        self.groups[place] = mask if known is None else known | mask
        self.stuck.discard(place)

    def _choose(self) -> Place | None:
        ready = [p for p in self.groups if p not in self.stuck] if self.stuck else list(self.groups)
        if not ready:
            return None
        if len(ready) == 1:
            return ready[0]
        self.tick += 1
        if self.tick % FAIR_EVERY == 0:
            return min(ready, key=lambda p: self.last_run.get(p, 0))
        return min(ready, key=lambda p: (*p[0].prefix, p[0].code.blocks[p[1]].rank))

    def _run_group(self, place: Place, mask: Array) -> None:
        frame, index = place
        while True:
            self.last_run[frame, index] = self.tick
            block = frame.code.blocks[index]
            if block.kind == "collective":
                mask = self._assemble(frame, index, block, mask)
                if not mask.any():
                    return
            moves = self._run_block(frame, index, block, mask)
            if len(moves) == 1 and not self.groups:
                frame, index, mask = moves[0]
                continue
            for move in moves:
                self._arrive(move)
            return

    def _run_block(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        act = Active(mask, bool(int(mask.sum()) == self.everyone))
        self.steps_left -= len(block.steps) + 1
        if self.steps_left < 0:
            raise self._fault(Deadlock, "the launch ran past its step limit", block.end or block.body[0])
        for step, ins, guard, negated in block.steps:
            part = act
            if guard >= 0:
                on = frame.regs[guard]
                taken = mask & ~on if negated else mask & on
                if not taken.any():
                    continue
                part = Active(taken)
            try:
                step(frame, part)
            except BadAccess as bad:
                raise self._bad_access(bad, ins, part) from None
        if block.end is None:
            return [(frame, block.next, mask)] if block.kind != "ret" else self._leave(frame, mask)
        try:
            return self._control(frame, index, block, mask)
        except BadAccess as bad:
            raise self._bad_access(bad, block.end, act) from None

    def _control(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        taken, rest = mask, None
        if block.guard >= 0:
            on = frame.regs[block.guard]
            taken = mask & ~on if block.negated else mask & on
            rest = mask & ~taken
        moves: list[Move] = []
        if taken.any():
            moves += getattr(self, f"_end_{block.kind}")(frame, index, block, taken)
        if rest is not None and rest.any():
            moves.append((frame, block.next, rest))
        return moves

    def _end_bra(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        return [(frame, self._known(block.targets[0], block), mask)]

    def _end_brx(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        chosen = np.broadcast_to(block.info(frame), mask.shape)
        moves = []
        for value in np.unique(chosen[mask]):
            if value >= len(block.targets):
                assert block.end is not None
                raise self._fault(
                    OutOfBounds, f"branch {value} of a table of {len(block.targets)}", block.end
                )
            moves.append((frame, self._known(block.targets[int(value)], block), mask & (chosen == value)))
        return moves

    def _known(self, target: int, block: CodeBlock) -> int:
        if target < 0:
            assert block.end is not None
            raise self._fault(UnknownInstruction, "a branch to a label that is not there", block.end)
        return target

    def _end_ret(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        return self._leave(frame, mask)

    def _leave(self, frame: Frame, mask: Array) -> list[Move]:
        if frame.parent is None:
            return self._exit(mask)
        leave(frame, mask)
        return [(frame.parent, frame.parent.code.blocks[frame.call_block].next, mask)]

    def _end_exit(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        return self._exit(mask)

    def _end_trap(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        assert block.end is not None
        raise self._fault(InterpreterFault, "the kernel trapped", block.end)

    def _exit(self, mask: Array) -> list[Move]:
        self.machine.alive = self.machine.alive & ~mask
        # Lanes that waited for these may continue.
        self.stuck.clear()
        return self.barriers.release()

    def _end_call(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        assert block.end is not None
        if block.info is None:
            raise self._fault(UnknownInstruction, "a call that cannot be decoded", block.end)
        try:
            return enter(self.frames, frame, index, block.info, mask)
        except KeyError as missing:
            raise self._fault(UnknownInstruction, f"a call of {missing.args[0]}", block.end) from None

    def _end_barrier(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> list[Move]:
        assert block.end is not None
        if block.info is None:
            raise self._fault(
                UnknownInstruction, f"the interpreter does not run '{block.end.op.text}'", block.end
            )
        return self.barriers.arrive(block.info, frame, block.next, mask, block.end)

    def _assemble(self, frame: Frame, index: int, block: CodeBlock, mask: Array) -> Array:
        machine = self.machine
        passing = mask
        if block.steps[0][2] >= 0:  # a false guard skips it
            on = frame.regs[block.steps[0][2]]
            passing = mask & (~on if not block.steps[0][3] else on)
            mask = mask & ~passing
        here, living = warp_bits(mask), warp_bits(machine.alive)
        if (here == living).all() or not mask.any():
            ready = mask
        elif block.info is None:
            ready = mask & per_lane(here == living)
        else:
            members = np.broadcast_to(block.info(frame), mask.shape)
            ready = mask & ((members & per_lane(living & ~here)) == 0)
        waiting = mask & ~ready
        if waiting.any():
            self.groups[frame, index] = waiting | self.groups.get((frame, index), np.False_)
            self.stuck.add((frame, index))
        return ready if block.steps[0][2] < 0 else ready | passing

    def _fault(self, kind: type[InterpreterFault], message: str, ins: Instruction) -> InterpreterFault:
        return kind(message, place=f"{self.machine.file}:{ins.line}")

    def _bad_access(self, bad: BadAccess, ins: Instruction, act: Active) -> InterpreterFault:
        lane = int(act.index[min(bad.lane, act.index.size - 1)])
        special = self.machine.special
        thread = ", ".join(str(int(special[f"%tid.{axis}"][lane])) for axis in "xyz")
        block = ", ".join(str(int(special[f"%ctaid.{axis}"][lane])) for axis in "xyz")
        return self._fault(
            OutOfBounds, f"{bad.message}, by '{ins.op.text}' of thread ({thread}) of block ({block})", ins
        )

    def _deadlock(self) -> Deadlock:
        lines = {ins.line for _, _, _, ins in self.barriers.waiting}
        for frame, index in self.groups:
            lines.add(frame.code.blocks[index].body[0].line)
        shown = ", ".join(str(line) for line in sorted(lines))
        return Deadlock(
            f"lanes wait at line {shown} for lanes that never come", place=f"{self.machine.file}:{min(lines)}"
        )
