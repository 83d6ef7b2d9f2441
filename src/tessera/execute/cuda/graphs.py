"""DeviceGraphs: what one device holds for some programs: weights, and memory and graphs by microbatch.

Every microbatch has one graph for each program, over the same weights and its own state; programs without
transfers that do the same share a graph. Graphs are captured when `prepare` is called, or when they are first
asked for. Memory is counted before anything is allocated; temporaries come on top, inside the graphs' own
pools.

Used by a worker (`worker`), with a transport, and without one to measure steps that run whole on a device.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from tessera.errors import DeviceMemoryError, WorkerError
from tessera.execute import driver
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.graph import MicrobatchRoom, ShareGraph
from tessera.execute.cuda.ipc import PeerAway
from tessera.execute.cuda.pace import Clockwork
from tessera.execute.cuda.transport import GpuTransport, is_move_of_state
from tessera.execute.kernel_launch import Launchable
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Storage, bytes_of, constant, given_storage
from tessera.ir import BufferKind, Cluster, Program, Trace

Tensors = Mapping[str, torch.Tensor]
# Step -> compiled objects by kernel.
Kernels = Mapping[int, Mapping[int, Launchable]]
MIB = 1 << 20


class DeviceGraphs:
    """The graphs of one device; `close` gives everything back."""

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        traces: Sequence[Trace],
        weights: Tensors,
        num_microbatches: int,
        *,
        us: Sequence[Sequence[float]] = (),
        kernels: Kernels | None = None,
        scale: float = 1.0,
        is_profiled: bool = False,
        transport: Callable[[GpuDevice], GpuTransport] | None = None,
    ) -> None:
        """`us[step][launch]`: modelled time on this device. `kernels`: compiled objects, valid on its GPU.

        `scale`: see `pace`. `is_profiled`: every launch and send is stamped, which costs a few
        microseconds each.
        """
        for trace in traces:
            refuse_generators(trace)
        self.device = GpuDevice(cluster.devices, number)
        self.traces, self.cluster, self.num_microbatches = tuple(traces), cluster, num_microbatches
        self._weights, self._us = weights, us
        self._resident: dict[object, Storage] = {}
        card = self.device.card
        self._launchers = [Launcher(t, card, (kernels or {}).get(step)) for step, t in enumerate(traces)]
        self.transport = transport(self.device) if transport is not None else None
        keeps_links = self.transport is None or self.transport.carries_records
        self._clockwork = Clockwork(
            cluster, number, us, num_microbatches, scale, is_profiled, card, keeps_links
        )
        self._programs: list[Program] = []
        # What a program does -> the first that does it; program -> whose graph it has.
        self._numbers: dict[object, int] = {}
        self._shared: list[int] = []
        self._rooms: list[MicrobatchRoom] = []
        # Where each microbatch's graph is, written by the graph itself: 1 + the receive that it waits at, and
        # 2 + the receive that it has passed.
        self.marks = driver.pinned((num_microbatches,), torch.int32)
        # (microbatch, program)
        self._graphs: dict[tuple[int, int], ShareGraph] = {}
        # Programs whose launches have set themselves up.
        self._rehearsed: set[int] = set()

    def add(self, programs: Sequence[Program]) -> list[int]:
        """Makes room for the programs of a lane; gives their numbers, which the transport counts too."""
        self._check_memory(programs)
        first = len(self._programs)
        self._programs += programs
        for number, program in enumerate(programs, first):
            # Programs without transfers that do the same share a graph; the first of them has it.
            key = (program.step, program.instructions, program.weights, program.homes, program.outputs)
            self._shared.append(number if program.transfers else self._numbers.setdefault(key, number))
        if self.transport is not None:
            self.transport.add(programs, self.traces)
        while len(self._rooms) < self.num_microbatches:
            self._rooms.append(self._open_room(len(self._rooms)))
        for room in self._rooms:
            for program in programs:
                self._make_room(room, program)
        self.device.synchronize()  # graphs run on streams that wait for nobody, not for zeros either
        return list(range(first, len(self._programs)))

    def room(self, microbatch: int) -> MicrobatchRoom:
        return self._rooms[microbatch]

    def graph(self, microbatch: int, number: int) -> ShareGraph | None:
        """The graph of a program in a microbatch; None where this device has no share in it."""
        key = (microbatch, self._shared[number])
        if key not in self._graphs and self._has_share(self._programs[number]):
            self._graphs[key] = self._capture(self._rooms[microbatch], number)
        return self._graphs.get(key)

    def prepare(self, first: int = 0) -> None:
        """Captures what is not captured yet, of the programs from number `first` on."""
        for microbatch in range(self.num_microbatches):
            for number in range(first, len(self._programs)):
                with suppress(PeerAway):  # captured when it is back, and asked for
                    self.graph(microbatch, number)
        self.device.synchronize()
        torch.cuda.empty_cache()  # of rehearsals

    def forget(self, microbatch: int, first: int) -> None:
        """Lets go of a microbatch's graphs that no program from number `first` on shares."""
        kept = set(self._shared[first:])
        for key in [k for k in self._graphs if k[0] == microbatch and k[1] < first and k[1] not in kept]:
            del self._graphs[key]

    def relink(self, peer: int, epoch: int) -> bool:
        """The link to a peer is opened anew; True if what sends there must be captured again."""
        if self.transport is None or not self.transport.relink(peer, epoch):
            return False
        mine = self.device.number
        for microbatch, number in list(self._graphs):
            pairs = {(t.src, t.dst) for t in self._programs[number].transfers}
            if (mine, peer) in pairs:
                del self._graphs[microbatch, number]
        return True

    def close(self) -> None:
        self._graphs, self._rooms = {}, []
        if self.transport is not None:
            self.transport.close()
        self.device.close()
        with suppress(RuntimeError):  # a GPU that has failed gives nothing back, and has said so
            torch.cuda.empty_cache()

    def _has_share(self, program: Program) -> bool:
        number = self.device.number
        return bool(program.instructions[number]) or any(at == number for _, at in program.outputs)

    def _capture(self, room: MicrobatchRoom, number: int) -> ShareGraph:
        program = self._programs[number]
        step, flags = program.step, (self._is_short(program.step), number in self._rehearsed)
        if self.transport is not None:
            self.transport.meet(number)
        place = (self.device, room, self._base(room, program), self._launchers[step])
        made = ShareGraph(program, number, self.traces[step], *place, self._clockwork, self.transport, *flags)
        self._rehearsed.add(number)
        return made

    def _is_short(self, step: int) -> bool:
        """True of a step that takes less than half as long as the longest; it goes before long ones."""
        totals = [sum(row) for row in self._us]
        return bool(totals) and 2 * totals[step] < max(totals)

    def _base(self, room: MicrobatchRoom, program: Program) -> dict[int, Storage]:
        """What the device has before the first launch."""
        number, trace = self.device.number, self.traces[program.step]
        base = {b: self._weight(program.step, b) for b in program.weights[number]}
        for buffer in trace.buffers_of(BufferKind.INPUT):
            base[buffer] = room.inputs[program.step, trace.buffers[buffer].name]
        for buffer in self._state_buffers(program):
            base[buffer] = room.state[trace.buffers[buffer].name]
        for index, found in enumerate(trace.buffers):
            if found.size_bytes == 0 and index not in base:  # nobody sends it, and everybody may name it
                base[index] = torch.empty(0, dtype=torch.uint8, device=self.device.card).untyped_storage()
        return base

    def _state_buffers(self, program: Program) -> list[int]:
        """State that lives here in a program, or leaves from here or comes here."""
        number = self.device.number
        found = {buffer for buffer, home in program.homes if home == number}
        for at, transfer in enumerate(program.transfers):
            if is_move_of_state(program, at) and number in (transfer.src, transfer.dst):
                found.add(transfer.buffer)
        return sorted(found)

    def _weight(self, step: int, index: int) -> Storage:
        buffer = self.traces[step].buffers[index]
        key: object = (step, index) if buffer.constant_hex else buffer.name
        if key not in self._resident:
            if buffer.constant_hex:
                self._resident[key] = constant(buffer, self.device.card)
            else:
                storage = given_storage(buffer, self._weights)
                if storage.device != self.device.card:
                    storage = bytes_of(storage, 0, storage.nbytes()).to(self.device.card).untyped_storage()
                self._resident[key] = storage
        return self._resident[key]

    def _open_room(self, number: int) -> MicrobatchRoom:
        device, (least, greatest) = self.device, self.device.priorities
        compute = {
            is_short: device.compute_stream(priority(number, is_short, least, greatest))
            for is_short in (False, True)
        }
        sends = {
            d: device.plain_stream(greatest) for d in range(len(self.cluster.devices)) if d != device.number
        }
        mark = self.marks.data_ptr() + 4 * number
        return MicrobatchRoom(
            number, device.plain_stream(), compute, sends, torch.cuda.graph_pool_handle(), mark
        )

    def _make_room(self, room: MicrobatchRoom, program: Program) -> None:
        """Zeros: a first run on them, before any request, reads no index out of bounds."""
        trace, card = self.traces[program.step], self.device.card
        for buffer in self._state_buffers(program):
            name, size = trace.buffers[buffer].name, trace.buffers[buffer].size_bytes
            if name not in room.state:
                room.state[name] = torch.zeros(size, dtype=torch.uint8, device=card).untyped_storage()
        for buffer in trace.buffers_of(BufferKind.INPUT):
            key, size = (program.step, trace.buffers[buffer].name), trace.buffers[buffer].size_bytes
            if key not in room.inputs:
                room.inputs[key] = torch.zeros(size, dtype=torch.uint8, device=card).untyped_storage()

    def _check_memory(self, new: Sequence[Program]) -> None:
        number, card = self.device.number, self.device.card
        weights: dict[str, int] = {}
        state: dict[str, int] = {}
        for program in new:
            buffers = self.traces[program.step].buffers
            for b in program.weights[number]:
                held = self._weights.get(buffers[b].name)
                if held is None or held.untyped_storage().device != card:
                    weights[buffers[b].name] = buffers[b].size_bytes
            state |= {buffers[b].name: buffers[b].size_bytes for b in self._state_buffers(program)}
        known = set(self._rooms[0].state) if self._rooms else set()
        weights = {n: size for n, size in weights.items() if n not in self._resident}
        inbox = self.transport.new_bytes(new, self.traces) if self.transport is not None else 0
        each = sum(size for n, size in state.items() if n not in known) + inbox // self.num_microbatches
        held_bytes, room = sum(weights.values()), torch.cuda.mem_get_info(card)[0]
        needed = held_bytes + self.num_microbatches * each
        if needed <= room:
            return
        fitting = (room - held_bytes) // each if each else 0
        remedy = (
            f"Lower --microbatches from {self.num_microbatches} to {fitting}, or the batch or the context."
            if fitting > 0
            else "Use a smaller batch or context, or fewer layers on this card."
        )
        raise DeviceMemoryError(
            f"the run needs {needed // MIB} MiB ({held_bytes // MIB} MiB of weights, {each // MIB} MiB a "
            f"microbatch); {room // MIB} MiB are free",
            remedy,
            self.device.record.name,
        )


def refuse_generators(trace: Trace) -> None:
    """Random numbers are not run on GPUs: their generator's state would have to live in the graph."""
    drawn = [b.name for b in trace.buffers if b.is_generator]
    if drawn:
        message = f"the {trace.step.kind} step draws random numbers ({', '.join(drawn)})"
        raise WorkerError(message, "Draw them outside of the step and pass them in as an input.")


def priority(microbatch: int, is_short: bool, least: int, greatest: int) -> int:
    """The priority of a microbatch's launches on a real device: short steps first, then by the microbatch.

    A GPU serves streams of equal priority in turns. Then microbatches in flight advance in step, and the
    devices of a pipeline take turns instead of overlapping.
    """
    levels = least - greatest + 1
    short = levels // 2
    if is_short and short:
        return greatest + min(microbatch, short - 1)
    return greatest + min(short + microbatch, levels - 1)
