"""Bulk copies, the barriers that count their bytes, and shared memory of other blocks of a cluster.

A copy is done when it is issued; its bytes are counted at its barrier at the same time. An mbarrier is
one 64-bit word in shared memory, with a layout of our own (PTX leaves it open):

    bit 0 phase | 20 bits arrivals expected per phase | 20 bits arrivals pending | 22 bits bytes pending

The bytes pending are kept with 2**21 added, because a copy may arrive before it is expected.
"""

from collections.abc import Callable

import numpy as np

from tessera_ptx.interp.access import RANK_SHIFT, load, pick, spaces_of, store
from tessera_ptx.interp.decode import Decoder, Get, Unknown, only, rule
from tessera_ptx.interp.memory import SHARED
from tessera_ptx.interp.rules_arith import lift
from tessera_ptx.interp.rules_atomic import UPDATES
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import PRED, U32, U64, Array, types_of
from tessera_ptx.syntax import Instruction, Mem, Reg

_BIAS, _COUNT = 1 << 21, (1 << 20) - 1


class Word:
    """One mbarrier."""

    def __init__(self, word: int) -> None:
        self.phase, self.expected = word & 1, word >> 1 & _COUNT
        self.pending, self.bytes = word >> 21 & _COUNT, (word >> 41) - _BIAS

    def packed(self) -> int:
        """The word, after the phase has ended if nothing is pending."""
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.expected
        return self.phase | self.expected << 1 | self.pending << 21 | (self.bytes + _BIAS) << 41


def change(frame: Frame, lane: int, address: int, edit: Callable[[Word], None]) -> int:
    """Edit a barrier in place; gives the word before."""
    one, at = np.array([lane]), np.array([address & (SHARED - 1)], np.uint64)
    before = int(load(frame, "shared", one, at, 8)[0])
    word = Word(before)
    edit(word)
    store(frame, "shared", one, at, np.array([word.packed()], np.uint64), 8)
    return before


def count_bytes(frame: Frame, lane: int, address: int, size: int) -> None:
    """A copy of `size` bytes has arrived at a barrier."""

    def edit(word: Word) -> None:
        word.bytes -= size

    change(frame, lane, address, edit)


def scalar(get: Get, frame: Frame, lane: int) -> int:
    """An operand's value in one lane."""
    return int(pick(np.asarray(get(frame)), np.array([lane]))[0])


@rule("mbarrier")
def mbarrier(ins: Instruction, decoder: Decoder) -> Step:
    """init, arrive, expect and wait."""
    kind = ins.op.mods[0]
    if kind == "init":
        return _init(ins, decoder)
    if kind in ("inval",):
        return lambda frame, act: None
    if kind in ("try_wait", "test_wait"):
        return _wait(ins, decoder)
    if kind in ("arrive", "expect_tx", "complete_tx"):
        return _arrive(ins, decoder, kind)
    raise Unknown(f"mbarrier.{kind}")


def _init(ins: Instruction, decoder: Decoder) -> Step:
    address, count = decoder.address(ins.operands[0]), decoder.get(ins.operands[1], U32)

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index) & np.uint64(SHARED - 1)
        n = pick(np.asarray(count(frame)), act.index).astype(np.uint64)
        word = n << np.uint64(1) | n << np.uint64(21) | np.uint64(_BIAS << 41)
        store(frame, "shared", act.index, where, word, 8)

    return step


def _arrive(ins: Instruction, decoder: Decoder, kind: str) -> Step:
    state = None
    operands = ins.operands
    if not isinstance(operands[0], Mem):
        state = None if operands[0] == Reg("_") else decoder.put(operands[0], U64)
        operands = operands[1:]
    address = decoder.address(operands[0])
    number = decoder.get(operands[1], U32) if len(operands) > 1 else None
    expects = "expect_tx" in ins.op.mods
    arrives = kind == "arrive"

    def step(frame: Frame, act: Active) -> None:
        tokens = np.zeros(frame.machine.num_lanes, np.uint64)
        for lane in act.index:
            given = scalar(number, frame, lane) if number is not None else 1

            def edit(word: Word, given: int = given) -> None:
                word.bytes += given if expects else -given if kind == "complete_tx" else 0
                word.pending -= (1 if expects else given) if arrives else 0

            tokens[lane] = change(frame, lane, scalar(address, frame, lane), edit)
        if state is not None:
            state(frame, act, tokens)

    return step


def _wait(ins: Instruction, decoder: Decoder) -> Step:
    put, address = decoder.put(ins.operands[0], PRED), decoder.address(ins.operands[1])
    phase = decoder.get(ins.operands[2], U32 if "parity" in ins.op.mods else U64)

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index) & np.uint64(SHARED - 1)
        word = load(frame, "shared", act.index, where, 8)
        wanted = pick(np.asarray(phase(frame)), act.index).astype(np.uint64)
        done = np.zeros(frame.machine.num_lanes, bool)
        done[act.index] = (word & np.uint64(1)) != (wanted & np.uint64(1))
        put(frame, act, done)

    return step


def copy(ins: Instruction, decoder: Decoder) -> Step:
    """`cp.async.bulk` and `cp.reduce.async.bulk`: one lane moves many bytes."""
    found = spaces_of(ins.op.mods)
    reduces = ins.op.mods[0] == "reduce"
    if sorted(found[:2]) != ["global", "shared"]:
        raise Unknown("a bulk copy between these spaces")
    target, source = (decoder.address(o) for o in ins.operands[:2])
    size = decoder.get(ins.operands[2], U32)
    counted = any(m.startswith("mbarrier::complete_tx") for m in ins.op.mods)
    barrier = decoder.address(ins.operands[3]) if counted else None
    combine = combiner(ins) if reduces else None

    def step(frame: Frame, act: Active) -> None:
        for lane in act.index:
            into, out_of = (np.uint64(scalar(get, frame, lane)) for get in (target, source))
            count = scalar(size, frame, lane)
            unit = 8 if combine is None else combine[1]
            steps = np.arange(0, count, unit, dtype=np.uint64)
            many = np.full(steps.size, lane)
            value = load(frame, found[1], many, out_of + steps, unit)
            if combine is None:
                store(frame, found[0], many, into + steps, value, unit)
            else:
                update(frame, many, into + steps, value, combine)
            if barrier is not None:
                count_bytes(frame, lane, scalar(barrier, frame, lane), count)

    return step


Combiner = tuple[Callable[[Array, Array], Array], int]


def combiner(ins: Instruction) -> Combiner:
    """How a reducing copy joins an element with what is there, on bit patterns, and the element's size."""
    name = next((m for m in ins.op.mods if m in UPDATES), "")
    kind = only(types_of(ins.op.mods), ins)
    if name not in ("add", "min", "max", "and", "or", "xor"):
        raise Unknown(f"a reduction by '{name}'")
    joined = lift(UPDATES[name], kind)

    def combine(old: Array, new: Array) -> Array:
        result: Array = np.asarray(joined(old.view(kind.dtype), new.view(kind.dtype))).astype(kind.dtype)
        return result.view(kind.raw)

    return combine, kind.bits // 8


def update(frame: Frame, lanes: Array, address: Array, value: Array, combine: Combiner) -> None:
    """Join elements with global memory; the addresses of one copy are all different."""
    join, size = combine
    old = load(frame, "global", lanes, address, size, "a")
    store(frame, "global", lanes, address, join(old, value), size, "a")


@rule("mapa")
def map_address(ins: Instruction, decoder: Decoder) -> Step:
    """The address of the same variable in another block of the cluster."""
    kind = only(types_of(ins.op.mods), ins)
    put, a, rank = decoder.put(ins.operands[0], kind), decoder.get(ins.operands[1], U64), ins.operands[2]
    to = decoder.get(rank, U32)
    low = np.uint64((1 << RANK_SHIFT) - 1)

    def step(frame: Frame, act: Active) -> None:
        address = a(frame)
        base = (address >> np.uint64(44)) << np.uint64(44)
        above = (to(frame).astype(np.uint64) + np.uint64(1)) << np.uint64(RANK_SHIFT)
        put(frame, act, (base | above | (address & low)).astype(kind.dtype))

    return step


@rule("getctarank")
def rank_of_address(ins: Instruction, decoder: Decoder) -> Step:
    """Which block of the cluster a shared address belongs to."""
    put, a = decoder.put(ins.operands[0], U32), decoder.get(ins.operands[1], U64)

    def step(frame: Frame, act: Active) -> None:
        rank = (a(frame) & np.uint64(SHARED - 1)) >> np.uint64(RANK_SHIFT)
        own = frame.machine.special["%cluster_ctarank"]
        put(frame, act, np.where(rank > 0, rank - np.uint64(1), own).astype(np.uint32))

    return step
