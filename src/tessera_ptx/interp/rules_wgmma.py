"""wgmma: products of 64 x N tiles by four warps, operands in shared memory or, for A, in registers.

Warp w of the four works on rows 16 w to 16 w + 15 with fragments as those of mma, so a warp needs no
other one. An operand in shared memory is given by a descriptor: start address, two strides, swizzle.
With e elements to 16 bytes, and rows of S = 1, 2, 4, 8 pieces of 16 bytes for no swizzle, 32, 64, 128
bytes:

    K-major      element (m, k): (m / 8) stride + (m % 8) 16 S bytes + k; without swizzle, (k / e) leading
    MN-major     element (m, k): (m / eS) leading + (k / 8) stride + (k % 8) 16 S bytes + (m % eS)

Products are done at once, so fences and waits mean nothing. Not handled: sparse products, other types
than f16 and bf16 with single accumulators.
"""

import re

import numpy as np

from tessera_ptx.interp.access import load
from tessera_ptx.interp.decode import Decoder, Get, Unknown, rule
from tessera_ptx.interp.rules_matrix import GROUP, PLACE, back, elements, fragment_a, rows, warps
from tessera_ptx.interp.rules_tensor import swizzled
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import F32, PRED, U32, U64, Array
from tessera_ptx.syntax import Imm, Instruction, Vec

_SHAPE = re.compile(r"m64n(\d+)k16$")
_SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}  # the descriptor's code -> log2 of 16-byte pieces to a row


@rule("wgmma")
def wgmma(ins: Instruction, decoder: Decoder) -> Step:
    """The product; fence, commit_group and wait_group are empty."""
    mods = ins.op.mods
    if mods[0] in ("fence", "commit_group", "wait_group"):
        return lambda frame, act: None
    shape = next((_SHAPE.match(m) for m in mods if _SHAPE.match(m)), None)
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
    """Rows `first` .. of a 16-deep operand in shared memory, (warp, row, k)."""
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
