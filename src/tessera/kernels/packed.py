"""Products with packed weights (`packing`): tessera::packed_linear, and tessera::packed_grouped for experts.

On a CPU the product is `linear` of the dequantised weight, so it has the bits of the dequantised model's.
GPUs run `packed_triton`.
"""

from typing import Any

import torch
from torch.nn.functional import linear

from tessera.kernels.packing import dequantise

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


@torch.library.impl("tessera::packed_linear", "cpu")
def _linear_on_cpu(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    scales, zeros, order, bias, weight_format, block = given
    return linear(x, dequantise(codes, scales, zeros, order, weight_format, block, x.dtype), bias)


@torch.library.impl("tessera::packed_grouped", "cpu")
def _grouped_on_cpu(x: torch.Tensor, codes: torch.Tensor, *given: Any) -> torch.Tensor:
    scales, zeros, offsets, weight_format, block = given
    out = x.new_zeros(x.shape[0], codes.shape[1])
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if begin < end:
            parts = (codes[expert], scales[expert], None if zeros is None else zeros[expert])
            weight = dequantise(*parts, None, weight_format, block, x.dtype)
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
