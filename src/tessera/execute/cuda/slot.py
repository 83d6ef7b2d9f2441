"""What requests in flight hold: weights once a card, and for each slot state, inputs, an inbox and streams.

All of it is allocated when the engine starts and kept; only temporaries come and go, inside the graphs' own
pool, of which a slot has one (its graphs never run at the same time). How much is needed is counted before
anything is allocated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.errors import DeviceMemoryError
from tessera.execute.cuda import driver
from tessera.execute.cuda.launches import bytes_of, constant_storage, given_storage
from tessera.execute.cuda.machine import Machine
from tessera.execute.cuda.order import inbox_offsets, pairs_of
from tessera.ir import BufferKind, Program, Trace

Tensors = Mapping[str, torch.Tensor]
Storage = torch.UntypedStorage
# As torch aligns what it allocates: results can depend on alignment.
ALIGN = 512
MIB = 1 << 20


@dataclass(frozen=True)
class Needs:
    """Bytes that a run allocates on each card before its first request; temporaries come on top."""

    # ordinal -> bytes
    weights: dict[int, int]
    # ordinal -> bytes of one slot
    per_slot: dict[int, int]

    def total(self, ordinal: int, slots: int) -> int:
        """Bytes on one card."""
        return self.weights.get(ordinal, 0) + slots * self.per_slot.get(ordinal, 0)


def count_needs(
    programs: Sequence[Program], traces: Sequence[Trace], ordinals: Sequence[int], resident: Mapping[str, int]
) -> Needs:
    """What programs need; `ordinals[device]` is a device's card, `resident` says which weights are on one."""
    weights: dict[int, dict[str, int]] = {o: {} for o in ordinals}
    state: dict[tuple[int, str], int] = {}
    inbox: dict[int, int] = {}
    for program in programs:
        buffers = traces[program.step].buffers
        for device, held in enumerate(program.weights):
            named = {buffers[b].name: buffers[b].size_bytes for b in held}
            weights[ordinals[device]] |= {
                n: size for n, size in named.items() if resident.get(n) != ordinals[device]
            }
        for buffer, device in program.homes:
            state[device, buffers[buffer].name] = buffers[buffer].size_bytes
        for device in range(len(program.instructions)):
            size = inbox_offsets(program, traces[program.step], device, ALIGN)[1]
            inbox[device] = max(inbox.get(device, 0), size)
    slot: dict[int, int] = dict.fromkeys(ordinals, 0)
    for (device, _), size in state.items():
        slot[ordinals[device]] += size
    for device, size in inbox.items():
        slot[ordinals[device]] += size
    return Needs({o: sum(w.values()) for o, w in weights.items()}, slot)


def check_fits(needs: Needs, free: Mapping[int, int], slots: int) -> None:
    """Raises if a card lacks the memory, with what to lower."""
    for ordinal, room in free.items():
        needed = needs.total(ordinal, slots)
        if needed <= room:
            continue
        each = needs.per_slot.get(ordinal, 0)
        fitting = (room - needs.weights.get(ordinal, 0)) // each if each else 0
        remedy = (
            f"Use {fitting} slots instead of {slots}, or a smaller batch or context."
            if fitting > 0
            else "Use a smaller batch or context, or fewer layers on this card."
        )
        raise DeviceMemoryError(
            f"the run needs {needed // MIB} MiB ({needs.weights.get(ordinal, 0) // MIB} MiB of weights, "
            f"{each // MIB} MiB a slot); {room // MIB} MiB are free",
            remedy,
            f"cuda:{ordinal}",
        )


class Resident:
    """Weights and constants, once a card, shared by all slots and plans."""

    def __init__(self, traces: Sequence[Trace], weights: Tensors) -> None:
        self._traces, self._weights = traces, weights
        self._moved: dict[tuple[int, str], Storage] = {}
        self._constants: dict[tuple[int, int, int], Storage] = {}

    def of(self, program: Program, device: int, card: torch.device) -> dict[int, Storage]:
        """Buffer -> storage of the weights that a device reads in a program."""
        buffers = self._traces[program.step].buffers
        return {b: self._storage(program.step, b, buffers[b], card) for b in program.weights[device]}

    def _storage(self, step: int, index: int, buffer: Any, card: torch.device) -> Storage:
        if buffer.constant_hex:
            key = (card.index, step, index)
            if key not in self._constants:
                self._constants[key] = constant_storage(buffer, card)
            return self._constants[key]
        storage = given_storage(buffer, self._weights)
        if storage.device == card:
            return storage
        if (card.index, buffer.name) not in self._moved:
            moved = bytes_of(storage, 0, storage.nbytes()).to(card)
            self._moved[card.index, buffer.name] = moved.untyped_storage()
        return self._moved[card.index, buffer.name]


@dataclass
class Slot:
    """One request's place: memory that outlives its graphs, and the streams they are captured on."""

    number: int
    machine: Machine
    origin: torch.cuda.Stream
    # (device, whether for short steps) -> stream
    compute: dict[tuple[int, bool], torch.cuda.Stream]
    # (src, dst) -> stream on the receiving card.
    copies: dict[tuple[int, int], torch.cuda.Stream]
    # Shared by the slot's graphs.
    pool: Any
    state: dict[tuple[int, str], Storage] = field(default_factory=dict)
    # (device, step, name) -> storage; one for all devices of a card, unless the step writes into its input.
    inputs: dict[tuple[int, int, str], Storage] = field(default_factory=dict)
    inbox: dict[int, Storage] = field(default_factory=dict)
    # Of the cards that the origin stream is not on: ordinal -> pool.
    pools: dict[int, Any] = field(default_factory=dict)

    def state_of(self, trace: Trace, program: Program, device: int) -> dict[int, Storage]:
        """Buffer -> storage of the state that lives on a device in a program."""
        return {
            buffer: self.state[device, trace.buffers[buffer].name]
            for buffer, home in program.homes
            if home == device
        }

    def inputs_of(self, trace: Trace, step: int, device: int) -> dict[int, Storage]:
        """Buffer -> storage of a step's inputs on a device."""
        return {
            b: self.inputs[device, step, trace.buffers[b].name] for b in trace.buffers_of(BufferKind.INPUT)
        }


def open_slot(number: int, machine: Machine, programs: Sequence[Program], traces: Sequence[Trace]) -> Slot:
    """Streams and zeroed memory for every program a slot may run."""
    slot = Slot(number, machine, *_streams(number, machine, programs), torch.cuda.graph_pool_handle())
    sizes: dict[int, int] = {}
    for program in programs:
        trace = traces[program.step]
        for buffer, device in program.homes:
            _zeros_once(slot.state, (device, trace.buffers[buffer].name), trace, buffer, machine.card(device))
        _open_inputs(slot, program.step, trace)
        for device in range(len(machine.devices)):
            sizes[device] = max(sizes.get(device, 0), inbox_offsets(program, trace, device, ALIGN)[1])
    for device, size in sizes.items():
        inbox = torch.zeros(size, dtype=torch.uint8, device=machine.card(device))
        slot.inbox[device] = inbox.untyped_storage()
    return slot


def _streams(number: int, machine: Machine, programs: Sequence[Program]) -> tuple[Any, Any, Any]:
    """(origin, streams for launches, streams for copies) of a slot. Copies go first: somebody waits."""
    ordinals = [d.ordinal for d in machine.devices]
    ranges = {o: driver.priorities(o) for o in set(ordinals)}
    compute = {
        (device, is_short): machine.compute_stream(device, priority(number, is_short, *ranges[ordinal]))
        for device, ordinal in enumerate(ordinals)
        for is_short in (False, True)
    }
    copies = {
        (a, b): machine.plain_stream(ordinals[b], ranges[ordinals[b]][1]) for a, b in pairs_of(programs)
    }
    return machine.plain_stream(ordinals[0]), compute, copies


def priority(number: int, is_short: bool, least: int, greatest: int) -> int:
    """The priority of a slot's launches on a real device: short steps first, then by the slot.

    A GPU serves streams of equal priority in turns. Then requests in flight advance in step, and the devices
    of a pipeline take turns instead of overlapping.
    """
    levels = least - greatest + 1
    short = levels // 2
    if is_short and short:
        return greatest + min(number, short - 1)
    return greatest + min(short + number, levels - 1)


def _open_inputs(slot: Slot, step: int, trace: Trace) -> None:
    written = {a.buffer for launch in trace.launches for a in launch.accesses if a.write or a.atomic}
    devices = slot.machine.devices
    for buffer in trace.buffers_of(BufferKind.INPUT):
        name = trace.buffers[buffer].name
        for number, device in enumerate(devices):
            first = next(i for i, d in enumerate(devices) if d.ordinal == device.ordinal)
            if first != number and buffer not in written:
                slot.inputs[number, step, name] = slot.inputs[first, step, name]
            else:
                _zeros_once(slot.inputs, (number, step, name), trace, buffer, slot.machine.card(number))


def _zeros_once(into: dict[Any, Storage], key: Any, trace: Trace, buffer: int, card: torch.device) -> None:
    """Zeros: a first run on them, before any request, reads no index out of bounds."""
    if key not in into:
        size = trace.buffers[buffer].size_bytes
        into[key] = torch.zeros(size, dtype=torch.uint8, device=card).untyped_storage()
