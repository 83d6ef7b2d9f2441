"""Loads, stores, asynchronous copies and cache hints.

Asynchronous copies complete immediately, as hardware may; waits are no-ops.
"""

import numpy as np

from tessera_ptx.interp.decode import Decoder, Unknown, only, rule
from tessera_ptx.interp.memory import BadAccess
from tessera_ptx.interp.rules.bulk import bulk_copy, tensor_copy
from tessera_ptx.interp.state import Active, Frame, Step, load, pick, spaces_of, spread, store
from tessera_ptx.interp.types import U32, U64, Array, types_of
from tessera_ptx.syntax import Imm, Instruction, Mem, Sym

_NOTHING = (
    "membar", "fence", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "pmevent", "applypriority",
    "setmaxnreg",
)  # fmt: skip


@rule(*_NOTHING)
def nothing(ins: Instruction, decoder: Decoder) -> Step:
    return lambda frame, act: None


@rule("createpolicy")
def policy(ins: Instruction, decoder: Decoder) -> Step:
    """An opaque number."""
    put = decoder.put(ins.operands[0], U64)
    return lambda frame, act: put(frame, act, np.uint64(0))


def space_of(ins: Instruction) -> str:
    """'' is generic."""
    found = spaces_of(ins.op.mods)
    return found[0] if found else ""


def aligned(address: Array, size: int) -> None:
    wrong = address & np.uint64(size - 1)
    if np.any(wrong):
        raise BadAccess(f"misaligned vector access of {size} bytes", int(np.flatnonzero(wrong)[0]))


@rule("ld", "ldu")
def read(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    space, size = space_of(ins), kind.bits // 8
    source = ins.operands[1]
    if (
        space == "param"
        and isinstance(source, Mem)
        and isinstance(source.base, Sym)
        and decoder.function.is_entry
    ):
        fast = _read_parameter(ins, decoder)
        if fast is not None:
            return fast
    address, puts = decoder.address(source), decoder.vector_put(ins.operands[0], kind)

    def step(frame: Frame, act: Active) -> None:
        index = act.index
        where = pick(address(frame), index)
        if len(puts) > 1:
            aligned(where, size * len(puts))
        lanes = frame.machine.num_lanes
        # All elements are read first: a destination may hold the address.
        values = [load(frame, space, index, where + np.uint64(k * size), size) for k in range(len(puts))]
        for put, value in zip(puts, values, strict=True):
            put(frame, act, spread(value.view(kind.dtype), index, lanes))

    return step


def _read_parameter(ins: Instruction, decoder: Decoder) -> Step | None:
    kind = only(types_of(ins.op.mods), ins)
    source = ins.operands[1]
    assert isinstance(source, Mem)
    assert isinstance(source.base, Sym)
    offset = decoder.function.param_offsets.get(source.base.name)
    if offset is None:
        return None
    offset += source.offset
    puts = decoder.vector_put(ins.operands[0], kind)
    size = kind.bits // 8

    def step(frame: Frame, act: Active) -> None:
        for k, put in enumerate(puts):
            raw = frame.machine.params[offset + k * size : offset + (k + 1) * size]
            if raw.size != size:
                raise BadAccess(f"access of {size} bytes outside the parameter block", 0)
            put(frame, act, raw.view(kind.dtype)[0])

    return step


@rule("st")
def write(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    if ins.op.mods[:1] in (("async",), ("bulk",)):
        raise Unknown("asynchronous stores")
    space, size = space_of(ins), kind.bits // 8
    address, gets = decoder.address(ins.operands[0]), decoder.vector(ins.operands[1], kind)

    def step(frame: Frame, act: Active) -> None:
        index = act.index
        where = pick(address(frame), index)
        if len(gets) > 1:
            aligned(where, size * len(gets))
        for k, get in enumerate(gets):
            value = pick(np.asarray(get(frame)), index).view(kind.raw)
            store(frame, space, index, where + np.uint64(k * size), value, size)

    return step


@rule("discard")
def discard(ins: Instruction, decoder: Decoder) -> Step:
    """Discarded bytes are written as zeros."""
    address, size = decoder.address(ins.operands[0]), decoder.get(ins.operands[1], U32)

    def step(frame: Frame, act: Active) -> None:
        where = pick(address(frame), act.index)
        for k in range(0, int(size(frame)), 8):
            zeros = np.zeros(act.index.size, np.uint64)
            store(frame, "", act.index, where + np.uint64(k), zeros, 8)

    return step


@rule("cp")
def copy(ins: Instruction, decoder: Decoder) -> Step:
    mods = ins.op.mods
    if {"commit_group", "wait_group", "wait_all", "prefetch"} & set(mods):
        return lambda frame, act: None
    if "tensor" in mods:
        return tensor_copy(ins, decoder)
    if "bulk" in mods:
        return bulk_copy(ins, decoder)
    if "mbarrier" in mods:
        raise Unknown("cp.async.mbarrier")
    return _copy_async(ins, decoder)


def _copy_async(ins: Instruction, decoder: Decoder) -> Step:
    """`[dst], [src], size {, source size or ignore predicate} {, policy}`"""
    target, source = (decoder.address(o) for o in ins.operands[:2])
    if not isinstance(ins.operands[2], Imm):
        raise Unknown("a copy of variable size")
    size = ins.operands[2].value
    extra = ins.operands[3:-1] if "L2::cache_hint" in ins.op.mods else ins.operands[3:]
    valid = decoder.get(extra[0], U32) if extra else None

    def step(frame: Frame, act: Active) -> None:
        index = act.index
        into, out_of = pick(target(frame), index), pick(source(frame), index)
        aligned(out_of, size)
        limit = (
            pick(np.asarray(valid(frame)), index)
            if valid is not None
            else np.full(index.shape, size, np.uint32)
        )
        unit = 4 if not np.any(limit & np.uint32(3)) else 1
        for k in range(0, size, unit):
            value = np.zeros(index.shape, f"u{unit}")
            inside = limit > k
            if np.any(inside):
                value[inside] = load(frame, "global", index[inside], out_of[inside] + np.uint64(k), unit)
            store(frame, "shared", index, into + np.uint64(k), value, unit)

    return step
