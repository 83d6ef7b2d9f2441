"""Warp shuffles, votes, matches and reductions.

The engine gathers the lanes of the member mask first. Reading a lane outside it gives its register, as on
hardware.
"""

from typing import Any

import numpy as np

from tessera_ptx.interp.decode import Decoder, Get, Unknown, only, rule
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import PRED, U32, Array, types_of
from tessera_ptx.syntax import Instruction, Operand, Pair


def warp_bits(mask: Array) -> Array:
    words: Array = np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()
    return words


def per_lane(words: Array) -> Array:
    return np.repeat(words, 32)


def member_operand(ins: Instruction) -> Operand | None:
    """None: the whole warp."""
    name, mods = ins.op.name, ins.op.mods
    if name == "shfl" or name in ("vote", "match", "redux") or (name == "elect"):
        return ins.operands[-1]
    if name in ("bar", "barrier") and "warp" in mods:
        return ins.operands[0]
    return None


@rule("bar", "barrier")
def warp_barrier(ins: Instruction, decoder: Decoder) -> Step:
    if "warp" not in ins.op.mods:
        raise Unknown("a barrier in this place")
    return lambda frame, act: None


@rule("activemask")
def activemask(ins: Instruction, decoder: Decoder) -> Step:
    put = decoder.put(ins.operands[0], U32)
    return lambda frame, act: put(frame, act, per_lane(warp_bits(act.mask)))


@rule("shfl")
def shuffle(ins: Instruction, decoder: Decoder) -> Step:
    mode = next(m for m in ins.op.mods if m in ("up", "down", "bfly", "idx"))
    target = ins.operands[0]
    put = decoder.put(target.first if isinstance(target, Pair) else target, U32)
    flag = decoder.put(target.second, PRED) if isinstance(target, Pair) else None
    value, by, clamp = (decoder.get(o, U32) for o in ins.operands[1:4])

    def step(frame: Frame, act: Active) -> None:
        lane = frame.machine.special["%laneid"].astype(np.int64)
        b, c = by(frame).astype(np.int64) & 31, clamp(frame).astype(np.int64)
        source, inside = _source(mode, lane, b, c)
        first = np.arange(lane.size) - lane
        words = np.broadcast_to(value(frame), lane.shape)
        put(frame, act, words[first + np.where(inside, source, lane)])
        if flag is not None:
            flag(frame, act, inside)

    return step


def _source(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The second: inside the lane's segment."""
    segment, limit = (c >> 8) & 31, c & 31
    low, high = lane & segment, (lane & segment) | (limit & ~segment & 31)
    if mode == "up":
        source = lane - b
        return source, source >= high
    source = {"down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment & 31)}[mode]
    return source, source <= high


@rule("vote")
def vote(ins: Instruction, decoder: Decoder) -> Step:
    mode = next(m for m in ins.op.mods if m in ("any", "all", "uni", "ballot"))
    get = decoder.predicate(ins.operands[1])
    put = decoder.put(ins.operands[0], U32 if mode == "ballot" else PRED)

    def step(frame: Frame, act: Active) -> None:
        members = warp_bits(act.mask)
        yes = warp_bits(act.mask & get(frame))
        if mode == "ballot":
            result = yes
        elif mode == "any":
            result = yes != 0
        elif mode == "all":
            result = yes == members
        else:
            result = (yes == 0) | (yes == members)
        put(frame, act, per_lane(result))

    return step


@rule("match")
def match(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    if "any" not in ins.op.mods:
        raise Unknown("match.all")
    get, put = decoder.get(ins.operands[1], kind), decoder.put(ins.operands[0], U32)

    def step(frame: Frame, act: Active) -> None:
        rows = np.broadcast_to(get(frame), act.mask.shape).reshape(-1, 32)
        there = act.mask.reshape(-1, 32)
        equal = (rows[:, :, None] == rows[:, None, :]) & there[:, None, :]
        put(
            frame,
            act,
            (equal * (np.uint32(1) << np.arange(32, dtype=np.uint32))).sum(axis=2, dtype=np.uint32).ravel(),
        )

    return step


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@rule("redux")
def reduce(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    function = _REDUCE[next(m for m in ins.op.mods if m in _REDUCE)]
    get, put = decoder.get(ins.operands[1], kind), decoder.put(ins.operands[0], kind)
    if kind.kind == "f":
        raise Unknown("float redux")

    def step(frame: Frame, act: Active) -> None:
        rows = np.broadcast_to(get(frame), act.mask.shape).reshape(-1, 32)
        there = act.mask.reshape(-1, 32)
        result = np.zeros(rows.shape[0], kind.dtype)
        for warp in np.flatnonzero(there.any(axis=1)):
            result[warp] = function.reduce(rows[warp][there[warp]], dtype=kind.dtype)  # sums wrap
        put(frame, act, per_lane(result))

    return step


@rule("elect")
def elect(ins: Instruction, decoder: Decoder) -> Step:
    """The lowest member is the leader."""
    target = ins.operands[0]
    if not isinstance(target, Pair):
        raise Unknown("elect with one result")
    number, leader = decoder.put(target.first, U32), decoder.put(target.second, PRED)

    def step(frame: Frame, act: Active) -> None:
        there = act.mask.reshape(-1, 32)
        lowest = per_lane(there.argmax(axis=1).astype(np.uint32))
        number(frame, act, lowest)
        leader(frame, act, frame.machine.special["%laneid"] == lowest)

    return step


def member_getter(ins: Instruction, decoder: Decoder) -> Get | None:
    operand = member_operand(ins)
    return None if operand is None else decoder.get(operand, U32)
