"""Ipc: transfers between GPUs of one machine, from inside graphs: CUDA IPC memory and flags in it.

Every worker has an inbox in its GPU's memory (`inbox`) and tells its handle through the engine's store. A
sender opens it; to send is a copy into it and a write to its flag, both on the sender's stream. When a peer's
worker is started again its inbox is another, so graphs that send there are captured again.
"""

from collections.abc import Sequence

import torch

from tessera.errors import WorkerError
from tessera.execute.cuda import driver
from tessera.execute.cuda.driver import MemOp
from tessera.execute.cuda.inbox import WORD, InboxLayout, Spot
from tessera.execute.cuda.transport import Parcel
from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.execute.links import KeyStore
from tessera.ir import Program, Trace

# A peer that has not told its handle after so long has failed.
MEET_S = 120.0


class PeerAway(WorkerError):
    """A peer's memory cannot be opened: its worker is gone, and will be started again."""

    def __init__(self, message: str, remedy: str = "", place: str = "", device: int = -1) -> None:
        super().__init__(message, remedy, place)
        self.device = device


class Ipc:
    """One worker's end; keeps `GpuTransport`."""

    carries_records = True

    def __init__(
        self,
        device: int,
        ordinal: int,
        num_devices: int,
        microbatches: int,
        store: KeyStore,
        epochs: Sequence[int],
    ) -> None:
        """`epochs`: how often every device's worker was started before."""
        self._epochs = list(epochs)
        self._device, self._ordinal, self._num = device, ordinal, num_devices
        self._microbatches, self._store = microbatches, store
        # (added together, device) -> layout of its inbox; one a call of `add`.
        self._layouts: list[list[InboxLayout]] = []
        self._inboxes: list[driver.IpcMemory] = []
        # (added together, device) -> address of its inbox in this process.
        self._opened: dict[tuple[int, int], int] = {}
        # Program -> (added together, number there)
        self._where: list[tuple[int, int]] = []
        self._programs: list[Program] = []
        self._side = driver.new_stream(ordinal)

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        """An inbox for these programs; those of the peers are opened when they are first sent to."""
        generation = len(self._layouts)
        layouts = [InboxLayout(programs, traces, d, self._microbatches) for d in range(self._num)]
        self._layouts.append(layouts)
        self._where += [(generation, number) for number in range(len(programs))]
        self._programs += programs
        memory = driver.IpcMemory(self._ordinal, layouts[self._device].total_bytes)
        self._inboxes.append(memory)
        self._store.set(self._key(generation, self._device), memory.handle)

    def meet(self, program: int) -> None:
        """The inboxes of its destinations."""
        for dst in {t.dst for t in self._programs[program].transfers if t.src == self._device}:
            self._address(self._where[program][0], dst)

    def landing(self, spot: Spot, num_bytes: int) -> torch.UntypedStorage:
        """A place in the inbox."""
        generation, at = self._at(spot)
        place = self._inboxes[generation].address + self._layouts[generation][self._device].place(at)
        return driver.bytes_at(place, num_bytes, self._ordinal).untyped_storage()

    def record(self, spot: Spot) -> torch.Tensor:
        """The record in the inbox."""
        generation, at = self._at(spot)
        start = self._inboxes[generation].address + self._layouts[generation][self._device].record(at)
        return driver.bytes_at(start, WORD * RECORD_WORDS, self._ordinal).view(torch.int64)

    def put(self, spot: Spot, parcel: Parcel, stream: int) -> None:
        """Copies into the peer's inbox, then sets the flag there."""
        generation, at = self._at(spot)
        layout, base = self._layouts[generation][parcel.dst], self._address(generation, parcel.dst)
        driver.copy(stream, base + layout.place(at) + parcel.start, parcel.source, parcel.num_bytes)
        if parcel.record:
            driver.copy(stream, base + layout.record(at), parcel.record, WORD * RECORD_WORDS)
        driver.mem_ops(stream, [MemOp(base + layout.flag(at), 1)])

    def wait(self, spot: Spot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        """The flag in this device's inbox."""
        generation, at = self._at(spot)
        flag = self._inboxes[generation].address + self._layouts[generation][self._device].flag(at)
        driver.mem_ops(stream, [marks[0], MemOp(flag, 1, is_wait=True), MemOp(flag, 0), marks[1]])

    def begin(self, microbatch: int, run: int, program: int) -> None:
        """Nothing is to be known of a run."""

    def end(self, run: int, is_cancelled: bool) -> None:
        """Likewise."""

    def release(self, microbatch: int) -> None:
        """On a stream of its own: those of the graphs wait."""
        self._fill(microbatch, 1)

    def reset(self, microbatch: int, program: int) -> None:
        """Likewise; then what this device has set in other inboxes."""
        self._fill(microbatch, 0)
        generation, _ = self._where[program]
        for number, transfer in enumerate(self._programs[program].transfers):
            base = self._opened.get((generation, transfer.dst))
            if transfer.src == self._device and base is not None:
                flag = self._layouts[generation][transfer.dst].flag(Spot(microbatch, 0, number))
                driver.mem_ops(self._side.cuda_stream, [MemOp(base + flag, 0)])
        self._side.synchronize()

    def relink(self, device: int, epoch: int) -> bool:
        """Its inbox is another, if its worker is."""
        if epoch == self._epochs[device]:
            return False
        self._epochs[device] = epoch
        for key in [k for k in self._opened if k[1] == device]:
            driver.close_shared(self._opened.pop(key))
        return True

    def close(self) -> None:
        """Peers' inboxes; this worker's own goes with its process, for peers may still write to it."""
        for address in self._opened.values():
            driver.close_shared(address)
        self._opened = {}

    def _fill(self, microbatch: int, value: int) -> None:
        for memory, layouts in zip(self._inboxes, self._layouts, strict=True):
            start, size = layouts[self._device].flags(microbatch)
            ops = [MemOp(memory.address + start + at, value) for at in range(0, size, WORD)]
            for first in range(0, len(ops), 128):  # a call takes no more than 256
                driver.mem_ops(self._side.cuda_stream, ops[first : first + 128])
        self._side.synchronize()

    def _at(self, spot: Spot) -> tuple[int, Spot]:
        generation, number = self._where[spot.program]
        return generation, Spot(spot.microbatch, number, spot.transfer)

    def _address(self, generation: int, device: int) -> int:
        key = (generation, device)
        if key not in self._opened:
            handle = self._store.get(self._key(generation, device), MEET_S)
            if len(handle) != driver.IPC_HANDLE_BYTES:
                raise WorkerError(f"device {device} told no handle of its memory", "Update both sides.")
            try:
                self._opened[key] = driver.open_shared(self._ordinal, handle)
            except WorkerError as error:
                raise PeerAway(error.message, device=device) from error
        return self._opened[key]

    def _key(self, generation: int, device: int) -> str:
        return f"ipc/{generation}/{device}/{self._epochs[device]}"
