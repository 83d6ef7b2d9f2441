"""Stand: one program in one microbatch, as one device has it: made once, used by every run of it.

`Ground` is the device's memory under all of them. Weights are there once. Every microbatch has its state
once, by name, whatever program or lane runs on it, and one pool for everything else, since it runs one
program at a time. A program takes its places from the pool when it is first used, and keeps them, so that
launches stay bound (`launcher`); what its list has freed serves the buffers of the same size behind it. A
device's list runs in order, a send has taken its bytes when it returns, and what arrives waits in memory of
the transport for its receive: so nobody waits for memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.execute.footprint import GIVEN, touched
from tessera.execute.memory import PlacedMemory, Storage, allocate, bytes_of
from tessera.execute.schedule import until_wait
from tessera.ir import BufferKind, Program, Run, Trace, View


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
        # (microbatch, name, bytes): the plans' variants may have state of other sizes under one name.
        self._state: dict[tuple[int, str, int], Storage] = {}
        # pools[microbatch][bytes]
        self._pools: dict[int, dict[int, list[Storage]]] = defaultdict(dict)

    def stand(self, microbatch: int, program: Program, us: Sequence[float]) -> Stand:
        """`us`: modelled time of each launch on this device; empty where it is not known."""
        trace, device = self._traces[program.step], self._device
        places = self._places(microbatch, program)
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

    def _places(self, microbatch: int, program: Program) -> dict[int, Storage]:
        trace, pool = self._traces[program.step], self._pools[microbatch]
        free = {size: list(held) for size, held in pool.items()}
        places: dict[int, Storage] = {}
        for buffer, is_needed in touched(trace, program, self._device):
            found = trace.buffers[buffer]
            size = found.size_bytes
            if found.kind is BufferKind.STATE:
                key = (microbatch, found.name, size)
                if key not in self._state:
                    self._state[key] = allocate(size)
                places[buffer] = self._state[key]
            elif not is_needed:
                free.setdefault(size, []).append(places[buffer])
            elif free.get(size):
                places[buffer] = free[size].pop()
            else:
                places[buffer] = allocate(size)
                pool.setdefault(size, []).append(places[buffer])
        return places
