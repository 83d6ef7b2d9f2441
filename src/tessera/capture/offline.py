"""Inductor without a GPU: the same launches, from fake tensors and kernels that are compiled but not loaded.

    with offline(gpu) as mode: ...      Inductor and Triton believe in one GPU of that kind

Inside, Inductor's compiled code can be called on fake tensors: allocations are fake, extern calls are
dispatched on fakes, Triton kernels are compiled to PTX and their launches are seen but not made.

Not known here: what Inductor decides by running things on the GPU. The autotuner's first configuration is
taken for its winner, and the passes that fold constants or pad matrix products by trying are off.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from tessera.capture.fake import ensure_cuda_guard
from tessera.errors import MissingExtra


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """What Inductor asks about a GPU."""

    arch: int  # compute capability, 90 for 9.0
    num_sms: int
    name: str = "fake"

    @property
    def properties(self) -> SimpleNamespace:
        """As torch.cuda.get_device_properties gives them."""
        return SimpleNamespace(
            name=self.name,
            major=self.arch // 10,
            minor=self.arch % 10,
            multi_processor_count=self.num_sms,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=1536 if self.arch in (86, 89, 120) else 2048,
            max_threads_per_block=1024,
            warp_size=32,
            total_memory=80 << 30,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=(99 if self.arch in (86, 89, 120) else 227) << 10,
            shared_memory_per_multiprocessor=228 << 10,
            L2_cache_size=50 << 20,
            gcnArchName="",
            is_integrated=False,
        )


H100 = FakeGpu(90, 132)

# Off: passes that run or time operators on the device while compiling, and compiling in other processes,
# which know nothing of this one's make-believe.
CONFIG: dict[str, Any] = {
    "joint_graph_constant_folding": False,
    "shape_padding": False,
    "compile_threads": 1,
}


@contextlib.contextmanager
def offline(gpu: FakeGpu = H100) -> Iterator[FakeTensorMode]:
    """While active, compiled code can be made for a GPU that is not there, and walked through on fakes."""
    ensure_cuda_guard()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling_for(gpu.arch))
        for target, name, value in _replacements(gpu):
            stack.enter_context(unittest.mock.patch.object(target, name, value, create=True))
        stack.enter_context(_interface(gpu))
        stack.enter_context(_asked_anew())
        stack.enter_context(mode)
        yield mode


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """While active, Triton compiles for a compute capability and loads nothing."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime import driver
    except ImportError as error:
        raise MissingExtra("triton", "gpu") from error
    # Asking Triton for its driver fails where there is no GPU, so its own place is filled.
    compiler = _driver(GPUTarget("cuda", arch, 32))
    with (
        unittest.mock.patch.object(driver, "_active", compiler, create=True),
        unittest.mock.patch.object(CompiledKernel, "_init_handles", _nothing),
    ):
        yield


def fake_like(mode: FakeTensorMode, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fake CUDA tensors of the same shapes and types."""
    device = torch.device("cuda", 0)
    fakes: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        with no_dispatch():  # a plain meta tensor, not another fake one
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fakes[name] = FakeTensor(mode, meta, device)
    return fakes


def _driver(target: Any) -> Any:
    from triton.backends.driver import DriverBase

    class Compiler(DriverBase):  # type: ignore[misc]
        """A driver that knows its target and has no device."""

        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return target

        def get_current_device(self) -> int:
            return -int(target.arch)  # Triton keeps what it compiled by device: every target has its own

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Callable[..., Any]:
            raise NotImplementedError

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    return Compiler()


@contextlib.contextmanager
def _asked_anew() -> Iterator[None]:
    """What torch remembers of Triton and the GPU was true before, and is again after."""
    from torch.utils import _triton

    remembered = [f for f in vars(_triton).values() if hasattr(f, "cache_clear")]
    for function in remembered:
        function.cache_clear()
    try:
        yield
    finally:
        for function in remembered:
            function.cache_clear()


@contextlib.contextmanager
def _interface(gpu: FakeGpu) -> Iterator[None]:
    """Dynamo's view of the device."""
    from torch._dynamo import device_interface

    real = device_interface.get_interface_for_device("cuda")

    class Interface(real):  # type: ignore[misc, valid-type]
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def exchange_device(device: int) -> int:
            return 0

        @staticmethod
        def maybe_exchange_device(device: int) -> int:
            return 0

        @staticmethod
        def get_compute_capability(device: Any = None) -> int:
            return gpu.arch

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return gpu.properties

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return gpu.arch >= 80

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return gpu.arch >= 70

    table = device_interface.device_interfaces
    names = [n for n in table if n.split(":")[0] == "cuda"]
    saved = {n: table[n] for n in names}
    for name in names:
        table[name] = Interface
    try:
        yield
    finally:
        table.update(saved)


def _nothing(_: Any) -> None:
    pass


class _NoGuard:
    def __init__(self, _: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _replacements(gpu: FakeGpu) -> list[tuple[Any, str, Any]]:
    """(object, attribute, what it is meanwhile)"""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    guards = torch._C._dynamo.guards
    return [
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=None: gpu.properties),
        (torch.cuda, "get_device_capability", lambda device=None: divmod(gpu.arch, 10)),
        (torch.cuda, "get_device_name", lambda device=None: gpu.name),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "_DeviceGuard", _NoGuard),
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
    """In place of CachingAutotuner.run: everything but the launch."""
    if not self.launchers:
        self.precompile()


def _first_of(heuristics: Any) -> Callable[[Any], Any]:
    """In place of CachingAutotuner._precompile_worker: compiles the first configuration that can be."""
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
