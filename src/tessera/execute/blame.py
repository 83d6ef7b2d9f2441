"""Who holds up a run, and what a device was doing when it was lost: for a message that says where to look."""

from collections.abc import Mapping
from typing import Protocol

from tessera.execute.hub import Hub
from tessera.execute.words import describe
from tessera.ir import Plan, Program, Recv, Wait


class Underway(Protocol):
    """A run that workers are at."""

    slot: int
    program: Program | None
    # Devices that have not answered yet.
    missing: set[int]

    @property
    def what(self) -> str:
        """Whose run it is, in words."""


def blame(hub: Hub, ticket: int, flight: Underway) -> int:
    """The device that a late run waits for: from waiting to awaited until one has no excuse."""
    assert flight.program is not None, "a flight with a ticket has a program"
    device = min(flight.missing)
    seen: set[int] = set()
    while device not in seen:
        seen.add(device)
        known = hub.progress(device, flight.slot)
        if known is None or known[0] != ticket or known[1] < 0:
            return device
        column = flight.program.instructions[device]
        # The position is of the instruction that was issued last; what holds the device up is behind it.
        behind = column[known[1] + 1] if known[1] + 1 < len(column) else None
        if not isinstance(behind, (Recv, Wait)):
            return device
        transfer = flight.program.transfers[behind.transfer]
        other = transfer.src if isinstance(behind, Recv) else transfer.dst
        if other not in flight.missing:
            return device
        device = other
    return device


def whereabouts(plan: Plan, hub: Hub, device: int, flights: Mapping[int, Underway]) -> str:
    """The instruction a device was at, in words."""
    for ticket, flight in flights.items():
        known = hub.progress(device, flight.slot)
        if known is None or known[0] != ticket or flight.program is None or known[1] < 0:
            continue
        column = flight.program.instructions[device]
        graph = plan.graphs[flight.program.step]
        words = describe(graph, flight.program, column[known[1]])
        step = graph.trace.step.kind
        return f"at instruction {known[1]} of {len(column)}, {words}, {step} of {flight.what}"
    mine = sorted(f.what for f in flights.values() if device in f.missing)
    return f"before its share of {mine[0]}" if mine else "with no work of its own"
