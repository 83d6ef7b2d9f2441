"""GpuTransport: how a GPU's worker sends and receives from inside its graphs; `direct` has two more.

What `put` and `wait` issue during a capture becomes part of the graph. A flag says that a transfer has
arrived; the receiver's graph waits for it and clears it. Nothing is overwritten before it was read
(`execute.lanes`).

When a peer is lost, a graph may wait for ever: `release` zeroes what may not have arrived, since zeros are
valid indices, and sets the microbatch's flags from the CPU, so that the graph ends; its contents are
discarded.

Inboxes are laid out alike by every worker. Each microbatch has, per transfer of a program, a flag, a record
of when it was due (`pace`), and a place as large as its buffer; its programs share them.

`Staged`: beside CPU workers of the same machine, graphs copy to shared memory and set flags there.

`Host`: over any network. Graphs copy to memory of the process and set flags there, which a thread per link
polls and sends. Arriving bytes are read into such memory and flagged.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute import driver
from tessera.execute.cuda.pace import RECORD_WORDS
from tessera.execute.driver import MemOp
from tessera.execute.links import Links
from tessera.execute.messages import LinkFrame, Setup
from tessera.execute.transport import WORD, Arenas
from tessera.ir import Program, Trace, Transfer

# Torch's alignment: results can depend on it.
ALIGN = 512
# Runs with transfers that arrived before the run began.
MAX_EARLY = 4096
# To drop late transfers of cancelled runs.
REMEMBERED = 4096


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
        """The last inbox or, if that is too small, a new one, larger by at least half."""
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


class Staged(GpuTransport):
    """Transfers land in the host's memory; graphs copy them to inboxes on the GPU."""

    carries_records = False

    def __init__(self, setup: Setup, ordinal: int) -> None:
        super().__init__(setup, ordinal)
        self._arenas = Arenas(setup, driver.pin)
        self._places: list[torch.Tensor] = []

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        super().add(programs, traces)
        self._arenas.open(programs)

    def _allocate(self) -> None:
        card = driver.card(self._ordinal)
        for layout in self._inboxes.layouts[self._device]:
            if (self._device, layout.number) not in self._bases:
                self._places.append(torch.zeros(max(1, layout.total_bytes), dtype=torch.uint8, device=card))
                self._bases[self._device, layout.number] = self._places[-1].data_ptr()

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        super().wait(spot, stream, marks)
        transfer, (source, _) = self._transfer(spot), self._ends(spot, self._device)
        place = self._base(spot.program) + self._inboxes.place(spot, self._device) + transfer.start
        driver.copy(stream, place, source, transfer.num_bytes)

    def _ends(self, spot: InboxSpot, device: int) -> tuple[int, int]:
        program, transfer = self._inboxes.programs[spot.program], self._transfer(spot)
        place = self._arenas.place(program, spot.microbatch, spot.transfer)
        flags = self._arenas.flags(program, transfer.src, transfer.dst, spot.microbatch)
        return place.data_ptr(), flags.ctypes.data + WORD * spot.transfer

    def reset(self, microbatch: int, program: int) -> None:
        self._arenas.fill(microbatch, 0)

    def _zero(self, microbatch: int) -> None:
        self._arenas.fill(microbatch, 0, self._device, "arena")

    def _fill(self, microbatch: int, value: int) -> None:
        self._arenas.fill(microbatch, value, self._device)


class Host(Staged):
    def __init__(self, setup: Setup, ordinal: int, links: Links) -> None:
        super().__init__(setup, ordinal)
        # Run -> (microbatch, program); microbatch -> its last run, whose flagged transfers may still have to
        # be sent.
        self._runs: dict[int, tuple[int, int]] = {}
        self._current: dict[int, int] = {}
        # After each end the flags are checked once more.
        self._in_flight: set[int] = set()
        self._num_ended = 0
        self._cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self._early: dict[int, list[tuple[LinkFrame, memoryview]]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._senders: set[int] = set()
        self._links = links
        links.arrived = self.arrived

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        with self._changed:
            super().add(programs, traces)
        peers = {t.dst for program in programs for t in program.transfers if t.src == self._device}
        for dst in peers - self._senders:
            self._senders.add(dst)
            name = f"tessera-send-{dst}"
            threading.Thread(target=self._send_all, args=(dst,), name=name, daemon=True).start()

    def begin(self, microbatch: int, run: int, program: int) -> None:
        with self._changed:
            self._runs.pop(self._current.get(microbatch, -1), None)
            self._runs[run] = (microbatch, program)
            self._current[microbatch] = run
            self._in_flight.add(run)
            early = self._early.pop(run, [])
            self._changed.notify_all()
        for frame, contents in early:
            self._land(frame, contents)

    def end(self, run: int, is_cancelled: bool) -> None:
        with self._changed:
            self._in_flight.discard(run)
            self._num_ended += 1
            if is_cancelled:
                microbatch, _ = self._runs.pop(run, (-1, -1))
                if self._current.get(microbatch) == run:
                    del self._current[microbatch]
                self._early.pop(run, None)
                self._cancelled.append(run)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        with self._changed:
            if frame.run in self._cancelled or self._is_closed:
                return
            if frame.run not in self._runs:
                self._early.setdefault(frame.run, []).append((frame, contents))
                while len(self._early) > MAX_EARLY:
                    del self._early[next(iter(self._early))]
                return
        self._land(frame, contents)

    def _land(self, frame: LinkFrame, contents: memoryview) -> None:
        with self._changed:
            microbatch, number = self._runs.get(frame.run, (-1, -1))
        program = self._inboxes.programs[number]
        if microbatch < 0 or frame.transfer >= len(program.transfers):
            return
        transfer = program.transfers[frame.transfer]
        if transfer.num_bytes == len(contents) and transfer.dst == self._device:
            self._arenas.place(program, microbatch, frame.transfer).numpy().data[:] = contents
            self._arenas.flags(program, transfer.src, transfer.dst, microbatch)[frame.transfer] = 1

    def _send_all(self, dst: int) -> None:
        seen = 0
        while True:
            with self._changed:
                while not self._in_flight and seen == self._num_ended and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                seen = self._num_ended
                spots = self._flagged(dst)
            for run, spot in spots:
                contents = self._arenas.place(
                    self._inboxes.programs[spot.program], spot.microbatch, spot.transfer
                )
                frame = LinkFrame(run, spot.transfer, time.monotonic())
                self._links.post(dst, frame, contents.numpy().data)
            if not spots:
                time.sleep(driver.LOOK_S)

    def _flagged(self, dst: int) -> list[tuple[int, InboxSpot]]:
        """Runs and their transfers that can be sent, older runs first; cancelled runs are left out."""
        spots = []
        for microbatch, number in self._arenas.flagged(dst):
            run = self._current.get(microbatch)
            if run is not None:
                spots.append((run, InboxSpot(microbatch, self._runs[run][1], number)))
        return sorted(spots, key=lambda spot: (spot[0], spot[1].transfer))
