"""PtxKernel: a kernel whose PTX the CUDA driver compiles and loads, launched on torch's current stream.

Parameters are passed by their declared types; pointers behind the launch's arguments (Triton's scratch
memory, which `capture` has shown to be unused) are null.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.ir import Kernel

_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float,
    "fp64": ctypes.c_double, "f64": ctypes.c_double,
}  # fmt: skip
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 << 10


class PtxKernel:
    """One PTX entry, loaded into the current CUDA context."""

    def __init__(self, kernel: Kernel, block: tuple[int, ...]) -> None:
        torch.cuda.current_stream()  # makes sure that there is a context
        self._name, self._shared = kernel.name, kernel.shared_bytes
        self._types = [kind for _, kind in kernel.signature if kind != "constexpr"]
        x, y, z = (*block, 1, 1, 1)[:3]
        self._block = (x, y, z)
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        driver = _driver()
        text = ctypes.c_char_p(kernel.ptx.encode())
        self._ask(driver.cuModuleLoadData(ctypes.byref(self._module), text), "load")
        name = kernel.name.encode()
        self._ask(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name), "find")
        if self._shared > _STATIC_SHARED_LIMIT:
            status = driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, self._shared)
            self._ask(status, "give shared memory to")
        self._sizes = self._param_sizes()

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        """Launches on the current stream."""
        values = [self._value(arg, kind) for arg, kind in zip(args, self._types, strict=True)]
        values += [ctypes.c_uint64(0) for _ in self._sizes[len(values) :]]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, *grid, *self._block, self._shared, stream, pointers, None
        )
        self._ask(status, "launch")

    def _value(self, arg: Any, kind: str) -> Any:
        if isinstance(arg, torch.Tensor):
            return ctypes.c_uint64(arg.data_ptr())
        if kind.startswith("*"):
            return ctypes.c_uint64(0 if arg is None else int(arg))
        if kind not in _TYPES:
            raise WorkerError(
                f"kernel {self._name} has a parameter of type {kind}", "Compile it from source."
            )
        return _TYPES[kind](arg)

    def _param_sizes(self) -> list[int]:
        """Bytes of every parameter of the entry."""
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        ask = _driver().cuFuncGetParamInfo
        while not ask(self._function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes

    def _ask(self, status: int, what: str) -> None:
        if status:
            raise WorkerError(
                f"the CUDA driver could not {what} kernel {self._name} (error {status})",
                "Capture it on this machine, or update the driver if the PTX is newer than it knows.",
            )


@functools.cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise WorkerError(
            "this machine has no CUDA driver", "Run on a machine with an NVIDIA GPU."
        ) from error
    for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncGetParamInfo"):
        getattr(library, name).restype = ctypes.c_int
    launch = library.cuLaunchKernel
    launch.restype = ctypes.c_int
    launch.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    ]  # fmt: skip
    library.cuFuncGetParamInfo.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
    ]  # fmt: skip
    return library
