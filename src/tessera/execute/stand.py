"""Stand: one program in one microbatch, as one device has it: made once, used by every run of it.

`Ground` is the device's memory under all of them. Weights are there once. Every microbatch has its state
once, by name, whatever program or lane runs on it; and for every step one place a buffer, which the lanes
share, since a microbatch runs one program at a time. Places are taken when a program first needs them, and
kept: no memory is used twice within a program, so nobody waits for memory, and launches stay bound (`bound`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute.footprint import touched
from tessera.execute.memory import PlacedMemory, Storage, allocate, bytes_of
from tessera.execute.schedule import until_wait
from tessera.ir import BufferKind, Program, Run, Trace, View

GIVEN = (BufferKind.INPUT, BufferKind.STATE)


@dataclass(frozen=True)
class Stand:
    """Where everything is, by name."""

    program: Program
    memory: PlacedMemory
    # Inputs and state -> buffer, of those that have a place here.
    given: dict[str, int]
    # Outputs that are here when a run ends.
    outputs: dict[str, View]
    # Bytes of the state that lives here.
    state: dict[str, torch.Tensor]
    # Modelled times that decide who goes first; see `schedule`. Empty: not known.
    until_wait_us: Sequence[float]


class Ground:
    """One device's memory for all microbatches."""

    def __init__(self, traces: Sequence[Trace], device: int, weights: Sequence[dict[int, Storage]]) -> None:
        """`weights`: by step, those that some lane reads on this device."""
        self._traces, self._device, self._weights = traces, device, weights
        self._places: dict[tuple[int, int, int] | tuple[int, str, int], Storage] = {}

    def stand(self, microbatch: int, program: Program, us: Sequence[float]) -> Stand:
        """`us`: modelled time of each launch on this device; empty where it is not known."""
        trace, device = self._traces[program.step], self._device
        places = {b: self._place(microbatch, program.step, b) for b in touched(trace, program, device)}
        memory = PlacedMemory(self._weights[program.step], places)
        given = {trace.buffers[b].name: b for b in places if trace.buffers[b].kind in GIVEN}
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

    def _place(self, microbatch: int, step: int, buffer: int) -> Storage:
        found = self._traces[step].buffers[buffer]
        is_state = found.kind is BufferKind.STATE
        key = (microbatch, found.name, found.size_bytes) if is_state else (microbatch, step, buffer)
        if key not in self._places:
            self._places[key] = allocate(found.size_bytes)
        return self._places[key]
