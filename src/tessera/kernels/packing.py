"""Weights of 4 or 8 bits as codes and scales, of N rows and K columns.

    codes   [..., N, K]     one byte per weight, or [..., N, K / 2]: two, the even column in the low bits
    scales  [..., N / r, K / c]   one per block of r x c weights (`block`)
    zeros   like scales     codes that stand for 0; None: 8 in int4, 0 elsewhere
    order   [K]             column k of `codes` is column order[k] of the weight; None: the same order

    format  code                                scale
    int4    0 to 15                             number
    int8    -128 to 127                         number
    fp8     8-bit float                         number
    mxfp4   4-bit float (1, 2 and 1 bits)       power of two: exponent plus 127, one byte

A weight is (code - zero) * scale, computed in float32 and rounded once to the type of the product.
"""

from collections.abc import Sequence

import torch

BITS = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4}
MIDDLE = {"int4": 8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def num_columns(codes: torch.Tensor, weight_format: str) -> int:
    return codes.shape[-1] * 8 // BITS[weight_format]


def unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    weight_format: str,
    block: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    if weight_format == "mxfp4":
        return _dequantise_mxfp4(codes, scales, dtype)
    if BITS[weight_format] == 4:
        codes = unpack_nibbles(codes)
    rows, columns = codes.shape[-2:]

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        wide = blocks.repeat_interleave(block[0], -2)[..., :rows, :] if block[0] > 1 else blocks
        return wide.repeat_interleave(block[1], -1)[..., :columns]

    values = codes.float()
    if zeros is not None:
        values -= spread(zeros.float())
    elif weight_format in MIDDLE:
        values -= MIDDLE[weight_format]
    weight = values.mul_(spread(scales.float())).to(dtype)
    return weight if order is None else torch.empty_like(weight).index_copy_(-1, order, weight)


def _dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Products with these powers of two are exact in this type.
    exact = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    values = torch.tensor(E2M1, dtype=exact, device=codes.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
    words = pairs.view(torch.int32 if exact.itemsize == 2 else torch.int64).flatten()
    found = words.index_select(0, codes.flatten().int()).view(exact).view(*scales.shape, -1)
    powers = torch.exp2(scales.float() - EXPONENT_BIAS).to(exact)
    return found.mul_(powers[..., None]).flatten(-2).to(dtype)
