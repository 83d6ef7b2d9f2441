"""shapes: what an operator returned before for tensors of the same shapes, without asking torch again.

A model is the same layer many times over, so nearly every operator of a fake run has been seen with the same
shapes, strides, types and numbers. Torch remembers such results too, but takes most of a millisecond to look
one up; here it is a dictionary of plain tuples. Only operators that write nothing and whose results are new
memory, or a view of an argument, are remembered; all others run as usual.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

UNSURE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
# Kinds of argument that are equal whenever their type and value are.
PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic collector, which would walk all that was recorded again and again for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Unkeyed(Exception):
    """An argument that has no key, so that the call is not remembered."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that was returned."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    # The argument whose memory it is, counted over all tensors given; None for new memory.
    source: int | None


class ShapeCache:
    """Runs operators of one fake machine."""

    def __init__(self, mode: FakeTensorMode, run: Run) -> None:
        self._mode, self._run = mode, run
        self._known: dict[Any, tuple[Any, tuple[_Result, ...]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `run` would, from memory where possible."""
        if func._schema.is_mutable or not UNSURE.isdisjoint(func.tags):
            return self._run(func, args, kwargs)
        tensors: list[FakeTensor] = []
        try:
            key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors))
        except _Unkeyed:
            return self._run(func, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            return self._make(known, tensors)
        made = self._run(func, args, kwargs)
        results = _results(made, tensors)
        if results is not None:
            self._known[key] = (type(made), results)
        return made

    def _make(self, known: tuple[Any, tuple[_Result, ...]], tensors: list[FakeTensor]) -> Any:
        kind, results = known
        made = [self._tensor(result, tensors) for result in results]
        return made[0] if issubclass(kind, torch.Tensor) else kind(made)

    def _tensor(self, result: _Result, tensors: list[FakeTensor]) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            meta = torch.empty_strided(result.size, result.stride, dtype=result.dtype, device="meta")
            if result.source is not None:
                storage = tensors[result.source].untyped_storage()
                meta.set_(storage, result.offset, result.size, result.stride)
        return FakeTensor(self._mode, meta, result.device)


def _key(value: Any, tensors: list[FakeTensor]) -> Any:
    if isinstance(value, FakeTensor):
        tensors.append(value)
        return (
            value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device,
            value.untyped_storage().nbytes(),
        )  # fmt: skip
    if isinstance(value, tuple | list):
        return tuple([_key(item, tensors) for item in value])
    if type(value) in PLAIN:
        return (type(value), value)  # 1, 1.0 and True are equal, but not alike
    raise _Unkeyed


def _results(made: Any, tensors: list[FakeTensor]) -> tuple[_Result, ...] | None:
    """What to remember of a result; None unless it is made of fake tensors, none an argument itself."""
    items = made if isinstance(made, tuple | list) else (made,)
    if type(made) not in (FakeTensor, tuple, list) or not items:
        return None
    found = []
    for item in items:
        if not isinstance(item, FakeTensor) or item.constant is not None or any(item is t for t in tensors):
            return None
        storage = item.untyped_storage()._cdata
        source = next((i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage), None)
        fresh_bytes = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True)) + 1
        is_whole = item.storage_offset() == 0 and item.untyped_storage().nbytes() == (
            fresh_bytes * item.itemsize if item.numel() else 0
        )
        if source is None and not is_whole:
            return None
        offset = int(item.storage_offset())
        found.append(_Result(tuple(item.shape), item.stride(), offset, item.dtype, item.fake_device, source))
    return tuple(found)
