"""Inductor without a GPU: the same launches on fake tensors, with kernels compiled to PTX but not loaded.

Not known: Inductor's decisions by timing. The autotuner's first configuration is taken; constant folding and
padding by trial are off.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.capture.fake import ensure_cuda_guard
from tessera.errors import extra_module
from tessera.ir.files import packaged

PROPERTIES = SimpleNamespace(**packaged("capture", "h100.json", dict[str, Any]))


def properties_of(ordinal: int) -> SimpleNamespace:
    real = torch.cuda.get_device_properties(ordinal)
    return SimpleNamespace(**{name: getattr(real, name, value) for name, value in vars(PROPERTIES).items()})


# Off: passes that run or time operators, and compile workers, which do not see these patches.
CONFIG: dict[str, Any] = {"joint_graph_constant_folding": False, "shape_padding": False, "compile_threads": 1}


@contextlib.contextmanager
def offline(card: SimpleNamespace = PROPERTIES) -> Iterator[FakeTensorMode]:
    ensure_cuda_guard()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling_for(10 * card.major + card.minor))
        for target, name, value in _replacements(card):
            stack.enter_context(unittest.mock.patch.object(target, name, value, create=True))
        stack.enter_context(_interface(card))
        stack.enter_context(_without_caches())
        stack.enter_context(mode)
        yield mode


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    extra_module("triton", "gpu")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    # Triton's driver lookup fails without a GPU.
    compiler = _driver(GPUTarget("cuda", arch, 32))
    with (
        unittest.mock.patch.object(driver, "_active", compiler, create=True),
        unittest.mock.patch.object(CompiledKernel, "_init_handles", return_value=None),
    ):
        yield


def _driver(target: Any) -> Any:
    from triton.backends.driver import DriverBase

    def benchmarker(self: Any) -> Callable[..., Any]:
        raise NotImplementedError

    methods = {
        "__init__": lambda self: None,
        "is_active": classmethod(lambda cls: True),
        "get_current_target": lambda self: target,
        # Triton caches by device: each target gets its own number.
        "get_current_device": lambda self: -int(target.arch),
        "get_current_stream": lambda self, device=0: 0,
        "get_active_torch_device": lambda self: torch.device("cuda", 0),
        "get_benchmarker": benchmarker,
        "map_python_to_cpp_type": lambda self, ty: ty,
    }
    return type("Compiler", (DriverBase,), methods)()


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Clears torch's caches before and after: a kernel compiled here has no handle, so a later compilation of
    the same source for a GPU must not find it.
    """
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.codecache import PyCodeCache
    from torch.utils import _triton

    remembered = [f for f in vars(_triton).values() if hasattr(f, "cache_clear")]
    remembered += [CompiledTritonKernels, PyCodeCache]
    for function in remembered:
        function.cache_clear()
    try:
        yield
    finally:
        for function in remembered:
            function.cache_clear()


def _interface(card: SimpleNamespace) -> contextlib.AbstractContextManager[Any]:
    from torch._dynamo import device_interface

    methods: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
        "get_compute_capability": lambda device=None: 10 * card.major + card.minor,
        "get_device_properties": lambda device=None: card,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda device=None: True,
    }
    real = device_interface.get_interface_for_device("cuda")
    interface = type("Interface", (real,), {name: staticmethod(method) for name, method in methods.items()})
    table = device_interface.device_interfaces
    return unittest.mock.patch.dict(table, {n: interface for n in table if n.split(":")[0] == "cuda"})


def _replacements(card: SimpleNamespace) -> list[tuple[Any, str, Any]]:
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    guards = torch._C._dynamo.guards
    return [
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=None: card),
        (torch.cuda, "get_device_capability", lambda device=None: (card.major, card.minor)),
        (torch.cuda, "get_device_name", lambda device=None: card.name),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "_DeviceGuard", contextlib.nullcontext),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (guards, "_empty_strided_cuda", empty),
        (guards, "_reinterpret_tensor", reinterpret),
        (guards, "assert_size_stride", lambda *args: None),
        (guards, "assert_alignment", lambda *args: None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (triton_heuristics.CachingAutotuner, "run", _run),
        (triton_heuristics.CachingAutotuner, "_precompile_worker", _first_of(triton_heuristics)),
        (triton_heuristics.CachingAutotuner, "_dynamic_scale_rblock", lambda self: None),
    ]


def _run(self: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> None:
    """Replaces CachingAutotuner.run: everything but the launch."""
    if not self.launchers:
        self.precompile()


def _first_of(heuristics: Any) -> Callable[[Any], Any]:
    """Compiles the first valid configuration."""
    original = heuristics.CachingAutotuner._precompile_worker

    def worker(self: Any) -> Any:
        *tries, last = self.configs or [None]
        for config in tries:
            self.configs = [config]
            with contextlib.suppress(heuristics.NoTritonConfigsError):
                return original(self)
        self.configs = last and [last]
        return original(self)

    return worker
