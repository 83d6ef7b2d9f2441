"""Nvshmem: transfers by put-with-signal on streams, from inside graphs, with the library that torch brings.

Every worker is a processing element, numbered as its device; they meet by an identifier that the first one
makes and tells through the engine's store. The inboxes are one symmetric allocation: the same offsets on
every device. By the same calls bytes go over NVLink, PCIe or InfiniBand, started by the GPU.

Elements cannot join again: when one worker is lost, all are started again. Two elements on one card need CUDA
MPS with `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` set to their share, as the library itself demands.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute.cuda import driver
from tessera.execute.cuda.driver import MemOp
from tessera.execute.cuda.inbox import WORD, InboxLayout, Spot
from tessera.execute.cuda.ipc import MEET_S
from tessera.execute.cuda.transport import Parcel
from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.execute.links import KeyStore
from tessera.ir import Program, Trace

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


class Nvshmem:
    """One worker's end; keeps `GpuTransport`."""

    carries_records = True

    def __init__(
        self, device: int, ordinal: int, num_devices: int, microbatches: int, store: KeyStore, epoch: int = 0
    ) -> None:
        self._device, self._ordinal, self._num, self._microbatches = (
            device,
            ordinal,
            num_devices,
            microbatches,
        )
        # One a call of `add`: layouts by device, and the address of the inbox, the same object everywhere.
        self._layouts: list[list[InboxLayout]] = []
        self._bases: list[int] = []
        self._where: list[tuple[int, int]] = []
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

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        """A symmetric inbox, as large as the largest device's; all workers must add the same."""
        layouts = [InboxLayout(programs, traces, d, self._microbatches) for d in range(self._num)]
        size = max(layout.total_bytes for layout in layouts)
        base = _library().nvshmem_malloc(ctypes.c_size_t(max(size, WORD)))
        if not base:
            remedy = "Use fewer slots, or raise NVSHMEM_SYMMETRIC_SIZE."
            raise WorkerError(f"NVSHMEM has no {size / 1e6:,.0f} MB of symmetric memory", remedy)
        driver.bytes_at(base, max(size, WORD), self._ordinal).zero_()
        torch.cuda.synchronize(self._ordinal)
        _library().nvshmem_barrier_all()
        generation = len(self._layouts)
        self._layouts.append(layouts)
        self._bases.append(base)
        self._where += [(generation, number) for number in range(len(programs))]

    def meet(self, program: int) -> None:
        """All have met when they joined."""

    def landing(self, spot: Spot, num_bytes: int) -> torch.UntypedStorage:
        """A place in the inbox."""
        base, layout, at = self._at(spot, self._device)
        return driver.bytes_at(base + layout.place(at), num_bytes, self._ordinal).untyped_storage()

    def record(self, spot: Spot) -> torch.Tensor:
        """The record in the inbox."""
        base, layout, at = self._at(spot, self._device)
        return driver.bytes_at(base + layout.record(at), WORD * RECORD_WORDS, self._ordinal).view(torch.int64)

    def put(self, spot: Spot, parcel: Parcel, stream: int) -> None:
        """Puts the bytes and sets the signal behind them."""
        base, layout, at = self._at(spot, parcel.dst)
        handle, pe = ctypes.c_void_p(stream), ctypes.c_int(parcel.dst)
        if parcel.record:
            _library().nvshmemx_putmem_on_stream(
                ctypes.c_void_p(base + layout.record(at)),
                ctypes.c_void_p(parcel.record),
                ctypes.c_size_t(WORD * RECORD_WORDS),
                pe,
                handle,
            )
        _library().nvshmemx_putmem_signal_on_stream(
            ctypes.c_void_p(base + layout.place(at) + parcel.start),
            ctypes.c_void_p(parcel.source),
            ctypes.c_size_t(parcel.num_bytes),
            ctypes.c_void_p(base + layout.flag(at)),
            ctypes.c_uint64(1),
            ctypes.c_int(_SET),
            pe,
            handle,
        )

    def wait(self, spot: Spot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        """The signal in this device's inbox."""
        base, layout, at = self._at(spot, self._device)
        flag = base + layout.flag(at)
        driver.mem_ops(stream, [marks[0]])
        _library().nvshmemx_signal_wait_until_on_stream(
            ctypes.c_void_p(flag), ctypes.c_int(_AT_LEAST), ctypes.c_uint64(1), ctypes.c_void_p(stream)
        )
        driver.mem_ops(stream, [MemOp(flag, 0, is_long=True), marks[1]])

    def begin(self, microbatch: int, run: int, program: int) -> None:
        """Nothing is to be known of a run."""

    def end(self, run: int, is_cancelled: bool) -> None:
        """Likewise."""

    def release(self, microbatch: int) -> None:
        """Sets this device's flags."""
        self._fill(microbatch, 1)

    def reset(self, microbatch: int, program: int) -> None:
        """Clears them; after a loss all workers are started again, so none is set elsewhere."""
        self._fill(microbatch, 0)

    def relink(self, device: int, epoch: int) -> bool:
        """Never: all workers are started again together."""
        return False

    def close(self) -> None:
        """The group ends with its processes."""

    def _fill(self, microbatch: int, value: int) -> None:
        for base, layouts in zip(self._bases, self._layouts, strict=True):
            start, size = layouts[self._device].flags(microbatch)
            for at in range(0, size, WORD):
                driver.mem_ops(self._side.cuda_stream, [MemOp(base + start + at, value, is_long=True)])
        self._side.synchronize()

    def _at(self, spot: Spot, device: int) -> tuple[int, InboxLayout, Spot]:
        generation, number = self._where[spot.program]
        at = Spot(spot.microbatch, number, spot.transfer)
        return self._bases[generation], self._layouts[generation][device], at

    @staticmethod
    def _ask(status: int, what: str) -> None:
        if status:
            remedy = "Use --transport ipc or host; `tessera doctor` says what this machine can use."
            raise WorkerError(f"NVSHMEM could not {what} (error {status})", remedy)
