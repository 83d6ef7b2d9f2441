"""GpuTransport: how a GPU's worker sends and receives from inside its graphs.

What `put` and `wait` issue during a capture becomes part of the graph. A flag says that a transfer has
arrived; the receiver's graph waits for it and clears it. Nothing is overwritten before it was read
(`execute.overlap`).

When a peer is lost, a graph may wait for ever: `release` zeroes what may not have arrived, since zeros are
valid indices, and sets the microbatch's flags from the CPU, so that the graph ends with contents that are
discarded; `reset` clears them.

Inboxes are laid out alike by every worker. Each microbatch has, per transfer of a program, a flag, a record
of when it was due (`pace`), and a place as large as its buffer; its programs share them. Programs added later
use the existing inbox if they fit; else a device gets another, larger by at least half.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute import driver
from tessera.execute.cuda.pace import RECORD_WORDS
from tessera.execute.driver import MemOp
from tessera.execute.messages import Setup
from tessera.execute.transport import WORD
from tessera.ir import Program, Trace, Transfer

# Torch's alignment: results can depend on it.
ALIGN = 512


@dataclass(frozen=True, slots=True)
class InboxSpot:
    """`program`: its number among those added."""

    microbatch: int
    program: int
    transfer: int


class InboxLayout:
    def __init__(self, number: int, microbatches: int, flags_each: int, bytes_each: int) -> None:
        self.number, self.flags_each, self.bytes_each = number, flags_each, bytes_each
        self.num_flags = microbatches * flags_each
        head = self.num_flags * WORD * (1 + RECORD_WORDS)
        self._first_place = -(-head // ALIGN) * ALIGN
        self.total_bytes = self._first_place + microbatches * bytes_each

    def flag(self, spot: InboxSpot) -> int:
        return (spot.microbatch * self.flags_each + spot.transfer) * WORD

    def flags(self, microbatch: int) -> tuple[int, int]:
        return microbatch * self.flags_each * WORD, self.flags_each * WORD

    def record(self, spot: InboxSpot) -> int:
        return self.num_flags * WORD + self.flag(spot) * RECORD_WORDS

    def part(self, microbatch: int) -> int:
        return self._first_place + microbatch * self.bytes_each


class Inboxes:
    def __init__(self, num_devices: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self.programs: list[Program] = []
        # Per device; per program its inbox and the offsets of its transfers.
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
        """The last inbox, or a new one if that is too small."""
        flags = max((len(p.transfers) for p in programs), default=0)
        each = max((_offsets(p, traces[p.step], device)[1] for p in programs), default=0)
        layouts = self.layouts[device]
        if not layouts:
            return InboxLayout(0, self._microbatches, flags, each)
        last = layouts[-1]
        if flags <= last.flags_each and each <= last.bytes_each:
            return last
        grown = -(-last.bytes_each * 3 // 2 // ALIGN) * ALIGN
        flags, each = max(flags, last.flags_each * 3 // 2), max(each, grown)
        return InboxLayout(len(layouts), self._microbatches, flags, each)

    def layout(self, program: int, device: int) -> InboxLayout:
        return self._used[device][program][0]

    def place(self, spot: InboxSpot, device: int) -> int:
        layout, offsets = self._used[device][spot.program]
        return layout.part(spot.microbatch) + offsets[spot.transfer]


def _offsets(program: Program, trace: Trace, device: int) -> tuple[dict[int, int], int]:
    """Incoming transfer -> offset in a microbatch's part, and the part's bytes."""
    offsets: dict[int, int] = {}
    total = 0
    for number, transfer in enumerate(program.transfers):
        if transfer.dst == device:
            offsets[number] = total
            total += -(-trace.buffers[transfer.buffer].size_bytes // ALIGN) * ALIGN
    return offsets, total


def is_move_of_state(program: Program, transfer: int) -> bool:
    return program.transfers[transfer].value < 0


@dataclass(frozen=True, slots=True)
class Parcel:
    source: int
    start: int
    num_bytes: int
    dst: int
    # Address of the due record on a dilated device; 0: none.
    record: int = 0


class GpuTransport(ABC):
    carries_records = True

    def __init__(self, setup: Setup, ordinal: int) -> None:
        self._device, self._ordinal, self._num = setup.device, ordinal, len(setup.cluster.devices)
        self._inboxes = Inboxes(self._num, setup.microbatches)
        # (device, inbox) -> address in this process.
        self._bases: dict[tuple[int, int], int] = {}

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        """Every worker adds lanes in the same order."""
        counts = [len(layouts) for layouts in self._inboxes.layouts]
        self._inboxes.add(programs, traces)
        if counts != [len(layouts) for layouts in self._inboxes.layouts]:
            self._allocate()

    def new_bytes(self, programs: Sequence[Program], traces: Sequence[Trace]) -> int:
        layout = self._inboxes.layout_for(programs, traces, self._device)
        return 0 if layout in self._inboxes.layouts[self._device] else layout.total_bytes

    @abstractmethod
    def _allocate(self) -> None:
        """Hook."""

    def meet(self, program: int) -> None:
        """Opens the destinations of a program before its capture, which allows no waiting."""

    def landing(self, spot: InboxSpot, num_bytes: int) -> torch.UntypedStorage:
        place = self._base(spot.program) + self._inboxes.place(spot, self._device)
        return driver.bytes_at(place, num_bytes, self._ordinal).untyped_storage()

    def record(self, spot: InboxSpot) -> torch.Tensor:
        start = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).record(spot)
        return driver.bytes_at(start, WORD * RECORD_WORDS, self._ordinal).view(torch.int64)

    def _base(self, program: int) -> int:
        return self._bases[self._device, self._inboxes.layout(program, self._device).number]

    def _target(self, program: int, device: int) -> int:
        return self._bases[device, self._inboxes.layout(program, device).number]

    def _ends(self, spot: InboxSpot, device: int) -> tuple[int, int]:
        base, layout = self._target(spot.program, device), self._inboxes.layout(spot.program, device)
        start = self._transfer(spot).start
        return base + self._inboxes.place(spot, device) + start, base + layout.flag(spot)

    def _transfer(self, spot: InboxSpot) -> Transfer:
        return self._inboxes.programs[spot.program].transfers[spot.transfer]

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        place, flag = self._ends(spot, parcel.dst)
        driver.copy(stream, place, parcel.source, parcel.num_bytes)
        if parcel.record and self.carries_records:
            record = self._inboxes.layout(spot.program, parcel.dst).record(spot)
            base = self._target(spot.program, parcel.dst)
            driver.copy(stream, base + record, parcel.record, WORD * RECORD_WORDS)
        driver.mem_ops(stream, [MemOp(flag, 1)])

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        """Waits for the flag and clears it, between writes of this device's position."""
        _, flag = self._ends(spot, self._device)
        driver.mem_ops(stream, [marks[0], MemOp(flag, 1, is_wait=True), MemOp(flag, 0), marks[1]])

    def begin(self, microbatch: int, run: int, program: int) -> None:
        """Before a run is launched."""

    def end(self, run: int, is_cancelled: bool) -> None:
        """Transfers of a cancelled run are dropped."""

    def release(self, microbatch: int) -> None:
        self._zero(microbatch)
        self._fill(microbatch, 1)

    def reset(self, microbatch: int, program: int) -> None:
        """Clears all flags of a microbatch here, and those set elsewhere from here, after its graph."""
        self._fill(microbatch, 0)

    @abstractmethod
    def _zero(self, microbatch: int) -> None:
        """Zeroes what graphs of a microbatch read here after a wait."""

    @abstractmethod
    def _fill(self, microbatch: int, value: int) -> None:
        """Fills all flags of a microbatch here."""

    def relink(self, device: int, epoch: int) -> bool:
        """True if graphs that send to the peer must be captured again."""
        return False

    def close(self) -> None:
        """Releases what it holds."""
