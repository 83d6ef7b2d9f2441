"""Transport: how the bytes of a transfer get from one worker process to another.

  shm      workers of one machine, some of them CPUs: bytes in shared memory; notices over a link, or beside a
           GPU flags in shared memory
  host     workers of any machines: bytes over the link, which is TCP
  ipc      GPUs of one machine; see `cuda`
  nvshmem  GPUs of any machines; see `cuda`

A transport never blocks the worker's thread.
"""

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.errors import WorkerError, check_known
from tessera.execute.links import Links
from tessera.execute.memory import landing
from tessera.execute.messages import LinkFrame, Setup
from tessera.ir import Device, DeviceKind, Program

AUTO, SHM, HOST, IPC, NVSHMEM = "auto", "shm", "host", "ipc", "nvshmem"
NAMES = (AUTO, SHM, HOST, IPC, NVSHMEM)
WORD = 8
# A worker polls without pauses for SPIN_S after news; then each LOOK_S of polling has a pause as long.
SPIN_S, LOOK_S = 2e-3, 50e-6
# From here several threads copy faster than one.
LARGE = 1 << 20
# Elements cannot rejoin (`cuda.direct`).
RESTART_TOGETHER = frozenset({NVSHMEM})
Post = Callable[[Any], None]
# Called with a run.
Move = Callable[[int], object]
Words = npt.NDArray[np.int64]
NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class TransferArrived:
    run: int
    number: int
    start_s: float
    stop_s: float
    contents: memoryview = NOTHING


def shared_bytes(path: Path | None, size: int) -> torch.Tensor:
    """Zeros at first. None: memory of this process alone."""
    if path is None:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
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


def copier(into: torch.Tensor, contents: torch.Tensor) -> Callable[[], object]:
    """Torch's copy wakes all threads for as little as 32 KB."""
    if into.numel() > LARGE:
        return partial(into.copy_, contents)
    return partial(np.copyto, into.numpy(), contents.numpy())


def resolve(name: str, devices: Sequence[Device], is_local: bool) -> str:
    """Resolves `auto`; raises WorkerError if these workers cannot use the transport."""
    check_known("transport", name, NAMES, "--transport")
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
    def __init__(self, setup: Setup, links: Links, post: Post) -> None:
        self._device, self._links, self._post = setup.device, links, post
        self._arenas = Arenas(setup)
        links.arrived = self.arrived
        self.load(setup.programs)

    @abstractmethod
    def sender(self, program: Program, microbatch: int, number: int, contents: torch.Tensor) -> Move:
        """A function that sends `contents` in a run; when it returns, they may be overwritten."""

    @abstractmethod
    def receiver(self, program: Program, microbatch: int, number: int, into: torch.Tensor) -> Move:
        """A function that copies what arrived in a run to its place; called once a run."""

    def watch(self, run: int, program: Program, microbatch: int) -> None:
        """Polls for the transfers of a run from now on."""

    def poll(self) -> Sequence[TransferArrived] | None:
        return None

    def hold(self, news: TransferArrived) -> None:
        """Keeps bytes that came with a notice until they are fetched."""

    def forget(self, run: int, microbatch: int | None) -> None:
        """Drops bytes of a run. `microbatch`: whose last run it is; None: it is an older run."""

    def load(self, programs: Sequence[Sequence[Program]]) -> None:
        """Adds lanes."""

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        self._post(TransferArrived(frame.run, frame.transfer, frame.sent_s, time.monotonic(), contents))


class Arenas:
    """Memory of transfers: files of the session's folder, with transport `host` this process's own.

    Each transfer of a program has a fixed place per microbatch, also after a restart. The microbatch's next
    run, which cannot overtake the last one (`lanes`), reuses it. Programs that need as much, up to the next
    power of two, share a file.
    """

    def __init__(self, setup: Setup, opened: Callable[[torch.Tensor], None] = lambda shared: None) -> None:
        self._device, self._microbatches = setup.device, setup.microbatches
        self._folder = Path(setup.folder) if setup.transport == SHM else None
        self._opened = opened
        # ("arena" or "flags", source, destination, bytes per microbatch)
        self._arenas: dict[tuple[str, int, int, int], torch.Tensor] = {}
        # (source, destination, program's identity) -> transfer -> offset, and bytes per microbatch
        self._places: dict[tuple[int, int, int], tuple[dict[int, int], int]] = {}

    def place(self, program: Program, microbatch: int, number: int) -> torch.Tensor:
        transfer = program.transfers[number]
        key = (transfer.src, transfer.dst, id(program))
        if key not in self._places:
            offsets, used = landing(program, transfer.src, transfer.dst)
            self._places[key] = offsets, 1 << (used - 1).bit_length()
        offsets, stride = self._places[key]
        start = microbatch * stride + offsets[number]
        return self._shared("arena", transfer.src, transfer.dst, stride)[start : start + transfer.num_bytes]

    def flags(self, program: Program, src: int, dst: int, microbatch: int) -> Words:
        stride = WORD << (len(program.transfers) - 1).bit_length()
        shared = self._shared("flags", src, dst, stride)[microbatch * stride : (microbatch + 1) * stride]
        return shared.numpy().view(np.int64)

    def open(self, programs: Sequence[Program]) -> None:
        for program in programs:
            for number, transfer in enumerate(program.transfers):
                if self._device in (transfer.src, transfer.dst):
                    self.place(program, 0, number)
                    self.flags(program, transfer.src, transfer.dst, 0)

    def fill(self, microbatch: int, value: int, dst: int | None = None, kind: str = "flags") -> None:
        """Sets flags of a microbatch, all or towards a device, or ("arena") the words of transfers."""
        for (held_kind, _, towards, stride), shared in self._arenas.items():
            if held_kind == kind and dst in (None, towards):
                part = shared.numpy()[microbatch * stride : (microbatch + 1) * stride]
                (part.view(np.int64) if kind == "flags" else part)[:] = value

    def flagged(self, dst: int) -> list[tuple[int, int]]:
        """(microbatch, transfer) whose flags towards a device are set; clears them."""
        flagged: list[tuple[int, int]] = []
        for (kind, src, towards, stride), shared in list(self._arenas.items()):
            if (kind, src, towards) == ("flags", self._device, dst):
                flags = shared.numpy().view(np.int64)
                words = np.flatnonzero(flags.copy()).tolist()  # graphs set flags meanwhile
                flags[words] = 0
                flagged += [divmod(word, stride // WORD) for word in words]
        return flagged

    def _shared(self, kind: str, src: int, dst: int, stride: int) -> torch.Tensor:
        key = kind, src, dst, stride
        if key not in self._arenas:
            path = self._folder / "-".join(map(str, key)) if self._folder else None
            self._arenas[key] = shared_bytes(path, stride * self._microbatches)
            self._opened(self._arenas[key])
            if kind == "flags" and src == self._device:  # set by a worker that was lost
                self._arenas[key].zero_()
        return self._arenas[key]


class SharedMemory(Transport):
    def sender(self, program: Program, microbatch: int, number: int, contents: torch.Tensor) -> Move:
        copy = copier(self._arenas.place(program, microbatch, number), contents)
        dst = program.transfers[number].dst

        def send(run: int) -> None:
            start_s = time.monotonic()
            copy()
            self._links.post(dst, LinkFrame(run, number, start_s))

        return send

    def receiver(self, program: Program, microbatch: int, number: int, into: torch.Tensor) -> Move:
        copy = copier(into, self._arenas.place(program, microbatch, number))
        return lambda run: copy()


class FlaggedMemory(SharedMemory):
    """Beside a GPU: flags in place of notices, polled while a run waits."""

    def __init__(self, setup: Setup, links: Links, post: Post) -> None:
        super().__init__(setup, links, post)
        # Run -> (flags from a peer, transfers not arrived)
        self._watched: dict[int, list[tuple[Words, set[int]]]] = {}
        self._news_s = 0.0

    def load(self, programs: Sequence[Sequence[Program]]) -> None:
        for lane in programs:
            self._arenas.open(lane)

    def sender(self, program: Program, microbatch: int, number: int, contents: torch.Tensor) -> Move:
        copy = copier(self._arenas.place(program, microbatch, number), contents)
        transfer = program.transfers[number]
        flags = self._arenas.flags(program, transfer.src, transfer.dst, microbatch)

        def send(run: int) -> None:
            copy()
            flags[number] = 1

        return send

    def watch(self, run: int, program: Program, microbatch: int) -> None:
        self._news_s = time.monotonic()
        awaited: dict[int, set[int]] = {}
        for number, transfer in enumerate(program.transfers):
            if transfer.dst == self._device:
                awaited.setdefault(transfer.src, set()).add(number)
        if awaited:
            self._watched[run] = [
                (self._arenas.flags(program, src, self._device, microbatch), numbers)
                for src, numbers in awaited.items()
            ]

    def poll(self) -> Sequence[TransferArrived] | None:
        if not self._watched:
            return None
        began_s = time.monotonic()
        while not (is_any := any(flags.any() for x in self._watched.values() for flags, _ in x)):
            if time.monotonic() - began_s > LOOK_S:
                break
        arrived: list[TransferArrived] = []
        now_s = time.monotonic()
        for run, sources in list(self._watched.items()) if is_any else ():
            for flags, awaited in sources:
                # Graphs set flags meanwhile, those of the microbatch's next run too.
                numbers = [n for n in np.flatnonzero(flags.copy()).tolist() if n in awaited]
                flags[numbers] = 0
                awaited.difference_update(numbers)
                arrived += [TransferArrived(run, number, now_s, now_s) for number in numbers]
            self._watched[run] = [source for source in sources if source[1]]
            if not self._watched[run]:
                del self._watched[run]
        if arrived:
            self._news_s = now_s
        elif now_s - self._news_s > SPIN_S:
            time.sleep(LOOK_S)
        return arrived

    def forget(self, run: int, microbatch: int | None) -> None:
        self._watched.pop(run, None)
        if microbatch is not None:
            self._arenas.fill(microbatch, 0)


class OverHost(Transport):
    """Bytes follow the frame over the link."""

    def __init__(self, setup: Setup, links: Links, post: Post) -> None:
        super().__init__(setup, links, post)
        self._held: dict[tuple[int, int], memoryview] = {}

    def sender(self, program: Program, microbatch: int, number: int, contents: torch.Tensor) -> Move:
        dst, data = program.transfers[number].dst, contents.numpy().data
        return lambda run: self._links.post(dst, LinkFrame(run, number, time.monotonic()), data)

    def receiver(self, program: Program, microbatch: int, number: int, into: torch.Tensor) -> Move:
        def receive(run: int) -> None:
            held = self._held.pop((run, number))
            if len(held) != into.numel():
                raise WorkerError(f"a transfer of {into.numel()} bytes arrived as {len(held)}")
            if len(held):
                into.numpy()[:] = np.frombuffer(held, dtype=np.uint8)

        return receive

    def forget(self, run: int, microbatch: int | None) -> None:
        for key in [k for k in self._held if k[0] == run]:
            del self._held[key]

    def hold(self, news: TransferArrived) -> None:
        self._held[news.run, news.number] = news.contents


OPENERS: dict[str, Callable[[Setup, Links, Post], Transport]] = {SHM: SharedMemory, HOST: OverHost}


def open_transport(setup: Setup, links: Links, post: Post) -> Transport:
    if setup.transport not in OPENERS:
        raise WorkerError(f"a CPU worker cannot use {setup.transport}", "Use --transport auto.")
    is_beside_gpu = any(device.kind is DeviceKind.CUDA for device in setup.cluster.devices)
    opener = FlaggedMemory if is_beside_gpu and setup.transport == SHM else OPENERS[setup.transport]
    return opener(setup, links, post)
