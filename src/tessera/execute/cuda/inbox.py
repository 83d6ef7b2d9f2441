"""Inboxes: where the transfers of programs land on every device; the same on every worker that asks.

For each microbatch there are, for each transfer of a program, a flag that says that it is there, a record of
when it was due (see `turnstile`; of devices that keep another GPU's time), and a place as large as its
buffer. A microbatch runs one program at a time, so programs share all three; within a program nothing shares
a place, so no copy waits for a reader.

Programs that are added later are laid out in the inbox that is there if they fit, so that plans can be
replaced for ever. If not, a device gets another one, larger by half at least: all that it ever had together
takes no more than three times the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.cuda.turnstile import RECORD_WORDS
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
        """Where the flag of a transfer is."""
        return (spot.microbatch * self.flags_each + spot.transfer) * WORD

    def flags(self, microbatch: int) -> tuple[int, int]:
        """(first byte, bytes) of all flags of a microbatch."""
        return microbatch * self.flags_each * WORD, self.flags_each * WORD

    def record(self, spot: InboxSpot) -> int:
        """Where the record of a transfer is."""
        return self.num_flags * WORD + self.flag(spot) * RECORD_WORDS

    def part(self, microbatch: int) -> int:
        """Where the places of a microbatch begin."""
        return self._first_place + microbatch * self.bytes_each


class Inboxes:
    """Of every device, as programs are added."""

    def __init__(self, num_devices: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self.programs: list[Program] = []
        # Of each device its inboxes, and of each program the one it uses and its transfers' offsets.
        self.layouts: list[list[InboxLayout]] = [[] for _ in range(num_devices)]
        self._used: list[list[tuple[InboxLayout, dict[int, int]]]] = [[] for _ in range(num_devices)]

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        """Makes room for the transfers of a lane's programs; every worker adds lanes in the same order."""
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
        """The inbox of a device that a program uses."""
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
