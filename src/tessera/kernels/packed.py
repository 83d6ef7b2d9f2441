"""Products with weights of 4 or 8 bits: tessera::packed_linear, and tessera::packed_grouped for experts.

A packed weight of N rows and K columns:

    codes   [..., N, K]     one byte per weight, or [..., N, K / 2]: two, the even column in the low bits
    scales  [..., N / r, K / c]   one per block of r x c weights (`block`)
    zeros   like scales     codes that stand for 0; None: 8 in int4, 0 elsewhere
    order   [K]             column k of `codes` is column order[k] of the weight; None: the same order

    format  code                                scale
    int4    0 to 15                             number
    int8    -128 to 127                         number
    fp8     8-bit float                         number
    mxfp4   4-bit float (1, 2 and 1 bits)       power of two: exponent plus 127, one byte

A weight is (code - zero) * scale, computed in float32 and rounded once to the type of `x`. On a CPU the
product is `linear` of these numbers, so it has the bits of the dequantised model's. GPUs run `packed_triton`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

# Format -> bits of a code.
BITS = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4}
# Zero of a format without zeros.
MIDDLE = {"int4": 8}
# Values of the 4-bit floats.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127

torch.library.define(
    "tessera::packed_linear",
    "(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? order, Tensor? bias, str format, "
    "int[] block) -> Tensor",
)
# Rows of x are sorted by expert; those of expert e end at offsets[e].
torch.library.define(
    "tessera::packed_grouped",
    "(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor offsets, str format, int[] block) "
    "-> Tensor",
)


def num_columns(codes: torch.Tensor, weight_format: str) -> int:
    return codes.shape[-1] * 8 // BITS[weight_format]


def unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] bytes -> [..., K] codes."""
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
    """The weight's numbers [..., N, K]."""
    if BITS[weight_format] == 4:
        codes = unpack_nibbles(codes)
    rows, columns = codes.shape[-2:]

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        wide = blocks.repeat_interleave(block[0], -2)[..., :rows, :] if block[0] > 1 else blocks
        return wide.repeat_interleave(block[1], -1)[..., :columns]

    if weight_format == "mxfp4":
        table = torch.tensor(E2M1, device=codes.device)
        values = table[codes.long()]
        scales = torch.exp2(scales.float() - EXPONENT_BIAS)
    else:
        values = codes.float()
    if zeros is not None:
        values -= spread(zeros.float())
    elif weight_format in MIDDLE:
        values -= MIDDLE[weight_format]
    weight = values.mul_(spread(scales.float())).to(dtype)
    return weight if order is None else torch.empty_like(weight).index_copy_(-1, order, weight)


@torch.library.impl("tessera::packed_linear", "cpu")
def _linear_on_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_format: str,
    block: Sequence[int],
) -> torch.Tensor:
    return linear(x, dequantise(codes, scales, zeros, order, weight_format, block, x.dtype), bias)


@torch.library.impl("tessera::packed_grouped", "cpu")
def _grouped_on_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor,
    weight_format: str,
    block: Sequence[int],
) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], codes.shape[1])
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if begin < end:
            given = (codes[expert], scales[expert], None if zeros is None else zeros[expert])
            weight = dequantise(*given, None, weight_format, block, x.dtype)
            out[begin:end] = linear(x[begin:end], weight)
        begin = end
    return out


@torch.library.impl("tessera::packed_linear", "cuda")
def _linear_on_cuda(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    from tessera.kernels.packed_triton import multiply

    scales, zeros, order, bias, weight_format, block = given
    rows = x.flatten(0, -2)
    rows = rows if order is None else rows.index_select(1, order)
    out = multiply(rows, codes[None], scales[None], zeros if zeros is None else zeros[None], bias, None,
                   weight_format, block)  # fmt: skip
    return out.view(*x.shape[:-1], -1)


@torch.library.impl("tessera::packed_grouped", "cuda")
def _grouped_on_cuda(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    from tessera.kernels.packed_triton import multiply

    scales, zeros, offsets, weight_format, block = given
    return multiply(x, codes, scales, zeros, None, offsets, weight_format, block)


@torch.library.register_fake("tessera::packed_linear")  # type: ignore[untyped-decorator]
def _linear_shaped(x: torch.Tensor, codes: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[-2]))


@torch.library.register_fake("tessera::packed_grouped")  # type: ignore[untyped-decorator]
def _grouped_shaped(x: torch.Tensor, codes: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[-2]))
