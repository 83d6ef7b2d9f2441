"""Memory blocks behind the tensors of a call.

Tensors that share a storage are one block, passed as one tensor: itself if dense and alone, else the covered
bytes. Positions are kept modulo `ALIGN`: results of some kernels depend on it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

ALIGN = 64


@dataclass(frozen=True, slots=True)
class BlockPart:
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps."""
        size = self.dtype.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and stride * self.dtype.itemsize != size:
                return 0 in self.shape
            size *= n
        return True


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """One storage, and the bytes passed to the step."""

    parts: tuple[tuple[int, BlockPart], ...]
    start: int
    stop: int
    # For each part the first that is the same tensor object.
    objects: tuple[int, ...]

    @property
    def first(self) -> int:
        """Number of its first tensor."""
        return self.parts[0][0]

    @property
    def is_tensor(self) -> bool:
        first = self.parts[0][1]
        return len(set(self.objects)) == 1 and first.is_dense and first.start % ALIGN == 0


def part_of(tensor: torch.Tensor) -> BlockPart:
    size = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (last + 1) * size if tensor.numel() else start
    return BlockPart(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), start, stop)


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def blocks_of(tensors: Sequence[torch.Tensor]) -> tuple[MemoryBlock, ...]:
    numbers: dict[int, list[int]] = {}
    firsts: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(storage_key(tensor), []).append(number)
        firsts.setdefault(id(tensor), number)
    return tuple(_block(tensors, firsts, mine) for mine in numbers.values())


def _block(tensors: Sequence[torch.Tensor], firsts: Mapping[int, int], numbers: list[int]) -> MemoryBlock:
    parts = tuple((number, part_of(tensors[number])) for number in numbers)
    start = min(part.start for _, part in parts)
    stop = max(part.stop for _, part in parts)
    block = MemoryBlock(parts, start, stop, tuple(firsts[id(tensors[number])] for number in numbers))
    return block if block.is_tensor else replace(block, start=start - start % ALIGN)


def handed(block: MemoryBlock, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        first = tensors[block.first].detach()
    return first if block.is_tensor else raw(first, block.start, block.stop)


def like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor with the example's class, attributes and flag of gradients."""
    if isinstance(example, FakeTensor):
        return tensor
    with no_dispatch(), torch._C.DisableTorchFunctionSubclass():
        alike: torch.Tensor = torch.Tensor._make_subclass(type(example), tensor)
        alike.__dict__ = example.__dict__
        return alike.requires_grad_(example.requires_grad and example.is_leaf)


def spread(block: MemoryBlock, whole: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    if block.is_tensor:
        return [(number, whole) for number, _ in block.parts]
    tensors: dict[int, torch.Tensor] = {}
    for (number, part), first in zip(block.parts, block.objects, strict=True):
        tensors[number] = tensors[first] if first in tensors else _view(whole, part, block.start)
    return list(tensors.items())


def _view(whole: torch.Tensor, part: BlockPart, origin: int) -> torch.Tensor:
    span = whole[part.start - origin : part.stop - origin].view(part.dtype)
    return span.as_strided(part.shape, part.stride, (part.start - origin) // part.dtype.itemsize)


def raw(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def view_of(tensor: torch.Tensor, part: BlockPart) -> torch.Tensor:
    if part_of(tensor) == part:
        return tensor
    offset = part.start // part.dtype.itemsize
    if tensor.dtype is part.dtype:
        return tensor.as_strided(part.shape, part.stride, offset)
    empty = torch.empty(0, dtype=part.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, part.shape, part.stride)


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Elements of `target` may share memory."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim]:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def flatten(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], Any]:
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    words = parameters(fn, len(args))
    named = []
    for (_, first, *rest), leaf in leaves:
        root = words[first.idx] if isinstance(first, pytree.SequenceKey) else path([first])
        named.append((".".join(filter(None, [root, path(rest)])), leaf))
    return named, spec


def parameters(fn: Callable[..., Any], num: int) -> list[str]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        signature = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have none
        signature = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    words = [p.name for p in signature if p.kind in kinds]
    return [words[i] if i < len(words) else f"arg{i}" for i in range(num)]


def path(keys: Sequence[Any]) -> str:
    words = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in keys)
    return ".".join(str(word) for word in words)


def unique(names: Sequence[str]) -> list[str]:
    distinct: dict[str, None] = {}
    for name in names:
        candidate, number = name, 1
        while candidate in distinct:
            candidate, number = f"{name}_{number}", number + 1
        distinct[candidate] = None
    return list(distinct)
