"""Products of some experts of a mixture: tessera::grouped_part, and tessera::grouped_join of two.

Rows of x are sorted by expert; those of expert e end at offsets[e]. A part has the experts from `first` on;
its results for rows of others have no meaning. A join copies rows. `share` is the part's expected share of
the rows, for pricing.

A CPU reads weights of experts with rows only.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tessera.kernels.register import register

PART = "(Tensor x, Tensor weight, Tensor offsets, int first, float share) -> Tensor"


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chosen(offsets: torch.Tensor, first: int, num: int) -> Iterator[tuple[int, slice]]:
    """Experts of a part with rows, from its first."""
    ends = offsets[max(0, first - 1) : first + num].tolist()
    begin = ends.pop(0) if first else 0
    for expert, end in enumerate(ends):
        if begin < end:
            yield expert, slice(begin, end)
        begin = end


def empty_part(x: torch.Tensor, width: int, offsets: torch.Tensor) -> torch.Tensor:
    """Rows without an expert are 0."""
    out = x.new_empty(x.shape[0], width)
    out[int(offsets[-1]) :] = 0
    return out


def rotated(product: Product, x: torch.Tensor, offsets: torch.Tensor, first: int, num: int) -> torch.Tensor:
    """With the part's rows rotated to the front: no read on the host."""
    ends = offsets[first : first + num]
    if not first:
        return product(x, ends)
    begin, rows = offsets[first - 1], torch.arange(x.shape[0], device=x.device)
    moved = product(x[(rows + begin) % x.shape[0]], ends - begin)
    return moved[(rows - begin) % x.shape[0]]


def _part_on_cpu(call: Any) -> torch.Tensor:
    out = empty_part(call.x, call.weight.shape[2], call.offsets)
    for expert, rows in chosen(call.offsets, call.first, call.weight.shape[0]):
        torch.mm(call.x[rows], call.weight[expert], out=out[rows])
    return out


def _part_on_cuda(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, first: int, share: float
) -> torch.Tensor:
    num, rows = weight.shape[0], torch.arange(x.shape[0], device=x.device)
    if x.dtype is not torch.bfloat16:  # the library would read the offsets on the host
        ends = offsets[first : first + num]
        expert = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp(max=num - 1)
        return torch.bmm(x[:, None], weight[expert])[:, 0]
    return rotated(lambda rows, ends: torch._grouped_mm(rows, weight, offs=ends), x, offsets, first, num)


def _join_on_cpu(call: Any) -> None:
    rows = slice(int(call.offsets[call.first - 1]) if call.first else 0, int(call.offsets[call.last - 1]))
    call.into[rows] = call.part[rows]


def _join_on_cuda(
    into: torch.Tensor, part: torch.Tensor, offsets: torch.Tensor, first: int, last: int, _: float
) -> None:
    rows = torch.arange(into.shape[0], device=into.device)[:, None]
    begin = offsets[first - 1] if first else 0
    torch.where((rows >= begin) & (rows < offsets[last - 1]), part, into, out=into)


JOIN = "(Tensor(a!) into, Tensor part, Tensor offsets, int first, int last, float share) -> ()"
register("grouped_part", PART, lambda x, w, *_: x.new_empty(len(x), w.shape[2]), _part_on_cpu, _part_on_cuda)
register("grouped_join", JOIN, lambda *_: None, _join_on_cpu, _join_on_cuda)
