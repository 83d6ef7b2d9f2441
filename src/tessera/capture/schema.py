"""Operators by their schema, and tensors by their geometry: the rules that both front ends record by.

An argument that the schema marks as written is written, and read too unless the operator overwrites it
unseen: copy_, zero_, fill_, and the arguments that the schema calls `out`.

A tensor subclass that wraps others, such as torchao's quantised weights, has no memory of its own: its parts
are what is stored, sent and priced. Capture names the parts after the wrapper ("proj.weight.qdata") and
leaves operators on wrappers to the wrapper's own code, whose operators on the parts are then recorded.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tessera.ir import Access, Arg, Buffer, BufferKind, Launch, Region, Symbol, View, arg_views, region

# A tensor the program made from Python values is carried in the trace up to this size.
MAX_CONSTANT_BYTES = 1 << 16
# These write their first argument without looking at it.
OVERWRITERS = frozenset({"aten::copy_", "aten::zero_", "aten::fill_"})
# Positional and named arguments of a launch; what an operator returned.
Recorded = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
Results = tuple[Any, ...] | list[Any]


def split(func: Any, recorded: Recorded, results: Results) -> Iterator[tuple[Recorded, Results]]:
    """A call as launches: those of an operator over lists of tensors, as optimisers use, are one a tensor.

    So each parameter can be updated where it is; the operator treats every tensor by itself.
    """
    args, kwargs = recorded
    first = args[0] if args else None
    is_list = isinstance(first, tuple) and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
    if not is_list or not isinstance(first, tuple):
        yield recorded, results
        return
    for i in range(len(first)):
        one = tuple(_item(arg, i) for arg in args), tuple((name, _item(arg, i)) for name, arg in kwargs)
        yield one, (results[i],) if func._schema.returns else ()


def _item(arg: Arg, place: int) -> Arg:
    return (arg[place],) if isinstance(arg, tuple) and arg else arg


def view_of(tensor: torch.Tensor, buffer: int) -> View:
    """A tensor as a view of the buffer that holds its storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(buffer, dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def byte_region(view: View) -> Region | None:
    """The bytes a view covers, or None if it is empty."""
    size = getattr(torch, view.dtype).itemsize
    dims = tuple((n, s * size) for n, s in zip(view.shape, view.stride, strict=True))
    return region(view.offset * size, size, dims)


def symbol_of(value: Any) -> Symbol | None:
    """A torch constant among the arguments; None for anything else."""
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return Symbol(kind.__name__, str(value).removeprefix("torch."))
    return None


def contents(tensor: torch.Tensor) -> str:
    """A constant's bytes as hexadecimal; empty for a fake one whose value torch did not keep."""
    known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if known is None:
        return ""
    with unset_fake_temporarily():
        flat = torch.empty(0, dtype=torch.uint8, device=known.device).set_(known.untyped_storage())
        return bytes(flat.tolist()).hex()


def given(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call passes for one argument, its default included; None if the operator has no such one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def argument_accesses(schema: Any, args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> list[Access]:
    """Reads and writes of the arguments, from the schema's alias annotations."""
    accesses = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (schema.name in OVERWRITERS or argument.is_out))
        for view in arg_views(value):
            touched = byte_region(view)
            if touched is not None:
                accesses.append(Access(view.buffer, touched, read=reads, write=writes))
    return accesses


def whole_buffers(launch: Launch, buffers: Sequence[Buffer], mutated: Set[int]) -> tuple[Access, ...]:
    """What a launch that was not proved may touch: all of every buffer it is given.

    A weight is written by nobody but whoever says so: `mutated` holds the arguments the compiler declares.
    """
    found: dict[int, Access] = {}
    for place, arg in enumerate(launch.args):
        for view in arg_views(arg):
            buffer = buffers[view.buffer]
            if buffer.size_bytes:
                writes = place in mutated or buffer.kind is not BufferKind.WEIGHT
                all_bytes = Region(0, buffer.size_bytes)
                found[view.buffer] = Access(view.buffer, all_bytes, read=True, write=writes)
    return tuple(found.values())


def is_wrapper(tensor: Any) -> bool:
    """True for a tensor that only wraps others."""
    return is_traceable_wrapper_subclass(tensor)


def has_wrappers(types: Any) -> bool:
    """True if an operator is to be left to a wrapper among its arguments' types."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors behind one, by name; the tensor itself if it is plain."""
    if not is_wrapper(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for key in attributes for part in parts(f"{name}.{key}", getattr(tensor, key))]
