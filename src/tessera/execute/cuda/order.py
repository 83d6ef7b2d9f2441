"""order: Program -> the order in which one thread issues its launches and copies, and who waits for whom.

Every device has one stream for launches, every ordered pair of devices one for copies. Work on one stream
runs in the order of its issue; between streams there are only the waits named here:

    a copy waits for the launches issued before it on the sending device, its producer among them;
    a launch waits for the copies into its device that it is the first to read (`arrivals`);
    a launch waits for the copies out of its device whose bytes it overwrites (`departures`).

A copy lands in memory of its own, so it waits for nobody on the receiving device. Memory that a copy reads is
kept until the program ends. Hence `Signal` and `Wait`, which static memory needs, have nothing to do here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import WorkerError
from tessera.ir import Free, Program, Recv, Region, Run, Send, Signal, Trace, Wait


@dataclass(frozen=True, slots=True)
class Compute:
    """One launch on one device."""

    device: int
    launch: int
    # Transfers into this device that must have arrived; their memory becomes the buffer's.
    arrivals: tuple[int, ...]
    # Transfers out of this device that must have left, since the launch overwrites what they read.
    departures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One transfer, on the stream of its pair of devices."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Release:
    """A device needs a buffer no more."""

    device: int
    buffer: int


Item = Compute | Copy | Release


def issue_order(program: Program, trace: Trace) -> tuple[Item, ...]:
    """Everything a program does, in an order in which nothing waits for what is issued after it."""
    return _Merge(program, trace).run()


class _Merge:
    """Walks the devices' lists together; a device stops at a receive until the send was issued."""

    def __init__(self, program: Program, trace: Trace) -> None:
        self._program, self._trace = program, trace
        self._positions = [0] * len(program.instructions)
        self._sent: set[int] = set()
        # Per device: received and not yet waited for; sent and not yet known to have left.
        self._arrivals: list[list[int]] = [[] for _ in program.instructions]
        self._leaving: list[list[int]] = [[] for _ in program.instructions]
        self._items: list[Item] = []

    def run(self) -> tuple[Item, ...]:
        todo = sum(map(len, self._program.instructions))
        while todo:
            before = todo
            for device in range(len(self._positions)):
                todo -= self._advance(device)
            if todo == before:
                raise self._stuck()
        return tuple(self._items)

    def _advance(self, device: int) -> int:
        """Issues what the device can; returns how many instructions that was."""
        column, count = self._program.instructions[device], 0
        while self._positions[device] < len(column):
            instruction = column[self._positions[device]]
            if isinstance(instruction, Recv) and instruction.transfer not in self._sent:
                break
            self._take(device, instruction)
            self._positions[device] += 1
            count += 1
        return count

    def _take(self, device: int, instruction: object) -> None:
        match instruction:
            case Run(launch):
                arrivals, self._arrivals[device] = tuple(self._arrivals[device]), []
                self._items.append(Compute(device, launch, arrivals, self._departures(device, launch)))
            case Send(transfer):
                self._sent.add(transfer)
                self._leaving[device].append(transfer)
                self._items.append(Copy(transfer))
            case Recv(transfer):
                self._arrivals[device].append(transfer)
            case Free(buffer):
                self._items.append(Release(device, buffer))
            case Signal(_) | Wait(_):
                pass  # only static memory needs them
            case _:
                raise WorkerError(f"unknown instruction {instruction}", "Update tessera on this machine.")

    def _departures(self, device: int, launch: int) -> tuple[int, ...]:
        """Copies that still read what the launch is about to overwrite."""
        written = [a for a in self._trace.launches[launch].accesses if a.write or a.atomic]
        found = []
        for number in self._leaving[device]:
            moved = self._program.transfers[number]
            region = Region(moved.start, moved.num_bytes)
            if any(a.buffer == moved.buffer and a.region.overlaps(region) for a in written):
                found.append(number)
        self._leaving[device] = [n for n in self._leaving[device] if n not in found]
        return tuple(found)

    def _stuck(self) -> WorkerError:
        waiting = [
            f"device {d} at instruction {p}"
            for d, p in enumerate(self._positions)
            if p < len(self._program.instructions[d])
        ]
        return WorkerError(
            f"the program cannot go on: {', '.join(waiting)} wait for one another",
            "Please report this plan.",
        )


def inbox_offsets(program: Program, trace: Trace, device: int, align: int) -> tuple[dict[int, int], int]:
    """Transfer into a device -> where its buffer starts in the device's inbox, and the inbox's bytes.

    State arrives in its new home, not here. Nothing shares a place, so no copy waits for a reader.
    """
    offsets: dict[int, int] = {}
    total = 0
    for number, transfer in enumerate(program.transfers):
        if transfer.dst == device and not is_move_of_state(program, number):
            offsets[number] = total
            total += -(-trace.buffers[transfer.buffer].size_bytes // align) * align
    return offsets, total


def is_move_of_state(program: Program, transfer: int) -> bool:
    """True of a transfer that brings state to a new home between two steps."""
    return program.transfers[transfer].value < 0


def pairs_of(programs: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """The ordered pairs of devices between which something is copied."""
    return tuple(sorted({(t.src, t.dst) for p in programs for t in p.transfers}))
