"""Tensor-core instructions: ldmatrix, stmatrix, mma.sync, wmma and wgmma.

mma fragments, with g = lane / 4, t = lane % 4 and n elements per 32-bit register:

    A   register r holds row g + 8 (r % 2), columns 4n (r / 2) + n t + 0 .. n-1
    B   register r holds column g, rows 4n r + n t + 0 .. n-1
    C   register pair p holds row g + 8 p, columns 2 t and 2 t + 1

wmma: element e of lane l is number (elements of a lane) l + e of the matrix, modulo its size. Products are
summed in double and rounded once: within the accumulator's accuracy of hardware, not bit for bit.

wgmma multiplies 64 x N tiles by four warps; warp w has rows 16 w to 16 w + 15 in mma fragments. Operands are
in shared memory, A also in registers. A descriptor has start address, two strides and swizzle. With e
elements per 16 bytes and rows of S = 1, 2, 4, 8 pieces of 16 bytes for swizzle 0, 32, 64, 128:

    K-major    element (m, k): (m / 8) stride + (m % 8) 16 S bytes + k; without swizzle, (k / e) leading
    MN-major   element (m, k): (m / eS) leading + (k / 8) stride + (k % 8) 16 S bytes + (m % eS)

Products complete immediately, so fences and waits are empty. Not handled: sparse products, types other than
f16 and bf16 with single accumulators.
"""

import re
from typing import Any

import numpy as np

from tessera_ptx.interp import floats
from tessera_ptx.interp.decode import Decoder, Get, Unknown, rule
from tessera_ptx.interp.rules.bulk import swizzled
from tessera_ptx.interp.state import Active, Frame, Step, load, spaces_of, store
from tessera_ptx.interp.types import F32, PRED, S32, U32, U64, Array, Type, types_of
from tessera_ptx.syntax import Imm, Instruction, Vec

LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")


def warps(act: Active) -> Array:
    there: Array = np.flatnonzero(act.mask.reshape(-1, 32).any(axis=1))
    return there


def rows(value: Any, frame: Frame, where: Array) -> Array:
    """One row of 32 per participating warp."""
    full: Array = np.broadcast_to(value, frame.machine.num_lanes).reshape(-1, 32)[where]
    return full


def back(value: Array, frame: Frame, where: Array) -> Array:
    out = np.zeros((frame.machine.num_lanes // 32, 32), value.dtype)
    out[where] = value
    return out.ravel()


@rule("ldmatrix")
def load_matrix(ins: Instruction, decoder: Decoder) -> Step:
    """Matrices of 8 x 8 halves; lane 8 m + i has the address of row i of matrix m."""
    count, trans = _count(ins), "trans" in ins.op.mods
    address, puts = decoder.address(ins.operands[1]), decoder.vector_put(ins.operands[0], U32)

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        first = rows(address(frame), frame, where)[:, : 8 * count].reshape(-1, count, 8)
        lanes = np.broadcast_to((where * 32)[:, None, None, None], (where.size, count, 8, 4))
        at = first[..., None] + np.arange(4, dtype=np.uint64) * np.uint64(4)
        words = load(frame, "shared", lanes.ravel(), at.ravel(), 4).reshape(at.shape)
        tiles = words.view(np.uint16).reshape(where.size, count, 8, 8)
        if trans:
            tiles = tiles.swapaxes(2, 3)
        for m, put in enumerate(puts):
            low, high = tiles[:, m, GROUP, 2 * PLACE], tiles[:, m, GROUP, 2 * PLACE + 1]
            put(frame, act, back(floats.join(low, high), frame, where))

    return step


def _count(ins: Instruction) -> int:
    if "m8n8" not in ins.op.mods or "b16" not in ins.op.mods:
        raise Unknown("this shape")
    return next((int(m[1]) for m in ins.op.mods if m in ("x1", "x2", "x4")), 1)


@rule("stmatrix")
def store_matrix(ins: Instruction, decoder: Decoder) -> Step:
    count, trans = _count(ins), "trans" in ins.op.mods
    address, gets = decoder.address(ins.operands[0]), decoder.vector(ins.operands[1], U32)

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        first = rows(address(frame), frame, where)[:, : 8 * count].reshape(-1, count, 8)
        tiles = np.zeros((where.size, count, 8, 8), np.uint16)
        for m, get in enumerate(gets):
            low, high = floats.halves(rows(get(frame), frame, where))
            tiles[:, m, GROUP, 2 * PLACE], tiles[:, m, GROUP, 2 * PLACE + 1] = low, high
        if trans:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        lanes = np.broadcast_to((where * 32)[:, None, None, None], (where.size, count, 8, 4))
        at = first[..., None] + np.arange(4, dtype=np.uint64) * np.uint64(4)
        store(frame, "shared", lanes.ravel(), at.ravel(), tiles.view(np.uint32).ravel(), 4)

    return step


def elements(words: Array, name: str) -> Array:
    """(..., 32) -> (..., 32, elements per word)."""
    parts = np.ascontiguousarray(words)[..., None]
    if name == "f16":
        return parts.view(np.float16).astype(np.float64)
    if name == "bf16":
        return floats.bf16_to_single(parts.view(np.uint16)).astype(np.float64)
    if name == "tf32":
        return (parts & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name in ("s8", "u8"):
        return parts.view(np.int8 if name == "s8" else np.uint8).astype(np.float64)
    if name in ("e4m3", "e5m2"):
        return floats.small_to_single(parts.view(np.uint8), name).astype(np.float64)
    raise Unknown(f"elements of type {name}")


@rule("mma")
def multiply(ins: Instruction, decoder: Decoder) -> Step:
    mods = ins.op.mods
    shape = next((_SHAPE.match(m) for m in mods if _SHAPE.match(m)), None)
    names = [m for m in mods if m in ("f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2", "f32", "s32", "f64")]
    if (
        shape is None
        or shape[1] != "16"
        or shape[2] != "8"
        or len(names) != 4
        or "sp" in mods
        or "row" not in mods
    ):
        raise Unknown("this shape")
    depth, (out, left, right, into) = int(shape[3]), names
    elements(np.zeros((1, 32), np.uint32), left)
    if out not in ("f32", "f16", "s32") or into != out:
        raise Unknown(f"accumulators of type {out}")
    word: Type = {"f32": F32, "f16": U32, "s32": S32}[out]
    puts = decoder.vector_put(ins.operands[0], word)
    a, b = (decoder.vector(o, U32) for o in ins.operands[1:3])
    c = decoder.vector(ins.operands[3], word)

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        matrix_a = fragment_a([rows(g(frame), frame, where) for g in a], left, depth)
        matrix_b = _fragment_b([rows(g(frame), frame, where) for g in b], right, depth)
        added = [rows(g(frame), frame, where) for g in c]
        product = matrix_a @ matrix_b
        for put, value in zip(puts, _results(product, added, out), strict=True):
            put(frame, act, back(value, frame, where))

    return step


def fragment_a(words: list[Array], name: str, depth: int) -> Array:
    matrix = np.zeros((words[0].shape[0], 16, depth))
    for r, word in enumerate(words):
        part = elements(word, name)
        n = part.shape[-1]
        for i in range(n):
            matrix[:, GROUP + 8 * (r % 2), 4 * n * (r // 2) + n * PLACE + i] = part[..., i]
    return matrix


def _fragment_b(words: list[Array], name: str, depth: int) -> Array:
    matrix = np.zeros((words[0].shape[0], depth, 8))
    for r, word in enumerate(words):
        part = elements(word, name)
        n = part.shape[-1]
        for i in range(n):
            matrix[:, 4 * n * r + n * PLACE + i, GROUP] = part[..., i]
    return matrix


def _results(product: Array, added: list[Array], out: str) -> list[Array]:
    places = [(GROUP + 8 * (i // 2), 2 * PLACE + i % 2) for i in range(4)]
    tiles = [product[:, row, column] for row, column in places]
    if out == "f16":
        results = []
        for p, word in enumerate(added):
            pair = [tiles[2 * p + i] + half.view(np.float16) for i, half in enumerate(floats.halves(word))]
            results.append(floats.join(*(v.astype(np.float16) for v in pair)))
        return results
    kind = np.float32 if out == "f32" else np.int32
    return [(tile + word.astype(np.float64)).astype(kind) for tile, word in zip(tiles, added, strict=True)]


@rule("wmma")
def wmma(ins: Instruction, decoder: Decoder) -> Step:
    """Tiles of halves with single accumulators."""
    mods = ins.op.mods
    if "m16n16k16" not in mods:
        raise Unknown("this shape")
    if mods[0] == "mma":
        return _wmma_multiply(ins, decoder)
    if mods[0] == "load" and types_of(mods)[-1].name == "f16" and mods[1] in ("a", "b"):
        return _wmma_load(ins, decoder)
    if mods[0] == "store" and types_of(mods)[-1].name == "f32":
        return _wmma_store(ins, decoder)
    raise Unknown("this form of wmma")


def _tile_address(address: Any, stride: Any, frame: Frame, where: Array, row_major: bool, size: int) -> Array:
    """The stride is in elements."""
    start = rows(address, frame, where)[:, :1, None]
    pitch = rows(stride, frame, where)[:, :1, None].astype(np.uint64)
    outer, inner = np.arange(16, dtype=np.uint64)[:, None], np.arange(16, dtype=np.uint64)[None, :]
    place = outer * pitch + inner if row_major else inner * pitch + outer
    at: Array = start + place * np.uint64(size)
    return at


def _wmma_load(ins: Instruction, decoder: Decoder) -> Step:
    space = (spaces_of(ins.op.mods) or [""])[0]
    address, stride = decoder.address(ins.operands[1]), decoder.get(ins.operands[2], U32)
    puts = decoder.vector_put(ins.operands[0], U32)

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        at = _tile_address(address(frame), np.asarray(stride(frame)), frame, where, "row" in ins.op.mods, 2)
        lanes = np.broadcast_to((where * 32)[:, None, None], at.shape)
        tile = load(frame, space, lanes.ravel(), at.ravel(), 2).reshape(where.size, 256)
        # 32 lanes x 8 registers x 2 halves hold every element twice.
        words = np.tile(np.ascontiguousarray(tile), (1, 2)).view(np.uint32).reshape(where.size, 32, 8)
        for k, put in enumerate(puts):
            put(frame, act, back(words[:, :, k], frame, where))

    return step


def _wmma_multiply(ins: Instruction, decoder: Decoder) -> Step:
    kinds = [k.name for k in types_of(ins.op.mods)]
    if set(kinds) != {"f32"} or len(kinds) != 2:
        raise Unknown("accumulators of another type")
    operands = ins.operands
    if not all(isinstance(o, Vec) for o in operands):
        raise Unknown("this form of wmma")
    puts = decoder.vector_put(operands[0], F32)
    a, b, c = (
        decoder.vector(operands[1], U32),
        decoder.vector(operands[2], U32),
        decoder.vector(operands[3], F32),
    )

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        left, right = (_wmma_tile(gets, frame, where) for gets in (a, b))
        held = np.stack([rows(g(frame), frame, where) for g in c], axis=2).reshape(where.size, 16, 16)
        result = (left @ right + held.astype(np.float64)).astype(np.float32).reshape(where.size, 32, 8)
        for k, put in enumerate(puts):
            put(frame, act, back(result[:, :, k], frame, where))

    return step


def _wmma_tile(gets: Any, frame: Frame, where: Array) -> Array:
    words = np.stack([rows(g(frame), frame, where) for g in gets], axis=2)
    halves = np.ascontiguousarray(words[:, :16]).view(np.float16).reshape(where.size, 16, 16)
    return halves.astype(np.float64)


def _wmma_store(ins: Instruction, decoder: Decoder) -> Step:
    space = (spaces_of(ins.op.mods) or [""])[0]
    address, gets = decoder.address(ins.operands[0]), decoder.vector(ins.operands[1], U32)
    stride = decoder.get(ins.operands[2], U32)

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        at = _tile_address(address(frame), np.asarray(stride(frame)), frame, where, "row" in ins.op.mods, 4)
        lanes = np.broadcast_to((where * 32)[:, None, None], at.shape)
        words = np.stack([rows(g(frame), frame, where) for g in gets], axis=2)
        store(frame, space, lanes.ravel(), at.ravel(), words.ravel(), 4)

    return step


_WG_SHAPE = re.compile(r"m64n(\d+)k16$")
_SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}  # descriptor code -> log2 of 16-byte pieces per row


@rule("wgmma")
def wgmma(ins: Instruction, decoder: Decoder) -> Step:
    mods = ins.op.mods
    if mods[0] in ("fence", "commit_group", "wait_group"):
        return lambda frame, act: None
    shape = next((_WG_SHAPE.match(m) for m in mods if _WG_SHAPE.match(m)), None)
    if shape is None or mods[-3] != "f32" or mods[-1] not in ("f16", "bf16"):
        raise Unknown("this shape or type")
    return _product(ins, decoder, int(shape[1]), mods[-1])


def _flag(ins: Instruction, index: int) -> int:
    operand = ins.operands[index]
    if not isinstance(operand, Imm):
        raise Unknown("an immediate is expected")
    return operand.value


def _product(ins: Instruction, decoder: Decoder, n: int, kind: str) -> Step:
    puts, gets = decoder.vector_put(ins.operands[0], F32), decoder.vector(ins.operands[0], F32)
    in_registers = isinstance(ins.operands[1], Vec)
    a = decoder.vector(ins.operands[1], U32 if in_registers else U64)
    b, keep = decoder.get(ins.operands[2], U64), decoder.get(ins.operands[3], PRED)
    sign = float(_flag(ins, 4) * _flag(ins, 5))
    trans_a, trans_b = (0, _flag(ins, 6)) if in_registers else (_flag(ins, 6), _flag(ins, 7))

    def step(frame: Frame, act: Active) -> None:
        where = warps(act)
        if in_registers:
            left = fragment_a([rows(g(frame), frame, where) for g in a], kind, 16)
        else:
            first = 16 * (where % (frame.machine.threads // 32) % 4)
            left = _tile(frame, where, a[0], first, 16, trans_a, kind)
        right = _tile(frame, where, b, np.zeros_like(where), n, trans_b, kind)
        product = sign * (left @ right.swapaxes(1, 2))
        old = np.broadcast_to(keep(frame), act.mask.shape).reshape(-1, 32)[where]
        for i, (get, put) in enumerate(zip(gets, puts, strict=True)):
            new = product[:, GROUP + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * PLACE + i % 2]
            held = np.where(old, rows(get(frame), frame, where), 0)
            put(frame, act, back((new + held).astype(np.float32), frame, where))

    return step


def _tile(frame: Frame, where: Array, get: Get, first: Array, count: int, trans: int, kind: str) -> Array:
    """Returns (warp, row, k)."""
    words = rows(np.asarray(get(frame)), frame, where)[:, 0].astype(np.uint64)
    start = (words & np.uint64(0x3FFF)) << np.uint64(4)
    leading, stride = (((words >> np.uint64(at)) & np.uint64(0x3FFF)) << np.uint64(4) for at in (16, 32))
    mode = _SWIZZLE[int(words[0] >> np.uint64(62))]
    m = (first[:, None] + np.arange(count)).astype(np.uint64)[:, :, None]
    k = np.arange(16, dtype=np.uint64)[None, None, :]
    lead, step = leading[:, None, None], stride[:, None, None]
    eight, row = np.uint64(8), np.uint64(16 << mode)
    if not trans:
        inner = k * np.uint64(2) if mode else (k // eight) * lead + (k % eight) * np.uint64(2)
        place = (m // eight) * step + (m % eight) * row + inner
    else:
        wide = np.uint64(8 << mode)
        outer = (m // wide) * lead + (k // eight) * step if mode else (m // wide) * step + (k // eight) * lead
        place = outer + (k % eight) * row + (m % wide) * np.uint64(2)
    address = swizzled(start[:, None, None] + place, mode)
    lanes = np.broadcast_to((where * 32)[:, None, None], address.shape)
    values = load(frame, "shared", lanes.ravel(), address.ravel(), 2).reshape(address.shape)
    pairs = np.ascontiguousarray(values).view(np.uint32)
    return elements(pairs, kind).reshape(address.shape)
