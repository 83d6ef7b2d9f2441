"""One launch of a PTX kernel, by the driver or, on a CPU, the interpreter.

Since Hopper a kernel is launched while the one before runs, and first waits for its end (`overlapping`),
which hides the launch.

A list of tensors is passed as the address of a table of pointers. Pointers behind the arguments (Triton's
scratch memory, proved unused by `capture`) are null.
"""

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tessera.errors import WorkerError
from tessera.ir import Kernel

Grid = tuple[int, int, int]


def three(sizes: Any) -> Grid:
    """One to three sizes of a grid or block."""
    x, y, z = (*map(int, sizes if isinstance(sizes, tuple | list) else (sizes,)), 1, 1, 1)[:3]
    return x, y, z


_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float,
    "fp64": ctypes.c_double, "f64": ctypes.c_double,
}  # fmt: skip
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 << 10
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# First target and PTX version with dependent launches.
_TARGET, _PTX_VERSION = 90, (7, 8)
_WAIT = "\n\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;"
_HEAD = re.compile(r"\.version\s+(\d+)\.(\d+).*?\.target\s+sm_(\d+)", re.DOTALL)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes."""

    _fields_ = (("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num", ctypes.c_uint),
    )  # fmt: skip


_OVERLAPPED = _Attribute(_SERIALIZATION, 0, (ctypes.c_int * 16)(1))


@cache
def driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        message = "this machine has no CUDA driver"
        raise WorkerError(message, "Run on a machine with an NVIDIA GPU.") from error


def run_kernel(kernel: Kernel, grid: Grid, block: Grid, args: Sequence[Any]) -> None:
    items = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,))]
    card = next((t.device.index for t in items if isinstance(t, torch.Tensor) and t.is_cuda), None)
    if card is not None:
        _loaded(kernel, block, card)(grid, args)
    else:
        _interpret(kernel, grid, block, args)


@cache  # unbounded: loading a module again during a graph capture would break the capture
def _loaded(kernel: Kernel, block: Grid, card: int) -> "PtxKernel":
    return PtxKernel(kernel, block, is_early=True)


def _interpret(kernel: Kernel, grid: Grid, block: Grid, args: Sequence[Any]) -> None:
    from tessera_ptx import PtxError
    from tessera_ptx.interp import ByPointer, Offset, Packed, run

    arrays: dict[int, Any] = {}

    def pointer(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            entries = [pointer(x) if isinstance(x, torch.Tensor) else np.int64(x) for x in arg]
            return ByPointer(Packed({8 * k: x for k, x in enumerate(entries)}, max(8 * len(entries), 8)))
        if not isinstance(arg, torch.Tensor):
            return arg
        storage = arg.untyped_storage()
        array = arrays.setdefault(storage.data_ptr(), _bytes(storage))
        return Offset(array, int(arg.storage_offset()) * arg.itemsize)

    values = [pointer(arg) for arg in args]
    shared = kernel.shared_bytes or None
    try:
        result = run(kernel.ptx, kernel.name, grid, block, values, shared_bytes=shared, file=kernel.name)
    except PtxError as error:
        raise WorkerError(error.message, place=error.place) from error
    for array, name in result.homes:
        if result.masks[name].write.any() or result.masks[name].atomic.any():
            array[:] = result.buffers[name]


def _bytes(storage: torch.UntypedStorage) -> Any:
    size = storage.nbytes()
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(storage.data_ptr()))


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= divmod(_TARGET, 10)


def overlapping(ptx: str, name: str) -> str:
    """The text for cards since Hopper, with a wait first; "" if it has no place.

    Every thread waits: a kernel's end is after the end of all before.
    """
    head, entry = _HEAD.search(ptx), re.search(rf"\.entry\s+{re.escape(name)}\b[^{{]*{{", ptx)
    if head is None or entry is None or "griddepcontrol" in ptx:
        return ""
    version, target = (int(head[1]), int(head[2])), int(head[3])
    if version < _PTX_VERSION:
        return ""
    text = ptx[: entry.end()] + _WAIT + ptx[entry.end() :]
    return text if target >= _TARGET else f"{ptx[: head.start(3)]}{_TARGET}{text[head.end(3) :]}"


class PtxKernel:
    def __init__(self, kernel: Kernel, block: Sequence[int], is_early: bool = False) -> None:
        """`is_early`: launched while the one before runs; it may wait for memory alone, since the next one
        takes room on the card.
        """
        torch.cuda.current_stream()  # creates the context
        self._name, self._shared = kernel.name, kernel.shared_bytes
        self._types = [kind for _, kind in kernel.signature if kind != "constexpr"]
        self._block = three(block)
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        cuda, waiting = driver(), ""
        if is_early and overlaps(torch.device("cuda", torch.cuda.current_device())):
            waiting = overlapping(kernel.ptx, kernel.name)
        self._attributes = (_Attribute * 1)(_OVERLAPPED) if waiting else None
        text = ctypes.c_char_p((waiting or kernel.ptx).encode())
        self._ask(cuda.cuModuleLoadData(ctypes.byref(self._module), text), "load")
        name = kernel.name.encode()
        self._ask(cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name), "find")
        if self._shared > _STATIC_SHARED_LIMIT:
            status = cuda.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, self._shared)
            self._ask(status, "give shared memory to")
        self._sizes = self._param_sizes()
        # By contents; kept, since graphs read them again.
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        values = [self._value(arg, kind) for arg, kind in zip(args, self._types, strict=True)]
        values += [ctypes.c_uint64(0) for _ in self._sizes[len(values) :]]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        num_attributes = 1 if self._attributes else 0
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*self._block)
        config = _Config(*sizes, self._shared, stream, self._attributes, num_attributes)
        status = driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        self._ask(status, "launch")

    def _value(self, arg: Any, kind: str) -> Any:
        if isinstance(arg, torch.Tensor):
            return ctypes.c_uint64(arg.data_ptr())
        if isinstance(arg, list | tuple):
            return ctypes.c_uint64(self._table(arg).data_ptr())
        if kind.startswith("*"):
            return ctypes.c_uint64(0 if arg is None else int(arg))
        if kind not in _TYPES:
            message = f"kernel {self._name} has a parameter of type {kind}"
            raise WorkerError(message, "Compile it from source.")
        return _TYPES[kind](arg)

    def _table(self, entries: Sequence[Any]) -> torch.Tensor:
        held = tuple(e.data_ptr() if isinstance(e, torch.Tensor) else int(e) for e in entries)
        if held not in self._tables:
            if torch.cuda.is_current_stream_capturing():
                message = f"kernel {self._name} needs a table of pointers that no earlier run made"
                remedy = "Please report this: a launch did not run before its graph was recorded."
                raise WorkerError(message, remedy)
            self._tables[held] = torch.tensor(held, dtype=torch.int64, device="cuda")
        return self._tables[held]

    def _param_sizes(self) -> list[int]:
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        ask = driver().cuFuncGetParamInfo
        while not ask(self._function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes

    def _ask(self, status: int, what: str) -> None:
        if status:
            message = f"the CUDA driver could not {what} kernel {self._name} (error {status})"
            remedy = "Capture it on this machine, or update the driver if the PTX is newer than it knows."
            raise WorkerError(message, remedy)
