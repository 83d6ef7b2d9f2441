"""Nvshmem: transfers by put-with-signal on streams, from inside graphs, with the library that torch brings.

Every worker is a processing element, numbered as its device; they meet by an identifier that the first one
makes and tells through the engine's store. The inboxes are one symmetric allocation: the same offsets on
every device. By the same calls bytes go over NVLink, PCIe or InfiniBand, started by the GPU.

Elements cannot join again: when one worker is lost, all are started again. Two elements on one card need CUDA
MPS with `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` set to their share, as the library itself demands.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.ipc import MEET_S
from tessera.execute.cuda.pace_kernel import RECORD_WORDS
from tessera.execute.cuda.transport import WORD, GpuTransport, InboxSpot, Parcel
from tessera.execute.driver import MemOp
from tessera.execute.links import KeyStore

ID_BYTES = 128
_BY_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_SET, _AT_LEAST = 9, 5  # NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_GE


class _IdArgs(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("ranks", ctypes.c_int),
    )  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", _IdArgs),
        ("device", ctypes.c_int),
        ("rest", ctypes.c_char * 92),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mpi", ctypes.c_void_p), ("args", _Args))


@functools.cache
def library_path() -> Path | None:
    """Where torch's own copy of the library lies; None if it brought none."""
    folder = Path(torch.__file__).parent.parent / "nvidia" / "nvshmem" / "lib"
    return next(iter(sorted(folder.glob("libnvshmem_host.so*"))), None)


@functools.cache
def _library() -> Any:
    path = library_path()
    if path is None:
        raise WorkerError("this torch brought no NVSHMEM", "Use --transport ipc or host.")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.nvshmem_malloc.restype = ctypes.c_void_p
    return library


class Nvshmem(GpuTransport):
    def __init__(
        self, device: int, ordinal: int, num_devices: int, microbatches: int, store: KeyStore, epoch: int = 0
    ) -> None:
        super().__init__(device, ordinal, num_devices, microbatches)
        self._num = num_devices
        # Of the inboxes, by (device, inbox): addresses in symmetric memory, the same objects everywhere.
        self._bases: dict[tuple[int, int], int] = {}
        self._side = driver.new_stream(ordinal)
        self._join(store, f"nvshmem/{epoch}")

    def _join(self, store: KeyStore, key: str) -> None:
        library = _library()
        name = (ctypes.c_char * ID_BYTES)()
        ctypes.cast(name, ctypes.POINTER(ctypes.c_int))[0] = (1 << 16) + ID_BYTES
        if self._device == 0:
            self._ask(library.nvshmemx_get_uniqueid(name), "make an identifier")
            store.set(key, bytes(name))
        else:
            found = store.get(key, MEET_S)
            if len(found) != ID_BYTES:
                raise WorkerError("the identifier of the NVSHMEM group is broken", "Update both sides.")
            ctypes.memmove(name, found, ID_BYTES)
        attributes = _Attributes()
        attributes.version = (1 << 16) + ctypes.sizeof(_Attributes)
        attributes.args.version = (1 << 16) + ctypes.sizeof(_Args)
        attributes.args.id.version = (1 << 16) + ctypes.sizeof(_IdArgs)
        pointer = ctypes.byref(attributes)
        ranks = (ctypes.c_int(self._device), ctypes.c_int(self._num))
        self._ask(library.nvshmemx_set_attr_uniqueid_args(*ranks, name, pointer), "set up its group")
        self._ask(library.nvshmemx_hostlib_init_attr(ctypes.c_uint(_BY_ID), pointer), "join its group")

    def _allocate(self) -> None:
        """Symmetric memory, as large as the largest new inbox; all workers must add the same."""
        new = [
            (device, layout)
            for device, layouts in enumerate(self._inboxes.layouts)
            for layout in layouts
            if (device, layout.number) not in self._bases
        ]
        size = max(WORD, *(layout.total_bytes for _, layout in new))
        base = _library().nvshmem_malloc(ctypes.c_size_t(size))
        if not base:
            remedy = "Use fewer microbatches (--microbatches), or raise NVSHMEM_SYMMETRIC_SIZE."
            raise WorkerError(f"NVSHMEM has no {size / 1e6:,.0f} MB of symmetric memory", remedy)
        driver.bytes_at(base, size, self._ordinal).zero_()
        torch.cuda.synchronize(self._ordinal)
        _library().nvshmem_barrier_all()
        self._bases |= {(device, layout.number): base for device, layout in new}

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        layout = self._inboxes.layout(spot.program, parcel.dst)
        base = self._bases[parcel.dst, layout.number]
        handle, pe = ctypes.c_void_p(stream), ctypes.c_int(parcel.dst)
        if parcel.record:
            _library().nvshmemx_putmem_on_stream(
                ctypes.c_void_p(base + layout.record(spot)),
                ctypes.c_void_p(parcel.record),
                ctypes.c_size_t(WORD * RECORD_WORDS),
                pe,
                handle,
            )
        _library().nvshmemx_putmem_signal_on_stream(
            ctypes.c_void_p(base + self._inboxes.place(spot, parcel.dst) + parcel.start),
            ctypes.c_void_p(parcel.source),
            ctypes.c_size_t(parcel.num_bytes),
            ctypes.c_void_p(base + layout.flag(spot)),
            ctypes.c_uint64(1),
            ctypes.c_int(_SET),
            pe,
            handle,
        )

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        flag = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).flag(spot)
        driver.mem_ops(stream, [marks[0]])
        _library().nvshmemx_signal_wait_until_on_stream(
            ctypes.c_void_p(flag), ctypes.c_int(_AT_LEAST), ctypes.c_uint64(1), ctypes.c_void_p(stream)
        )
        driver.mem_ops(stream, [MemOp(flag, 0, is_long=True), marks[1]])

    def _fill(self, microbatch: int, value: int) -> None:
        """After a loss all workers are started again, so none is set elsewhere."""
        for layout in self._inboxes.layouts[self._device]:
            start, size = layout.flags(microbatch)
            first = self._bases[self._device, layout.number] + start
            for at in range(first, first + size, WORD):
                driver.mem_ops(self._side.cuda_stream, [MemOp(at, value, is_long=True)])
        self._side.synchronize()

    def _base(self, program: int) -> int:
        return self._bases[self._device, self._inboxes.layout(program, self._device).number]

    @staticmethod
    def _ask(status: int, what: str) -> None:
        if status:
            remedy = "Use --transport ipc or host; `tessera doctor` says what this machine can use."
            raise WorkerError(f"NVSHMEM could not {what} (error {status})", remedy)
