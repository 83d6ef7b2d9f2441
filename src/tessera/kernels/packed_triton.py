"""The CUDA implementation of the operators of `packed`.

  few rows, experts  `tiled_product`: one program per (tile of outputs, expert, split of inputs). Codes become
                     numbers in registers, in a tensor core's order; scales multiply the sums of a group, in
                     float32. `packed_product` for weights that are not tiled.
  many rows          `tiled_unpack` or `packed_unpack` writes the weight out, and the library multiplies.
  blocks of FP8      Where the library multiplies them (Hopper) `float8_rows` rounds the inputs to FP8,
                     with a scale for 128, as such checkpoints are meant; `float8_product`, or the library.

Codes become floats by their bits: a small integer is the mantissa of 128 (bfloat16) or 1024 (float16), a
small float keeps exponent and mantissa, times the difference of the biases. One instruction turns two codes.

Tiles and splits depend on shapes alone, without atomics: results repeat bit for bit on any card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from tessera.kernels.grouped import rotated
from tessera.kernels.launch import overlaps
from tessera.kernels.overlap_triton import fetch_early, launch_next, wait_previous
from tessera.kernels.packing import BLOCKS, GROUP, MIDDLE, PLAIN, dequantise, num_columns

# Rows, of each expert, from which a weight is written out.
MANY_ROWS, MANY_EACH, MAX_EXPERTS_BYTES = 256, 128, 2 << 30
# Rows beyond which the library multiplies FP8; rows, and blocks of inputs, are multiples of the second then.
MAX_OWN_ROWS, FLOAT8_ALIGN, HOPPER = 64, 4, (9, 0)
MAX_DEPTH, MIN_DEPTH = 128, 32
# Programs that keep a large card's memory busy, and the least iterations of one.
_BUSY, _LEAST = 200, 4
# Those of tiled weights: of 16 rows, of more.
_BUSY_FEW, _BUSY_MORE = 190, 128
_MAX_SPLITS = 8
# Columns, blocks of inputs and stages of few rows, by more outputs than so many; how many rows those are; the
# same for experts; most stages on cards with less shared memory than Hopper's.
_FEW = ((12_000, (64, 2, 3)), (4_608, (32, 4, 3)), (0, (32, 8, 4)))
FEW_ROWS, _FEW_EXPERTS, _MODEST_STAGES = 8, (64, 2, 4), 3
# Lines of 128 bytes of each output that are fetched before the inputs are there.
_AHEAD = tl.constexpr(4)
# Programs beside one another for the rows of an expert.
TILES_EACH = 2
# Bytes per output, row and split.
_JOINED = 8
_COLUMNS, _WARPS, _STAGES = 128, 4, 4
_ITEM = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.uint8}


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    splits: int
    warps: int = _WARPS
    stages: int = _STAGES
    depth: int = 1


# Inputs wider than the numbers of codes: products in float32, whose operands take shared memory.
_WIDE = ProductTile(16, 32, 1, stages=2)


def tile_for(
    rows: int, experts: int, outputs: int, iterations: int, line: int, tiled: bool, busy: int = 0
) -> ProductTile:
    """`line`: bytes of an output's codes; `busy`: programs that are enough."""
    each = rows if experts == 1 else -(-2 * rows // experts)
    if tiled and each <= FEW_ROWS and not busy:
        by_outputs = next(few for least, few in _FEW if outputs > least)
        columns, depth, stages = by_outputs if experts == 1 else _FEW_EXPERTS
        return ProductTile(FEW_ROWS, columns, 1, columns * depth // 32, stages, depth)
    tile_rows = min(max(16, triton.next_power_of_2(each)), 64)
    programs = -(-outputs // _COLUMNS) * (-(-rows // tile_rows) if experts == 1 else min(experts, rows))
    busy = busy or ((_BUSY_FEW if tile_rows == 16 else _BUSY_MORE) if tiled else _BUSY)
    joined = _JOINED if tiled else 2 * _JOINED
    splits, most = 1, min(_MAX_SPLITS, line // (joined * rows))
    while 2 * splits <= most and splits * programs < busy and iterations >= 2 * splits * _LEAST:
        splits *= 2
    return ProductTile(tile_rows, _COLUMNS, splits, 8 if tiled and experts == 1 and rows > 64 else _WARPS)


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
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    bias: torch.Tensor | None, offsets: torch.Tensor | None, weight_format: str, block: Sequence[int],
    tile: ProductTile | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] times weights [E, N, K]; without `offsets` there is one weight."""
    rows, columns = x.shape
    experts, outputs = codes.shape[:2]
    depth = MAX_DEPTH if weight_format in PLAIN else depth_of(columns, block[1])
    is_blocks = weight_format == BLOCKS and columns % (FLOAT8_ALIGN * GROUP) == 0
    if offsets is None and is_blocks and rows and multiplies_blocks(x.device, x.dtype):
        return _float8_linear(x, codes[0], scales[0], bias, tile)
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
    is_tiled, line, blocks = weight_format in PLAIN, codes.shape[2] * codes.itemsize, -(-columns // depth)
    is_brain = x.dtype is not torch.float16 or weight_format == "mxfp4_tiled"
    is_wide = is_tiled and x.dtype is not (torch.bfloat16 if is_brain else torch.float16)
    tile = tile or (_WIDE if is_wide else tile_for(rows, experts, outputs, blocks, line, is_tiled))
    overlap = overlaps(x.device)
    parts = x.new_empty(tile.splits, rows, outputs, dtype=torch.float32) if tile.splits > 1 else None
    groups = -(-rows // tile.rows) if offsets is None else TILES_EACH * experts
    grid, options = (-(-outputs // tile.columns), groups, tile.splits), {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "SPLITS": tile.splits, "TILES": TILES_EACH,
        "OVERLAPS": overlap, "launch_pdl": overlap, "num_warps": tile.warps,
        "num_stages": tile.stages if overlap or tile.depth == 1 else min(tile.stages, _MODEST_STAGES),
    }  # fmt: skip
    if is_tiled:
        tiled_product[grid](
            x, codes, scales.view(torch.int32), bias, offsets, out, parts, rows, N=outputs, K=columns,
            FORMAT=PLAIN[weight_format], IS_BRAIN=is_brain, HAS_BLOCKS=weight_format == BLOCKS,
            DEPTH=tile.depth, **options,
        )  # fmt: skip
    else:
        packed_product[grid](
            x, codes.view(_ITEM[weight_format]), scales, zeros, bias, offsets, out, parts, rows,
            **_sizes(outputs, columns, scales, weight_format, block), DEPTH=depth, **options,
        )  # fmt: skip
    if parts is not None:
        _join(parts, bias, out)
    return out


def _join(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    splits, rows, outputs = parts.shape
    packed_join[-(-outputs // 256), rows](
        parts, bias, out, rows, N=outputs, SPLITS=splits, SIZE=256, OVERLAPS=overlaps(out.device),
        launch_pdl=overlaps(out.device),
    )  # fmt: skip


@cache
def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Does the library multiply FP8 with blocks of scales?"""
    is_known = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    if not is_known or dtype is not torch.bfloat16:
        return False
    one = torch.zeros(512, 512, device=device)
    try:
        many = one[: MAX_OWN_ROWS + 1].bfloat16()
        _float8_linear(many, one[:, :128].contiguous().view(torch.int32), one[:4, :4], None)
    except RuntimeError:
        return False
    return True


def _float8_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    tile: ProductTile | None = None,
) -> torch.Tensor:  # fmt: skip
    (rows, columns), outputs, x = x.shape, codes.shape[0], x.contiguous()
    tile = tile or tile_for(rows, 1, outputs, columns // GROUP, columns, True, _BUSY_FEW)
    is_library = rows > MAX_OWN_ROWS
    unit = FLOAT8_ALIGN if is_library else tile.rows
    padded = -(-rows // unit) * unit
    short = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    each = torch.empty(columns // GROUP, padded, device=x.device)
    options = {"OVERLAPS": overlaps(x.device), "launch_pdl": overlaps(x.device)}
    float8_rows[-(-padded // 32), columns // GROUP](
        x, short, each, rows, padded, K=columns, ROWS=32, **options
    )
    weight = codes.view(torch.float8_e4m3fn)
    if is_library:
        out = torch._scaled_mm(short, weight.t(), each.t(), scales.contiguous().t(), out_dtype=x.dtype)[:rows]
        return out if bias is None else out + bias
    out = x.new_empty(rows, outputs)
    parts = x.new_empty(tile.splits, rows, outputs, dtype=torch.float32) if tile.splits > 1 else None
    float8_product[-(-outputs // tile.columns), padded // tile.rows, tile.splits](
        short, each, weight, scales, bias, out, parts, rows, padded, N=outputs, K=columns, ROWS=tile.rows,
        COLUMNS=tile.columns, SPLITS=tile.splits, num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    if parts is not None:
        _join(parts, bias, out)
    return out


@triton.jit(do_not_specialize=["rows", "padded"])
def float8_product(
    short, each, codes, scales, bias, out, parts, rows, padded, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Inputs and codes in FP8. `COLUMNS` divides the block of a scale, `ROWS` the padded rows."""
    wait_previous(OVERLAPS)
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = K // 128
    SHARE: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k, first = tl.arange(0, 128)[None, :], split * SHARE
    line = codes + (n if N % COLUMNS == 0 else tl.minimum(n, N - 1)).to(tl.int64)[:, None] * K + k
    given_at = short + m.to(tl.int64)[:, None] * K + k
    scales += tl.program_id(0) * COLUMNS // 128 * BLOCKS
    each += m
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    begin = tl.minimum(first, BLOCKS - 1)  # a last split may be empty
    scale = tl.load(each + begin * padded) * tl.load(scales + begin)
    for block in range(first, tl.minimum(first + SHARE, BLOCKS)):
        later = tl.minimum(block + 1, BLOCKS - 1)
        next_scale = tl.load(each + later * padded) * tl.load(scales + later)
        code, given = tl.load(line + block * 128), tl.load(given_at + block * 128)
        total += tl.dot(code, tl.trans(given)) * scale[None, :]
        scale = next_scale
    _store(out, parts, bias, tl.trans(total), m, n, split * rows + m, m < rows, n < N, N, SPLITS)


@triton.jit(do_not_specialize=["rows", "padded"])
def float8_rows(x, out, scales, rows, padded, K: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Inputs in the order of tiled codes, and the scale of 128."""
    launch_next(OVERLAPS)
    wait_previous(OVERLAPS)
    m, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    at = m.to(tl.int64)[:, None] * K + block * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + at, mask=(m < rows)[:, None], other=0.0).to(tl.float32)
    most = tl.max(tl.abs(value), 1)
    scale = tl.where(most > 0.0, most / 448.0, 1.0)
    short = tl.reshape((value / scale[:, None]).to(tl.float8e4nv), [ROWS, 2, 32, 2])
    short = tl.reshape(tl.permute(short, (0, 2, 3, 1)), [ROWS, 128])
    tl.store(out + at, short, mask=(m < padded)[:, None])
    tl.store(scales + block * padded + m, scale, mask=m < padded)


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, weight_format: str,
    block: Sequence[int], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    (experts, outputs), columns = codes.shape[:2], num_columns(codes, weight_format, block)
    if weight_format not in PLAIN and (columns % MIN_DEPTH or not depth_of(columns, block[1])):
        return dequantise(codes, scales, zeros, None, weight_format, block, dtype)
    out = torch.empty(experts, outputs, columns, dtype=dtype, device=codes.device)
    if weight_format in PLAIN:
        grid = -(-outputs // 32), -(-columns // GROUP), experts
        tiled_unpack[grid](
            codes, scales.view(torch.int32), out, N=outputs, K=columns, FORMAT=PLAIN[weight_format],
            HAS_BLOCKS=weight_format == BLOCKS,
        )  # fmt: skip
        return out
    depth = min(columns & -columns, depth_of(columns, block[1]))
    packed_unpack[-(-outputs // 32), columns // depth, experts](
        codes.view(_ITEM[weight_format]), scales, zeros, out, DEPTH=depth, COLUMNS=32,
        **_sizes(outputs, columns, scales, weight_format, block),
    )  # fmt: skip
    return out


def _sizes(
    outputs: int, columns: int, scales: torch.Tensor, weight_format: str, block: Sequence[int]
) -> dict[str, Any]:
    return {
        "N": outputs, "K": columns, "FORMAT": weight_format, "BLOCK_N": block[0], "BLOCK_K": block[1],
        "NIBBLES": {"int4": True, "int8": False, "fp8": False}[weight_format], "SCALE_ROWS": scales.shape[-2],
        "MIDDLE": MIDDLE.get(weight_format, 0), "SCALE_COLUMNS": scales.shape[-1],
    }  # fmt: skip


@triton.jit
def _rows_of(offsets, rows, ROWS: tl.constexpr, TILES: tl.constexpr):
    """A program's weight, its first row and the last: a tile of all rows, or every tile in `TILES` of an
    expert's.
    """
    tile = tl.program_id(1)
    weight = tile // TILES
    begin = tile * ROWS
    end = tl.minimum(begin + ROWS, rows)
    if offsets is None:
        weight = weight * 0
    else:
        begin = tile % TILES * ROWS
        end = tl.load(offsets + weight)
        if weight > 0:
            begin += tl.load(offsets + weight - 1)
    return weight, begin, end


@triton.jit(do_not_specialize=["rows"])
def packed_product(
    x, codes, scales, zeros, bias, offsets, out, parts, rows, N: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, NIBBLES: tl.constexpr, MIDDLE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAPS)
    EACH: tl.constexpr = 2 if NIBBLES else 1
    expert, begin, end = _rows_of(offsets, rows, ROWS, TILES)
    split = tl.program_id(2)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = n < N
    LINE: tl.constexpr = K // EACH
    SHARE: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
    codes += (expert.to(tl.int64) * N + n)[:, None] * LINE
    scale_at = (expert * SCALE_ROWS + n // BLOCK_N) * SCALE_COLUMNS
    for start in range(begin, end, TILES * ROWS):
        m = start + tl.arange(0, ROWS)
        is_row = m < end
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        at = scale_at + split * SHARE // BLOCK_K
        scale = tl.load(scales + at, mask=is_output, other=0)
        zero = scale if zeros is None else tl.load(zeros + at, mask=is_output, other=0)
        for first in range(split * SHARE, tl.minimum(split * SHARE + SHARE, K), DEPTH):
            later = tl.minimum(first + DEPTH, K - 1)
            at = scale_at + later // BLOCK_K
            next_scale = tl.load(scales + at, mask=is_output, other=0)
            next_zero = next_scale if zeros is None else tl.load(zeros + at, mask=is_output, other=0)
            k = first + tl.arange(0, DEPTH)
            mask = is_row[:, None] & (k < K)[None, :]
            given = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
            place = first // EACH + tl.arange(0, DEPTH // EACH)
            mask = is_output[:, None] & (place < LINE)[None, :]
            code = tl.load(codes + place[None, :], mask=mask, other=0)
            less = None if zeros is None else zero
            part = tl.zeros([COLUMNS, ROWS], tl.float32)
            part = _product(given, code, less, part, FORMAT, NIBBLES, MIDDLE)
            total += part * scale.to(tl.float32)[:, None]
            scale, zero = next_scale, next_zero
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
def _product(given, code, less, part, FORMAT: tl.constexpr, NIBBLES: tl.constexpr, MIDDLE: tl.constexpr):
    """Adds inputs times codes, without scales."""
    if NIBBLES:
        x0, x1 = tl.split(tl.reshape(given, [given.shape[0], given.shape[1] // 2, 2]))
        low = _numbers(code & 15, less, given.dtype, FORMAT, MIDDLE)
        high = _numbers(code >> 4, less, given.dtype, FORMAT, MIDDLE)
        part = tl.dot(low, tl.trans(x0), part, input_precision="ieee")
        part = tl.dot(high, tl.trans(x1), part, input_precision="ieee")
    else:
        weight = _numbers(code, less, given.dtype, FORMAT, MIDDLE)
        part = tl.dot(weight, tl.trans(given), part, input_precision="ieee")
    return part


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
    else:
        wide = code.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << (4 if IS_BRAIN else 7))
        number = bits.to(tl.int16).to(SHORT, bitcast=True) * (2.0**120 if IS_BRAIN else 2.0**8)
    return number.to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def packed_join(
    parts, bias, out, rows, N: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr
):
    launch_next(OVERLAPS)
    wait_previous(OVERLAPS)
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
    number *= tl.load(scales + at, mask=is_output, other=0).to(tl.float32)[:, None]
    to = out + row[:, None] * K + first + tl.arange(0, DEPTH)[None, :]
    tl.store(to, number.to(out.dtype.element_ty), mask=is_output[:, None])


@triton.constexpr_function
def _tile_code(form, is_brain):
    """PTX from a word ($4) and its output's scales ($5) to numbers of codes p ($0 to $3), two each; of fp8
    from a word ($2).
    """
    if form == "int4":
        words = "0x64006400 0x3C003C00 0xE400E400", "0x43004300 0x3F803F80 0xC300C300"
        magic, one, less = words[is_brain].split()
        code = f"and.b32 t, $5, 15; mad.lo.u32 z, t, 0x10001, {less}; mov.b32 f, {one}; "
        for p in range(4):
            code += f"shr.u32 t, $4, {4 * p}; lop3.b32 t, t, 0x000F000F, {magic}, 0xEA; "
            code += f"fma.rn.{'bf' if is_brain else 'f'}16x2 ${p}, t, f, z; "
        return f"{{ .reg .b32 f, t, z; {code} }}"
    code = "mov.b32 z, 0x80008000; "  # minus zero: a product keeps its sign
    if form == "fp8":
        up, keep, more = (4, "0x07F007F0", "0x7B807B80") if is_brain else (7, "0x3F803F80", "0x5C005C00")
        code += f"mov.b32 f, {more}; "
        for p in range(2):
            move = f"shl.b32 t, $2, {up}" if not p else f"shr.u32 t, $2, {8 - up}"
            code += f"{move}; and.b32 t, t, {keep}; shl.b32 s, $2, {8 - 8 * p}; "
            code += "lop3.b32 t, s, 0x80008000, t, 0xEA; "
            code += f"fma.rn.{'bf' if is_brain else 'f'}16x2 ${p}, t, f, z; "
        return f"{{ .reg .b32 f, s, t, z; {code} }}"
    for p in range(4):
        code += f"prmt.b32 f, $5, 0, 0x4{p}4{p}; shl.b32 f, f, 7; "
        if p < 3:
            code += f"shl.b32 t, $4, {3 * p}; and.b32 t, t, 0x81C081C0; "
        else:
            code += "shr.u32 t, $4, 5; and.b32 t, t, 0x01400140; shr.u32 s, $4, 3; "
            code += (
                "lop3.b32 t, s, 0x00800080, t, 0xEA; shl.b32 s, $4, 1; lop3.b32 t, s, 0x80008000, t, 0xEA; "
            )
        code += f"fma.rn.bf16x2 ${p}, t, f, z; "
    return f"{{ .reg .b32 f, s, t, z; {code} }}"


@triton.jit
def _halves(pair, IS_BRAIN: tl.constexpr):
    SHORT: tl.constexpr = tl.bfloat16 if IS_BRAIN else tl.float16
    low = pair.to(tl.int16).to(SHORT, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.int16).to(SHORT, bitcast=True))


@triton.jit
def _float(scale, FORMAT: tl.constexpr):
    return (scale & -16 if FORMAT == "int4" else scale).to(tl.float32, bitcast=True)


@triton.jit
def _tiled_numbers(words, scales, FORMAT: tl.constexpr, IS_BRAIN: tl.constexpr):
    """Words [C, W] and scales [C] -> numbers [C, 128]; without scales but for MXFP4."""
    C: tl.constexpr = words.shape[0]
    CODE: tl.constexpr = _tile_code(FORMAT, IS_BRAIN)
    # Word 8 i + 4 j + t has inputs 16 i + 8 j + 2 t + 2 W p: thread t of four has them in a product.
    W: tl.constexpr = words.shape[1]
    words = tl.reshape(tl.permute(tl.reshape(words, [C, W // 4, 4]), (0, 2, 1)), [C, W])
    if FORMAT == "fp8":
        PAIR: tl.constexpr = (tl.int32, tl.int32)
        a0, a1 = tl.inline_asm_elementwise(CODE, "=r,=r,r", [words], PAIR, is_pure=True, pack=1)
        pairs = tl.join(_halves(a0, IS_BRAIN), _halves(a1, IS_BRAIN))
        pairs = tl.permute(tl.reshape(pairs, [C, 4, 4, 2, 2, 2]), (0, 5, 2, 3, 1, 4))
    else:
        KINDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        scales = tl.broadcast_to(scales[:, None], [C, W])
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r,r", [words, scales], KINDS, is_pure=True, pack=1
        )
        even = tl.join(_halves(a0, IS_BRAIN), _halves(a2, IS_BRAIN))
        pairs = tl.join(even, tl.join(_halves(a1, IS_BRAIN), _halves(a3, IS_BRAIN)))
        pairs = tl.permute(tl.reshape(pairs, [C, 4, 2, 2, 2, 2, 2]), (0, 5, 6, 2, 3, 1, 4))
    return tl.reshape(pairs, [C, 128])


@triton.jit
def _lines(
    codes, scales, at, scale_at, depth, block, BLOCKS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Words and scales of blocks from `block` on."""
    if DEPTH == 1:
        return tl.load(codes + at + block * WORDS), tl.load(scales + scale_at + block * EACH)
    else:
        inside = block + depth if BLOCKS % DEPTH == 0 else tl.minimum(block + depth, BLOCKS - 1)
        return tl.load(codes + at + (inside * WORDS)[:, None]), tl.load(scales + scale_at + inside * EACH)


@triton.jit
def _by_warp(number, given, scale, DEPTH: tl.constexpr):
    """Operands of a product for each warp, of 32 lines and one block of inputs [DEPTH, ROWS, 128]."""
    WARPS: tl.constexpr = number.shape[0] // 32
    given = tl.permute(given, (0, 2, 1))[:, None]
    given = tl.broadcast_to(given, [DEPTH, WARPS // DEPTH, 128, given.shape[3]])
    given = tl.reshape(given, [WARPS, 128, given.shape[3]])
    return tl.reshape(number, [WARPS, 32, 128]), given, tl.reshape(scale, [WARPS, 32, 1])


@triton.jit
def _add(number, given, scale, total, FORMAT: tl.constexpr):
    if FORMAT == "mxfp4":
        total = tl.dot(number, given, total, input_precision="ieee")
    else:
        total += tl.dot(number, given, input_precision="ieee") * scale
    return total


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x, codes, scales, bias, offsets, out, parts, rows, N: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, IS_BRAIN: tl.constexpr, HAS_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each warp has 32 outputs of one of `DEPTH` blocks of inputs for 8 rows; warps are summed at the end."""
    IS_FEW: tl.constexpr = ROWS < 16
    WORDS: tl.constexpr = 32 if FORMAT == "fp8" else 16
    BLOCKS: tl.constexpr = (K + 127) // 128
    SHARE: tl.constexpr = (BLOCKS + SPLITS * DEPTH - 1) // (SPLITS * DEPTH) * DEPTH
    WIDE: tl.constexpr = x.dtype.element_ty != (tl.bfloat16 if IS_BRAIN else tl.float16)
    EACH: tl.constexpr = 1 if HAS_BLOCKS else 32
    GROUP: tl.constexpr = 128 if HAS_BLOCKS else 32
    split, line = tl.program_id(2), tl.arange(0, COLUMNS * DEPTH)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    near, depth = tl.program_id(0) * COLUMNS + line % COLUMNS, line // COLUMNS
    near = near if N % COLUMNS == 0 else tl.minimum(near, N - 1)
    at = (near * (BLOCKS * WORDS))[:, None] + tl.arange(0, WORDS)[None, :]
    scale_at = near // GROUP * (BLOCKS * EACH)
    if not HAS_BLOCKS:
        scale_at += near % 8 * 4 + near // 8 % 4
    if IS_FEW and OVERLAPS and offsets is None and BLOCKS * WORDS >= 32 * _AHEAD:
        fetch_early(codes + tl.minimum(n, N - 1) * (BLOCKS * WORDS), _AHEAD)
    wait_previous(OVERLAPS)
    expert, first, end = _rows_of(offsets, rows, ROWS, TILES)
    codes += expert.to(tl.int64) * (N * BLOCKS * WORDS)
    scales += expert.to(tl.int64) * ((N + GROUP - 1) // GROUP * BLOCKS * EACH)
    for start in range(first, end, TILES * ROWS):
        m, k = start + tl.arange(0, ROWS), tl.arange(0, 128)[None, :]
        if IS_FEW:
            k = (tl.arange(0, DEPTH) * 128)[:, None, None] + k[None]
            total = tl.zeros([COLUMNS * DEPTH // 32, 32, ROWS], tl.float32)
        else:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
        x_at, is_row = x + m.to(tl.int64)[:, None] * K + k, m < end
        for block in range(split * SHARE, tl.minimum(split * SHARE + SHARE, BLOCKS), DEPTH):
            word, scale = _lines(codes, scales, at, scale_at, depth, block, BLOCKS, WORDS, EACH, DEPTH)
            mask = is_row[:, None] if K % (128 * DEPTH) == 0 else is_row[:, None] & (block * 128 + k < K)
            given = tl.load(x_at + block * 128, mask=mask, other=0.0)
            number = _tiled_numbers(word, scale, FORMAT, IS_BRAIN)
            if WIDE:
                number, given = number.to(tl.float32), given.to(tl.float32)
            if IS_FEW:
                total = _add(*_by_warp(number, given, _float(scale, FORMAT), DEPTH), total, FORMAT)
            else:
                total = _add(number, tl.trans(given), _float(scale, FORMAT)[:, None], total, FORMAT)
        if IS_FEW:
            total = tl.sum(tl.reshape(total, [DEPTH, COLUMNS, ROWS]), 0)
        if FORMAT == "mxfp4":
            total *= 2.0**63
        _store(out, parts, bias, tl.trans(total), m, n, split * rows + m, is_row, n < N, N, SPLITS)


@triton.jit
def tiled_unpack(
    codes, scales, out, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, HAS_BLOCKS: tl.constexpr
):
    """Numbers of 32 outputs and 128 inputs."""
    pid, block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    WORDS: tl.constexpr = 32 if FORMAT == "fp8" else 16
    BLOCKS: tl.constexpr = (K + 127) // 128
    row = tl.arange(0, 32)
    n, k = pid * 32 + row, block * 128 + tl.arange(0, 128)
    if HAS_BLOCKS:
        scale = tl.load(scales + (expert.to(tl.int64) * (N // 128) + n // 128) * BLOCKS + block, mask=n < N)
    else:
        scales += ((expert.to(tl.int64) * ((N + 31) // 32) + pid) * BLOCKS + block) * 32
        scale = tl.load(scales + row % 8 * 4 + row // 8)
    line = (expert.to(tl.int64) * N + n)[:, None]
    place = codes + line * (BLOCKS * WORDS) + block * WORDS + tl.arange(0, WORDS)[None, :]
    word = tl.load(place, mask=(n < N)[:, None], other=0)
    number = _tiled_numbers(word, scale, FORMAT, True).to(tl.float32)
    if FORMAT == "mxfp4":
        number *= 2.0**63
    else:
        number *= _float(scale, FORMAT)[:, None]
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + line * K + k[None, :], number.to(out.dtype.element_ty), mask=mask)
