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


def _linear_on_cpu(call: Any) -> torch.Tensor:
    return linear(call.x, _plain(call, call.order), call.bias)


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
    ("packed_linear", "Tensor? order, Tensor? bias", _linear_on_cpu),
    ("packed_grouped", "Tensor offsets", _grouped_on_cpu),
    ("packed_part", "Tensor offsets, int first, float share", _grouped_on_cpu),
):
    _schema = f"({_WEIGHT}, {_more}, str format, int[] block) -> Tensor"
    register(_name, _schema, _shaped, _on_cpu, "tessera.kernels.packed_triton")
