"""Program: one lane of a plan lowered to an instruction list per device.

Every list is in trace order, a send stands right after its producer and a receive right before its first
reader; so every wait points backwards in the trace and no two devices can wait for each other. A value is
sent once per destination device.

A send takes the bytes as they are then, and a receive puts them down: between the two they are in memory of
the transport, so both ends may go on as they like. A buffer is freed behind its last use on a device; how its
memory is used again is the business of whoever runs the program.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Run one launch of the trace."""

    launch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start transfer number `transfer`; nothing behind it waits."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait until transfer number `transfer` has arrived, then own a copy of its bytes."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Free:
    """This device needs the buffer no more."""

    buffer: int


Instruction = Run | Send | Recv | Free


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes [start, stop) of one version of one buffer, from one device to another."""

    value: int
    buffer: int
    start: int
    stop: int
    src: int
    dst: int

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.stop - self.start


@dataclass(frozen=True)
class Program:
    """What every device does for one run of one step along one lane."""

    lane: int
    # Number of its step among those of all the plan's variants; see `Plan.graphs`.
    step: int
    # Number of runs of this step in one request.
    count: int
    # instructions[device]
    instructions: tuple[tuple[Instruction, ...], ...]
    transfers: tuple[Transfer, ...]
    # weights[device]: weight buffers that the device must hold.
    weights: tuple[tuple[int, ...], ...]
    # homes: (state buffer, device it lives on when the step starts).
    homes: tuple[tuple[int, int], ...]
    # outputs: (output name, device that holds it when the step ends).
    outputs: tuple[tuple[str, int], ...]
