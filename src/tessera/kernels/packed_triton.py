"""The CUDA implementation of the operators of `packed`.

  few rows, experts  `packed_product`: one program per (tile of outputs, expert, split of inputs). It turns
                     codes into numbers in registers; scales multiply the sums of a group, in float32.
  many rows          `packed_unpack` writes the weight out, and the library multiplies.

Codes become floats by their bits: a small integer is the mantissa of 128 (bfloat16) or 1024 (float16), and a
small float keeps its exponent and mantissa, multiplied by the difference of the biases. Codes are read as
16-bit words, so that one instruction turns two of them. Scales are loaded an iteration ahead.

Tiles and splits depend on shapes alone, and there are no atomics: results repeat bit for bit on any card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from tessera.kernels.grouped import rotated
from tessera.kernels.packing import BITS, MIDDLE, dequantise, num_columns

# Rows, of each expert, from which a weight is written out.
MANY_ROWS, MANY_EACH, MAX_EXPERTS_BYTES = 256, 128, 2 << 30
MAX_DEPTH, MIN_DEPTH = 128, 32
# Programs that keep a large card's memory busy, and the least iterations of one.
_BUSY, _LEAST = 200, 4
_MAX_SPLITS = 8
# Bytes per output, row and split.
_JOINED = 8
_COLUMNS, _WARPS, _STAGES = 128, 4, 4


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    splits: int
    warps: int = _WARPS
    stages: int = _STAGES


def tile_for(rows: int, experts: int, outputs: int, iterations: int, line: int) -> ProductTile:
    """`line`: bytes of an output's codes."""
    each = rows if experts == 1 else -(-2 * rows // experts)
    tile_rows = min(max(16, triton.next_power_of_2(each)), 64)
    programs = -(-outputs // _COLUMNS) * min(experts, rows)
    splits, most = 1, min(_MAX_SPLITS, line // (2 * _JOINED * rows))
    while 2 * splits <= most and splits * programs < _BUSY and iterations >= 2 * splits * _LEAST:
        splits *= 2
    return ProductTile(tile_rows, _COLUMNS, splits)


def depth_of(columns: int, group: int) -> int:
    """A power of two that divides the group of a scale."""
    if group >= columns:
        return MAX_DEPTH
    depth = min(group & -group, MAX_DEPTH)
    return depth if depth >= MIN_DEPTH else 0


def packed_linear(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    scales, zeros, order, bias, weight_format, block = given
    rows = x.flatten(0, -2)
    rows = rows if order is None else rows.index_select(1, order)
    weight = (codes[None], scales[None], None if zeros is None else zeros[None])
    return multiply(rows, *weight, bias, None, weight_format, block).view(*x.shape[:-1], -1)


def packed_grouped(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    scales, zeros, offsets, weight_format, block = given
    return multiply(x, codes, scales, zeros, None, offsets, weight_format, block)


def packed_part(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    scales, zeros, offsets, first, _, *form = given

    def product(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return multiply(rows, codes, scales, zeros, None, ends, *form)

    return rotated(product, x, offsets, first, codes.shape[0])


def multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    weight_format: str,
    block: Sequence[int],
    tile: ProductTile | None = None,
) -> torch.Tensor:
    """x [M, K] times weights [E, N, K]; without `offsets` there is one weight."""
    rows, columns = x.shape
    experts, outputs = codes.shape[:2]
    depth = depth_of(columns, block[1])
    if offsets is None and (rows >= MANY_ROWS or not depth):
        return linear(x, unpack(codes, scales, zeros, weight_format, block, x.dtype)[0], bias)
    is_small = x.dtype is torch.bfloat16 and 2 * experts * outputs * columns <= MAX_EXPERTS_BYTES
    if not depth or (offsets is not None and is_small and rows >= MANY_EACH * experts):
        weight = unpack(codes, scales, zeros, weight_format, block, x.dtype)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    x = x.contiguous()
    out = x.new_empty(rows, outputs)
    if not out.numel():
        return out
    tile = tile or tile_for(rows, experts, outputs, -(-columns // depth), codes.shape[2] * codes.itemsize)
    parts = x.new_empty(tile.splits, rows, outputs, dtype=torch.float32) if tile.splits > 1 else None
    each, depth, items = _items(codes, weight_format, depth, x.dtype)
    packed_product[-(-outputs // tile.columns), experts, tile.splits](
        x, items, scales, zeros, bias, offsets, out, parts, rows,
        **_sizes(outputs, columns, scales, weight_format, block), EACH=each, DEPTH=depth, ROWS=tile.rows,
        COLUMNS=tile.columns, SPLITS=tile.splits, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts is not None:
        packed_join[-(-outputs // 256), rows](parts, bias, out, rows, N=outputs, SPLITS=tile.splits, SIZE=256)
    return out


def unpack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    weight_format: str,
    block: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    (experts, outputs), columns = codes.shape[:2], num_columns(codes, weight_format)
    if columns % MIN_DEPTH or not depth_of(columns, block[1]):
        return dequantise(codes, scales, zeros, None, weight_format, block, dtype)
    out = torch.empty(experts, outputs, columns, dtype=dtype, device=codes.device)
    depth = min(columns & -columns, depth_of(columns, block[1]))
    packed_unpack[-(-outputs // 32), columns // depth, experts](
        _plain(codes), scales, zeros, out, **_sizes(outputs, columns, scales, weight_format, block),
        DEPTH=depth, COLUMNS=32,
    )  # fmt: skip
    return out


def _plain(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8) if codes.dtype.is_floating_point else codes


def _items(
    codes: torch.Tensor, weight_format: str, depth: int, dtype: torch.dtype
) -> tuple[int, int, torch.Tensor]:
    """Codes per item, inputs per iteration, and items: 16-bit words if a product has enough, else bytes.
    MXFP4's groups are short: with words, an iteration has several.
    """
    each = 8 // BITS[weight_format]
    if weight_format == "mxfp4" and dtype is torch.bfloat16 and codes.shape[-1] % 2 == 0:
        return 4, MAX_DEPTH, codes.view(torch.int16)
    if weight_format in ("int4", "fp8") and depth >= 32 * each and codes.shape[-1] % 2 == 0:
        return 2 * each, depth, codes.view(torch.int16)
    return each, depth, _plain(codes)


def _sizes(
    outputs: int, columns: int, scales: torch.Tensor, weight_format: str, block: Sequence[int]
) -> dict[str, Any]:
    return {
        "N": outputs,
        "K": columns,
        "FORMAT": weight_format,
        "NIBBLES": BITS[weight_format] == 4,
        "MIDDLE": MIDDLE.get(weight_format, 0),
        "BLOCK_N": block[0],
        "BLOCK_K": block[1],
        "SCALE_ROWS": scales.shape[-2],
        "SCALE_COLUMNS": scales.shape[-1],
    }


@triton.jit(do_not_specialize=["rows"])
def packed_product(
    x, codes, scales, zeros, bias, offsets, out, parts, rows, N: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, NIBBLES: tl.constexpr, MIDDLE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, EACH: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    expert, split = tl.program_id(1), tl.program_id(2)
    begin, end = 0, rows
    if offsets is not None:
        end = tl.load(offsets + expert)
        if expert > 0:
            begin = tl.load(offsets + expert - 1)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = n < N
    LINE: tl.constexpr = K // EACH
    GROUPS: tl.constexpr = DEPTH // BLOCK_K if BLOCK_K < DEPTH else 1
    SHARE: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
    codes += (expert.to(tl.int64) * N + n)[:, None] * LINE
    scale_at = (expert * SCALE_ROWS + n // BLOCK_N) * SCALE_COLUMNS
    for start in range(begin, end, ROWS):
        m = start + tl.arange(0, ROWS)
        is_row = m < end
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        at = scale_at + split * SHARE // BLOCK_K
        scale = _scales(scales, scale_at, split * SHARE, is_output, SCALE_COLUMNS, BLOCK_K, GROUPS)
        zero = scale if zeros is None else tl.load(zeros + at, mask=is_output, other=0)
        for first in range(split * SHARE, tl.minimum(split * SHARE + SHARE, K), DEPTH):
            later = tl.minimum(first + DEPTH, K - 1)
            at = scale_at + later // BLOCK_K
            next_scale = _scales(scales, scale_at, later, is_output, SCALE_COLUMNS, BLOCK_K, GROUPS)
            next_zero = next_scale if zeros is None else tl.load(zeros + at, mask=is_output, other=0)
            k = first + tl.arange(0, DEPTH)
            mask = is_row[:, None] & (k < K)[None, :]
            given = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
            place = first // EACH + tl.arange(0, DEPTH // EACH)
            mask = is_output[:, None] & (place < LINE)[None, :]
            code = tl.load(codes + place[None, :], mask=mask, other=0)
            less = None if zeros is None else zero
            part = tl.zeros([COLUMNS, ROWS], tl.float32)
            if GROUPS > 1:
                less, part = _spread(scale, DEPTH // 4 // GROUPS), total
            part = _product(given, code, less, part, EACH, FORMAT, NIBBLES, MIDDLE)
            if GROUPS > 1:
                total = part
            else:
                total += part * _factor(scale, FORMAT)[:, None]
            scale, zero = next_scale, next_zero
        if GROUPS > 1:
            total *= 2.0**63
        _store(out, parts, bias, tl.trans(total), m, n, split * rows + m, is_row, is_output, N, SPLITS)


@triton.jit
def _store(out, parts, bias, total, m, n, part_row, is_row, is_output, N: tl.constexpr, SPLITS: tl.constexpr):
    is_inside = is_row[:, None] & is_output[None, :]
    if SPLITS == 1:
        if bias is not None:
            total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        place = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_inside)
    else:
        tl.store(parts + part_row.to(tl.int64)[:, None] * N + n[None, :], total, mask=is_inside)


@triton.jit
def _product(
    given, code, less, part, EACH: tl.constexpr, FORMAT: tl.constexpr, NIBBLES: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Adds inputs times codes, without scales."""
    ROWS: tl.constexpr = given.shape[0]
    DEPTH: tl.constexpr = given.shape[1]
    if EACH == 4:
        even, odd = tl.split(tl.reshape(given, [ROWS, DEPTH // 4, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        part = _multiplied(x0, code, less, part, 0, FORMAT, MIDDLE)
        part = _multiplied(x1, code, less, part, 1, FORMAT, MIDDLE)
        part = _multiplied(x2, code, less, part, 2, FORMAT, MIDDLE)
        part = _multiplied(x3, code, less, part, 3, FORMAT, MIDDLE)
    elif EACH == 1:
        weight = _numbers(code, less, given.dtype, FORMAT, MIDDLE)
        part = tl.dot(weight, tl.trans(given), part, input_precision="ieee")
    else:
        x0, x1 = tl.split(tl.reshape(given, [ROWS, DEPTH // 2, 2]))
        if NIBBLES:
            low = _numbers(code & 15, less, given.dtype, FORMAT, MIDDLE)
            high = _numbers(code >> 4, less, given.dtype, FORMAT, MIDDLE)
            part = tl.dot(low, tl.trans(x0), part, input_precision="ieee")
            part = tl.dot(high, tl.trans(x1), part, input_precision="ieee")
        else:
            part = _multiplied(x0, code, less, part, 0, FORMAT, MIDDLE)
            part = _multiplied(x1, code, less, part, 1, FORMAT, MIDDLE)
    return part


@triton.jit
def _multiplied(x, word, zero, total, J: tl.constexpr, FORMAT: tl.constexpr, MIDDLE: tl.constexpr):
    """Code J of every 16-bit word. `zero`: of each output; for mxfp4 the factors of the words."""
    IS_BRAIN: tl.constexpr = x.dtype == tl.bfloat16
    SHORT: tl.constexpr = tl.bfloat16 if IS_BRAIN else tl.float16
    CODE: tl.constexpr = _two_codes(FORMAT, J, IS_BRAIN)
    if FORMAT == "int4":
        ONE: tl.constexpr = 128.0 if IS_BRAIN else 1024.0
        if zero is None:
            more = tl.full(word.shape, -ONE - MIDDLE, SHORT)
        else:
            more = tl.broadcast_to((-ONE - zero.to(tl.float32)).to(SHORT)[:, None], word.shape)
    elif FORMAT == "fp8":
        more = tl.full(word.shape, 2.0**120 if IS_BRAIN else 2.0**8, SHORT)
    else:
        more = zero
    if IS_BRAIN:
        number = tl.inline_asm_elementwise(CODE, "=r,r,r", [word, more], tl.bfloat16, is_pure=True, pack=2)
    else:
        number = tl.inline_asm_elementwise(CODE, "=r,r,r", [word, more], tl.float16, is_pure=True, pack=2)
    return tl.dot(number.to(x.dtype), tl.trans(x), total, input_precision="ieee")


@triton.constexpr_function
def _two_codes(form, place, is_brain):
    """PTX from two words ($1) to the floats of one code of each ($0), plus or times two floats ($2)."""
    fma = f"fma.rn.{'bf' if is_brain else 'f'}16x2"
    if form == "int4":
        magic, one = ("0x43004300", "0x3F803F80") if is_brain else ("0x64006400", "0x3C003C00")
        body = f"shr.u32 t, $1, {4 * place}; lop3.b32 t, t, 0x000F000F, {magic}, 0xEA; mov.b32 s, {one};"
        return f"{{ .reg .b32 s, t; {body} {fma} $0, t, s, $2; }}"
    if form == "fp8":
        keep, up, sign = ("0x07F007F0", 4, 8) if is_brain else ("0x3F803F80", 7, 8)
        up, sign = up - 8 * place, sign - 8 * place
    else:
        keep, up, sign = "0x01C001C0", 6 - 4 * place, 12 - 4 * place
    move = f"shl.b32 t, $1, {up}" if up >= 0 else f"shr.u32 t, $1, {-up}"
    body = f"{move}; and.b32 t, t, {keep}; shl.b32 s, $1, {sign}; lop3.b32 t, s, 0x80008000, t, 0xEA;"
    # Minus zero: a product keeps its sign.
    return f"{{ .reg .b32 s, t; {body} mov.b32 s, 0x80008000; {fma} $0, t, $2, s; }}"


@triton.jit
def _scales(
    scales, at, first, is_output, NUM: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    if GROUPS == 1:
        found = tl.load(scales + at + first // BLOCK_K, mask=is_output, other=0)
    else:
        group = first // BLOCK_K + tl.arange(0, GROUPS)
        mask = is_output[:, None] & (group < NUM)[None, :]
        found = tl.load(scales + at[:, None] + group[None, :], mask=mask, other=0)
    return found


@triton.jit
def _spread(powers, WORDS: tl.constexpr):
    """2**63 times the powers of two of groups, for each word."""
    COLUMNS: tl.constexpr = powers.shape[0]
    GROUPS: tl.constexpr = powers.shape[1]
    factor = ((tl.minimum(powers, 191).to(tl.int16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    wide = tl.broadcast_to(factor[:, :, None], [COLUMNS, GROUPS, WORDS])
    return tl.reshape(wide, [COLUMNS, GROUPS * WORDS])


@triton.jit
def _factor(scale, FORMAT: tl.constexpr):
    if FORMAT == "mxfp4":
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _numbers(code, zero, DTYPE: tl.constexpr, FORMAT: tl.constexpr, MIDDLE: tl.constexpr):
    IS_BRAIN: tl.constexpr = DTYPE == tl.bfloat16
    SHORT: tl.constexpr = tl.bfloat16 if IS_BRAIN else tl.float16
    if FORMAT == "int4":
        bits = code.to(tl.int16) | (0x4300 if IS_BRAIN else 0x6400)
        ONE: tl.constexpr = 128.0 if IS_BRAIN else 1024.0
        number = bits.to(SHORT, bitcast=True)
        if zero is None:
            number -= ONE + MIDDLE
        else:
            number -= (zero.to(tl.float32) + ONE).to(SHORT)[:, None]
    elif FORMAT == "int8":
        number = code.to(tl.float32)
        if zero is not None:
            number -= zero.to(tl.float32)[:, None]
    elif FORMAT == "fp8":
        wide = code.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << (4 if IS_BRAIN else 7))
        number = bits.to(tl.int16).to(SHORT, bitcast=True) * (2.0**120 if IS_BRAIN else 2.0**8)
    else:
        wide = code.to(tl.int16)
        bits = ((wide & 8) << 12) | ((wide & 7) << (6 if IS_BRAIN else 9))
        number = bits.to(tl.int16).to(SHORT, bitcast=True) * (2.0**126 if IS_BRAIN else 2.0**14)
    return number.to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def packed_join(parts, bias, out, rows, N: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    n, m = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1)
    is_output = n < N
    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * rows + m).to(tl.int64) * N + n, mask=is_output, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def packed_unpack(
    codes, scales, zeros, out, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, NIBBLES: tl.constexpr,
    MIDDLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first = tl.program_id(2), tl.program_id(1) * DEPTH
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = n < N
    row = expert.to(tl.int64) * N + n
    at = (expert * SCALE_ROWS + n // BLOCK_N) * SCALE_COLUMNS + first // BLOCK_K
    zero = None if zeros is None else tl.load(zeros + at, mask=is_output, other=0)
    if NIBBLES:
        place = first // 2 + tl.arange(0, DEPTH // 2)
        code = tl.load(codes + row[:, None] * (K // 2) + place[None, :], mask=is_output[:, None], other=0)
        low = _numbers(code & 15, zero, tl.float32, FORMAT, MIDDLE)
        high = _numbers(code >> 4, zero, tl.float32, FORMAT, MIDDLE)
        number = tl.reshape(tl.join(low, high), [COLUMNS, DEPTH])
    else:
        k = first + tl.arange(0, DEPTH)
        code = tl.load(codes + row[:, None] * K + k[None, :], mask=is_output[:, None], other=0)
        number = _numbers(code, zero, tl.float32, FORMAT, MIDDLE)
    number *= _factor(tl.load(scales + at, mask=is_output, other=0), FORMAT)[:, None]
    to = out + row[:, None] * K + first + tl.arange(0, DEPTH)[None, :]
    tl.store(to, number.to(out.dtype.element_ty), mask=is_output[:, None])
