"""InboxLayout: where the transfers of some programs land on one device; the same on every worker that asks.

For each microbatch there are, for each transfer of a program, a flag that says that it is there, a record of
when it was due (see `turnstile`; of devices that keep another GPU's time), and a place as large as its
buffer. A microbatch runs one program at a time, so programs share all three; within a program nothing shares
a place, so no copy waits for a reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.ir import Program, Trace

# As torch aligns what it allocates: results can depend on alignment.
ALIGN = 512
WORD = 8


@dataclass(frozen=True, slots=True)
class Spot:
    """One transfer of one program (by its number among those added together) in one microbatch."""

    microbatch: int
    program: int
    transfer: int


class InboxLayout:
    """Offsets in one device's inbox."""

    def __init__(
        self, programs: Sequence[Program], traces: Sequence[Trace], device: int, microbatches: int
    ) -> None:
        self._places = [_offsets(p, traces[p.step], device) for p in programs]
        # Flags of one microbatch, and of all.
        self.flags_each = max((len(p.transfers) for p in programs), default=0)
        self._bytes = max((total for _, total in self._places), default=0)
        self.num_flags = microbatches * self.flags_each
        head = microbatches * self.flags_each * WORD * (1 + RECORD_WORDS)
        self._first_place = -(-head // ALIGN) * ALIGN
        self._first_record = microbatches * self.flags_each * WORD
        self.total_bytes = self._first_place + microbatches * self._bytes

    def flag(self, spot: Spot) -> int:
        """Where the flag of a transfer is."""
        return (spot.microbatch * self.flags_each + spot.transfer) * WORD

    def flags(self, microbatch: int) -> tuple[int, int]:
        """(first byte, bytes) of all flags of a microbatch."""
        return microbatch * self.flags_each * WORD, self.flags_each * WORD

    def record(self, spot: Spot) -> int:
        """Where the record of a transfer is."""
        row = spot.microbatch * self.flags_each + spot.transfer
        return self._first_record + row * WORD * RECORD_WORDS

    def place(self, spot: Spot) -> int:
        """Where the buffer of a transfer begins."""
        return (
            self._first_place + spot.microbatch * self._bytes + self._places[spot.program][0][spot.transfer]
        )


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
