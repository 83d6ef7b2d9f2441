"""Graphs: one device's weights for some programs, and memory and CUDA graphs per microbatch.

Equal programs without transfers share a graph. `capture_next` captures likely graphs first; others wait for
first use. Memory is checked before allocation, except temporaries in the graphs' pools.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.direct import PeerAway
from tessera.execute.cuda.pace import Clockwork
from tessera.execute.cuda.share import InputArena, MicrobatchBuffers, ShareGraph
from tessera.execute.cuda.transport import ALIGN, GpuTransport, is_move_of_state
from tessera.execute.launcher import Launcher
from tessera.execute.memory import (
    DeviceState,
    Footprint,
    Storage,
    bytes_of,
    check_memory,
    constant,
    is_shared,
    slot_bytes,
    storage_of,
)
from tessera.execute.messages import Setup
from tessera.ir import SLOTS, BufferKind, Program, Trace

Tensors = Mapping[str, torch.Tensor]


class DeviceGraphs:
    def __init__(
        self, setup: Setup, transport: Callable[[int], GpuTransport | None] = lambda ordinal: None
    ) -> None:
        self.device = GpuDevice(setup.cluster.devices, setup.device)
        self.cluster, self._num_microbatches = setup.cluster, setup.microbatches
        self._weights: Tensors = setup.weights
        self.state = DeviceState(setup.device, self.device.card)
        self.traces = self.state.traces
        self._us: list[Sequence[float]] = []
        self.launchers: list[Launcher] = []
        self._resident: dict[object, Storage] = {}
        # By address: given, and page-locked.
        self._locked: dict[int, tuple[Storage, Storage]] = {}
        self.transport = transport(self.device.ordinal)
        keeps_links = self.transport is None or self.transport.carries_records
        self.clockwork = Clockwork(setup, self._us, self.device.card, keeps_links)
        self._programs: list[Program] = []
        # Contents of a program -> first such program; program -> the one whose graph it shares.
        self._numbers: dict[object, int] = {}
        self._shared: list[int] = []
        # By program; those that its lane can have.
        self._microbatches: list[Sequence[int]] = []
        self.buffers: dict[int, MicrobatchBuffers] = {}
        # Positions of the graphs: 1 + the receive it waits at, 2 + the receive it passed.
        self.marks = driver.pinned((setup.microbatches,), torch.int32)
        self._graphs: dict[tuple[int, int], ShareGraph] = {}
        self._missing: deque[tuple[int, int]] = deque()
        self._rehearsed: set[int] = set()
        self._dropped: set[int] = set()

    def add_steps(self, traces: Sequence[Trace], us: Sequence[Sequence[float]] = ()) -> None:
        """`us[step][launch]`: modelled time here."""
        for step, trace in enumerate(traces):
            refuse_generators(trace)
            self.traces.append(trace)
            self._us.append(us[step] if us else ())
            self.launchers.append(Launcher(trace, self.device.card))

    def add(
        self, programs: Sequence[Program], microbatches: Sequence[int], is_dropped: bool = False
    ) -> list[int]:
        """Allocates for the programs and microbatches of a lane; returns the programs' numbers, which the
        transport shares.

        `is_dropped`: only its places in the transport are kept.
        """
        first = len(self._programs)
        if is_dropped or not any(self._has_share(p) or self._state_buffers(p) for p in programs):
            microbatches = ()
        if is_dropped:
            self._dropped |= set(range(first, first + len(programs)))
        else:
            self._check_memory(programs, microbatches)
        self._programs += programs
        self._microbatches += [microbatches] * len(programs)
        for number, program in enumerate(programs, first):
            step = (program.step, program.home, program.instructions, program.weights)
            key = (step, program.homes, program.outputs)
            self._shared.append(number if program.transfers else self._numbers.setdefault(key, number))
        if self.transport is not None:
            self.transport.add(programs, self.traces)
        for microbatch in microbatches:
            if microbatch not in self.buffers:
                self.buffers[microbatch] = self._open_buffers(microbatch)
            for program in programs:
                self._allocate_for(self.buffers[microbatch], program)
        self.device.synchronize()  # graphs' streams do not wait for the zeros
        self._list_missing()
        return list(range(first, len(self._programs)))

    def drop(self, numbers: Collection[int]) -> None:
        self._dropped |= set(numbers)
        live = self._live()
        steps = {self._programs[n].step for n in live}
        kept = {(microbatch, self._shared[n]) for n in live for microbatch in self._microbatches[n]}
        self._graphs = {key: graph for key, graph in self._graphs.items() if key in kept}
        for room in self.buffers.values():
            room.arenas = {step: arena for step, arena in room.arenas.items() if step in steps}
        self._list_missing()
        torch.cuda.empty_cache()

    def keep_weights(self) -> None:
        kept: set[object] = set()
        for program in (self._programs[n] for n in self._live()):
            kept |= {self._weight_key(program.step, b) for b in program.weights[self.device.number]}
        self._resident = {key: storage for key, storage in self._resident.items() if key in kept}

    def _live(self) -> list[int]:
        return [number for number in range(len(self._programs)) if number not in self._dropped]

    def graph(self, microbatch: int, number: int) -> ShareGraph | None:
        """None if this device has no share."""
        key = (microbatch, self._shared[number])
        if key not in self._graphs and self._has_share(self._programs[number]):
            self._graphs[key] = self._capture(self.buffers[microbatch], number)
        return self._graphs.get(key)

    def capture_next(self) -> bool:
        """False if none is missing."""
        while self._missing:
            microbatch, number = self._missing.popleft()
            if (microbatch, self._shared[number]) not in self._graphs:
                with suppress(PeerAway):  # captured on first use after the peer is back
                    self.graph(microbatch, number)
                if not self._missing:
                    torch.cuda.empty_cache()  # of rehearsals
                return True
        return False

    def _list_missing(self) -> None:
        """Early microbatches first, then the extreme sizes of steps."""

        def rank(number: int) -> tuple[int, int]:
            place = sizes.index(self._size(number))
            return min(place, len(sizes) - 1 - place), number

        shares = [n for n in self._live() if self._has_share(self._programs[n])]
        sizes = sorted({self._size(n) for n in shares})
        ranked = sorted(shares, key=rank)
        self._missing = deque(
            (microbatch, number)
            for microbatch in sorted({m for number in shares for m in self._microbatches[number]})
            for number in ranked
            if microbatch in self._microbatches[number]
            and (microbatch, self._shared[number]) not in self._graphs
        )

    def _size(self, number: int) -> int:
        step = self.traces[self._programs[number].step].step
        return step.batch * step.context

    def relink(self, peer: int, epoch: int) -> None:
        if self.transport is None or not self.transport.relink(peer, epoch):
            return
        mine = self.device.number
        for microbatch, number in list(self._graphs):
            pairs = {(t.src, t.dst) for t in self._programs[number].transfers}
            if (mine, peer) in pairs:
                del self._graphs[microbatch, number]
        self._list_missing()

    def close(self) -> None:
        self._graphs, self.buffers, self._resident, self._weights, self._locked = {}, {}, {}, {}, {}
        self.state = DeviceState(self.device.number, self.device.card)
        if self.transport is not None:
            self.transport.close()
        self.device.close()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _has_share(self, program: Program) -> bool:
        number = self.device.number
        return bool(program.instructions[number]) or any(at == number for _, at in program.outputs)

    def _capture(self, room: MicrobatchBuffers, number: int) -> ShareGraph:
        program = self._programs[number]
        base = self._base(room, program)
        slots = self.state.slots(room.number, program)
        if self.transport is not None:
            self.transport.meet(number)
        share = (program, number, self.traces[program.step], room, base, slots, self.launchers[program.step])
        flags = (self._is_short(program.step), number in self._rehearsed)
        graph = ShareGraph(*share, self.device, self.transport, self.clockwork, *flags)
        self._rehearsed.add(number)
        return graph

    def _is_short(self, step: int) -> bool:
        """Less than half the longest step's time: it gets priority."""
        totals = [sum(row) for row in self._us]
        return bool(totals) and 2 * totals[step] < max(totals)

    def _base(self, room: MicrobatchBuffers, program: Program) -> dict[int, Storage]:
        number, trace = self.device.number, self.traces[program.step]
        base = {b: self._weight(program.step, b) for b in program.weights[number]}
        fetched = {b for slot in self.state.slots(room.number, program).values() for b in slot}
        if fetched:
            driver.fetch_kernel(self.device.ordinal)
        base |= {b: self._pinned(program.step, b) for b in fetched}
        for buffer in trace.buffers_of(BufferKind.INPUT):
            base[buffer] = room.arenas[program.step].storage(trace.buffers[buffer].name)
        base |= {b: self.state.buffer(room.number, program, b) for b in self._state_buffers(program)}
        for index, record in enumerate(trace.buffers):
            if record.size_bytes == 0 and index not in base:  # never sent, but any launch may name it
                base[index] = torch.empty(0, dtype=torch.uint8, device=self.device.card).untyped_storage()
        return base

    def _state_buffers(self, program: Program) -> list[int]:
        """State that lives here, or moves from or to here."""
        number = self.device.number
        buffers = {buffer for buffer, home in program.homes if home == number}
        for at, transfer in enumerate(program.transfers):
            if is_move_of_state(program, at) and number in (transfer.src, transfer.dst):
                buffers.add(transfer.buffer)
        return sorted(buffers)

    def _weight(self, step: int, index: int) -> Storage:
        buffer, key = self.traces[step].buffers[index], self._weight_key(step, index)
        if key not in self._resident:
            if buffer.constant_hex:
                self._resident[key] = constant(buffer, self.device.card)
            else:
                storage = storage_of(buffer, self._weights)
                if storage.device != self.device.card:
                    storage = bytes_of(storage, 0, storage.nbytes()).to(self.device.card).untyped_storage()
                self._resident[key] = storage
        return self._resident[key]

    def _pinned(self, step: int, index: int) -> Storage:
        storage = storage_of(self.traces[step].buffers[index], self._weights)
        place = storage.data_ptr()
        if storage.device.type == "cpu" and place not in self._locked:
            contents = bytes_of(storage, 0, storage.nbytes())
            # Tensors of files are not aligned.
            contents = contents.clone() if place % driver.FETCH_ALIGN else contents
            driver.pin(contents)
            self._locked[place] = storage, contents.untyped_storage()
        return self._locked.get(place, (storage, storage))[1]

    def _weight_key(self, step: int, index: int) -> object:
        buffer = self.traces[step].buffers[index]
        return (step, index) if buffer.constant_hex else buffer.name

    def _open_buffers(self, number: int) -> MicrobatchBuffers:
        place, device, (least, greatest) = len(self.buffers), self.device, self.device.priorities
        compute = {
            is_short: device.compute_stream(priority(place, is_short, least, greatest))
            for is_short in (False, True)
        }
        sends = {
            d: device.plain_stream(greatest) for d in range(len(self.cluster.devices)) if d != device.number
        }
        mark = self.marks.data_ptr() + 4 * number
        streams = (device.plain_stream(), compute, sends, device.plain_stream())
        return MicrobatchBuffers(number, *streams, torch.cuda.graph_pool_handle(), mark)

    def _allocate_for(self, room: MicrobatchBuffers, program: Program) -> None:
        """Zeros are valid indices."""
        trace = self.traces[program.step]
        for index in self._state_buffers(program):
            self.state.buffer(room.number, program, index)
        self.state.slots(room.number, program)
        if program.step in room.arenas:
            return
        places: dict[str, tuple[int, int]] = {}
        total = 0
        for buffer in (trace.buffers[b] for b in trace.buffers_of(BufferKind.INPUT)):
            places[buffer.name] = total, buffer.size_bytes
            total += -(-buffer.size_bytes // ALIGN) * ALIGN
        zeros = torch.zeros(total, dtype=torch.uint8, device=self.device.card)
        room.arenas[program.step] = InputArena(zeros, places)

    def _check_memory(self, new: Sequence[Program], microbatches: Sequence[int]) -> None:
        number, card = self.device.number, self.device.card
        weights: dict[str, int] = {}
        pages: dict[tuple[int, str], int] = {}
        # A microbatch's state, by name and size, and its places for fetched weights, by their sizes.
        sizes: dict[tuple[object, ...], int] = {}
        for program in new:
            buffers = self.traces[program.step].buffers
            slots = slot_bytes(self.traces[program.step], program, number)
            sizes[(slots,)] = SLOTS * sum(slots)
            for weight in (buffers[b] for b in program.weights[number]):
                held = self._weights.get(weight.name)
                if weight.name not in self._resident and (held is None or held.device != card):
                    weights[weight.name] = weight.size_bytes
            for state in (buffers[b] for b in self._state_buffers(program)):
                if not is_shared(program, state.name):
                    sizes[state.name, state.size_bytes] = state.size_bytes
                elif state.name not in self.state.homes.get(program.home, {}):
                    pages[program.home, state.name] = state.size_bytes
        allocated = {*self.state.by_microbatch, *self.state.rings}
        each = [sum(n for key, n in sizes.items() if (m, *key) not in allocated) for m in microbatches]
        inbox = self.transport.new_bytes(new, self.traces) if self.transport is not None else 0
        most, total = max(each, default=0) + inbox // self._num_microbatches, sum(each) + inbox
        here = (sum(weights.values()), most, len(each), total, sum(pages.values()))
        footprint = Footprint(self.device.record.name, *here)
        check_memory(footprint, torch.cuda.mem_get_info(card)[0], " that are free")


def refuse_generators(trace: Trace) -> None:
    """The generator's state would have to live in the graph."""
    drawn = [b.name for b in trace.buffers if b.is_generator]
    if drawn:
        message = f"the {trace.step.kind} step draws random numbers ({', '.join(drawn)})"
        raise WorkerError(message, "Draw them outside of the step and pass them in as an input.")


def priority(place: int, is_short: bool, least: int, greatest: int) -> int:
    """Short steps first, then by the microbatch's place among those on this device.

    With equal priorities all microbatches advance in step, and the devices of a pipeline take turns instead
    of overlapping.
    """
    levels = least - greatest + 1
    short = levels // 2
    if is_short and short:
        return greatest + min(place, short - 1)
    return greatest + min(short + place, levels - 1)
