"""A fake GPU: records a step without a GPU or weights.

Torch switches devices through a c10 guard, which a CPU build lacks: a dummy whose methods return zero stands
in for the one call that creates torch's replacement.

`F.scaled_dot_product_attention` becomes the operator that a CUDA build picks for compute capability 8.0 and
above: flash, memory-efficient or the formula; cuDNN for few queries under a mask, where the memory-efficient
kernel reaches a third of an H200's bandwidth.
"""

import ctypes
import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tessera.errors import CaptureError

# c10::impl::device_guard_impl_registry: pointers indexed by c10::DeviceType.
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA = 1
_NUM_METHODS = 64

_REMEDY = "Install a CUDA build of torch (it needs no GPU), or capture with --device cpu."


# Strides of a mask for the memory-efficient kernel (all but the last).
MASK_ALIGNMENT = 8
# Widest head of the flash kernel; heads are padded to a multiple of 8.
MAX_FLASH_HEAD = 256
FLASH_ALIGNMENT = 8
# Limits of cuDNN's kernel under a mask on every GPU.
FEW_QUERIES = range(2, 9)
MAX_CUDNN_HEAD = 128
# Least capable GPU that the trace must run on.
CAPABILITY = (8, 0)
VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@functools.cache
def ensure_cuda_guard() -> None:
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    registry = _registry()
    if not registry[_CUDA]:
        _replace(registry)


def _replace(registry: "ctypes.Array[ctypes.c_void_p]") -> None:
    zero = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _NUM_METHODS)(*[address] * _NUM_METHODS)
    stand_in = ctypes.c_void_p(ctypes.addressof(methods))  # C++ object: a pointer to its methods
    mine = ctypes.addressof(stand_in)
    registry[_CUDA] = ctypes.c_void_p(mine)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] == mine:
        registry[_CUDA] = None
        raise CaptureError("this torch kept no guard for fake CUDA tensors", _REMEDY)


def _registry() -> "ctypes.Array[ctypes.c_void_p]":
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError) as error:
        message = "this torch was built without CUDA and hides its device guards"
        raise CaptureError(message, _REMEDY) from error


class InPlaceOf(TorchFunctionMode):
    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._other = function, other

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))


def target_attention() -> InPlaceOf:
    return InPlaceOf(scaled_dot_product_attention, _attend)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten, width = torch.ops.aten, query.shape[-1]
    kind = choose(query, key, value, attn_mask, enable_gqa)
    out: torch.Tensor
    if kind == "flash":
        missing = -width % FLASH_ALIGNMENT
        if missing:
            query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
        chosen = scale if scale is not None else 1.0 / math.sqrt(width)
        flash = aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, False, scale=chosen)[0]
        return out[..., :width] if missing else out
    if kind == "cudnn" and attn_mask is not None:
        # Without the softmax sums the operator returns None there on a GPU only.
        mask, cudnn = _additive(attn_mask, query), aten._scaled_dot_product_cudnn_attention
        out = cudnn(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if kind == "efficient":
        bias = None if attn_mask is None else _prepare_mask(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, bias, False, dropout_p, is_causal, scale=scale)[0]
        return out
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> str:
    alike = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype
    if query.device.type != "cuda" or not alike or any(n == 0 for n in (*query.shape, *key.shape)):
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    if not query.shape[0] == key.shape[0] == value.shape[0] or not (same_heads or enable_gqa):
        return "math"  # which repeats a batch of one, or heads
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and same_width and query.shape[-1] <= MAX_FLASH_HEAD:
        return "flash"
    if not same_heads or not (half or query.dtype is torch.float32):
        return "math"
    alignment = 8 if half else 4
    is_few = half and mask is not None and mask.dim() == 4 and query.shape[2] in FEW_QUERIES
    if is_few and same_width and query.shape[-1] <= MAX_CUDNN_HEAD and query.shape[-1] % alignment == 0:
        return "cudnn"
    return "efficient" if query.shape[-1] % alignment == 0 == value.shape[-1] % alignment else "math"


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    number = functools.partial(torch.scalar_tensor, dtype=query.dtype, device=query.device)
    return torch.where(mask, number(0.0), number(-math.inf))


def _prepare_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    mask = _additive(mask, query)
    missing = -mask.shape[-1] % MASK_ALIGNMENT
    is_aligned = mask.stride(-1) == 1 and all(s % MASK_ALIGNMENT == 0 for s in mask.stride()[:-1])
    if not is_aligned and missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


@contextmanager
def machine() -> Iterator[None]:
    """CUDA appears available."""
    ensure_cuda_guard()
    capability = patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    with capability, FakeTensorMode(), target_attention():
        yield


def on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda")
        for name, t in tensors.items()
    }


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Corrects results where torch's fake differs from the real operator."""
    is_grouped = func is torch.ops.aten._grouped_mm.default and args[0].dim() == 2 and args[1].dim() == 3
    if is_grouped and args[0].dtype is not torch.bfloat16:
        return _grouped_product(args)
    result = func(*args, **kwargs)
    if func in VIEWS and 1 in (*args[0].shape, *result.shape):
        return _as_viewed(result, *args)
    return result


def _grouped_product(args: tuple[Any, ...]) -> torch.Tensor:
    """The fake takes bfloat16 only; GPUs take other floats and align rows to 16 bytes."""
    rows, weights = args[:2]
    unit, size = 16 // rows.itemsize, (len(rows), weights.shape[2])
    return torch.empty_strided(size, (-(-size[1] // unit) * unit, 1), dtype=rows.dtype, device=rows.device)


def _as_viewed(result: torch.Tensor, source: torch.Tensor, shape: Any) -> torch.Tensor:
    """The fake keeps old strides of size-1 dimensions; the real ones decide later layouts."""
    with unset_fake_temporarily():
        real = torch.empty_strided(source.size(), source.stride(), device="meta").view(shape).stride()
    is_alike = result.stride() == real
    return result if is_alike else result.as_strided(result.size(), real, result.storage_offset())


@contextmanager
def uncollected() -> Iterator[None]:
    """Callbacks and finalizers of others are no part of the step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
