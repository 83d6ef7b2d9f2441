"""Graphs: one device's weights for some programs, and memory and CUDA graphs per microbatch.

`ShareGraph` is one device's share of one program, captured for one microbatch as one CUDA graph with
launches, sends and waits (see `transport`). Without transfers and fetches it is two graphs: the first need
not wait for late inputs. Launches go to a compute stream in program order, sends to a stream per destination.

    a send waits for the launches issued before it, its producer among them;
    a receive makes the compute stream wait for the flag, right before the first launch that reads it;
    a launch waits for the sends whose bytes it overwrites;
    a fetch copies page-locked weights on its own stream, after the launch that used their place before; their
    launch waits for it.

Memory that a send reads is kept until the whole program is issued. The launches of a program run once before
its first capture, without transfers, so that libraries and kernels initialise. This rehearsal has its own
zeroed state, since a microbatch may be running under another plan; zeros are valid indices.

`DeviceGraphs`: graphs of a microbatch share weights, pages of homes and its own state; equal programs without
transfers share a graph. `capture_next` captures likely graphs first; others are captured on first use. Memory
is checked before allocation, except temporaries in the graphs' pools.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.direct import PeerAway
from tessera.execute.cuda.pace import RECORD_WORDS, Chain, Clockwork, Pace
from tessera.execute.cuda.transport import ALIGN, GpuTransport, InboxSpot, Parcel, is_move_of_state
from tessera.execute.driver import MemOp
from tessera.execute.launcher import Launchable, Launcher
from tessera.execute.memory import (
    DeviceState,
    Footprint,
    Memory,
    Storage,
    bytes_of,
    check_memory,
    constant,
    fresh,
    is_allocation,
    is_shared,
    late_at,
    slot_bytes,
    storage_of,
    tensor_of,
)
from tessera.ir import SLOTS, BufferKind, Cluster, Fetch, Free, Program, Recv, Region, Run, Send, Trace

Tensors = Mapping[str, torch.Tensor]
# Copies of 4 MB hold up values on other streams until all are done.
PIECE_BYTES = 1 << 20
# Step -> compiled objects by kernel.
Kernels = Mapping[int, Mapping[int, Launchable]]


@dataclass(frozen=True)
class InputArena:
    """One copy brings all inputs of a step."""

    contents: torch.Tensor
    # Name -> (offset, bytes).
    places: Mapping[str, tuple[int, int]]


@dataclass
class MicrobatchBuffers:
    """Shared by the microbatch's graphs."""

    number: int
    origin: Any
    # Is it for short steps -> stream.
    compute: Mapping[bool, Any]
    # By destination.
    sends: Mapping[int, Any]
    fetching: Any
    # Its graphs never run concurrently.
    pool: Any
    # Address of the pinned word with its graph's position.
    mark: int = 0
    # By step, and by (step, name).
    arenas: dict[int, InputArena] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Storage] = field(default_factory=dict)


class ShareGraph:
    def __init__(
        self,
        program: Program,
        number: int,
        room: MicrobatchBuffers,
        base: Mapping[int, Storage],
        graphs: "DeviceGraphs",
        is_short: bool = False,
        is_rehearsed: bool = False,
    ) -> None:
        """`number`: of the program in the transport. `base`: initial buffers, and weights to fetch."""
        device, trace = graphs.device, graphs.traces[program.step]
        slots = graphs.state.slots(room.number, program)
        self._is_rehearsed = is_rehearsed
        self.program, self.trace, self.room = program, trace, room
        self._number, self._device, self._base, self._slots = number, device, base, slots
        self._launcher, self._transport = graphs.launchers[program.step], graphs.transport
        self._clockwork, self._pace = graphs.clockwork, graphs.clockwork.pace(program)
        self._compute = room.compute[is_short]
        column = program.instructions[device.number]
        self._sends = sorted({program.transfers[x.transfer].dst for x in column if isinstance(x, Send)})
        # A row per launch, then per transfer.
        rows = len(trace.launches) + len(program.transfers)
        is_timed = bool(self._pace.launches or self._pace.transfers)
        self.records = torch.zeros(
            rows if is_timed else 0, RECORD_WORDS, dtype=torch.int64, device=device.card
        )
        self.outputs: dict[str, torch.Tensor] = {}
        late = late_at(trace, program, device.number)
        is_cut = 0 < late < len(column) and not program.transfers and not slots
        self._parts = [range(late), range(late, len(column))] if is_cut else [range(len(column))]
        self._graphs = self._capture()

    def replay(self) -> dict[str, torch.Tensor]:
        """Overwrites outputs and state."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Launches what reads no late input."""
        for graph in self._graphs[:-1]:
            graph.replay()

    def finish(self) -> dict[str, torch.Tensor]:
        self._graphs[-1].replay()
        return self.outputs

    def _capture(self) -> list[Any]:
        if not self._is_rehearsed:
            with torch.no_grad(), torch.cuda.stream(self.room.origin):
                self.issue(is_rehearsal=True)
        self._device.synchronize()
        issue = _Issue(self, is_rehearsal=False)
        with torch.no_grad(), own_workspaces():
            graphs = [self._capture_part(issue, part) for part in self._parts]
        self.outputs = issue.outputs()
        return graphs

    def _capture_part(self, issue: "_Issue", part: range) -> Any:
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(
                graph, pool=self.room.pool, stream=self.room.origin, capture_error_mode="thread_local"
            ):
                try:
                    issue.run(part)
                except Exception as error:
                    failure = error
                    raise
        except RuntimeError as error:
            raise failure or error from None  # the end of a failed capture hides why it failed
        return graph

    def issue(self, is_rehearsal: bool = False) -> dict[str, torch.Tensor]:
        """A rehearsal has no sends, waits or times."""
        issue = _Issue(self, is_rehearsal)
        for part in self._parts:
            issue.run(part)
        return issue.outputs()


class _Issue:
    def __init__(self, share: ShareGraph, is_rehearsal: bool) -> None:
        self._share, self._is_rehearsal = share, is_rehearsal
        self._program, self._room = share.program, share.room
        fill = torch.zeros if is_rehearsal else torch.empty
        self._memory = Memory(share._base, fresh(share.trace, share._device.card, fill))
        self._memory.slots = share._slots
        self._compute = share._compute
        self._fetched: dict[int, Any] = {}  # launch -> mark of its weights
        self._links = {dst: share.room.sends[dst] for dst in share._sends}
        self._leaving: dict[int, Any] = {}  # transfer -> mark of its send
        self._kept: list[Storage] = []
        self._arrivals: list[int] = []
        pace = Pace() if is_rehearsal else share._pace
        self._pace, clock, device = pace, share._clockwork, share._device
        self._chain = Chain(device.pace_kernel, clock.queue, share.room.number) if pace.launches else None
        self._wires = {
            dst: Chain(device.pace_kernel, clock.wires.get(dst))
            for dst in (self._links if pace.transfers or pace.launches else ())
        }

    def run(self, part: range) -> None:
        """Forks from the microbatch's stream, and joins."""
        start = _mark(self._room.origin)
        fetching = [self._room.fetching] if self._share._slots else []
        for stream in (self._compute, *self._links.values(), *fetching):
            stream.wait_event(start)
        if self._share._transport is not None and not self._is_rehearsal and not part.start:
            driver.mem_ops(_handle(self._compute), [MemOp(self._room.mark, 0)])
        column = self._program.instructions[self._share._device.number]
        for position in part:
            match column[position]:
                case Run(launch):
                    self._run(launch)
                case Send(number) if not self._is_rehearsal:
                    self._send(number)
                case Recv(number):
                    self._receive(number, position)
                case Fetch(launch) if not self._is_rehearsal:
                    self._fetch(launch)
                case Free(buffer):
                    self._memory.free(buffer)
        self._settle()
        for stream in (self._compute, *self._links.values(), *fetching):
            self._room.origin.wait_event(_mark(stream))

    def outputs(self) -> dict[str, torch.Tensor]:
        number = self._share._device.number
        here = {name for name, at in self._program.outputs if at == number}
        return {
            name: tensor_of(self._memory.get(view.buffer), view)
            for name, view in self._share.trace.outputs
            if name in here
        }

    def _run(self, launch: int) -> None:
        for number in self._overwritten(launch):
            self._compute.wait_event(self._leaving.pop(number))
        if launch in self._fetched:
            self._compute.wait_event(self._fetched.pop(launch))
        self._memory.use_slot(launch)
        with torch.cuda.stream(self._compute):
            self._enter(launch)
            zeroed = self._put_zero_state(launch) if self._is_rehearsal else ()
            if not (self._is_rehearsal and is_allocation(self._share.trace, launch)):
                self._share._launcher.run(launch, self._memory)
            for buffer in zeroed:
                self._memory.free(buffer)

    def _fetch(self, launch: int) -> None:
        """Values that arrive meanwhile wait for one piece at most."""
        stream = self._room.fetching
        stream.wait_event(_mark(self._compute))
        for buffer, place in self._memory.slots[launch].items():
            source = self._share._base[buffer]
            for start in range(0, source.nbytes(), PIECE_BYTES):
                ends = place.data_ptr() + start, source.data_ptr() + start
                driver.copy(_handle(stream), *ends, min(PIECE_BYTES, source.nbytes() - start))
        self._fetched[launch] = _mark(stream)

    def _put_zero_state(self, launch: int) -> list[int]:
        trace = self._share.trace
        named = {view.buffer for view in trace.launches[launch].views}
        named |= {access.buffer for access in trace.launches[launch].accesses}
        state = sorted(named.intersection(trace.buffers_of(BufferKind.STATE)))
        for buffer in state:
            self._memory.put(buffer, _zeros(trace.buffers[buffer].size_bytes, self._share._device.card))
        return state

    def _enter(self, launch: int) -> None:
        """Starts a launch's time: after its arrivals' latency, when its device is free."""
        arrivals, self._arrivals = self._arrivals, []
        if self._chain is None or self._share._transport is None:
            if self._chain is not None and launch in self._pace.launches:
                self._chain.enter(self._share.records[launch], self._pace.launches[launch])
            return
        for number in arrivals:
            hold = self._pace.transfers.get(number)
            if hold is not None and hold.extra_ns and self._share._transport.carries_records:
                self._chain.arrive(self._share._transport.record(self._spot(number)), hold.extra_ns)
        if launch in self._pace.launches:
            self._chain.enter(self._share.records[launch], self._pace.launches[launch])
        else:
            self._chain.settle()

    def _receive(self, number: int, position: int) -> None:
        transfer = self._program.transfers[number]
        size = self._share.trace.buffers[transfer.buffer].size_bytes
        if self._is_rehearsal:
            place = _zeros(size, self._share._device.card)
        else:
            transport = self._transport()
            with torch.cuda.stream(self._compute):
                if self._chain is not None and not self._chain.keeps_time:
                    self._chain.settle()
                marks = (MemOp(self._room.mark, position + 1), MemOp(self._room.mark, position + 2))
                transport.wait(self._spot(number), _handle(self._compute), marks)
            place = transport.landing(self._spot(number), size)
            self._arrivals.append(number)
        if is_move_of_state(self._program, number):
            home = self._share._base[transfer.buffer]
            if not self._is_rehearsal:  # its contents are needed
                with torch.cuda.stream(self._compute):
                    bytes_of(home, 0, size).copy_(bytes_of(place, 0, size), non_blocking=True)
                self._kept.append(place)
            place = home
        self._memory.put(transfer.buffer, place)

    def _send(self, number: int) -> None:
        transfer = self._program.transfers[number]
        source, link = self._memory.get(transfer.buffer), self._links[transfer.dst]
        due = self._due()
        link.wait_event(_mark(self._compute))
        with torch.cuda.stream(link):
            hold, wire = self._pace.transfers.get(number), self._wires.get(transfer.dst)
            first = len(self._share.trace.launches)
            record = self._share.records[first + number] if hold is not None else None
            if wire is not None:
                if due is not None:
                    wire.arrive(due, 0)
                if hold is not None and record is not None:
                    wire.enter(record, hold)
                wire.settle()
            place, told = source.data_ptr() + transfer.start, 0 if record is None else record.data_ptr()
            parcel = Parcel(place, transfer.start, transfer.num_bytes, transfer.dst, told)
            self._transport().put(self._spot(number), parcel, _handle(link))
        self._leaving[number] = _mark(link)
        self._kept.append(source)

    def _overwritten(self, launch: int) -> list[int]:
        """Sends that still read what the launch overwrites."""
        written = [a for a in self._share.trace.launches[launch].accesses if a.write or a.atomic]
        found = []
        for number in self._leaving:
            moved = self._program.transfers[number]
            region = Region(moved.start, moved.num_bytes)
            if any(a.buffer == moved.buffer and a.region.overlaps(region) for a in written):
                found.append(number)
        return found

    def _due(self) -> torch.Tensor | None:
        """Record of the last launch if a send must wait for its end.

        The compute stream does not wait: a launch behind a send keeps its turn.
        """
        if self._chain is not None and self._chain.keeps_time:
            return self._chain.open
        self._settle()
        return None

    def _settle(self) -> None:
        if self._chain is not None:
            with torch.cuda.stream(self._compute):
                self._chain.settle()

    def _spot(self, number: int) -> InboxSpot:
        return InboxSpot(self._room.number, self._share._number, number)

    def _transport(self) -> GpuTransport:
        assert self._share._transport is not None, "a program with transfers has a transport"
        return self._share._transport


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Waiting for it in a capture adds a graph edge."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream)


def _zeros(num_bytes: int, card: torch.device) -> Storage:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=card).untyped_storage()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Allocates cuBLAS workspaces of a capture from the graph's own pool.

    torch keeps one workspace per cuBLAS handle and stream, which captured products name. Clearing it
    (torch.compile with CUDA graphs does) frees memory that the graph still writes to. So workspaces are
    cleared before and after a capture, while its streams are idle. Not handled: other CUDA graphs that share
    a workspace.
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:  # a torch without CUDA
        yield
        return
    clear()
    try:
        yield
    finally:
        clear()


class DeviceGraphs:
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
        """`us[step][launch]`: modelled time here. `scale`: see `pace`. `is_profiled`: stamp every launch and
        send, a few microseconds each.
        """
        self.device = GpuDevice(cluster.devices, number)
        self.cluster, self.num_microbatches, self._weights = cluster, num_microbatches, weights
        self.state = DeviceState(number, self.device.card)
        self.traces = self.state.traces
        self._us: list[Sequence[float]] = []
        self.launchers: list[Launcher] = []
        self.add_steps(traces, us, kernels)
        self._resident: dict[object, Storage] = {}
        # By address.
        self._locked: dict[int, Storage] = {}
        card = self.device.card
        self.transport = transport(self.device) if transport is not None else None
        keeps_links = self.transport is None or self.transport.carries_records
        self.clockwork = Clockwork(
            cluster, number, self._us, num_microbatches, scale, is_profiled, card, keeps_links
        )
        self._programs: list[Program] = []
        # Contents of a program -> first such program; program -> the one whose graph it shares.
        self._numbers: dict[object, int] = {}
        self._shared: list[int] = []
        self._buffers: list[MicrobatchBuffers] = []
        # Positions of the graphs: 1 + the receive it waits at, 2 + the receive it passed.
        self.marks = driver.pinned((num_microbatches,), torch.int32)
        # (microbatch, program)
        self._graphs: dict[tuple[int, int], ShareGraph] = {}
        self._missing: deque[tuple[int, int]] = deque()
        self._rehearsed: set[int] = set()
        self._dropped: set[int] = set()

    def add_steps(
        self, traces: Sequence[Trace], us: Sequence[Sequence[float]] = (), kernels: Kernels | None = None
    ) -> None:
        for step, trace in enumerate(traces):
            refuse_generators(trace)
            self.traces.append(trace)
            self._us.append(us[step] if us else ())
            self.launchers.append(Launcher(trace, self.device.card, (kernels or {}).get(step)))

    def add(self, programs: Sequence[Program], is_dropped: bool = False) -> list[int]:
        """Allocates for the programs of a lane; returns their numbers, which the transport shares.

        `is_dropped`: only its places in the transport are kept.
        """
        first = len(self._programs)
        if is_dropped:
            self._dropped |= set(range(first, first + len(programs)))
        else:
            self._check_memory(programs)
        self._programs += programs
        for number, program in enumerate(programs, first):
            step = (program.step, program.home, program.instructions, program.weights)
            key = (step, program.homes, program.outputs)
            self._shared.append(number if program.transfers else self._numbers.setdefault(key, number))
        if self.transport is not None:
            self.transport.add(programs, self.traces)
        while len(self._buffers) < self.num_microbatches:
            self._buffers.append(self._open_buffers(len(self._buffers)))
        for room in self._buffers if not is_dropped else ():
            for program in programs:
                self._allocate_for(room, program)
        self.device.synchronize()  # graphs' streams do not wait for the zeros
        self._list_missing()
        return list(range(first, len(self._programs)))

    def drop(self, numbers: Collection[int], homes: Collection[int]) -> None:
        self._dropped |= set(numbers)
        live = self._live()
        graphs, steps = {self._shared[n] for n in live}, {self._programs[n].step for n in live}
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in graphs}
        for room in self._buffers:
            room.inputs = {key: held for key, held in room.inputs.items() if key[0] in steps}
            room.arenas = {step: arena for step, arena in room.arenas.items() if step in steps}
        for home in homes:
            self.state.homes.pop(home, None)
        self._list_missing()
        torch.cuda.empty_cache()

    def keep_weights(self) -> None:
        kept: set[object] = set()
        for program in (self._programs[n] for n in self._live()):
            kept |= {self._weight_key(program.step, b) for b in program.weights[self.device.number]}
        self._resident = {key: storage for key, storage in self._resident.items() if key in kept}

    def _live(self) -> list[int]:
        return [number for number in range(len(self._programs)) if number not in self._dropped]

    def buffers(self, microbatch: int) -> MicrobatchBuffers:
        return self._buffers[microbatch]

    def graph(self, microbatch: int, number: int) -> ShareGraph | None:
        """None if this device has no share."""
        key = (microbatch, self._shared[number])
        if key not in self._graphs and self._has_share(self._programs[number]):
            self._graphs[key] = self._capture(self._buffers[microbatch], number)
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
            for microbatch in range(self.num_microbatches)
            for number in ranked
            if (microbatch, self._shared[number]) not in self._graphs
        )

    def _size(self, number: int) -> int:
        step = self.traces[self._programs[number].step].step
        return step.batch * step.context

    def relink(self, peer: int, epoch: int) -> None:
        """Drops graphs that must be captured again."""
        if self.transport is None or not self.transport.relink(peer, epoch):
            return
        mine = self.device.number
        for microbatch, number in list(self._graphs):
            pairs = {(t.src, t.dst) for t in self._programs[number].transfers}
            if (mine, peer) in pairs:
                del self._graphs[microbatch, number]
        self._list_missing()

    def close(self) -> None:
        self._graphs, self._buffers, self._resident, self._weights, self._locked = {}, [], {}, {}, {}
        self.state = DeviceState(self.device.number, self.device.card)
        if self.transport is not None:
            self.transport.close()
        self.device.close()
        with suppress(RuntimeError):  # a failed GPU, already reported
            torch.cuda.empty_cache()

    def _has_share(self, program: Program) -> bool:
        number = self.device.number
        return bool(program.instructions[number]) or any(at == number for _, at in program.outputs)

    def _capture(self, room: MicrobatchBuffers, number: int) -> ShareGraph:
        program = self._programs[number]
        flags = (self._is_short(program.step), number in self._rehearsed)
        if self.transport is not None:
            self.transport.meet(number)
        made = ShareGraph(program, number, room, self._base(room, program), self, *flags)
        self._rehearsed.add(number)
        return made

    def _is_short(self, step: int) -> bool:
        """Less than half the longest step's time: it gets priority."""
        totals = [sum(row) for row in self._us]
        return bool(totals) and 2 * totals[step] < max(totals)

    def _base(self, room: MicrobatchBuffers, program: Program) -> dict[int, Storage]:
        number, trace = self.device.number, self.traces[program.step]
        base = {b: self._weight(program.step, b) for b in program.weights[number]}
        fetched = {b for slot in self.state.slots(room.number, program).values() for b in slot}
        base |= {b: self._pinned(program.step, b) for b in fetched}
        for buffer in trace.buffers_of(BufferKind.INPUT):
            base[buffer] = room.inputs[program.step, trace.buffers[buffer].name]
        base |= {b: self.state.buffer(room.number, program, b) for b in self._state_buffers(program)}
        for index, found in enumerate(trace.buffers):
            if found.size_bytes == 0 and index not in base:  # never sent, but any launch may name it
                base[index] = torch.empty(0, dtype=torch.uint8, device=self.device.card).untyped_storage()
        return base

    def _state_buffers(self, program: Program) -> list[int]:
        """State that lives here, or moves from or to here."""
        number = self.device.number
        found = {buffer for buffer, home in program.homes if home == number}
        for at, transfer in enumerate(program.transfers):
            if is_move_of_state(program, at) and number in (transfer.src, transfer.dst):
                found.add(transfer.buffer)
        return sorted(found)

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
        if storage.device.type == "cpu" and storage.data_ptr() not in self._locked:
            driver.pin(bytes_of(storage, 0, storage.nbytes()))
        self._locked[storage.data_ptr()] = storage
        return storage

    def _weight_key(self, step: int, index: int) -> object:
        buffer = self.traces[step].buffers[index]
        return (step, index) if buffer.constant_hex else buffer.name

    def _open_buffers(self, number: int) -> MicrobatchBuffers:
        device, (least, greatest) = self.device, self.device.priorities
        compute = {
            is_short: device.compute_stream(priority(number, is_short, least, greatest))
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
        trace, card = self.traces[program.step], self.device.card
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
        arena = InputArena(torch.zeros(total, dtype=torch.uint8, device=card), places)
        room.arenas[program.step] = arena
        for name, (start, size) in places.items():
            place = arena.contents.data_ptr() + start
            empty = torch.empty(0, dtype=torch.uint8, device=card)
            found = driver.bytes_at(place, size, self.device.ordinal) if size else empty
            room.inputs[program.step, name] = found.untyped_storage()

    def _check_memory(self, new: Sequence[Program]) -> None:
        number, card = self.device.number, self.device.card
        weights: dict[str, int] = {}
        state: dict[tuple[str, int], int] = {}
        pages: dict[tuple[int, str], int] = {}
        rings: dict[tuple[int, ...], int] = {}
        for program in new:
            buffers = self.traces[program.step].buffers
            sizes = slot_bytes(self.traces[program.step], program, number)
            rings[sizes] = SLOTS * sum(sizes)
            for b in program.weights[number]:
                held = self._weights.get(buffers[b].name)
                if held is None or held.untyped_storage().device != card:
                    weights[buffers[b].name] = buffers[b].size_bytes
            for b in self._state_buffers(program):
                name, size = buffers[b].name, buffers[b].size_bytes
                if not is_shared(program, name):
                    state[name, size] = size
                elif name not in self.state.homes.get(program.home, {}):
                    pages[program.home, name] = size
        known = {*(key[1:] for key in self.state.own), *(sizes for _, sizes in self.state.rings)}
        weights = {n: size for n, size in weights.items() if n not in self._resident}
        inbox = self.transport.new_bytes(new, self.traces) if self.transport is not None else 0
        own = (*state.items(), *rings.items())
        each = sum(size for n, size in own if n not in known) + inbox // self.num_microbatches
        size, num = sum(weights.values()), self.num_microbatches
        footprint = Footprint(self.device.record.name, size, each, num, num * each, sum(pages.values()))
        check_memory(footprint, torch.cuda.mem_get_info(card)[0], " that are free")


def refuse_generators(trace: Trace) -> None:
    """The generator's state would have to live in the graph."""
    drawn = [b.name for b in trace.buffers if b.is_generator]
    if drawn:
        message = f"the {trace.step.kind} step draws random numbers ({', '.join(drawn)})"
        raise WorkerError(message, "Draw them outside of the step and pass them in as an input.")


def priority(microbatch: int, is_short: bool, least: int, greatest: int) -> int:
    """Short steps first, then by microbatch.

    With equal priorities all microbatches advance in step, and the devices of a pipeline take turns instead
    of overlapping.
    """
    levels = least - greatest + 1
    short = levels // 2
    if is_short and short:
        return greatest + min(microbatch, short - 1)
    return greatest + min(short + microbatch, levels - 1)
