"""Transport between worker processes of one machine: bytes in shared memory, news of them through a pipe.

Every directed pair of devices has an arena: for each slot, a fixed place for each transfer of a program. A
sender copies into the place and writes (ticket, transfer) to the pipe; the pipe orders memory between the
processes. A place is used again only by the slot's next run, which starts when all devices have finished the
last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from tessera.ir import Program

# Torch aligns its own memory so; results can depend on it.
ALIGN = 64


def offsets(program: Program, src: int, dst: int) -> tuple[dict[int, int], int]:
    """Transfer -> place in a slot's part of the arena from src to dst, and the bytes used."""
    places: dict[int, int] = {}
    used = 0
    for number, transfer in enumerate(program.transfers):
        if (transfer.src, transfer.dst) == (src, dst):
            places[number] = used
            used += -(-transfer.num_bytes // ALIGN) * ALIGN
    return places, used


def slot_bytes(programs: Sequence[Sequence[Program]], src: int, dst: int) -> int:
    """Bytes one slot needs in the arena from src to dst, whichever program it runs."""
    return max((offsets(p, src, dst)[1] for lane in programs for p in lane), default=0)


@dataclass
class Wire:
    """One worker's end of the arena and pipe from one device to another."""

    src: int
    dst: int
    arena: torch.Tensor
    slot_bytes: int
    pipe: Connection
    _places: dict[int, dict[int, int]] = field(default_factory=dict)

    def place(self, program: Program, slot: int, number: int) -> torch.Tensor:
        """The bytes of the arena that belong to one transfer of one slot."""
        key = id(program)
        if key not in self._places:
            self._places[key] = offsets(program, self.src, self.dst)[0]
        start = slot * self.slot_bytes + self._places[key][number]
        return self.arena[start : start + program.transfers[number].num_bytes]

    def send(self, program: Program, slot: int, ticket: int, number: int, contents: torch.Tensor) -> None:
        """Copies the bytes over and tells the other end."""
        self.place(program, slot, number).copy_(contents)
        self.pipe.send((ticket, number))
