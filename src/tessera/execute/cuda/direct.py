"""Transports by which GPUs reach one another's memory, and which transports this machine can use.

`Ipc`: GPUs of one machine. Every worker has an inbox in CUDA IPC memory (`transport`) and publishes its
handle in the engine's store. A send is a copy into the opened inbox and a write to its flag, on the sender's
stream. A restarted worker has another inbox, so graphs that send there are captured again.

`Nvshmem`: put-with-signal on streams (NVLink, PCIe or InfiniBand), with the library that torch brings. Every
worker is a processing element, numbered as its device; the first publishes an identifier in the store. The
inboxes are one symmetric allocation. Elements cannot rejoin: when one worker is lost, all are restarted. Two
elements on one card need CUDA MPS with `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` set to their share.

`transports` lists what is usable, and why others are not, by asking torch and the driver:

    shm      CPU workers of one machine
    ipc      GPUs of one machine, also several workers on one card
    nvshmem  GPUs with the library that torch brings
    host     workers of any kind, on any machines
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.pace import RECORD_WORDS
from tessera.execute.cuda.transport import WORD, GpuTransport, InboxSpot, Parcel
from tessera.execute.driver import MemOp
from tessera.execute.engine_connection import KeyStore, OwnerGone, key_of

# Seconds to wait for a peer's handle.
MEET_S = 120.0


class PeerAway(WorkerError):
    """A peer's worker is gone and will be restarted."""

    def __init__(self, message: str, device: int) -> None:
        super().__init__(message)
        self.device = device


class Ipc(GpuTransport):
    def __init__(
        self,
        device: int,
        ordinal: int,
        num_devices: int,
        microbatches: int,
        store: KeyStore,
        epochs: Sequence[int],
    ) -> None:
        """`epochs`: earlier starts of every device's worker."""
        super().__init__(device, ordinal, num_devices, microbatches)
        self._store, self._epochs = store, list(epochs)
        # Own inboxes, and (device, inbox) -> address of a peer's inbox in this process.
        self._own: list[driver.IpcMemory] = []
        self._opened: dict[tuple[int, int], int] = {}
        self._side = driver.new_stream(ordinal)

    def _allocate(self) -> None:
        """Peers' inboxes are opened on first use."""
        for layout in self._inboxes.layouts[self._device][len(self._own) :]:
            memory = driver.IpcMemory(self._ordinal, layout.total_bytes)
            self._own.append(memory)
            self._store.set(self._key(self._device, layout.number), memory.handle)

    def meet(self, program: int) -> None:
        transfers = self._inboxes.programs[program].transfers
        for dst in {t.dst for t in transfers if t.src == self._device}:
            self._address(dst, program)

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        base, layout = self._address(parcel.dst, spot.program), self._inboxes.layout(spot.program, parcel.dst)
        place = self._inboxes.place(spot, parcel.dst) + parcel.start
        driver.copy(stream, base + place, parcel.source, parcel.num_bytes)
        if parcel.record:
            driver.copy(stream, base + layout.record(spot), parcel.record, WORD * RECORD_WORDS)
        driver.mem_ops(stream, [MemOp(base + layout.flag(spot), 1)])

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        flag = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).flag(spot)
        driver.mem_ops(stream, [marks[0], MemOp(flag, 1, is_wait=True), MemOp(flag, 0), marks[1]])

    def reset(self, microbatch: int, program: int) -> None:
        """Uses a separate stream, since those of the graphs wait; also clears flags set in other inboxes."""
        super().reset(microbatch, program)
        for number, transfer in enumerate(self._inboxes.programs[program].transfers):
            layout = self._inboxes.layout(program, transfer.dst)
            base = self._opened.get((transfer.dst, layout.number))
            if transfer.src == self._device and base is not None:
                flag = layout.flag(InboxSpot(microbatch, program, number))
                driver.mem_ops(self._side.cuda_stream, [MemOp(base + flag, 0)])
        self._side.synchronize()

    def relink(self, device: int, epoch: int, address: str) -> bool:
        if epoch == self._epochs[device]:
            return False
        self._epochs[device] = epoch
        for key in [k for k in self._opened if k[0] == device]:
            driver.close_shared(self._opened.pop(key))
        return True

    def close(self) -> None:
        """Closes peers' inboxes; the own ones end with the process, since peers may still write to them."""
        for address in self._opened.values():
            driver.close_shared(address)
        self._opened = {}

    def _fill(self, microbatch: int, value: int) -> None:
        for memory, layout in zip(self._own, self._inboxes.layouts[self._device], strict=True):
            start, size = layout.flags(microbatch)
            ops = [MemOp(memory.address + start + at, value) for at in range(0, size, WORD)]
            for first in range(0, len(ops), 128):  # limit of one call
                driver.mem_ops(self._side.cuda_stream, ops[first : first + 128])
        self._side.synchronize()

    def _base(self, program: int) -> int:
        return self._own[self._inboxes.layout(program, self._device).number].address

    def _address(self, device: int, program: int) -> int:
        key = (device, self._inboxes.layout(program, device).number)
        if key not in self._opened:
            try:
                handle = self._store.get(self._key(*key), MEET_S)
            except OwnerGone as error:
                raise PeerAway(error.message, device) from error
            if len(handle) != driver.IPC_HANDLE_BYTES:
                raise WorkerError(f"device {device} told no handle of its memory", "Update both sides.")
            try:
                self._opened[key] = driver.open_shared(self._ordinal, handle)
            except WorkerError as error:
                raise PeerAway(error.message, device) from error
        return self._opened[key]

    def _key(self, device: int, number: int) -> str:
        return key_of(f"ipc/{number}", device, self._epochs[device])


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
    """Path of torch's copy of the library; None if it has none."""
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
        # (device, inbox) -> address in symmetric memory, the same everywhere.
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
        """Symmetric memory as large as the largest new inbox; all workers must add the same."""
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
        """A loss restarts all workers, so no flag is set elsewhere."""
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


NO_GPU = "no CUDA device"
MPS_PIPE, MPS_SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class TransportState:
    name: str
    # Devices that it joins, for people.
    joins: str
    is_present: bool
    # True if usable on this machine.
    is_usable: bool
    why: str


def transports() -> tuple[TransportState, ...]:
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        TransportState("shm", "CPU workers of one machine", True, True, "shared memory"),
        _ipc(num),
        _nvshmem(num),
        TransportState("host", "any workers", True, True, "TCP, through pinned memory where there is a GPU"),
    )


def chosen(found: tuple[TransportState, ...]) -> dict[str, str | None]:
    """The choice of `--transport auto`."""
    has_gpus = any(state.name == "ipc" and state.is_present for state in found)
    gpus = "ipc" if any(state.name == "ipc" and state.is_usable for state in found) else "host"
    return {
        "CPUs of one machine": "shm",
        "GPUs of one machine": gpus if has_gpus else None,
        "several machines": "host",
    }


def _ipc(num: int) -> TransportState:
    joins = "GPUs of one machine"
    if not num:
        return TransportState("ipc", joins, False, False, NO_GPU)
    if not driver.has("cuStreamBatchMemOp_v2"):
        return TransportState("ipc", joins, True, False, "this driver has no waits on streams; CUDA 12 has")
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    apart = [f"cuda:{a}-cuda:{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        return TransportState("ipc", joins, True, False, f"no peer access: {', '.join(apart)}")
    beside = (
        "" if num > 1 or os.environ.get(MPS_PIPE) else "; workers on one card take turns without CUDA MPS"
    )
    return TransportState("ipc", joins, True, True, f"CUDA IPC memory{beside}")


def _nvshmem(num: int) -> TransportState:
    joins, path = "GPUs of any machines", library_path()
    if not num or path is None:
        why = "this torch brought no NVSHMEM" if num else NO_GPU
        return TransportState("nvshmem", joins, False, False, why)
    if num == 1 and not (os.environ.get(MPS_PIPE) and os.environ.get(MPS_SHARE)):
        why = f"two workers on one card need CUDA MPS, with {MPS_SHARE} set to each one's share"
        return TransportState("nvshmem", joins, True, False, why)
    return TransportState("nvshmem", joins, True, True, path.name)
