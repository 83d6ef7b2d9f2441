"""Transports by which GPUs reach one another's memory, and which transports this machine can use.

`Ipc`: GPUs of one machine. Workers publish handles of their inboxes (CUDA IPC memory) in the engine's store.
A send is a copy into the opened inbox and a write to its flag. A restarted worker has another inbox: graphs
that send there are captured again.

`Nvshmem`: put-with-signal on streams, with the library that torch brings. Workers are processing elements;
inboxes are one symmetric allocation. Elements cannot rejoin: when one is lost, all are restarted. Two
elements on one card need CUDA MPS with `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` set to their share.
"""

import ctypes
import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.pace import RECORD_WORDS
from tessera.execute.cuda.transport import GpuTransport, InboxSpot, Parcel
from tessera.execute.driver import MemOp
from tessera.execute.engine_connection import EngineConnection, OwnerGone, key_of
from tessera.execute.messages import Setup
from tessera.execute.transport import WORD

MEET_S = 120.0
# The driver takes at most 256.
MAX_OPS = 128
ID_BYTES = 128
_BY_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_SET, _AT_LEAST = 9, 5  # NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_GE
NO_GPU = "no CUDA device"
MPS_PIPE, MPS_SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_ADDRESS, _SIZE, _INT, _WORD = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64
SIGNATURES = {
    "nvshmem_malloc": (_SIZE,),
    "nvshmemx_putmem_on_stream": (_ADDRESS, _ADDRESS, _SIZE, _INT, _ADDRESS),
    "nvshmemx_putmem_signal_on_stream": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _WORD, _INT, _INT, _ADDRESS),
    "nvshmemx_signal_wait_until_on_stream": (_ADDRESS, _INT, _WORD, _ADDRESS),
}


class PeerAway(WorkerError):
    """A peer's worker is gone and will be restarted."""

    def __init__(self, message: str, device: int) -> None:
        super().__init__(message)
        self.device = device


class DirectTransport(GpuTransport):
    is_long = False

    def __init__(self, setup: Setup, ordinal: int, store: EngineConnection) -> None:
        super().__init__(setup, ordinal)
        self._store = store
        # Not a stream of the graphs, which wait.
        self._side = driver.new_stream(ordinal)

    def _zero(self, microbatch: int) -> None:
        for layout in self._inboxes.layouts[self._device]:
            first = self._bases[self._device, layout.number] + layout.part(microbatch)
            with torch.cuda.stream(self._side):
                driver.bytes_at(first, layout.bytes_each, self._ordinal).zero_()

    def _fill(self, microbatch: int, value: int) -> None:
        for layout in self._inboxes.layouts[self._device]:
            start, size = layout.flags(microbatch)
            first = self._bases[self._device, layout.number] + start
            ops = [MemOp(at, value, is_long=self.is_long) for at in range(first, first + size, WORD)]
            for done in range(0, len(ops), MAX_OPS):
                driver.mem_ops(self._side.cuda_stream, ops[done : done + MAX_OPS])
        self._side.synchronize()


class Ipc(DirectTransport):
    def __init__(self, setup: Setup, ordinal: int, store: EngineConnection) -> None:
        super().__init__(setup, ordinal, store)
        self._epochs = list(setup.epochs)

    def _allocate(self) -> None:
        """Peers' inboxes are opened on first use."""
        for layout in self._inboxes.layouts[self._device]:
            key = (self._device, layout.number)
            if key not in self._bases:
                memory = driver.IpcMemory(self._ordinal, layout.total_bytes)
                self._bases[key] = memory.address
                self._store.set(self._key(*key), memory.handle)

    def meet(self, program: int) -> None:
        transfers = self._inboxes.programs[program].transfers
        for dst in {t.dst for t in transfers if t.src == self._device}:
            self._target(program, dst)

    def reset(self, microbatch: int, program: int) -> None:
        super().reset(microbatch, program)
        for number, transfer in enumerate(self._inboxes.programs[program].transfers):
            layout = self._inboxes.layout(program, transfer.dst)
            base = self._bases.get((transfer.dst, layout.number))
            if transfer.src == self._device and base is not None:
                flag = layout.flag(InboxSpot(microbatch, program, number))
                driver.mem_ops(self._side.cuda_stream, [MemOp(base + flag, 0)])
        self._side.synchronize()

    def relink(self, device: int, epoch: int) -> bool:
        if epoch == self._epochs[device]:
            return False
        self._epochs[device] = epoch
        self._close({device})
        return True

    def close(self) -> None:
        """The own inboxes end with the process, since peers may still write to them."""
        self._close({device for device, _ in self._bases if device != self._device})

    def _close(self, devices: Collection[int]) -> None:
        for key in [k for k in self._bases if k[0] in devices]:
            driver.close_shared(self._bases.pop(key))

    def _target(self, program: int, device: int) -> int:
        key = (device, self._inboxes.layout(program, device).number)
        if key not in self._bases:
            try:
                handle = self._store.get(self._key(*key), MEET_S)
            except OwnerGone as error:
                raise PeerAway(error.message, device) from error
            if len(handle) != driver.IPC_HANDLE_BYTES:
                raise WorkerError(f"device {device} told no handle of its memory", "Update both sides.")
            try:
                self._bases[key] = driver.open_shared(self._ordinal, handle)
            except WorkerError as error:
                raise PeerAway(error.message, device) from error
        return self._bases[key]

    def _key(self, device: int, number: int) -> str:
        return key_of(f"ipc/{number}", device, self._epochs[device])


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
    folder = Path(torch.__file__).parent.parent / "nvidia" / "nvshmem" / "lib"
    return next(iter(sorted(folder.glob("libnvshmem_host.so*"))), None)


@functools.cache
def _library() -> Any:
    path = library_path()
    if path is None:
        raise WorkerError("this torch brought no NVSHMEM", "Use --transport ipc or host.")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.nvshmem_malloc.restype = ctypes.c_void_p
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


class Nvshmem(DirectTransport):
    is_long = True

    def __init__(self, setup: Setup, ordinal: int, store: EngineConnection) -> None:
        super().__init__(setup, ordinal, store)
        self._join(f"nvshmem/{setup.epoch}")

    def _join(self, key: str) -> None:
        library = _library()
        name = (ctypes.c_char * ID_BYTES)()
        ctypes.cast(name, ctypes.POINTER(ctypes.c_int))[0] = (1 << 16) + ID_BYTES
        if self._device == 0:
            self._ask(library.nvshmemx_get_uniqueid(name), "make an identifier")
            self._store.set(key, bytes(name))
        else:
            identifier = self._store.get(key, MEET_S)
            if len(identifier) != ID_BYTES:
                raise WorkerError("the identifier of the NVSHMEM group is broken", "Update both sides.")
            ctypes.memmove(name, identifier, ID_BYTES)
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
        base = _library().nvshmem_malloc(size)
        if not base:
            remedy = "Use fewer microbatches (--microbatches), or raise NVSHMEM_SYMMETRIC_SIZE."
            raise WorkerError(f"NVSHMEM has no {size / 1e6:,.0f} MB of symmetric memory", remedy)
        driver.bytes_at(base, size, self._ordinal).zero_()
        torch.cuda.synchronize(self._ordinal)
        _library().nvshmem_barrier_all()
        self._bases |= {(device, layout.number): base for device, layout in new}

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        base, layout = self._target(spot.program, parcel.dst), self._inboxes.layout(spot.program, parcel.dst)
        library, place = _library(), base + self._inboxes.place(spot, parcel.dst) + parcel.start
        if parcel.record:
            record = (base + layout.record(spot), parcel.record, WORD * RECORD_WORDS)
            library.nvshmemx_putmem_on_stream(*record, parcel.dst, stream)
        signal = (base + layout.flag(spot), 1, _SET)
        library.nvshmemx_putmem_signal_on_stream(
            place, parcel.source, parcel.num_bytes, *signal, parcel.dst, stream
        )

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        flag = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).flag(spot)
        driver.mem_ops(stream, [marks[0]])
        _library().nvshmemx_signal_wait_until_on_stream(flag, _AT_LEAST, 1, stream)
        driver.mem_ops(stream, [MemOp(flag, 0, is_long=True), marks[1]])

    @staticmethod
    def _ask(status: int, what: str) -> None:
        if status:
            remedy = "Use --transport ipc or host; `tessera doctor` says what this machine can use."
            raise WorkerError(f"NVSHMEM could not {what} (error {status})", remedy)


@dataclass(frozen=True, slots=True)
class TransportState:
    name: str
    joins: str
    is_present: bool
    is_usable: bool
    why: str


def transports() -> tuple[TransportState, ...]:
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        TransportState("shm", "workers of one machine, one at least on a CPU", True, True, "shared memory"),
        _ipc(num),
        _nvshmem(num),
        TransportState("host", "any workers", True, True, "TCP, through pinned memory where there is a GPU"),
    )


def chosen(states: tuple[TransportState, ...]) -> dict[str, str | None]:
    has_gpus = any(state.name == "ipc" and state.is_present for state in states)
    gpus = "ipc" if any(state.name == "ipc" and state.is_usable for state in states) else "host"
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
