"""Memory: what a device must hold for some plans, where its buffers are, and tensors as views of them.

The footprint is computed before anything is allocated, in multiples of `ALIGN`:

    peak = weights + pages of homes + the most that each microbatch needs on a lane it can have
    one microbatch = its lane's own state + the peak of a program's other buffers, each counted until its
                     `Free`, + places of fetched weights

Weights of several plans are counted once. Not counted: scratch memory inside a launch,
and the shared memory of transfers (`landing`).
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import torch

from tessera import ir
from tessera.errors import DeviceMemoryError, MismatchError, WorkerError, first_line
from tessera.execute.lanes import shared_out
from tessera.execute.lower import check_programs, fetched_by, lower
from tessera.execute.schedule import until_wait
from tessera.ir import units
from tessera.kernels import BY_ROW, is_paged
from tessera.kernels.choice import LATE_INPUTS
from tessera.kernels.tensors import flat_bytes

# programs[lane][index]
Programs = Sequence[Sequence[ir.Program]]
# Kinds of buffers that have contents before a step.
FILLED = (ir.BufferKind.INPUT, ir.BufferKind.STATE)
ALIGN = 64
REMEDY = "Give every tensor in the shape that was captured, or capture the trace again with this program."
# See `part_of`.
PART = re.compile(r"\[(\d+):(\d+)/(\d+)(?:,(\d+)x(\d+))?\]$")
Storage = torch.UntypedStorage
Make = Callable[[int], Storage]
# Launch -> weight -> the place it is fetched to.
Slots = Mapping[int, Mapping[int, Storage]]
# (home, -1), or (lane, microbatch) for a microbatch's own state.
StatePlace = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    device: str
    weight_bytes: int
    microbatch_bytes: int
    microbatches: int
    held_bytes: int
    home_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.weight_bytes + self.home_bytes + self.held_bytes


def is_shared(program: ir.Program, name: str) -> bool:
    return program.home >= 0 and is_paged(name)


def is_cleared(program: ir.Program, name: str) -> bool:
    """False for rows: the first step of a sequence clears them, and one may have arrived before the
    microbatch opens.
    """
    return not is_shared(program, name) and not name.startswith(BY_ROW)


def ready_programs(plan: ir.Plan) -> tuple[tuple[ir.Program, ...], ...]:
    """The lowered programs of each lane, proved by `check_programs`."""
    lanes = lower(plan)
    for programs in lanes:
        check_programs(plan, programs)
    return lanes


def footprints(
    plans: Sequence[ir.Plan], programs: Sequence[Programs], microbatches: Sequence[Sequence[int]] = ()
) -> tuple[Footprint, ...]:
    """`microbatches`: those that each plan can have; by default, as `Lanes` gives them."""
    by_device = []
    for index, device in enumerate(plans[0].cluster.devices):
        weights = {
            w: s for p, lanes in zip(plans, programs, strict=True) for w, s in _weights(p, lanes, index)
        }
        pages: dict[tuple[str, str], int] = {}
        each = [
            [_lane_bytes(plan, lane, index, pages) for lane in lanes]
            for plan, lanes in zip(plans, programs, strict=True)
        ]
        held: dict[int, int] = {}
        for numbers, lanes in zip(microbatches or shared_out(plans, None), each, strict=True):
            held |= {number: max(held.get(number, 0), *lanes) for number in numbers}
        if len(plans) == 1 and (table := plans[0].lane_table):  # any microbatch may use the largest lane
            held = {number: each[0][table[number % len(table)]] for number in held}
        most, num = max(max(lanes) for lanes in each), sum(size > 0 for size in held.values())
        sizes = (sum(weights.values()), most, num, sum(held.values()), sum(pages.values()))
        by_device.append(Footprint(device.name, *sizes))
    return tuple(by_device)


def touched(trace: ir.Trace, program: ir.Program, device: int) -> Iterator[tuple[int, bool]]:
    """(buffer, True) at first need, inputs and state at the start; (buffer, False) after last use. Weights
    are left out, except empty ones: they are never sent, but any launch may name them.
    """
    column, named = program.instructions[device], named_on(trace, program, device)
    seen = set(trace.buffers_of(ir.BufferKind.WEIGHT))
    for index, buffer in enumerate(trace.buffers):
        if buffer.size_bytes == 0 or (index in named and buffer.kind in FILLED):
            seen.add(index)
            yield index, True
    for instruction in column:
        if isinstance(instruction, ir.Free):
            yield instruction.buffer, False
            continue
        for index in _named(trace, program, instruction):
            if index not in seen:
                seen.add(index)
                yield index, True


def named_on(trace: ir.Trace, program: ir.Program, device: int) -> set[int]:
    views = {name: view.buffer for name, view in trace.outputs}
    named = {b for instruction in program.instructions[device] for b in _named(trace, program, instruction)}
    named |= {views[name] for name, holder in program.outputs if holder == device}
    return named | {b for b, home in program.homes if home == device}


def late_at(trace: ir.Trace, program: ir.Program, device: int) -> int:
    """Position of the first instruction that reads a late input."""
    late = {b for b in trace.buffers_of(ir.BufferKind.INPUT) if trace.buffers[b].name in LATE_INPUTS}
    column = program.instructions[device]
    positions = (n for n, x in enumerate(column) if not late.isdisjoint(_named(trace, program, x)))
    return next(positions, len(column))


def _named(trace: ir.Trace, program: ir.Program, instruction: ir.Instruction) -> set[int]:
    if isinstance(instruction, ir.Run):
        return trace.launches[instruction.launch].buffers
    if isinstance(instruction, ir.Send | ir.Recv):
        return {program.transfers[instruction.transfer].buffer}
    return set()


def _lane_bytes(
    plan: ir.Plan, programs: Sequence[ir.Program], device: int, pages: dict[tuple[str, str], int]
) -> int:
    """Adds the bytes of its home to `pages`."""
    state: dict[str, int] = {}
    most = ring = 0
    for program in programs:
        buffers = plan.graphs[program.step].trace.buffers
        now = 0
        for index, is_needed in touched(plan.graphs[program.step].trace, program, device):
            size, name = _aligned(buffers[index].size_bytes), buffers[index].name
            if buffers[index].kind is ir.BufferKind.STATE and plan.home and is_paged(name):
                pages[plan.home, name] = size
            elif buffers[index].kind is ir.BufferKind.STATE:
                state[name] = size
            else:
                now += size if is_needed else -size
                most = max(most, now)
        ring = max(ring, sum(slot_bytes(plan.graphs[program.step].trace, program, device)))
    return sum(state.values()) + most + ir.SLOTS * ring


def fetches(trace: ir.Trace, program: ir.Program, device: int) -> dict[int, list[int]]:
    """Launch -> the weights that are fetched for it."""
    launches = (x.launch for x in program.instructions[device] if isinstance(x, ir.Fetch))
    return {launch: fetched_by(trace, program, device, launch) for launch in launches}


def slot_bytes(trace: ir.Trace, program: ir.Program, device: int) -> tuple[int, ...]:
    """Bytes of a place for the weights of one launch."""
    weights = fetches(trace, program, device).values()
    each = [[trace.buffers[buffer].size_bytes for buffer in buffers] for buffers in weights]
    return tuple(map(max, zip_longest(*each, fillvalue=0)))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN) * ALIGN


def check_fits(plans: Sequence[ir.Plan], needed: Sequence[Footprint]) -> None:
    for device, footprint in zip(plans[0].cluster.devices, needed, strict=True):
        check_memory(footprint, device.memory_bytes)


def check_memory(footprint: Footprint, memory_bytes: int, what: str = "") -> None:
    over = footprint.peak_bytes - memory_bytes
    if over <= 0:
        return
    text = units.size
    pages = f", {text(footprint.home_bytes)} of pages" if footprint.home_bytes else ""
    message = (
        f"{text(footprint.peak_bytes)} are needed ({text(footprint.weight_bytes)} of weights{pages} and "
        f"{footprint.microbatches} microbatches of {text(footprint.microbatch_bytes)}), "
        f"{text(over)} more than its {text(memory_bytes)}{what}"
    )
    raise DeviceMemoryError(message, _remedy(footprint, memory_bytes), f"device {footprint.device}")


def landing(program: ir.Program, src: int, dst: int) -> tuple[dict[int, int], int]:
    """Transfer -> offset in one microbatch's memory from src to dst, and the bytes used."""
    places: dict[int, int] = {}
    used = 0
    for number, transfer in enumerate(program.transfers):
        if (transfer.src, transfer.dst) == (src, dst):
            places[number] = used
            used += _aligned(transfer.num_bytes)
    return places, used


def _weights(plan: ir.Plan, programs: Programs, device: int) -> list[tuple[str, int]]:
    sizes = []
    for lane in programs:
        for program in lane:
            trace = plan.graphs[program.step].trace
            for buffer in program.weights[device]:
                weight = trace.buffers[buffer]
                name = f"{weight.name} of {trace.digest}" if weight.constant_hex else weight.name
                sizes.append((name, weight.size_bytes))
    return sizes


def _remedy(footprint: Footprint, memory_bytes: int) -> str:
    room = memory_bytes - footprint.weight_bytes - footprint.home_bytes
    fitting = room // footprint.microbatch_bytes if footprint.microbatch_bytes else 0
    if fitting >= 1:
        return f"Lower --microbatches to {fitting}, or capture with a smaller batch or context."
    if room <= 0:
        return f"Put {units.size(-room)} of its weights on another device: plan again with more devices."
    share = 1 - room / footprint.microbatch_bytes
    return f"Use one microbatch, and capture with a batch or context at least {share:.0%} smaller."


def tensor_of(storage: Storage, view: ir.View) -> torch.Tensor:
    empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
    tensor = empty.set_(storage, view.offset, view.shape, view.stride)
    tensor = torch._conj(tensor) if "conj" in (view.flags or ()) else tensor
    return torch._neg_view(tensor) if "neg" in (view.flags or ()) else tensor


def bytes_of(storage: Storage, start: int, stop: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def allocate(size_bytes: int) -> Storage:
    """Torch's alignment: results can depend on it."""
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def constant(buffer: ir.Buffer, device: torch.device | None = None) -> Storage:
    data = torch.frombuffer(bytearray.fromhex(buffer.constant_hex), dtype=torch.uint8)
    return data.to(device or torch.device("cpu"), copy=True).untyped_storage()


def fresh(trace: ir.Trace, device: torch.device, fill: Callable[..., torch.Tensor] = torch.empty) -> Make:
    sizes = [buffer.size_bytes for buffer in trace.buffers]
    return lambda buffer: fill(sizes[buffer], dtype=torch.uint8, device=device).untyped_storage()


def is_allocation(trace: ir.Trace, launch: int) -> bool:
    """True if the result is uninitialised memory."""
    return trace.kernel_of(launch).name.startswith(("aten.empty", "aten.new_empty"))


def bind_storages(
    trace: ir.Trace,
    kinds: Collection[ir.BufferKind],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device | None = None,
    is_partial: bool = False,
) -> dict[int, Storage]:
    """Includes constants of the trace. `is_partial`: leave out buffers without a tensor; else raise
    MismatchError.
    """
    storages: dict[int, Storage] = {}
    for index in (b for kind in kinds for b in trace.buffers_of(kind)):
        buffer = trace.buffers[index]
        if buffer.constant_hex:
            storages[index] = constant(buffer, device)
        elif not is_partial or {buffer.name, whole_of(buffer.name)} & tensors.keys():
            storages[index] = storage_of(buffer, tensors)
    return storages


def whole_of(name: str) -> str:
    """Name of the weight that a part belongs to; any other name itself."""
    return name.partition("[")[0] if PART.search(name) else name


def part_of(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor by name; `W[a:b/n]` is bytes a to b of each n bytes of W, as a matrix that views them.

    `W[a:b/n,kxm]` is those bytes as 16-bit matrices of k rows and m columns, transposed.
    """
    match = PART.search(name)
    if name in tensors or match is None:
        return tensors[name]
    first, last, width, rows, columns = (int(number or 0) for number in match.groups())
    storage = tensors[whole_of(name)].detach().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    part = flat.view(-1, width)[:, first:last]
    return part.view(torch.int16).view(-1, rows, columns).transpose(1, 2) if rows else part


@contextmanager
def sharing(what: str) -> Iterator[None]:
    """Around shared memory, of which a container has little."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        for file in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):  # torch leaves the one it could not fill
            file.unlink(missing_ok=True)
        remedy = "Make room in /dev/shm (containers: --shm-size), or allow more open files (ulimit -n)."
        raise WorkerError(f"no shared memory for {what}: {first_line(error)}", remedy) from error


def copied(view: torch.Tensor, is_shared_memory: bool = False) -> torch.Tensor:
    if not is_shared_memory or view.device.type != "cpu":
        return view.clone(memory_format=torch.contiguous_format)
    storage = torch.UntypedStorage._new_shared(view.nbytes)
    flat = torch.empty(0, dtype=view.dtype).set_(storage).view(view.shape)
    return flat.copy_(view)


def storage_of(buffer: ir.Buffer, tensors: Mapping[str, torch.Tensor]) -> Storage:
    if not {buffer.name, whole_of(buffer.name)} & tensors.keys():
        raise MismatchError(f"there is no {buffer.kind} '{buffer.name}'", REMEDY)
    tensor = tensors[buffer.name] if buffer.name in tensors else copied(part_of(buffer.name, tensors))
    tensor = tensor.detach()
    if buffer.kind is ir.BufferKind.INPUT and tensor.nbytes < buffer.size_bytes and tensor.is_contiguous():
        padded = torch.zeros(buffer.size_bytes, dtype=torch.uint8, device=tensor.device)
        padded[: tensor.nbytes] = flat_bytes(tensor)
        return padded.untyped_storage()
    storage: Storage = tensor.untyped_storage()
    if storage.nbytes() != buffer.size_bytes:
        sizes = f"{storage.nbytes()} bytes, but {buffer.size_bytes} in the trace"
        raise MismatchError(f"{buffer.kind} '{buffer.name}' has {sizes}", REMEDY)
    return storage


class Memory:
    def __init__(self, weights: Mapping[int, Storage], make: Make | None = None) -> None:
        """`make` allocates a buffer that is named before it is written."""
        self._weights, self._make = weights, make
        self._storages: dict[int, Storage] = {}
        self.calls: dict[int, Callable[[], None]] = {}
        self.slots: Slots = {}

    def get(self, buffer: int) -> Storage:
        """A KeyError here is a bug in lowering."""
        storage = self._storages.get(buffer)
        if storage is None:
            storage = self._weights.get(buffer)
        if storage is None:
            if self._make is None:
                raise KeyError(buffer)
            storage = self._storages[buffer] = self._make(buffer)
        return storage

    def use_slot(self, launch: int) -> None:
        self._storages.update(self.slots.get(launch, ()))

    def is_fixed(self, buffer: int) -> bool:
        return False

    def fetch(self, launch: int) -> None:
        for buffer, place in self.slots[launch].items():
            source = self._weights[buffer]
            bytes_of(place, 0, source.nbytes()).copy_(bytes_of(source, 0, source.nbytes()))

    def put(self, buffer: int, storage: Storage) -> None:
        self._storages[buffer] = storage

    def free(self, buffer: int) -> None:
        self._storages.pop(buffer, None)


class PlacedMemory(Memory):
    def __init__(self, weights: Mapping[int, Storage], places: Mapping[int, Storage]) -> None:
        super().__init__(weights)
        self._storages.update(places)

    def is_fixed(self, buffer: int) -> bool:
        return buffer in self._storages or buffer in self._weights

    def put(self, buffer: int, storage: Storage) -> None:
        """An input may be given in part, its first bytes."""
        place = self._storages[buffer]
        if place.data_ptr() != storage.data_ptr():
            size = min(place.nbytes(), storage.nbytes())
            bytes_of(place, 0, size).copy_(bytes_of(storage, 0, size))


@dataclass(frozen=True)
class ProgramMemory:
    program: ir.Program
    memory: PlacedMemory
    buffers: dict[str, int]  # inputs and state, by name
    outputs: dict[str, ir.View]
    state: dict[str, torch.Tensor]
    until_wait_us: Sequence[float]
    late_at: int
    # The worker's, by position of an instruction.
    actions: list[Callable[[Any], object] | None] = field(default_factory=list)


class DeviceState:
    """Pages once per home, a microbatch's own state, and places of fetched weights."""

    def __init__(self, device: int, card: torch.device) -> None:
        self._device, self._card = device, card
        self.traces: list[ir.Trace] = []
        self.homes: dict[int, dict[str, Storage]] = defaultdict(dict)
        # (microbatch, name, bytes): plans may have state of different sizes under one name.
        self.by_microbatch: dict[tuple[int, str, int], Storage] = {}
        # (microbatch, bytes of a place)
        self.rings: dict[tuple[int, tuple[int, ...]], list[list[Storage]]] = {}

    def buffer(self, microbatch: int, program: ir.Program, index: int) -> Storage:
        """Zeros at first: finite, and valid indices."""
        buffer = self.traces[program.step].buffers[index]
        held: dict[Any, Storage] = self.by_microbatch
        key: Any = (microbatch, buffer.name, buffer.size_bytes)
        if is_shared(program, buffer.name):
            held, key = self.homes[program.home], buffer.name
        if key not in held:
            held[key] = self._zeros(buffer.size_bytes)
        return held[key]

    def named(self, microbatch: int, program: ir.Program) -> dict[str, torch.Tensor]:
        buffers = self.traces[program.step].buffers
        contents: dict[str, torch.Tensor] = {}
        for index, home in program.homes:
            if home == self._device:
                storage = self.buffer(microbatch, program, index)
                contents[buffers[index].name] = bytes_of(storage, 0, storage.nbytes())
        return contents

    def find(self, place: StatePlace, name: str, programs: Sequence[Sequence[ir.Program]]) -> Storage | None:
        """`programs`: by lane. None: not here."""
        number, microbatch = place
        if microbatch < 0:
            return self.homes.get(number, {}).get(name)
        for program in programs[number] if 0 <= number < len(programs) else ():
            for index, device in program.homes:
                if device == self._device and self.traces[program.step].buffers[index].name == name:
                    return self.buffer(microbatch, program, index)
        return None

    def slots(self, microbatch: int, program: ir.Program) -> Slots:
        trace = self.traces[program.step]
        sizes = slot_bytes(trace, program, self._device)
        if (microbatch, sizes) not in self.rings:
            self.rings[microbatch, sizes] = [[self._zeros(size) for size in sizes] for _ in range(ir.SLOTS)]
        ring = self.rings[microbatch, sizes]
        in_turn = zip(fetches(trace, program, self._device).items(), cycle(ring), strict=False)
        return {launch: dict(zip(buffers, places, strict=False)) for (launch, buffers), places in in_turn}

    def drop(self, homes: Iterable[int], kept: Collection[int]) -> None:
        """`kept`: microbatches that may be opened again."""
        for home in homes:
            self.homes.pop(home, None)
        self.by_microbatch = {key: held for key, held in self.by_microbatch.items() if key[0] in kept}
        self.rings = {key: ring for key, ring in self.rings.items() if key[0] in kept}

    def _zeros(self, size_bytes: int) -> Storage:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._card).untyped_storage()


class WorkerMemory(DeviceState):
    def __init__(self, device: int) -> None:
        super().__init__(device, torch.device("cpu"))
        self._weights: list[dict[int, Storage]] = []
        self._pools: dict[int, dict[int, list[Storage]]] = defaultdict(dict)

    def add_step(self, trace: ir.Trace, weights: dict[int, Storage]) -> None:
        self.traces.append(trace)
        self._weights.append(weights)

    def add_homes(self, programs: Iterable[ir.Program]) -> None:
        for program in programs:
            for index, device in program.homes:
                name = self.traces[program.step].buffers[index].name
                if device == self._device and is_shared(program, name):
                    self.buffer(0, program, index)

    def program_memory(self, microbatch: int, program: ir.Program, us: Sequence[float]) -> ProgramMemory:
        trace, device = self.traces[program.step], self._device
        places = self._places(microbatch, program)
        memory = PlacedMemory(self._weights[program.step], places)
        memory.slots = self.slots(microbatch, program)
        buffers = {trace.buffers[b].name: b for b in places if trace.buffers[b].kind in FILLED}
        names = {name for name, holder in program.outputs if holder == device}
        outputs = {name: view for name, view in trace.outputs if name in names}
        state = self.named(microbatch, program)
        until: Sequence[float] = ()
        if us:
            until = until_wait(
                program.instructions[device], lambda x: us[x.launch] if isinstance(x, ir.Run) else 0.0
            )
        late = late_at(trace, program, device)
        return ProgramMemory(program, memory, buffers, outputs, state, until, late)

    def _places(self, microbatch: int, program: ir.Program) -> dict[int, Storage]:
        trace, pool = self.traces[program.step], self._pools[microbatch]
        free = {size: list(held) for size, held in pool.items()}
        places: dict[int, Storage] = {}
        for index, is_needed in touched(trace, program, self._device):
            buffer = trace.buffers[index]
            size = buffer.size_bytes
            if buffer.kind is ir.BufferKind.STATE:
                places[index] = self.buffer(microbatch, program, index)
            elif not is_needed:
                free.setdefault(size, []).append(places[index])
            elif free.get(size):
                places[index] = free[size].pop()
            else:
                places[index] = allocate(size)
                pool.setdefault(size, []).append(places[index])
        return places
