"""atom and red: lanes at one address run in lane order."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_ptx.interp.decode import Decoder, Get, Unknown, rule
from tessera_ptx.interp.memory import SHARED
from tessera_ptx.interp.rules.arith import lift
from tessera_ptx.interp.state import Active, Frame, Step, load, pick, spaces_of, spread, store
from tessera_ptx.interp.types import Array, Type, types_of
from tessera_ptx.syntax import Instruction, Reg, Vec

Function = Callable[..., Any]


def _increment(old: Any, limit: Any) -> Any:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: Any, limit: Any) -> Any:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


UPDATES: dict[str, Function] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new, "inc": _increment, "dec": _decrement,
    "cas": lambda old, compare, new: np.where(old == compare, new, old),
}  # fmt: skip


@rule("atom", "red")
def atomic(ins: Instruction, decoder: Decoder) -> Step:
    name = next((m for m in ins.op.mods if m in UPDATES), "")
    kinds = types_of(ins.op.mods)
    if not name or not kinds or ins.op.mods[:1] == ("async",):
        raise Unknown("this atomic operation")
    kind, space = kinds[-1], (spaces_of(ins.op.mods) or [""])[0]
    update = lift(UPDATES[name], kind) if name in ("add", "min", "max") else UPDATES[name]
    operands = ins.operands if ins.op.name == "red" else ins.operands[1:]
    wanted = decoder.vector_put(ins.operands[0], kind) if ins.op.name == "atom" else []
    address = decoder.address(operands[0])
    count = 2 if name == "cas" else 1
    columns = [decoder.vector(o, kind) for o in operands[1 : 1 + count]]
    if isinstance(ins.operands[0], Reg) and ins.operands[0].name == "_":
        wanted = []
    width = len(operands[1].items) if isinstance(operands[1], Vec) else 1

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index)
        for k in range(width):
            gets = [column[k] for column in columns]
            old = take_turns(frame, act, space, where + np.uint64(k * kind.bits // 8), kind, update, gets)
            if wanted:
                wanted[k](frame, act, spread(old, act.index, frame.machine.num_lanes))

    return step


def take_turns(
    frame: Frame, act: Active, space: str, where: Array, kind: Type, update: Function, gets: list[Get]
) -> Array:
    """Distinct addresses together; returns the old values."""
    index, size = act.index, kind.bits // 8
    values = [pick(np.asarray(get(frame)), index) for get in gets]
    old = np.zeros(index.shape, kind.dtype)
    for turn in turns(frame, space, where, index):
        before = load(frame, space, index[turn], where[turn], size, "a").view(kind.dtype)
        after = np.asarray(update(before, *(v[turn] for v in values))).astype(kind.dtype)
        store(frame, space, index[turn], where[turn], after.view(kind.raw), size, "a")
        old[turn] = before
    return old


def turns(frame: Frame, space: str, where: Array, lanes: Array) -> list[Array]:
    """Without repeated places, in lane order per place."""
    owner = np.zeros(where.shape, np.int64)
    if space != "global":
        # A shared address in two blocks is two places.
        private = np.ones(where.shape, bool) if space else where >> np.uint64(44) == np.uint64(SHARED >> 44)
        owner = np.where(private, frame.machine.block_of[lanes], 0)
    order = np.lexsort((owner, where))
    new = (where[order][1:] != where[order][:-1]) | (owner[order][1:] != owner[order][:-1])
    first = np.flatnonzero(np.concatenate(([True], new)))
    rank = np.arange(order.size) - np.repeat(first, np.diff(np.append(first, order.size)))
    if not rank.any():
        return [np.arange(order.size)]
    by_rank = np.argsort(rank, kind="stable")
    cuts = np.flatnonzero(np.diff(rank[by_rank])) + 1
    return [np.sort(order[part]) for part in np.split(by_rank, cuts)]
