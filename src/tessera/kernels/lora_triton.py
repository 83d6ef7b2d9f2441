"""The CUDA implementation of `tessera::lora`.

Sums are in float32. Adapter numbers are read on the GPU, for CUDA graphs.
"""

import torch
import triton
import triton.language as tl

_DEPTH, _COLUMNS = 256, 64


def lora(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, given = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    (num, outputs), (_, rank, inputs) = rows.shape, down.shape
    if not out.numel():
        return out
    low = torch.empty(num, rank, dtype=torch.float32, device=y.device)
    sizes = {"R": rank, "RANK": triton.next_power_of_2(rank)}
    lora_down[(num,)](given, down, adapters, low, K=inputs, DEPTH=_DEPTH, **sizes)
    grid = (-(-outputs // _COLUMNS), num)
    lora_up[grid](rows, low, up, adapters, out, Y_ROW=rows.stride(0), N=outputs, COLUMNS=_COLUMNS, **sizes)
    return out


@triton.jit
def lora_down(
    x, down, adapters, low, K: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    adapter = tl.load(adapters + row).to(tl.int64)
    if adapter == 0:
        return
    rank = tl.arange(0, RANK)
    total = tl.zeros([RANK], tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        given = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        place = ((adapter - 1) * R + rank)[:, None] * K + k[None, :]
        weight = tl.load(down + place, mask=(rank < R)[:, None] & (k < K)[None, :], other=0.0)
        total += tl.sum(weight.to(tl.float32) * given[None, :], 1)
    tl.store(low + row * R + rank, total, mask=rank < R)


@triton.jit
def lora_up(
    y, low, up, adapters, out, Y_ROW: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n, rank = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    is_output = n < N
    total = tl.load(y + row * Y_ROW + n, mask=is_output, other=0.0).to(tl.float32)
    adapter = tl.load(adapters + row).to(tl.int64)
    if adapter > 0:
        given = tl.load(low + row * R + rank, mask=rank < R, other=0.0)
        place = ((adapter - 1) * N + n)[:, None] * R + rank[None, :]
        weight = tl.load(up + place, mask=is_output[:, None] & (rank < R)[None, :], other=0.0)
        total += tl.sum(weight.to(tl.float32) * given[None, :], 1)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=is_output)
