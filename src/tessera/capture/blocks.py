"""Blocks: the memory behind the tensors that a call is given.

Tensors that share a storage are one block, since what is written through one is read through the others. A
block is handed to a step as one tensor of its own memory: the tensor itself where it is dense and no other
differs from it, else the bytes between the first and the last that any of its tensors covers. Positions in a
block are kept modulo `ALIGN`, because the results of some kernels depend on how their operands are aligned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Torch aligns its own memory so.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class BlockPart:
    """How one tensor lies in its storage; `start` and `stop` are the bytes it covers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_dense(self) -> bool:
        """True iff the elements lie row-major without gaps."""
        size = self.dtype.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and stride * self.dtype.itemsize != size:
                return 0 in self.shape
            size *= n
        return True


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """One storage: which tensors lie in it, by their numbers, and the bytes that are handed over."""

    parts: tuple[tuple[int, BlockPart], ...]
    start: int
    stop: int

    @property
    def is_tensor(self) -> bool:
        """True if the block's tensors are all alike and can be handed over as one."""
        first = self.parts[0][1]
        is_one = all(part == first for _, part in self.parts)
        return is_one and first.is_dense and first.start % ALIGN == 0


def part_of(tensor: torch.Tensor) -> BlockPart:
    """Where a tensor lies in its storage."""
    size = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (last + 1) * size if tensor.numel() else start
    return BlockPart(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), start, stop)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, for as long as somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


def blocks_of(tensors: Sequence[torch.Tensor]) -> tuple[MemoryBlock, ...]:
    """The blocks behind some tensors, in order of first appearance."""
    parts: dict[int, list[tuple[int, BlockPart]]] = {}
    for number, tensor in enumerate(tensors):
        parts.setdefault(storage_key(tensor), []).append((number, part_of(tensor)))
    return tuple(_block(tuple(found)) for found in parts.values())


def _block(parts: tuple[tuple[int, BlockPart], ...]) -> MemoryBlock:
    start = min(part.start for _, part in parts)
    stop = max(part.stop for _, part in parts)
    block = MemoryBlock(parts, start, stop)
    return block if block.is_tensor else MemoryBlock(parts, start - start % ALIGN, stop)


def handed(block: MemoryBlock, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What stands for the block: its tensor, or its bytes, in the memory where they are."""
    first = tensors[block.parts[0][0]].detach()
    return first if block.is_tensor else raw(first, block.start, block.stop)


def spread(block: MemoryBlock, whole: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The block's tensors again, by their numbers, as views of what was handed over."""
    if block.is_tensor:
        return [(number, whole) for number, _ in block.parts]
    return [(number, _view(whole, part, block.start)) for number, part in block.parts]


def _view(whole: torch.Tensor, part: BlockPart, origin: int) -> torch.Tensor:
    span = whole[part.start - origin : part.stop - origin].view(part.dtype)
    return span.as_strided(part.shape, part.stride, (part.start - origin) // part.dtype.itemsize)


def raw(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of a tensor's storage, in place."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def view_of(tensor: torch.Tensor, part: BlockPart) -> torch.Tensor:
    """Another tensor over the storage of one."""
    if part_of(tensor) == part:
        return tensor
    offset = part.start // part.dtype.itemsize
    if tensor.dtype is part.dtype:
        return tensor.as_strided(part.shape, part.stride, offset)
    empty = torch.empty(0, dtype=part.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, part.shape, part.stride)


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor whose elements may share bytes, where they agree."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0:
            target, values = (
                target.narrow(dim, 0, min(1, target.shape[dim])),
                values.narrow(dim, 0, min(1, values.shape[dim])),
            )
    span = 1 + sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True))
    if span >= target.numel():
        target.copy_(values)
        return
    places = torch.arange(span).as_strided(target.shape, target.stride())
    target.as_strided((span,), (1,))[places.reshape(-1)] = values.reshape(-1)
