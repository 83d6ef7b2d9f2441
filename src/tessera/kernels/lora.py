"""tessera::lora: adds low-rank adapters to a product.

    y         [..., N]   the product of the base weight
    x         [..., K]   its input
    down, up  [A, R, K], [A, N, R]   adapters one behind the other, scales included
    adapters  [T]        adapter of each row of x, from 1; 0: none
    -> y + x @ down.T @ up.T

Rows of a step may have different adapters.
"""

from typing import Any

import torch
from torch.nn.functional import linear

from tessera.kernels.register import alike, register


def _on_cpu(call: Any) -> torch.Tensor:
    out: torch.Tensor = call.y.clone(memory_format=torch.contiguous_format)
    rows, inputs = out.view(-1, out.shape[-1]), call.x.reshape(-1, call.x.shape[-1])
    for adapter in call.adapters.unique().tolist():
        if adapter:
            chosen = (call.adapters == adapter).nonzero()[:, 0]
            low = linear(inputs[chosen], call.down[adapter - 1])
            rows.index_add_(0, chosen, linear(low, call.up[adapter - 1]))
    return out


SCHEMA = "(Tensor y, Tensor x, Tensor down, Tensor up, Tensor adapters) -> Tensor"
register("lora", SCHEMA, alike, _on_cpu, "tessera.kernels.lora_triton")
