"""Products of some experts of a mixture: tessera::grouped_part, and tessera::grouped_join of two.

Rows of x are sorted by expert; those of expert e end at offsets[e]. A part has the experts from `first` on
and gives a result of all rows; those of other experts have no meaning. A join takes every row from the part
that computed it, so nothing is added and no value changes. `share` is the expected share of the rows that are
in the part: planning prices by it.

A CPU reads the weights of experts with rows only.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from tessera.kernels.register import register

PART = "(Tensor x, Tensor weight, Tensor offsets, int first, float share) -> Tensor"


def chosen(offsets: torch.Tensor, first: int, num: int) -> Iterator[tuple[int, slice]]:
    """Experts of a part that have rows, counted from its first, and their rows; for a CPU."""
    ends = offsets[max(0, first - 1) : first + num].tolist()
    begin = ends.pop(0) if first else 0
    for expert, end in enumerate(ends):
        if begin < end:
            yield expert, slice(begin, end)
        begin = end


def rotated(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    offsets: torch.Tensor,
    first: int,
    num: int,
) -> torch.Tensor:
    """A part by a product of rows that begin with its experts'; reads nothing on the host."""
    ends = offsets[first : first + num]
    if not first:
        return product(x, ends)
    begin, rows = offsets[first - 1], torch.arange(x.shape[0], device=x.device)
    moved = product(x[(rows + begin) % x.shape[0]], ends - begin)
    return moved[(rows - begin) % x.shape[0]]


def _part_on_cpu(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, first: int, share: float
) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, rows in chosen(offsets, first, weight.shape[0]):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


def _part_on_cuda(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, first: int, share: float
) -> torch.Tensor:
    num = weight.shape[0]
    if x.dtype is not torch.bfloat16:  # the library would read the offsets on the host
        ends, rows = offsets[first : first + num], torch.arange(x.shape[0], device=x.device)
        expert = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp(max=num - 1)
        return torch.bmm(x[:, None], weight[expert])[:, 0]
    return rotated(lambda rows, ends: torch._grouped_mm(rows, weight, offs=ends), x, offsets, first, num)


def _part_shaped(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _join(parts: Sequence[torch.Tensor], offsets: torch.Tensor, first: int) -> torch.Tensor:
    """Rows before the experts from `first` on are those of the first tensor."""
    rows = torch.arange(parts[0].shape[0], device=offsets.device)[:, None]
    before, after = parts
    return torch.where(rows < offsets[first - 1], before, after)


JOIN = "(Tensor[] parts, Tensor offsets, int first) -> Tensor"
register("grouped_part", PART, _part_shaped, _part_on_cpu, _part_on_cuda)
register("grouped_join", JOIN, _join, _join, _join)
