"""Operators for products with packed weights (`packing`).

On a CPU the product is `linear` of the dequantised weight, so it has the bits of the dequantised model's.
"""

from typing import Any

import torch
from torch.nn.functional import linear

from tessera.kernels.grouped import chosen, empty_part
from tessera.kernels.packing import dequantise
from tessera.kernels.register import register

_WEIGHT = "Tensor x, Tensor codes, Tensor scales, Tensor? zeros"


def _linear_on_cpu(x: torch.Tensor, codes: torch.Tensor, *operands: Any) -> torch.Tensor:
    scales, zeros, order, bias, weight_format, block = operands
    return linear(x, dequantise(codes, scales, zeros, order, weight_format, block, x.dtype), bias)


def _grouped_on_cpu(x: torch.Tensor, codes: torch.Tensor, *operands: Any) -> torch.Tensor:
    scales, zeros, offsets, *part, weight_format, block = operands
    out = empty_part(x, codes.shape[1], offsets)
    for expert, rows in chosen(offsets, part[0] if part else 0, codes.shape[0]):
        parts = (codes[expert], scales[expert], None if zeros is None else zeros[expert])
        weight = dequantise(*parts, None, weight_format, block, x.dtype)
        out[rows] = linear(x[rows], weight)
    return out


def _shaped(x: torch.Tensor, codes: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[-2]))


for _name, _more, _on_cpu in (
    ("packed_linear", "Tensor? order, Tensor? bias", _linear_on_cpu),
    ("packed_grouped", "Tensor offsets", _grouped_on_cpu),
    ("packed_part", "Tensor offsets, int first, float share", _grouped_on_cpu),
):
    _schema = f"({_WEIGHT}, {_more}, str format, int[] block) -> Tensor"
    register(_name, _schema, _shaped, _on_cpu, "tessera.kernels.packed_triton")
