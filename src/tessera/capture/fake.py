"""fake: a make-believe GPU, so that a step can be recorded without one and without its weights.

Inside `machine`, tensors are torch's fake tensors: shapes, strides and devices, but no bytes. Parameters are
created on fake CUDA, so an 8-billion-parameter model costs megabytes. What the program asks of the GPU (its
compute capability, its attention operator) is answered for the GPUs named in `attention`.

Not handled: a program that looks at values. Such reads are refused with their line (see `refuse`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tessera.capture.attention import TargetAttention
from tessera.capture.guard import ensure_cuda_guard
from tessera.capture.shapes import Run, ShapeCache

# The least capable GPU whose kernels the trace must be able to run on.
CAPABILITY = (8, 0)


@contextmanager
def machine() -> Iterator[Run]:
    """While entered, new tensors are fake and CUDA seems to be there; yields how to run an operator."""
    ensure_cuda_guard()
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    try:
        with FakeTensorMode() as mode, TargetAttention():
            yield runner(mode)
    finally:
        torch.cuda.get_device_capability = real


def runner(mode: FakeTensorMode) -> Run:
    """How to run an operator on tensors of a fake mode: from memory where possible, and as a GPU would."""
    return ShapeCache(mode, run_fake).run


def on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors on the fake GPU; to be called inside `machine`."""
    return {
        name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda")
        for name, t in tensors.items()
    }


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on fake tensors, repaired where torch's fake differs from the real one."""
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_product(func, args, kwargs)
    made = func(*args, **kwargs)
    if func in VIEWS and 1 in (*args[0].shape, *made.shape):
        return _as_viewed(made, *args)
    return made


VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The fake takes bfloat16 alone; GPUs take other floats too, with the same layout."""
    halves = [
        torch.empty_strided(t.size(), t.stride(), dtype=torch.bfloat16, device=t.device) for t in args[:2]
    ]
    made = func(*halves, *args[2:], **kwargs)
    return torch.empty_strided(made.size(), made.stride(), dtype=args[0].dtype, device=made.device)


def _as_viewed(made: torch.Tensor, source: torch.Tensor, shape: Any) -> torch.Tensor:
    """The fake keeps old strides of dimensions of size 1; real ones decide the layout of what follows."""
    with unset_fake_temporarily():
        real = torch.empty_strided(source.size(), source.stride(), device="meta").view(shape).stride()
    return made if made.stride() == real else made.as_strided(made.size(), real, made.storage_offset())
