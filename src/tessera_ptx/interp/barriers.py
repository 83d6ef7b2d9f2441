"""Block and cluster barriers: who has arrived, who waits, who goes on."""

from typing import Any

import numpy as np

from tessera_ptx.interp.control import Barrier
from tessera_ptx.interp.state import Active, Frame, Machine
from tessera_ptx.interp.types import Array
from tessera_ptx.syntax import Instruction

Move = tuple[Frame, int, Array]
CLUSTER = -1


class Barriers:
    """All barriers of a batch; numbers 0 to 15 per block, CLUSTER per cluster."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrived: dict[int, Array] = {}
        self.expected: dict[int, Array] = {}
        self.votes: dict[int, Array] = {}
        # Lanes whose cluster arrival is complete and that have not waited for it yet.
        self.passed: Array = np.zeros(machine.num_lanes, bool)
        # (frame and block to go on with, barrier number, lanes, instruction)
        self.waiting: list[tuple[tuple[Frame, int, Barrier], int, Array, Instruction]] = []

    def arrive(self, barrier: Barrier, frame: Frame, after: int, mask: Array, ins: Instruction) -> list[Move]:
        """Lanes reach a barrier; gives those, of all that wait, that may go on."""
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
        """Lanes whose barrier is complete."""
        moves: list[Move] = []
        for number in list(self.arrived):
            done = self._complete(number)
            if done.any():
                moves += self._let_go(number, done)
        return moves

    def _complete(self, number: int) -> Array:
        """Lanes of blocks (or clusters) in which the barrier is complete."""
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
        """Give the lanes of a reducing barrier what it found."""
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
