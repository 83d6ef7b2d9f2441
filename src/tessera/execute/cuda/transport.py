"""GpuTransport: how a GPU's worker sends and receives from inside its graphs.

`put` and `wait` are called while a graph is captured: what they issue on the stream becomes part of the
graph, so that no CPU stands between two devices. A flag says that the bytes of a transfer are there; the
receiver's graph waits for it and clears it, so a graph can be launched again and again. A microbatch's next
step is begun when all devices have ended the last, so no flag and no place is written before it was read.

    ipc      GPUs of one machine: memory of the receiver that the sender's process has opened (`ipc`)
    nvshmem  put-with-signal on streams, by NVLink, PCIe or InfiniBand (`nvshmem`)
    host     pinned memory and a link of the worker process, over any network (`host`)

When a peer is lost in the middle of a step, this device's graph may wait for ever: `release` sets the flags
of a microbatch from the CPU, so that the graph ends, with contents that nobody will look at; `reset` clears
them then.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute.cuda import driver
from tessera.execute.cuda.driver import MemOp
from tessera.execute.cuda.inbox import WORD, Inboxes, InboxSpot
from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.ir import Program, Trace


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes to be sent: addresses in this device's memory."""

    source: int
    # Of the bytes within their buffer.
    start: int
    num_bytes: int
    dst: int
    # The record of when it is due, on a device that keeps another GPU's time; 0: there is none.
    record: int = 0


class GpuTransport(ABC):
    """One worker's end; `program` in a spot counts the programs that were added, from 0."""

    # True if the record of a transfer arrives with it.
    carries_records = True

    def __init__(self, device: int, ordinal: int, num_devices: int, microbatches: int) -> None:
        self._device, self._ordinal = device, ordinal
        self._inboxes = Inboxes(num_devices, microbatches)

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        """Makes room for the transfers of a lane's programs; every worker adds lanes in the same order."""
        known = [len(layouts) for layouts in self._inboxes.layouts]
        self._inboxes.add(programs, traces)
        if known != [len(layouts) for layouts in self._inboxes.layouts]:
            self._allocate()

    def new_bytes(self, programs: Sequence[Program], traces: Sequence[Trace]) -> int:
        """What `add` would take of this device's memory."""
        layout = self._inboxes.layout_for(programs, traces, self._device)
        return 0 if layout in self._inboxes.layouts[self._device] else layout.total_bytes

    @abstractmethod
    def _allocate(self) -> None:
        """Some devices have an inbox more."""

    def meet(self, program: int) -> None:
        """Opens what a program sends to; before its graph is captured, for a capture allows no waiting."""

    def landing(self, spot: InboxSpot, num_bytes: int) -> torch.UntypedStorage:
        """Memory of this device in which the buffer of a transfer is, once `wait` is over."""
        place = self._base(spot.program) + self._inboxes.place(spot, self._device)
        return driver.bytes_at(place, num_bytes, self._ordinal).untyped_storage()

    def record(self, spot: InboxSpot) -> torch.Tensor:
        """The record that came with it."""
        start = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).record(spot)
        return driver.bytes_at(start, WORD * RECORD_WORDS, self._ordinal).view(torch.int64)

    @abstractmethod
    def _base(self, program: int) -> int:
        """Address of this device's inbox for a program."""

    @abstractmethod
    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        """Issues the copy and the flag."""

    @abstractmethod
    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        """Issues the wait for the flag and what clears it, between marks that say where this device is."""

    def begin(self, microbatch: int, run: int, program: int) -> None:
        """A run of a program is about to be launched."""

    def end(self, run: int, is_cancelled: bool) -> None:
        """It has ended on this device; if it was cancelled, what is still to be sent or comes is dropped."""

    def release(self, microbatch: int) -> None:
        """Sets all flags of a microbatch, from the CPU."""
        self._fill(microbatch, 1)

    def reset(self, microbatch: int, program: int) -> None:
        """Clears all flags of a microbatch here, and those that this device has set elsewhere.

        Called when a cancelled graph has ended here. When every device has done so, no flag is left: each
        clears what it may still have set itself.
        """
        self._fill(microbatch, 0)

    @abstractmethod
    def _fill(self, microbatch: int, value: int) -> None:
        """All flags of a microbatch here."""

    def relink(self, device: int, epoch: int) -> bool:
        """The link to a peer is opened anew; True if graphs that send there must be captured again."""
        return False

    def close(self) -> None:
        """Lets go of what it holds."""
