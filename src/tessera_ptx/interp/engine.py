"""The engine: runs the blocks of a batch until every lane has left.

Lanes at the same block of the same frame form a group. The engine always runs the group whose block has
the lowest rank (see `program`), so lanes that parted meet again at the immediate post-dominator. Lanes wait

    at a block barrier      until all living lanes of their block, or as many as it says, have arrived;
    at a warp collective    until all living lanes of the member mask stand at the same instruction.

Every 1,024 blocks the group that has waited longest gets a turn, so that lanes that spin on memory let
others write. When every group waits, the launch is deadlocked: a Deadlock names the line.
"""

import numpy as np

from tessera_ptx.errors import (
    Deadlock,
    InterpreterFault,
    OutOfBounds,
    UnknownInstruction,
)
from tessera_ptx.interp.barriers import Barriers
from tessera_ptx.interp.calls import enter, leave
from tessera_ptx.interp.memory import BadAccess
from tessera_ptx.interp.rules_warp import per_lane, warp_bits
from tessera_ptx.interp.state import Active, Block, Frame, Machine
from tessera_ptx.interp.types import Array
from tessera_ptx.syntax import Instruction

Place = tuple[Frame, int]  # a frame and the index of a block
Move = tuple[Frame, int, Array]
FAIR_EVERY = 1024


class Engine:
    """Runs one batch of blocks."""

    def __init__(self, machine: Machine, max_steps: int) -> None:
        self.machine, self.steps_left = machine, max_steps
        self.groups: dict[Place, Array] = {}
        self.stuck: set[Place] = set()
        self.last_run: dict[Place, int] = {}
        self.barriers = Barriers(machine)
        self.frames: dict[tuple[int, int, str], Frame] = {}
        self.tick = 0
        self.everyone = int(machine.exists.sum())

    def run(self, entry: Frame) -> None:
        """Run until all lanes are gone."""
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
        """Run a block; go straight on while this group is the only one."""
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

    # ---- one block -------------------------------------------------------------------------------

    def _run_block(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
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

    def _control(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
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

    def _end_bra(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        return [(frame, self._known(block.targets[0], block), mask)]

    def _end_brx(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
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

    def _known(self, target: int, block: Block) -> int:
        if target < 0:
            assert block.end is not None
            raise self._fault(UnknownInstruction, "a branch to a label that is not there", block.end)
        return target

    def _end_ret(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        return self._leave(frame, mask)

    def _leave(self, frame: Frame, mask: Array) -> list[Move]:
        if frame.parent is None:
            return self._exit(mask)
        leave(frame, mask)
        return [(frame.parent, frame.parent.code.blocks[frame.call_block].next, mask)]

    def _end_exit(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        return self._exit(mask)

    def _end_trap(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        assert block.end is not None
        raise self._fault(InterpreterFault, "the kernel trapped", block.end)

    def _exit(self, mask: Array) -> list[Move]:
        self.machine.alive = self.machine.alive & ~mask
        # Lanes that waited for these need wait no longer.
        self.stuck.clear()
        return self.barriers.release()

    def _end_call(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        assert block.end is not None
        if block.info is None:
            raise self._fault(UnknownInstruction, "a call that cannot be decoded", block.end)
        try:
            return enter(self.frames, frame, index, block.info, mask)
        except KeyError as missing:
            raise self._fault(UnknownInstruction, f"a call of {missing.args[0]}", block.end) from None

    def _end_barrier(self, frame: Frame, index: int, block: Block, mask: Array) -> list[Move]:
        assert block.end is not None
        if block.info is None:
            raise self._fault(
                UnknownInstruction, f"the interpreter does not run '{block.end.op.text}'", block.end
            )
        return self.barriers.arrive(block.info, frame, block.next, mask, block.end)

    # ---- warps -----------------------------------------------------------------------------------

    def _assemble(self, frame: Frame, index: int, block: Block, mask: Array) -> Array:
        """The lanes that may run a collective now; the others stay where they are."""
        machine = self.machine
        passing = mask
        if block.steps[0][2] >= 0:  # lanes whose guard is off pass by
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

    # ---- faults ----------------------------------------------------------------------------------

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
