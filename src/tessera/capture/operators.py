"""Operator schemas, tensor geometry, and refusals.

An argument that the schema marks as written is also read, unless overwritten: copy_, zero_, fill_, `out`.

A tensor subclass that wraps others (torchao's quantised weights) has no memory. Its parts are named
("proj.weight.qdata"), and operators on them recorded.
"""

import functools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tessera.capture.blocks import raw
from tessera.errors import CaptureError
from tessera.ir import Access, Arg, Buffer, BufferKind, Launch, Region, Symbol, View, arg_views, region
from tessera.kernels.tensors import same_bits

# Larger constants are refused.
MAX_CONSTANT_BYTES = 1 << 16
OVERWRITERS = frozenset({"aten::copy_", "aten::zero_", "aten::fill_"})
# They return what shapes and storages are, not values.
METADATA = frozenset({"aten::is_same_size", "aten::_has_same_storage_numel"})
Recorded = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
Results = tuple[Any, ...] | list[Any]
_PACKAGES = f"site-packages{os.sep}"
# In training, these update statistics that their schemas do not declare.
SILENT_WRITERS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
# Operators of other namespaces are untested.
TESTED = frozenset({"aten", "prims", "tessera"})
# Arguments whose values decide result sizes; for others with torch's tag, all do.
DECIDERS = {
    "aten::index": ("indices",),
    "aten::masked_select": ("mask",),
    "aten::repeat_interleave": ("repeats",),
    "aten::_pack_padded_sequence": ("lengths",),
    "aten::_ctc_loss": ("targets", "input_lengths", "target_lengths"),
}
BATCHED = "Keep the decision on the device (for experts: the grouped or batched path)"
_ON_DEVICE = "Make the optimiser with fused=True, or on a GPU with capturable=True."
_SIZED = (
    f"{BATCHED}, or give the result a size of its own: torch.where(mask, x, 0), nonzero_static(size=...), "
    "repeat_interleave(output_size=...)."
)
# Torch's errors under a dispatch mode: text before a name, what it names, remedy.
_TORCHS_ERRORS = (
    ("HigherOrderOperator ", "an operator over functions",
     "Compute with plain operators: torch.where in place of torch.cond, attention by its own operator."),
    ("new Tensor subclass ", "a class of tensors, made in the step", "Make it before the step, or a tensor."),
)  # fmt: skip


def split(func: Any, recorded: Recorded, results: Results) -> Iterator[tuple[Recorded, Results]]:
    """Operators over lists become one launch per tensor: parameters may differ in device."""
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
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    if not is_lazy(tensor):
        return View(buffer, dtype, shape, stride, offset)
    flags = ("conj",) * tensor.is_conj() + ("neg",) * tensor.is_neg()
    return View(buffer, dtype, shape, stride, offset, flags)


def byte_region(view: View) -> Region | None:
    size = getattr(torch, view.dtype).itemsize
    dims = tuple((n, s * size) for n, s in zip(view.shape, view.stride, strict=True))
    return region(view.offset * size, size, dims)


def symbol_of(value: Any) -> Symbol | None:
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format, complex):
        if isinstance(value, kind):
            return Symbol(kind.__name__, str(value).removeprefix("torch."))
    return None


def contents(tensor: torch.Tensor) -> str:
    value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if value is None:
        return ""
    with unset_fake_temporarily():
        # An empty tensor is a constant too; no text means none.
        return bytes(raw(value, 0, value.untyped_storage().nbytes()).tolist()).hex() or "00"


def argument_of(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    values = (value for argument, value, _ in arguments(func._schema, args, kwargs) if argument.name == name)
    return next(values, None)


def arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any, bool]]:
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, value, argument.alias_info is not None and argument.alias_info.is_write


def argument_accesses(schema: Any, args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> list[Access]:
    accesses = []
    for argument, value, writes in arguments(schema, args, kwargs):
        reads = not (writes and (schema.name in OVERWRITERS or argument.is_out))
        for view in arg_views(value):
            touched = byte_region(view)
            if touched is not None:
                accesses.append(Access(view.buffer, touched, read=reads, write=writes))
    return accesses


def whole_buffers(launch: Launch, buffers: Sequence[Buffer], mutated: Set[int]) -> tuple[Access, ...]:
    """All of every buffer, for an unproved launch; weights are written only where the compiler says."""
    accesses: dict[int, Access] = {}
    for place, arg in enumerate(launch.args):
        for view in arg_views(arg):
            buffer = buffers[view.buffer]
            if buffer.size_bytes:
                writes = place in mutated or buffer.kind is not BufferKind.WEIGHT
                all_bytes = Region(0, buffer.size_bytes)
                accesses[view.buffer] = Access(view.buffer, all_bytes, read=True, write=writes)
    return tuple(accesses.values())


def is_wrapper(tensor: Any) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if not is_wrapper(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for key in attributes for part in parts(f"{name}.{key}", getattr(tensor, key))]


def from_parts(name: str, tensor: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not is_wrapper(tensor):
        return values[name]
    attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {key: from_parts(f"{name}.{key}", getattr(tensor, key), values) for key in attributes}
    kind: Any = type(tensor)
    wrapper: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return wrapper


def _folder(file: str | None) -> str:
    return str(Path(file or "").parent) + os.sep


# Frames in these, but for capture's models, are not the program's.
_TORCH, _NUMPY, _PYTHON = (_folder(module.__file__) for module in (torch, np, os))
_TESSERA = str(Path(__file__).parents[1]) + os.sep
_MODELS = f"{_folder(__file__)}models{os.sep}"


class _LastRefusal(threading.local):
    error: CaptureError | None = None


_last = _LastRefusal()


def fail(message: str, remedy: str, place: str | None = None) -> NoReturn:
    _last.error = CaptureError(message, remedy, program_line() if place is None else place)
    raise _last.error


@contextmanager
def insisting() -> Iterator[None]:
    """A refusal stands even if the program catches it."""
    before, _last.error = _last.error, None
    try:
        yield
        if _last.error is not None:
            raise _last.error
    except CaptureError:
        raise
    except Exception as error:
        if _last.error is not None:
            raise _last.error from error
        for text, what, remedy in _TORCHS_ERRORS:
            if text in str(error):
                lines = list(_program_lines(walk_tb(error.__traceback__)))
                name = str(error).partition(text)[2].split()[0]
                raise CaptureError(f"{name} is {what}", remedy, lines[-1] if lines else "") from error
        raise
    finally:
        _last.error = before


def refuse_read(what: str) -> NoReturn:
    if any(f"{_TORCH}optim{os.sep}" in f.f_code.co_filename for f, _ in walk_stack(sys._getframe())):
        fail("the optimiser reads its step count or rate on the host", _ON_DEVICE)
    fail(f"{what} reads a tensor's value on the host", f"{BATCHED}, or pass the value as a plain number.")


def program_line() -> str:
    return next(_program_lines(walk_stack(sys._getframe())), "")


def _program_call() -> str:
    """Text of the call that the program is in, if it is on one line."""
    for frame, _ in walk_stack(sys._getframe()):
        if is_program(frame.f_code.co_filename):
            first, last, start, stop = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            line = linecache.getline(frame.f_code.co_filename, first or 0).encode()
            return line[start:stop].decode() if first == last else ""
    return ""


def _program_lines(frames: Iterator[tuple[FrameType, int]]) -> Iterator[str]:
    for frame, line in frames:
        if is_program(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{line}"


@functools.cache
def is_program(filename: str) -> bool:
    if filename.startswith(("<", _TORCH, _NUMPY)):
        return False
    if filename.startswith(_TESSERA):
        return filename.startswith(_MODELS)
    return not is_python(filename)


def is_python(filename: str) -> bool:
    return filename.startswith(_PYTHON) and _PACKAGES not in filename


def is_users(filename: str) -> bool:
    return is_program(filename) and _PACKAGES not in filename


def check_operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], varies: Callable[[Any], bool]
) -> None:
    """Refuses host reads of varying values, and writes that no schema declares."""
    is_silent = func._schema.name in SILENT_WRITERS and argument_of(func, "training", args, kwargs)
    if is_silent and argument_of(func, "running_mean", args, kwargs) is not None:
        message = f"{func} changes its running statistics, which its schema does not say"
        fail(message, "Call the model's eval() first.")
    if _answers_the_host(func) and any(map(varies, tree_leaves((args, kwargs)))):
        if func is torch.ops.aten._nested_tensor_from_mask_left_aligned.default:
            message = "TransformerEncoder reads on the host whether padding is at the end"
            fail(message, "Make it with enable_nested_tensor=False.")
        # Functions of several operators read by one that the program does not name.
        is_plain = func is torch.ops.aten._local_scalar_dense.default
        refuse_read((is_plain and _program_call()) or str(func))
    if _sizes_by_value(func) and any(map(varies, tree_leaves(_deciding(func, args, kwargs)))):
        fail(f"{func} gives a result whose shape depends on values", _SIZED)


def _deciding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name == "aten::repeat_interleave" and argument_of(func, "output_size", args, kwargs) is not None:
        return ()
    deciders = [argument_of(func, which, args, kwargs) for which in DECIDERS.get(name, ())]
    if name == "aten::index":
        return [t for t in deciders[0] if t is not None and t.dtype in (torch.bool, torch.uint8)]
    return deciders if name in DECIDERS else (args, kwargs)


@functools.cache
def _sizes_by_value(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or func._schema.name in DECIDERS


@functools.cache
def _answers_the_host(func: Any) -> bool:
    if func.namespace in ("prim", "profiler") or func._schema.name in METADATA:
        return False
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(r.type) for r in returns)


def check_tensor(tensor: torch.Tensor, name: str = "a value") -> None:
    if torch.nn.parameter.is_lazy(tensor):
        fail(f"{name} has no shape before the first call", "Call the module once before the capture.")
    if tensor._is_zerotensor():
        remedy = "Differentiate backwards: torch.func.jacrev, torch.func.grad."
        fail(f"{name} is a zero without memory", remedy)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = str(tensor.layout).removeprefix("torch.")
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else kind
        fail(f"{name} is a {what} tensor", "Use dense, unquantized tensors: .to_dense(), .dequantize().")
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not (is_plain or isinstance(tensor, FakeTensor) or is_wrapper(tensor)):
        fail(f"{name} is a {type(tensor).__name__}, whose operators are its own", "Use plain tensors.")
    if is_wrapper(tensor):
        message = f"{name} is a {type(tensor).__name__}, which wraps other tensors"
        fail(message, "Pass its parts, as to_local() of a DTensor, or make it a parameter of a module.")


def have_same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.shape == other.shape and same_bits(one, other)


def check_declared(func: Any, given: tuple[Any, Any], tried: tuple[Any, Any]) -> None:
    """`tried`: copies of `given`, after a call with them."""
    named = [
        (argument.name, is_write, leaf, after)
        for (argument, value, is_write), (_, left, _) in zip(
            arguments(func._schema, *given), arguments(func._schema, *tried), strict=True
        )
        for leaf, after in zip(tree_leaves(value), tree_leaves(left), strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    written = {leaf.untyped_storage()._cdata for _, is_write, leaf, _ in named if is_write}
    for name, _, leaf, after in named:
        if leaf.untyped_storage()._cdata not in written and not have_same_bits(leaf, after):
            message = f"{func} writes '{name}', which its schema does not say"
            fail(message, "Name it in mutates_args, or mark it in the schema as Tensor(a!).")


def check_repeatable(func: Any, one: Any, other: Any) -> None:
    """Results of two calls with the same arguments. On a GPU sums may differ by their order."""
    on_cpu = all(t.device.type == "cpu" for t in tree_leaves(other) if isinstance(t, torch.Tensor))
    if on_cpu and not all(map(have_same_bits, tree_leaves(one), tree_leaves(other))):
        message = f"{func} gives other results for the same arguments"
        fail(message, "Pass what it keeps or draws as an argument.")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Conjugated or negated by a flag: its bytes are other values."""
    return tensor.is_conj() or tensor.is_neg()


def check_resolved(tensor: torch.Tensor, name: str) -> None:
    if is_lazy(tensor):
        what, method = ("conjugated", "resolve_conj") if tensor.is_conj() else ("negated", "resolve_neg")
        fail(f"{name} is {what} by a flag and not in memory", f"Call .{method}() on it.")


def explain(func: Any, error: Exception) -> NoReturn:
    kind = type(error).__name__
    if kind in ("DynamicOutputShapeException", "DataDependentOutputException"):
        remedy = f"{BATCHED}, or capture on real tensors with --device cpu or cuda:0."
        fail(f"{func} gives a result that depends on values, and fake tensors have none", remedy)
    if kind in ("UnsupportedOperatorException", "UnsupportedFakeTensorException"):
        message = f"{func} cannot be run on fake tensors"
        fail(message, "Register a fake for it with torch.library.register_fake.")
    if "two devices" in str(error) or "two different devices" in str(error):
        message = f"{func} is given tensors of two devices"
        fail(message, "Make new tensors where the others are: device=x.device.")
    if isinstance(error, NotImplementedError):
        first = str(error).partition(". ")[0].partition("\n")[0]
        remedy = "Capture on a device that has it (--device fake or cuda:0), or use another operator."
        fail(f"{func} is missing on this device: {first}", remedy)
    raise error
