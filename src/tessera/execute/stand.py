"""Stand: one program in one slot, as one device has it: made once, used by every run of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute.memory import Arena, ArenaMemory, Storage, allocate, bytes_of
from tessera.execute.schedule import until_wait
from tessera.ir import BufferKind, Program, Run, Trace, View

GIVEN = (BufferKind.INPUT, BufferKind.STATE)


@dataclass(frozen=True)
class Stand:
    """Where everything is, by name."""

    program: Program
    memory: ArenaMemory
    # Inputs and state -> buffer, of those that have a place here.
    given: dict[str, int]
    # Outputs that are here when a run ends.
    outputs: dict[str, View]
    # Bytes of the state that lives here.
    state: dict[str, torch.Tensor]
    # Modelled times that decide who goes first; see `schedule`. Empty: not known.
    until_wait_us: Sequence[float]


def make_stand(
    trace: Trace,
    program: Program,
    device: int,
    slot: int,
    arena: Arena,
    weights: dict[int, Storage],
    us: Sequence[float],
) -> Stand:
    """`us`: modelled time of each launch on this device; empty where it is not known."""
    places = {p.buffer: arena.storage(slot, p) for p in program.places[device]}
    memory = ArenaMemory(weights, places)
    given: dict[str, int] = {}
    for buffer, found in enumerate(trace.buffers):
        if found.size_bytes == 0:  # nobody sends it, and everybody may name it
            memory.put(buffer, allocate(0))
        elif buffer in places and found.kind in GIVEN:
            given[found.name] = buffer
    here = {name for name, holder in program.outputs if holder == device}
    outputs = {name: view for name, view in trace.outputs if name in here}
    homes = [buffer for buffer, home in program.homes if home == device]
    state = {trace.buffers[b].name: bytes_of(s := memory.get(b), 0, s.nbytes()) for b in homes}
    until: Sequence[float] = ()
    if us:
        until = until_wait(
            program.instructions[device], lambda x: us[x.launch] if isinstance(x, Run) else 0.0
        )
    return Stand(program, memory, given, outputs, state, until)
