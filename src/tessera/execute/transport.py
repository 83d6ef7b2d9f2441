"""Transport: how the bytes of a transfer get from one worker process to another.

  shm      workers of one machine, some of them CPUs (their default): bytes in shared memory, notices over a
           link
  host     workers of any machines: bytes over the link, which is TCP
  ipc      GPUs of one machine; see `cuda`
  nvshmem  GPUs of any machines; see `cuda`

A transport owns its threads and never blocks the worker's thread. It reports arrived transfers and lost
peers.
"""

import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.errors import UnknownName, WorkerError
from tessera.execute.links import Links
from tessera.execute.mailbox import Mailbox
from tessera.execute.memory import landing
from tessera.execute.messages import LinkFrame, Setup
from tessera.ir import Device, DeviceKind, Program

AUTO, SHM, HOST, IPC, NVSHMEM = "auto", "shm", "host", "ipc", "nvshmem"
NAMES = (AUTO, SHM, HOST, IPC, NVSHMEM)
# Transports whose workers hold one another's memory: all restart when one is lost.
RESTART_TOGETHER = frozenset({NVSHMEM})
Post = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class RunTransfer:
    program: Program
    microbatch: int
    run: int
    number: int


@dataclass(frozen=True, slots=True)
class TransferArrived:
    """The bytes of a transfer are here; times when sent and arrived."""

    run: int
    number: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The link to another worker was cut."""

    device: int
    message: str
    epoch: int


def shared_bytes(path: Path, size: int) -> torch.Tensor:
    """Memory that workers of one machine share under a path of the session's folder."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # raises here rather than faulting later
        shared = mmap.mmap(fd, size)
    except OSError as error:
        what = f"could not take {size:,} bytes of shared memory: {error.strerror}"
        raise WorkerError(what, "Lower --microbatches, or use --transport host.") from error
    finally:
        os.close(fd)
    return torch.frombuffer(shared, dtype=torch.uint8)


def check_name(name: str) -> None:
    if name not in NAMES:
        raise UnknownName("transport", name, NAMES)


def resolve(name: str, devices: Sequence[Device], is_local: bool) -> str:
    """The transport that `auto` means; raises WorkerError if these workers cannot use the given one."""
    check_name(name)
    kinds = {device.kind is DeviceKind.CUDA for device in devices}
    if name == AUTO:
        if not is_local:
            return HOST
        return SHM if False in kinds else IPC
    if name in (IPC, NVSHMEM) and False in kinds:
        raise WorkerError(f"{name} joins GPUs only", "Use --transport auto.", "--transport")
    if name == SHM and False not in kinds:
        raise WorkerError("shm joins workers of which some are CPUs", "Use --transport auto.", "--transport")
    if name in (SHM, IPC) and not is_local:
        raise WorkerError(f"{name} joins workers of one machine only", "Use --transport auto.", "--transport")
    return name


class Transport(ABC):
    """One worker's end of all its links; implements `links.Receiver` and reports by `post`."""

    def __init__(self, setup: Setup, mailbox: Mailbox, post: Post) -> None:
        self._device, self._post = setup.device, post
        # Peer -> maximum bytes of one transfer from it.
        self._largest: Counter[int] = Counter()
        self.load(setup.programs)
        where = {"folder": setup.folder, "host": setup.host, "secret": setup.secret}
        limit = self._largest.__getitem__
        self.links = Links(mailbox, setup.device, setup.epochs, self, limit, **where)  # type: ignore[arg-type]

    @property
    def address(self) -> str:
        return self.links.address

    @abstractmethod
    def send(self, transfer: RunTransfer, contents: torch.Tensor) -> None:
        """Starts a transfer; `contents` may be overwritten when this returns."""

    @abstractmethod
    def fetch(self, transfer: RunTransfer, into: torch.Tensor) -> None:
        """Copies an arrived transfer to its place; once only."""

    def forget(self, run: int) -> None:
        """Bytes of this run will not be fetched."""

    def load(self, programs: Sequence[Sequence[Program]]) -> None:
        """Adds lanes, whose transfers may be larger."""
        for transfer in (t for lane in programs for p in lane for t in p.transfers if t.dst == self._device):
            self._largest[transfer.src] = max(self._largest[transfer.src], transfer.num_bytes)

    def relink(self, device: int, epoch: int, address: str) -> None:
        """A peer was restarted, or the link to it was cut: the next transfer opens another."""
        self.links.relink(device, epoch, address)

    def close(self) -> None:
        self.links.close()

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        self._post(TransferArrived(frame.run, frame.transfer, frame.sent_s, time.monotonic()))

    def gone(self, peer: int, why: str) -> None:
        self._post(Gone(peer, why, self.links.epochs[peer]))


class Arenas:
    """Shared memory of transfers, in files of the session's folder.

    Each transfer of a program has a fixed place per microbatch, which the workers of a pair share, also after
    a restart. A place is reused only by the microbatch's next run, which starts when all devices have
    finished or forgotten the last one, or cannot overtake it (`overlap`). Programs that need as much, up to
    the next power of two, share a file, so plans can be replaced any number of times.
    """

    def __init__(self, folder: str, microbatches: int) -> None:
        self._folder, self._microbatches = folder, microbatches
        # (source, destination, bytes per microbatch)
        self._arenas: dict[tuple[int, int, int], torch.Tensor] = {}
        # (source, destination, program's identity) -> transfer -> offset, and bytes per microbatch
        self._places: dict[tuple[int, int, int], tuple[dict[int, int], int]] = {}

    def place(self, program: Program, microbatch: int, number: int) -> torch.Tensor:
        """Shared memory of one transfer of one microbatch."""
        found = program.transfers[number]
        key = (found.src, found.dst, id(program))
        if key not in self._places:
            offsets, used = landing(program, found.src, found.dst)
            self._places[key] = offsets, 1 << (used - 1).bit_length()
        offsets, stride = self._places[key]
        start = microbatch * stride + offsets[number]
        return self._arena(found.src, found.dst, stride)[start : start + found.num_bytes]

    def _arena(self, src: int, dst: int, stride: int) -> torch.Tensor:
        if (src, dst, stride) not in self._arenas:
            path = Path(self._folder) / f"arena-{src}-{dst}-{stride}"
            self._arenas[src, dst, stride] = shared_bytes(path, stride * self._microbatches)
        return self._arenas[src, dst, stride]


class SharedMemory(Transport):
    """Transport `shm` of a CPU worker: a send copies into shared memory and sends a notice over the link."""

    def __init__(self, setup: Setup, mailbox: Mailbox, post: Post) -> None:
        self._arenas = Arenas(setup.folder, setup.microbatches)
        super().__init__(setup, mailbox, post)

    def send(self, transfer: RunTransfer, contents: torch.Tensor) -> None:
        start_s = time.monotonic()
        self._place(transfer).copy_(contents)
        dst = transfer.program.transfers[transfer.number].dst
        self.links.post(dst, LinkFrame(transfer.run, transfer.number, start_s))

    def fetch(self, transfer: RunTransfer, into: torch.Tensor) -> None:
        into.copy_(self._place(transfer))

    def _place(self, transfer: RunTransfer) -> torch.Tensor:
        return self._arenas.place(transfer.program, transfer.microbatch, transfer.number)


class OverHost(Transport):
    """Transport `host`: the bytes follow the frame over the link, and are held until fetched."""

    def __init__(self, setup: Setup, mailbox: Mailbox, post: Post) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], memoryview] = {}
        self._forgotten: set[int] = set()
        super().__init__(setup, mailbox, post)

    def send(self, transfer: RunTransfer, contents: torch.Tensor) -> None:
        dst = transfer.program.transfers[transfer.number].dst
        frame = LinkFrame(transfer.run, transfer.number, time.monotonic())
        self.links.post(dst, frame, contents.numpy().data)

    def fetch(self, transfer: RunTransfer, into: torch.Tensor) -> None:
        with self._lock:
            held = self._held.pop((transfer.run, transfer.number))
        if len(held) != into.numel():
            raise WorkerError(f"a transfer of {into.numel()} bytes arrived as {len(held)}")
        if len(held):
            into.numpy()[:] = np.frombuffer(held, dtype=np.uint8)

    def forget(self, run: int) -> None:
        """Drops what arrived for an ended run."""
        with self._lock:
            self._forgotten.add(run)
            for key in [k for k in self._held if k[0] == run]:
                del self._held[key]

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        with self._lock:
            if frame.run in self._forgotten:
                return
            self._held[frame.run, frame.transfer] = contents
        super().arrived(peer, frame, contents)


# Transports of a CPU worker by name; a CUDA worker has its own.
OPENERS: dict[str, Callable[[Setup, Mailbox, Post], Transport]] = {SHM: SharedMemory, HOST: OverHost}


def open_transport(setup: Setup, mailbox: Mailbox, post: Post) -> Transport:
    if setup.transport not in OPENERS:
        raise WorkerError(f"a CPU worker cannot use {setup.transport}", "Use --transport auto.")
    return OPENERS[setup.transport](setup, mailbox, post)
