"""Weights of 4 or 8 bits, [N, K], as codes and scales, and operators that multiply by them.

    codes   [..., N, K]     one byte per weight, or [..., N, K / 2]: two, the even column in the low bits
    scales  [..., N / r, K / c]   one per block of r x c weights (`block`)
    zeros   like scales     codes that stand for 0; None: 8 in int4, 0 elsewhere
    order   [K]             column k of `codes` is column order[k] of the weight; None: the same order

    format  code                                scale
    int4    0 to 15                             number
    int8    -128 to 127                         number
    fp8     8-bit float                         number
    mxfp4   4-bit float (1, 2 and 1 bits)       power of two: exponent plus 127, one byte; always tiled

A weight is (code - zero) * scale, computed in float32 and rounded once to the product's type. On a CPU the
product is `linear` of the dequantised weight, bit for bit.

Codes of int4 and fp8 whose groups are multiples of 128 columns, and MXFP4, are tiled in the order in which a
GPU's threads multiply: format `int4_tiled`, `fp8_tiled` or `mxfp4_tiled`, block (32, K). fp8 with one scale
for 128 x 128 weights is `fp8_blocks_tiled`, block (128, K), and keeps its scales.

    codes   [..., N, W per 128 columns] words, W = 32 (fp8) or 16. Word j has columns 2 W p + 2 j and the
            next, in its halves; p is the code of a half, in MXFP4 with bits where bfloat16 has them, after a
            shift.
    scales  [..., N / 32, 32 per 128 columns] words: float32, in int4 with the zero in its last 4 bits, or
            four exponents plus 63. Row 8 i + j of 32 is at 4 j + i.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from tessera.kernels.grouped import chosen, empty_part
from tessera.kernels.register import register

BLOCKS = "fp8_blocks_tiled"
PLAIN = {"int4_tiled": "int4", "fp8_tiled": "fp8", BLOCKS: "fp8", "mxfp4_tiled": "mxfp4"}
BITS = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4}
MIDDLE = {"int4": 8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
MXFP4_BLOCK = 32
# Rows that share a tile of scales, columns of a tile and of a group.
TILE_ROWS, GROUP = 32, 128
# Bits of MXFP4's codes of a half word: sign, exponent, exponent, mantissa.
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 10, 11))
# Exponents have 63 more: products with small floats stay normal.
MORE, MAX_EXPONENT = 63, 191
_WEIGHT = "Tensor x, Tensor codes, Tensor scales, Tensor? zeros"


def num_columns(codes: torch.Tensor, weight_format: str, block: Sequence[int]) -> int:
    return block[1] if weight_format in PLAIN else codes.shape[-1] * 8 // BITS[weight_format]


def unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def can_tile(codes: torch.Tensor, scales: torch.Tensor, weight_format: str, block: Sequence[int]) -> bool:
    columns = num_columns(codes, weight_format, block)
    is_exact = block[0] == 1 and scales.dtype in (torch.float16, torch.bfloat16)
    is_wide = block[1] % GROUP == 0 or block[1] >= columns
    is_known = weight_format == "fp8" or (weight_format == "int4" and is_exact)
    return columns % MXFP4_BLOCK == 0 and ((is_known and is_wide) or weight_format == "mxfp4")


def tile(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, weight_format: str,
    block: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, str, tuple[int, int]]:  # fmt: skip
    """Codes, scales, format and block."""
    (rows, size), columns = codes.shape[-2:], num_columns(codes, weight_format, block)
    each = GROUP * BITS[weight_format] // 8
    plain = torch.nn.functional.pad(codes.view(torch.uint8), (0, -size % each))
    planes = (2, 64) if weight_format == "fp8" else (4, 16)
    many = plain.view(-1, rows, plain.shape[-1] // each, *planes)
    words = torch.stack([_words(each, weight_format) for each in many]).view(*codes.shape[:-1], -1)
    if weight_format == "fp8" and tuple(block) == (GROUP, GROUP) and rows % GROUP == columns % GROUP == 0:
        return words, scales.float(), BLOCKS, (GROUP, columns)
    if weight_format == "mxfp4":
        powers = (scales.clamp(max=MAX_EXPONENT) + MORE).to(torch.uint8)
        info = torch.nn.functional.pad(powers, (0, -powers.shape[-1] % 4)).view(torch.int32)
    else:
        groups = torch.arange(0, columns, GROUP, device=codes.device) // block[1]
        info = scales.repeat_interleave(block[0], -2)[..., :rows, groups].float().view(torch.int32)
        if weight_format == "int4":
            info = info | (MIDDLE["int4"] if zeros is None else zeros[..., groups].int())
    info = torch.nn.functional.pad(info, (0, 0, 0, -rows % TILE_ROWS))
    info = info.unflatten(-2, (-1, 4, 8)).movedim(-1, -3).transpose(-1, -2)
    return words, info.flatten(-3).contiguous(), f"{weight_format}_tiled", (TILE_ROWS, columns)


def _words(codes: torch.Tensor, weight_format: str) -> torch.Tensor:
    """From bytes [..., tiles, 4, 16] of two codes or [..., 2, 64] of one, by operations that CPUs have."""
    planes = codes.movedim(-2, 0).contiguous()
    if weight_format == "fp8":
        return torch.stack([*planes], -1).flatten(-2).view(torch.int32)
    packed = []
    for a, b, c, d in (planes & 15, planes >> 4):
        if weight_format == "int4":
            packed += [a | b << 4, c | d << 4]
        else:
            top = (a & 8) << 4 | (a & 4) >> 2 | (b & 8) << 1 | (c & 8) >> 2
            packed += [(a & 3) << 6 | (b & 7) << 3 | c & 7, top | (d & 13) << 3 | (d & 2) << 1]
    return torch.stack(packed, -1).view(torch.int32)


def _untiled(
    codes: torch.Tensor, scales: torch.Tensor, weight_format: str, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (numbers for mxfp4), scales, zeros."""
    halves = codes.view(torch.int16).unflatten(-1, (-1, 64 if weight_format == "fp8" else 32))
    if weight_format == "fp8":
        codes = halves.view(torch.uint8).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-3)
        plain = codes[..., :columns].contiguous().view(torch.float8_e4m3fn)
        if scales.is_floating_point():
            return plain, scales, None
    info = scales.unflatten(-1, (-1, 8, 4)).transpose(-1, -2).movedim(-3, -1).flatten(-4, -2)
    info = info[..., : codes.shape[-2], :].contiguous()
    if weight_format == "mxfp4":
        fours = _numbers_of_halves().to(codes.device).index_select(0, halves.flatten().int() & 0xFFFF)
        plain = fours.view(torch.bfloat16).view(*halves.shape, 4).movedim(-1, -2).flatten(-3)
        powers = info.view(torch.uint8)[..., : columns // MXFP4_BLOCK].float() - (MORE + EXPONENT_BIAS)
        return plain[..., :columns], torch.exp2(powers), None
    if weight_format == "fp8":
        return plain, info.view(torch.float32), None
    plain = torch.stack([halves >> (4 * p) & 15 for p in range(4)], -2).flatten(-3)
    return plain[..., :columns], (info & ~15).view(torch.float32), info & 15


@cache
def _numbers_of_halves() -> torch.Tensor:
    """Four bfloat16 in 64 bits."""
    halves, places = torch.arange(1 << 16, device="cpu"), torch.tensor(PLACES, device="cpu")
    codes = ((halves[:, None, None] >> places & 1) << torch.arange(3, -1, -1, device="cpu")).sum(-1)
    numbers: torch.Tensor = torch.tensor(E2M1, dtype=torch.bfloat16, device="cpu")[codes]
    return numbers.view(torch.int64).flatten()


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None,
    weight_format: str, block: Sequence[int], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    assert weight_format != "mxfp4", "MXFP4 is tiled"
    plain_format = PLAIN.get(weight_format, weight_format)
    if weight_format in PLAIN:
        codes, scales, zeros = _untiled(codes, scales, plain_format, block[1])
        group = MXFP4_BLOCK if plain_format == "mxfp4" else GROUP
        block = (block[0] if weight_format == BLOCKS else 1, group)
    elif BITS[weight_format] == 4:
        codes = unpack_nibbles(codes)
    rows, columns = codes.shape[-2:]
    if plain_format == "mxfp4" and dtype is torch.bfloat16:  # powers of two are exact
        groups: torch.Tensor = codes.unflatten(-1, (-1, MXFP4_BLOCK))
        return groups.mul(scales.to(dtype)[..., None]).flatten(-2)

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        wide = blocks.repeat_interleave(block[0], -2)[..., :rows, :] if block[0] > 1 else blocks
        return wide.repeat_interleave(block[1], -1)[..., :columns]

    values = codes.float()
    if zeros is not None:
        values -= spread(zeros.float())
    elif plain_format in MIDDLE:
        values -= MIDDLE[plain_format]
    weight = values.mul_(spread(scales.float())).to(dtype)
    return weight if order is None else torch.empty_like(weight).index_copy_(-1, order, weight)


def _grouped_on_cpu(call: Any) -> torch.Tensor:
    out = empty_part(call.x, call.codes.shape[1], call.offsets)
    for expert, rows in chosen(call.offsets, getattr(call, "first", 0), call.codes.shape[0]):
        out[rows] = linear(call.x[rows], _plain(call, None, expert))
    return out


def _plain(call: Any, order: torch.Tensor | None, expert: Any = ...) -> torch.Tensor:
    zeros = None if call.zeros is None else call.zeros[expert]
    codes, scales = call.codes[expert], call.scales[expert]
    return dequantise(codes, scales, zeros, order, call.format, call.block, call.x.dtype)


def _shaped(x: torch.Tensor, codes: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[-2]))


for _name, _more, _on_cpu in (
    ("packed_linear", "Tensor? order, Tensor? bias", lambda x: linear(x.x, _plain(x, x.order), x.bias)),
    ("packed_grouped", "Tensor offsets", _grouped_on_cpu),
    ("packed_part", "Tensor offsets, int first, float share", _grouped_on_cpu),
):
    _schema = f"({_WEIGHT}, {_more}, str format, int[] block) -> Tensor"
    register(_name, _schema, _shaped, _on_cpu, "tessera.kernels.packed_triton")
