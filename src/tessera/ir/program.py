"""Program: one lane of a plan lowered to an instruction list per device.

Every list is in trace order, a send stands right after its producer and a receive right before its first
reader; so every wait points backwards in the trace and no two devices can wait for each other. A value is
sent once per destination device.

A program may carry static memory: a place for every buffer that a device touches, in one arena a slot and
device. Memory that is used twice needs two more words, which only such a program has:

    Signal(t)  on the receiver: the place where transfer t will land is free from here on.
    Wait(t)    on the sender: go no further until transfer t has left, since its memory is about to be reused.

Both point backwards in the trace as well, because a place that a transfer will land in is kept free from the
launch that makes the value, not from the receive. What they are in practice depends on who runs the program:
between GPUs of one process a signal is an event that the copy stream waits for and a wait is an event of the
copy stream; a worker process hands its bytes to a transport, which says when they have left.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Run one launch of the trace."""

    launch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start transfer number `transfer` once its place has been signalled free; nothing behind it waits."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait until transfer number `transfer` has arrived, then own a copy of its bytes."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Signal:
    """From here on transfer number `transfer` may land on this device."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until transfer number `transfer` has left this device: its memory is used again."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Free:
    """This device needs the buffer no more."""

    buffer: int


Instruction = Run | Send | Recv | Signal | Wait | Free


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer is in the arena of one slot on one device."""

    buffer: int
    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size_bytes

    def overlaps(self, other: "Place") -> bool:
        """True if the two share a byte."""
        return self.offset < other.stop and other.offset < self.stop


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
    # places[device]: every buffer the device touches but weights, by buffer; none without static memory.
    places: tuple[tuple[Place, ...], ...] = ()
    # arena_bytes[device]: bytes of one slot's arena that the program needs there.
    arena_bytes: tuple[int, ...] = ()
