"""ShareGraph: one device's share of one program, captured for one microbatch as one CUDA graph.

Launches, sends and waits are inside it (see `transport`), so a run is one call and no CPU takes part in it,
nor stands between two devices. The capture begins on the microbatch's own stream and forks: launches go to a
compute stream in program order, sends to a stream for each destination.

    a send waits for the launches issued before it, its producer among them;
    a receive makes the compute stream wait for the flag, right before the first launch that reads it;
    a launch waits for the sends whose bytes it overwrites.

Memory that a send reads is kept until the whole program has been issued: a buffer that was released may not
be handed out again while a send still reads it. The launches of a program run once before its first capture,
without sends and waits, so that libraries and kernels set themselves up. That is a rehearsal, in which state
is memory that nobody has: a microbatch may be at work on its own, under another plan. Whatever nobody wrote
is zero in it, so that an index that would come from another device is one that exists.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.pace import Clockwork, Pace
from tessera.execute.cuda.pace_kernel import RECORD_WORDS, Chain
from tessera.execute.cuda.transport import GpuTransport, InboxSpot, Parcel, is_move_of_state
from tessera.execute.driver import MemOp
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, Storage, bytes_of, fresh, is_allocation, tensor_of
from tessera.ir import BufferKind, Free, Program, Recv, Region, Run, Send, Trace


@dataclass
class MicrobatchRoom:
    """What a microbatch has on one device: memory that outlives its graphs, and streams."""

    number: int
    origin: Any
    # Whether for short steps -> stream.
    compute: Mapping[bool, Any]
    # Destination -> stream.
    sends: Mapping[int, Any]
    # Shared by the microbatch's graphs, which never run at the same time.
    pool: Any
    # Address of the pinned word that says where the microbatch's graph is.
    mark: int = 0
    state: dict[str, Storage] = field(default_factory=dict)
    # (step, name)
    inputs: dict[tuple[int, str], Storage] = field(default_factory=dict)


class ShareGraph:
    """A captured share; `replay` runs it on the current stream."""

    def __init__(
        self,
        program: Program,
        number: int,
        trace: Trace,
        device: GpuDevice,
        room: MicrobatchRoom,
        base: Mapping[int, Storage],
        launcher: Launcher,
        clockwork: Clockwork,
        transport: GpuTransport | None,
        is_short: bool = False,
        is_rehearsed: bool = False,
    ) -> None:
        """`number`: of the program among those that the transport knows. `base`: what is there at first."""
        self._is_rehearsed = is_rehearsed
        self.program, self.trace, self.room = program, trace, room
        self._number, self._device, self._base, self._launcher = number, device, base, launcher
        self._transport = transport
        self._clockwork, self._pace = clockwork, clockwork.pace(program)
        self._compute = room.compute[is_short]
        column = program.instructions[device.number]
        self._sends = sorted({program.transfers[x.transfer].dst for x in column if isinstance(x, Send)})
        # A row a launch, then a row a transfer; only what is timed on this device is written.
        rows = len(trace.launches) + len(program.transfers)
        is_timed = bool(self._pace.launches or self._pace.transfers)
        self.records = torch.zeros(
            rows if is_timed else 0, RECORD_WORDS, dtype=torch.int64, device=device.card
        )
        self.outputs: dict[str, torch.Tensor] = {}
        self._graph = self._capture()

    def replay(self) -> dict[str, torch.Tensor]:
        """Launches the graph on the current stream; outputs and state are overwritten."""
        self._graph.replay()
        return self.outputs

    def _capture(self) -> Any:
        if not self._is_rehearsed:
            with torch.no_grad(), torch.cuda.stream(self.room.origin):
                self.issue(is_rehearsal=True)
        self._device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.no_grad(),
            own_workspaces(),
            torch.cuda.graph(
                graph, pool=self.room.pool, stream=self.room.origin, capture_error_mode="thread_local"
            ),
        ):
            self.outputs = self.issue()
        return graph

    def issue(self, is_rehearsal: bool = False) -> dict[str, torch.Tensor]:
        """Issues everything once; a rehearsal has no sends, waits and times."""
        return _Issue(self, is_rehearsal).run()


class _Issue:
    def __init__(self, share: ShareGraph, is_rehearsal: bool) -> None:
        self._share, self._is_rehearsal = share, is_rehearsal
        self._program, self._room = share.program, share.room
        fill = torch.zeros if is_rehearsal else torch.empty
        self._memory = Memory(share._base, fresh(share.trace, share._device.card, fill))
        self._compute = share._compute
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

    def run(self) -> dict[str, torch.Tensor]:
        """Forks from the microbatch's stream, issues everything, joins."""
        start = _mark(self._room.origin)
        for stream in (self._compute, *self._links.values()):
            stream.wait_event(start)
        for position, instruction in enumerate(self._program.instructions[self._share._device.number]):
            match instruction:
                case Run(launch):
                    self._run(launch)
                case Send(number) if not self._is_rehearsal:
                    self._send(number)
                case Recv(number):
                    self._receive(number, position)
                case Free(buffer):
                    self._memory.free(buffer)
        self._settle()
        for stream in (self._compute, *self._links.values()):
            self._room.origin.wait_event(_mark(stream))
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
        with torch.cuda.stream(self._compute):
            self._enter(launch)
            stand_ins = self._put_stand_ins(launch) if self._is_rehearsal else ()
            if not (self._is_rehearsal and is_allocation(self._share.trace, launch)):
                self._share._launcher.run(launch, self._memory)
            for buffer in stand_ins:
                self._memory.free(buffer)

    def _put_stand_ins(self, launch: int) -> list[int]:
        """Zeros in the place of the state that a launch names."""
        trace = self._share.trace
        named = {view.buffer for view in trace.launches[launch].views}
        named |= {access.buffer for access in trace.launches[launch].accesses}
        state = sorted(named.intersection(trace.buffers_of(BufferKind.STATE)))
        for buffer in state:
            size, card = trace.buffers[buffer].size_bytes, self._share._device.card
            self._memory.put(buffer, torch.zeros(size, dtype=torch.uint8, device=card).untyped_storage())
        return state

    def _enter(self, launch: int) -> None:
        """Time starts for a launch: after its arrivals' latency, and when its device is free."""
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
            place = torch.zeros(size, dtype=torch.uint8, device=self._share._device.card).untyped_storage()
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
            home = self._room.state[self._share.trace.buffers[transfer.buffer].name]
            if not self._is_rehearsal:  # its contents are somebody's
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
        """Sends that still read what the launch is about to overwrite."""
        written = [a for a in self._share.trace.launches[launch].accesses if a.write or a.atomic]
        found = []
        for number in self._leaving:
            moved = self._program.transfers[number]
            region = Region(moved.start, moved.num_bytes)
            if any(a.buffer == moved.buffer and a.region.overlaps(region) for a in written):
                found.append(number)
        return found

    def _due(self) -> torch.Tensor | None:
        """The record of the last launch, before whose end a send must not begin; None: it has ended.

        The compute stream goes on meanwhile: a launch behind a send keeps its turn.
        """
        if self._chain is not None and self._chain.keeps_time:
            return self._chain.open
        self._settle()
        return None

    def _settle(self) -> None:
        """Nothing issued after this on the compute stream starts before its last launch is due."""
        if self._chain is not None:
            with torch.cuda.stream(self._compute):
                self._chain.settle()

    def _spot(self, number: int) -> InboxSpot:
        return InboxSpot(self._room.number, self._share._number, number)

    def _transport(self) -> GpuTransport:
        assert self._share._transport is not None, "a program with transfers has a transport"
        return self._share._transport


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The work issued on the stream so far; who waits for it, inside a capture, is an edge of the graph."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Scratch memory of matrix products belongs to the graph that is captured meanwhile.

    torch keeps one workspace for each handle of cuBLAS and stream, in common memory, and captured products
    name it. Whoever clears them (torch.compile with CUDA graphs does) frees memory that the graph still
    writes to. So workspaces are cleared before a capture, which makes it allocate them from the graph's own
    pool, and again after it, so that nothing else uses them. Nothing may be at work on the streams that are
    captured. Not handled: other people's CUDA graphs that name a common workspace; these are torch's rules.
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
