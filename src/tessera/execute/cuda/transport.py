"""GpuTransport: how a GPU's worker sends and receives from inside its graphs.

`put` and `wait` are called during a capture: what they issue on the stream becomes part of the graph, so no
CPU stands between two devices. A flag says that the bytes of a transfer have arrived; the receiver's graph
waits for it and clears it, so a graph can be launched again. A microbatch's next step begins when all devices
have ended the last, so no flag and no place is overwritten before it was read.

    ipc      GPUs of one machine: memory of the receiver that the sender has opened (`direct`)
    nvshmem  put-with-signal on streams, by NVLink, PCIe or InfiniBand (`direct`)
    host     pinned memory and a link of the worker process, over any network (`host`)

When a peer is lost during a step, this device's graph may wait for ever: `release` sets the flags of a
microbatch from the CPU, so that the graph ends with contents that are discarded; `reset` then clears them.

Inboxes are where transfers land, laid out alike by every worker. Each microbatch has, per transfer of a
program, a flag, a record of when it was due (see `pace`), and a place as large as its buffer. A microbatch
runs one program at a time, so programs share all three; within a program no two transfers share a place.
Programs added later use the existing inbox if they fit. If not, a device gets another one, larger by at least
half, so all its inboxes together take at most three times the largest.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute import driver
from tessera.execute.cuda.pace import RECORD_WORDS
from tessera.execute.driver import MemOp
from tessera.ir import Program, Trace

# As torch aligns what it allocates: results can depend on alignment.
ALIGN = 512
WORD = 8


@dataclass(frozen=True, slots=True)
class InboxSpot:
    """One transfer of one program (by its number among those added) in one microbatch."""

    microbatch: int
    program: int
    transfer: int


class InboxLayout:
    """Offsets in one inbox of one device, of so many flags and bytes a microbatch."""

    def __init__(self, number: int, microbatches: int, flags_each: int, bytes_each: int) -> None:
        # Among the inboxes of its device.
        self.number, self.flags_each, self.bytes_each = number, flags_each, bytes_each
        self.num_flags = microbatches * flags_each
        head = self.num_flags * WORD * (1 + RECORD_WORDS)
        self._first_place = -(-head // ALIGN) * ALIGN
        self.total_bytes = self._first_place + microbatches * bytes_each

    def flag(self, spot: InboxSpot) -> int:
        return (spot.microbatch * self.flags_each + spot.transfer) * WORD

    def flags(self, microbatch: int) -> tuple[int, int]:
        """(first byte, bytes) of all flags of a microbatch."""
        return microbatch * self.flags_each * WORD, self.flags_each * WORD

    def record(self, spot: InboxSpot) -> int:
        return self.num_flags * WORD + self.flag(spot) * RECORD_WORDS

    def part(self, microbatch: int) -> int:
        return self._first_place + microbatch * self.bytes_each


class Inboxes:
    def __init__(self, num_devices: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self.programs: list[Program] = []
        # Of each device its inboxes, and of each program the one it uses and its transfers' offsets.
        self.layouts: list[list[InboxLayout]] = [[] for _ in range(num_devices)]
        self._used: list[list[tuple[InboxLayout, dict[int, int]]]] = [[] for _ in range(num_devices)]

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        self.programs += programs
        for device, layouts in enumerate(self.layouts):
            layout = self.layout_for(programs, traces, device)
            if layout not in layouts:
                layouts.append(layout)
            self._used[device] += [(layout, _offsets(p, traces[p.step], device)[0]) for p in programs]

    def layout_for(self, programs: Sequence[Program], traces: Sequence[Trace], device: int) -> InboxLayout:
        """The inbox that these programs would use: the last one, or another if it is too small."""
        flags = max((len(p.transfers) for p in programs), default=0)
        each = max((_offsets(p, traces[p.step], device)[1] for p in programs), default=0)
        known = self.layouts[device]
        if not known:
            return InboxLayout(0, self._microbatches, flags, each)
        last = known[-1]
        if flags <= last.flags_each and each <= last.bytes_each:
            return last
        grown = -(-last.bytes_each * 3 // 2 // ALIGN) * ALIGN
        flags, each = max(flags, last.flags_each * 3 // 2), max(each, grown)
        return InboxLayout(len(known), self._microbatches, flags, each)

    def layout(self, program: int, device: int) -> InboxLayout:
        return self._used[device][program][0]

    def place(self, spot: InboxSpot, device: int) -> int:
        """Where the buffer of a transfer begins in it."""
        layout, offsets = self._used[device][spot.program]
        return layout.part(spot.microbatch) + offsets[spot.transfer]


def _offsets(program: Program, trace: Trace, device: int) -> tuple[dict[int, int], int]:
    """Transfer into the device -> where its buffer starts in a microbatch's part, and the part's bytes."""
    offsets: dict[int, int] = {}
    total = 0
    for number, transfer in enumerate(program.transfers):
        if transfer.dst == device:
            offsets[number] = total
            total += -(-trace.buffers[transfer.buffer].size_bytes // ALIGN) * ALIGN
    return offsets, total


def is_move_of_state(program: Program, transfer: int) -> bool:
    """True of a transfer that brings state to a new home between two steps."""
    return program.transfers[transfer].value < 0


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
    # Where links of this worker listen; empty: it has none.
    address = ""

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

    def relink(self, device: int, epoch: int, address: str) -> bool:
        """The link to a peer is opened anew; True if graphs that send there must be captured again."""
        return False

    def close(self) -> None:
        """Lets go of what it holds."""
