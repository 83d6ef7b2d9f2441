"""The CUDA driver by ctypes, for what torch lacks.

Private streams (library workspaces belong to a stream, and torch reuses streams), green contexts, memory that
another process can open, and writes and waits for values on a stream, also during a graph capture.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.ir import Kernel, Origin
from tessera.kernels.launch import PtxKernel, driver

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RESOURCE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_WAIT_32, _WRITE_32, _WAIT_64, _WRITE_64 = 1, 2, 4, 5  # CUstreamBatchMemOpType
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
IPC_HANDLE_BYTES = 64
# Programs and threads that fetch weights: 128 KB on the way, about what PCIe 5 needs. With more, values of
# other streams wait longer.
FETCH_GRID, FETCH_BLOCK, FETCH_ALIGN = (16, 1, 1), (128, 1, 1), 16
FETCH = Kernel(
    "tessera_fetch", Origin.PTX, signature=(("source", "*u8"), ("target", "*u8"), ("num", "u64")),
    ptx=files("tessera.execute").joinpath("fetch.ptx").read_text(encoding="ascii"),
)  # fmt: skip
# Between two looks of a worker at its GPU.
LOOK_S = 20e-6
# SMs of a group where the driver does not say: valid on every architecture, the smallest on Hopper.
_LEAST_GROUP = 8


class SmResource(ctypes.Structure):
    """CUdevResource of SMs: 144 bytes since CUDA 12.4."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("padding", ctypes.c_ubyte * 92),
        ("num_sms", ctypes.c_uint),
        ("least", ctypes.c_uint),
        ("alignment", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 36),
    )


class _MemOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * IPC_HANDLE_BYTES),)


def ask(name: str, *args: Any) -> None:
    try:
        function = getattr(driver(), name)
    except AttributeError as error:
        message = f"this CUDA driver has no {name}"
        raise WorkerError(message, "Green contexts need driver 550 or later.") from error
    status = function(*args)
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise WorkerError(f"{name} of the CUDA driver failed: {reason}", "See `tessera doctor`.")


def has(name: str) -> bool:
    try:
        return hasattr(driver(), name)
    except WorkerError:
        return False


def card(ordinal: int) -> torch.device:
    return torch.device("cuda", ordinal)


def pinned(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)


def pin(tensor: torch.Tensor) -> None:
    """For as long as the process lives."""
    place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    ask("cuMemHostRegister_v2", place, size, ctypes.c_uint(_PORTABLE))


def new_stream(ordinal: int, priority: int = 0) -> torch.cuda.Stream:
    """Lives as long as the process."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(ordinal):
        torch.cuda.current_stream().synchronize()  # creates the context
        ask("cuStreamCreateWithPriority", ctypes.byref(handle), NON_BLOCKING, priority)
    return torch.cuda.ExternalStream(handle.value, device=ordinal)


def priorities(ordinal: int) -> tuple[int, int]:
    """(least, greatest); the smaller number goes first."""
    least, greatest = ctypes.c_int(), ctypes.c_int()
    with torch.cuda.device(ordinal):
        torch.cuda.current_stream().synchronize()
        ask("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    return least.value, greatest.value


def all_sms(ordinal: int) -> SmResource:
    resource = SmResource()
    ask("cuDeviceGetDevResource", _device(ordinal), ctypes.byref(resource), _RESOURCE_SM)
    return resource


def split_sms(whole: SmResource) -> tuple[list[SmResource], SmResource]:
    """(groups, rest), in one call: the driver cannot split a split."""
    least, num, rest = whole.least or _LEAST_GROUP, ctypes.c_uint(0), SmResource()
    split = "cuDevSmResourceSplitByCount"
    ask(split, None, ctypes.byref(num), ctypes.byref(whole), None, 0, least)
    groups = (SmResource * num.value)()
    ask(split, groups, ctypes.byref(num), ctypes.byref(whole), ctypes.byref(rest), 0, least)
    return list(groups)[: num.value], rest


def green_context(ordinal: int, resources: Sequence[SmResource]) -> ctypes.c_void_p:
    """Its streams run on these SMs only; they must come from one split."""
    description, context = ctypes.c_void_p(), ctypes.c_void_p()
    together = (SmResource * len(resources))(*resources)
    ask("cuDevResourceGenerateDesc", ctypes.byref(description), together, len(resources))
    ask("cuGreenCtxCreate", ctypes.byref(context), description, _device(ordinal), _DEFAULT_STREAM)
    return context


def green_stream(ordinal: int, context: ctypes.c_void_p, priority: int = 0) -> torch.cuda.Stream:
    handle = ctypes.c_void_p()
    ask("cuGreenCtxStreamCreate", ctypes.byref(handle), context, NON_BLOCKING, priority)
    return torch.cuda.ExternalStream(handle.value, device=ordinal)


def _device(ordinal: int) -> ctypes.c_int:
    torch.cuda.init()
    device = ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(device), ordinal)
    return device


@dataclass(frozen=True, slots=True)
class MemOp:
    address: int
    value: int
    is_wait: bool = False
    # 8 bytes instead of 4.
    is_long: bool = False


def mem_ops(stream: int, ops: Sequence[MemOp]) -> None:
    records = []
    for x in ops:
        wait, write = (_WAIT_64, _WRITE_64) if x.is_long else (_WAIT_32, _WRITE_32)
        operation, flags = (wait, _EQUAL) if x.is_wait else (write, 0)
        records.append(_MemOp(operation, x.address, x.value, flags, 0, 0))
    array = (_MemOp * len(ops))(*records)
    ask("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(len(ops)), array, ctypes.c_uint(0))


def copy(stream: int, target: int, source: int, num_bytes: int) -> None:
    ends = (ctypes.c_uint64(target), ctypes.c_uint64(source))
    ask("cuMemcpyAsync", *ends, ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))


@cache
def fetch_kernel(ordinal: int) -> PtxKernel:
    """To be loaded before a graph is recorded."""
    with torch.cuda.device(ordinal):
        return PtxKernel(FETCH, FETCH_BLOCK)


def fetch(stream: torch.cuda.Stream, target: int, source: int, num_bytes: int) -> None:
    """Copies page-locked memory by a kernel; both addresses are multiples of `FETCH_ALIGN`.

    Copies by the card's engine hold up values of other streams: by 0.14 ms in pieces of 1 MB, by 0.6 ms in
    larger ones; and a graph of many pieces is slow to launch.
    """
    with torch.cuda.stream(stream):
        fetch_kernel(stream.device.index)(FETCH_GRID, [source, target, num_bytes])


class IpcMemory:
    """Zeroed GPU memory that other processes of this machine can open by its handle."""

    def __init__(self, ordinal: int, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        pointer = ctypes.c_uint64()
        with torch.cuda.device(ordinal):
            torch.cuda.current_stream().synchronize()
            ask("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(self.num_bytes))
            ask("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(self.num_bytes))
        self.address = pointer.value
        handle = _IpcHandle()
        ask("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        self.handle = bytes(handle)

    def close(self) -> None:
        """Other processes must have closed it."""
        ask("cuMemFree_v2", ctypes.c_uint64(self.address))


def open_shared(ordinal: int, handle: bytes) -> int:
    pointer = ctypes.c_uint64()
    with torch.cuda.device(ordinal):
        torch.cuda.current_stream().synchronize()
        record, flags = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS)
        ask("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), record, flags)
    return pointer.value


def close_shared(address: int) -> None:
    ask("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def bytes_at(address: int, num_bytes: int, ordinal: int) -> torch.Tensor:
    """The allocator keeps it alive."""
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=card(ordinal))
