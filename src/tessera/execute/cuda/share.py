"""ShareGraph: one device's share of one program, captured for one microbatch.

It is one CUDA graph of launches, sends and waits (`transport`). Without transfers and fetches it is two
graphs: the first need not wait for late inputs. Launches go to a compute stream in program order, sends to a
stream per destination.

    a send waits for all launches issued before it;
    a receive makes the compute stream wait for the flag, right before the first launch that reads it;
    a launch waits for the sends whose bytes it overwrites;
    a fetch copies page-locked weights on its own stream, after the launch that used their place before; their
    launch waits for it.

Memory that a send reads is kept until the whole program is issued. Before its first capture a program runs
once without transfers, so that libraries and kernels initialise, on zeroed state of its own: the microbatch
may be running under another plan. Zeros are valid indices.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.execute import driver
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.pace import RECORD_WORDS, Chain, Clockwork, Pace
from tessera.execute.cuda.transport import GpuTransport, InboxSpot, Parcel, is_move_of_state
from tessera.execute.driver import MemOp
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, Storage, bytes_of, fresh, is_allocation, late_at, tensor_of
from tessera.ir import BufferKind, Fetch, Free, Program, Recv, Region, Run, Send, Trace


@dataclass(frozen=True)
class InputArena:
    """One copy brings all inputs of a step."""

    contents: torch.Tensor
    # Offset and bytes.
    places: Mapping[str, tuple[int, int]]

    def storage(self, name: str) -> Storage:
        start, size = self.places[name]
        if not size:
            return _zeros(0, self.contents.device)
        ordinal = self.contents.device.index
        return driver.bytes_at(self.contents.data_ptr() + start, size, ordinal).untyped_storage()


@dataclass
class MicrobatchBuffers:
    number: int
    origin: Any
    # Is it for short steps -> stream.
    compute: Mapping[bool, Any]
    sends: Mapping[int, Any]
    fetching: Any
    # Its graphs never run concurrently.
    pool: Any
    # Address of the pinned word with its graph's position.
    mark: int = 0
    # By step.
    arenas: dict[int, InputArena] = field(default_factory=dict)


@dataclass(eq=False)
class ShareGraph:
    program: Program
    # Counted by the transport.
    number: int
    trace: Trace
    room: MicrobatchBuffers
    # Initial buffers, and weights to fetch.
    base: Mapping[int, Storage]
    slots: Mapping[int, Mapping[int, Storage]]
    launcher: Launcher
    device: GpuDevice
    transport: GpuTransport | None
    clockwork: Clockwork
    is_short: bool
    is_rehearsed: bool

    def __post_init__(self) -> None:
        self.pace = self.clockwork.pace(self.program)
        column = self.program.instructions[self.device.number]
        rows = len(self.trace.launches) + len(self.program.transfers)
        is_timed = bool(self.pace.launches or self.pace.transfers)
        self.records = torch.zeros(
            rows if is_timed else 0, RECORD_WORDS, dtype=torch.int64, device=self.device.card
        )
        self.outputs: dict[str, torch.Tensor] = {}
        late = late_at(self.trace, self.program, self.device.number)
        is_cut = 0 < late < len(column) and not self.program.transfers and not self.slots
        self._parts = [range(late), range(late, len(column))] if is_cut else [range(len(column))]
        self._graphs = self._capture()

    def replay(self) -> dict[str, torch.Tensor]:
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
        if not self.is_rehearsed:
            with torch.no_grad(), torch.cuda.stream(self.room.origin):
                self._rehearse()
        self.device.synchronize()
        issue = _Issue(self, is_rehearsal=False)
        with torch.no_grad(), own_workspaces():
            graphs = [self._capture_part(issue, part) for part in self._parts]
        self.outputs = issue.outputs()
        return graphs

    def _capture_part(self, issue: "_Issue", part: range) -> Any:
        graph, room = torch.cuda.CUDAGraph(), self.room
        failure: Exception | None = None
        try:
            with torch.cuda.graph(graph, room.pool, room.origin, capture_error_mode="thread_local"):
                try:
                    issue.run(part)
                except Exception as error:
                    failure = error
                    raise
        except RuntimeError as error:
            raise failure or error from None  # the end of a failed capture hides why it failed
        return graph

    def _rehearse(self) -> None:
        """Without sends, waits and times."""
        issue = _Issue(self, is_rehearsal=True)
        for part in self._parts:
            issue.run(part)


class _Issue:
    def __init__(self, share: ShareGraph, is_rehearsal: bool) -> None:
        self._share, self._records, self._is_rehearsal = share, share.records, is_rehearsal
        program, device = share.program, share.device
        self._program, self._room = program, share.room
        fill = torch.zeros if is_rehearsal else torch.empty
        self._memory = Memory(share.base, fresh(share.trace, device.card, fill))
        self._memory.slots = share.slots
        self._compute = share.room.compute[share.is_short]
        self._fetched: dict[int, Any] = {}  # launch -> mark of its weights
        self._column = program.instructions[device.number]
        sends = sorted({program.transfers[x.transfer].dst for x in self._column if isinstance(x, Send)})
        self._links = {dst: share.room.sends[dst] for dst in sends}
        self._leaving: dict[int, Any] = {}  # transfer -> mark of its send
        self._kept: list[Storage] = []
        self._arrivals: list[int] = []
        pace, clock = Pace() if is_rehearsal else share.pace, share.clockwork
        self._pace = pace
        self._chain = Chain(device.pace_kernel, clock.queue, share.room.number) if pace.launches else None
        self._wires = {
            dst: Chain(device.pace_kernel, clock.wires.get(dst))
            for dst in (self._links if pace.transfers or pace.launches else ())
        }

    def run(self, part: range) -> None:
        """Forks from the microbatch's stream, and joins."""
        start = _mark(self._room.origin)
        fetching = [self._room.fetching] if self._share.slots else []
        for stream in (self._compute, *self._links.values(), *fetching):
            stream.wait_event(start)
        if self._share.transport is not None and not self._is_rehearsal and not part.start:
            driver.mem_ops(_handle(self._compute), [MemOp(self._room.mark, 0)])
        for position in part:
            match self._column[position]:
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
        number = self._share.device.number
        names = {name for name, at in self._program.outputs if at == number}
        return {
            name: tensor_of(self._memory.get(view.buffer), view)
            for name, view in self._share.trace.outputs
            if name in names
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
                self._share.launcher.run(launch, self._memory)
            for buffer in zeroed:
                self._memory.free(buffer)

    def _fetch(self, launch: int) -> None:
        stream = self._room.fetching
        stream.wait_event(_mark(self._compute))
        for buffer, place in self._memory.slots[launch].items():
            source = self._share.base[buffer]
            driver.fetch(stream, place.data_ptr(), source.data_ptr(), source.nbytes())
        self._fetched[launch] = _mark(stream)

    def _put_zero_state(self, launch: int) -> list[int]:
        trace = self._share.trace
        named = {view.buffer for view in trace.launches[launch].views}
        named |= {access.buffer for access in trace.launches[launch].accesses}
        state = sorted(named.intersection(trace.buffers_of(BufferKind.STATE)))
        for buffer in state:
            self._memory.put(buffer, _zeros(trace.buffers[buffer].size_bytes, self._share.device.card))
        return state

    def _enter(self, launch: int) -> None:
        """Starts a launch's time: after its arrivals' latency, when its device is free."""
        arrivals, self._arrivals = self._arrivals, []
        if self._chain is None:
            return
        for number in arrivals:
            hold = self._pace.transfers.get(number)
            if hold is not None and hold.extra_ns and self._transport().carries_records:
                self._chain.arrive(self._transport().record(self._spot(number)), hold.extra_ns)
        if launch in self._pace.launches:
            self._chain.enter(self._records[launch], self._pace.launches[launch])
        elif self._share.transport is not None:
            self._chain.settle()

    def _receive(self, number: int, position: int) -> None:
        transfer = self._program.transfers[number]
        size = self._share.trace.buffers[transfer.buffer].size_bytes
        if self._is_rehearsal:
            place = _zeros(size, self._share.device.card)
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
            home = self._share.base[transfer.buffer]
            if not self._is_rehearsal:
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
            record = self._records[first + number] if hold is not None else None
            if wire is not None:
                if due is not None:
                    wire.arrive(due, 0)
                if hold is not None and record is not None:
                    wire.enter(record, hold)
                wire.settle()
            place = source.data_ptr() + transfer.start
            due_record = 0 if record is None else record.data_ptr()
            parcel = Parcel(place, transfer.start, transfer.num_bytes, transfer.dst, due_record)
            self._transport().put(self._spot(number), parcel, _handle(link))
        self._leaving[number] = _mark(link)
        self._kept.append(source)

    def _overwritten(self, launch: int) -> list[int]:
        """Sends that still read what the launch overwrites."""
        written = [a for a in self._share.trace.launches[launch].accesses if a.write or a.atomic]
        sends = []
        for number in self._leaving:
            moved = self._program.transfers[number]
            region = Region(moved.start, moved.num_bytes)
            if any(a.buffer == moved.buffer and a.region.overlaps(region) for a in written):
                sends.append(number)
        return sends

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
        return InboxSpot(self._room.number, self._share.number, number)

    def _transport(self) -> GpuTransport:
        assert self._share.transport is not None, "a program with transfers has a transport"
        return self._share.transport


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

    torch keeps one workspace per cuBLAS handle and stream, which captured products name. Clearing it, as
    torch.compile with CUDA graphs does, frees memory that the graph still writes to. So workspaces are
    cleared before and after a capture, while its streams are idle.
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
