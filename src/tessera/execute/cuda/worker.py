"""CudaWorker: one process, one GPU or part of one.

A run is one graph. Graphs are launched in the order of the engine's orders, which is the same on every
device: this keeps graphs that wait for one another from hanging (streams share the GPU's hardware queues). A
step ordered while another runs is queued on the GPU; if its late inputs follow, so does its second graph
(`graphs`). Waiting for them counts as busy time.

A cancelled graph may wait for a lost peer: its flags are set from here, so that it ends, then cleared. The
microbatch is used again when every device has done so.

Busy time is measured for runs without receives; for others it is the plan's costs times the scale.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.errors import WorkerError
from tessera.execute import driver, messages
from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.direct import Ipc, Nvshmem, PeerAway
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.pace import DUE, ENDED, RECORD_WORDS, STARTED, link_hold, throttled_links
from tessera.execute.cuda.share import MicrobatchBuffers, ShareGraph
from tessera.execute.cuda.transport import ALIGN, GpuTransport, Host, Staged
from tessera.execute.engine_connection import EngineConnection
from tessera.execute.links import Links
from tessera.execute.page_mover import PageCopier, PageMover
from tessera.execute.worker_loop import DeviceWorker
from tessera.ir import Program, Recv, Run

# Captured before a worker is ready: the largest and the smallest step of a microbatch.
START_GRAPHS = 2
# A released graph normally ends within milliseconds.
CANCEL_S = 20.0
# Readings of the clock; the quickest counts.
CLOCK_LOOKS = 20
# (launch, start, stop, busy time), and (transfer, start, stop) of sends.
Rows = tuple[list[tuple[int, float, float, float]], list[tuple[int, float, float]]]


@dataclass
class _Running:
    order: messages.Begin
    program: Program
    graph: ShareGraph | None
    start: Any
    stop: Any
    done: Any
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    is_open: bool = False


class CudaWorker(DeviceWorker):
    def __init__(self, setup: messages.Setup, engine: EngineConnection) -> None:
        super().__init__(setup, engine)
        torch.cuda.set_device(setup.cluster.devices[setup.device].ordinal)
        # numbers[lane][index], as `DeviceGraphs` counts programs.
        self._numbers: list[Sequence[int]] = []
        self._graphs = DeviceGraphs(setup, partial(_open_transport, setup, engine, self._links))
        self._state = self._graphs.state
        self._clock = GpuClock.of(self._graphs.device) if setup.is_profiled else None
        copier, hold_s = GpuCopier(self._graphs.device), _hold_s(setup)
        self._pages = PageMover(setup, self._find, copier, self._links, engine.tell, hold_s)
        # Oldest first.
        self._running: dict[int, _Running] = {}
        # Microbatch -> its last run and the number of its program.
        self._ordered: dict[int, tuple[int, int]] = {}
        self._modelled_s: dict[tuple[int, int], float | None] = {}
        self._last: _Running | None = None
        # (microbatch, step of inputs or name of state) -> pinned memory, with the event after its last copy.
        self._staged: dict[tuple[int, int | str], deque[tuple[torch.Tensor, Any]]] = {}
        self._load(messages.LoadLanes(setup.programs, setup.traces, setup.us, setup.lane_microbatches))
        for _ in range(START_GRAPHS):
            self._graphs.capture_next()

    def _advance(self) -> bool:
        if self._running and not self._end_runs():
            time.sleep(driver.LOOK_S)
        return bool(self._running)

    def _prepare(self) -> bool:
        return self._graphs.capture_next()

    def close(self) -> None:
        """The weights belong to the engine."""
        if self._running:  # a graph that waits for a lost peer never ends
            return
        super().close()
        self._graphs.close()
        self._setup = replace(self._setup, weights={})

    def _load(self, new: messages.LoadLanes) -> None:
        self._graphs.add_steps(new.traces, new.us)
        for lane, added in enumerate(zip(new.programs, new.microbatches, strict=True), len(self._programs)):
            self._numbers.append(self._graphs.add(*added, lane in self._setup.dropped))
        self._programs += new.programs
        self._graphs.keep_weights()

    def _drop(self, lanes: Collection[int]) -> None:
        self._graphs.drop([number for lane in lanes for number in self._numbers[lane]])

    def _relink(self, device: int, epoch: int) -> None:
        self._graphs.relink(device, epoch)

    def _where(self) -> list[tuple[int, int, int]]:
        """Position of the last instruction begun; -1 in a queued run."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for run, running in list(self._running.items()):
            microbatch = running.order.microbatch
            position = -1 if microbatch in rows else max(-1, int(self._graphs.marks[microbatch]) - 2)
            rows.setdefault(microbatch, []).append((microbatch, run, position))
        return [row for listed in rows.values() for row in listed]

    def _begin(self, order: messages.Begin) -> None:
        program, number = self._programs[order.lane][order.index], self._numbers[order.lane][order.index]
        room = self._graphs.buffers[order.microbatch]
        self._ordered[order.microbatch] = order.run, number
        try:
            graph = self._graphs.graph(order.microbatch, number)
        except PeerAway as error:
            self._engine.tell(messages.PeerLost(error.device, error.message))
            return
        start, stop, done = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
        running = _Running(order, program, graph, start, stop, done)
        if self._graphs.transport is not None:
            self._graphs.transport.begin(order.microbatch, order.run, number)
        with torch.no_grad(), torch.cuda.stream(room.origin):
            self._take_in(room, program, order.inputs, order.state)
            start.record()
            if graph is not None:
                graph.begin()
            if order.is_open:
                running.is_open = True
                done.record()
            else:
                self._finish(room, running)
        self._running[order.run] = running

    def _give(self, late: messages.LateInputs) -> None:
        running = self._running.get(late.run)
        if running is not None:
            room = self._graphs.buffers[running.order.microbatch]
            with torch.no_grad(), torch.cuda.stream(room.origin):
                self._take_in(room, running.program, late.inputs, {})
                self._finish(room, running)
            running.is_open = False

    def _finish(self, room: MicrobatchBuffers, running: _Running) -> None:
        order = running.order
        outputs = running.graph.finish() if running.graph is not None else {}
        running.stop.record()
        running.outputs = {name: _to_host(t) for name, t in outputs.items() if name not in order.skips}
        if order.wants_state:
            state = self._graphs.state.named(room.number, running.program)
            running.state = {name: _to_host(tensor) for name, tensor in state.items()}
        running.done.record()

    def _take_in(
        self,
        room: MicrobatchBuffers,
        program: Program,
        inputs: messages.PackedTensors,
        initial: messages.PackedTensors,
    ) -> None:
        arena = room.arenas.get(program.step)
        placed = {name: packed for name, packed in inputs.items() if arena and name in arena.places}
        if arena is not None and placed:
            parts = [(*arena.places[name], packed, f"input '{name}'") for name, packed in placed.items()]
            self._copy_in((room.number, program.step), arena.contents, parts)
        state = self._graphs.state.named(room.number, program) if initial else {}
        for name, packed in initial.items():
            if name in state:
                contents = state[name]
                self._copy_in((room.number, name), contents, [(0, len(contents), packed, f"state '{name}'")])

    def _copy_in(
        self,
        key: tuple[int, int | str],
        target: torch.Tensor,
        parts: Sequence[tuple[int, int, messages.PackedTensor, str]],
    ) -> None:
        """Copies (offset, bytes, values, name) through pinned memory that no earlier copy still reads.

        Values may be given in part: the rest stays as it is. Neighbours are copied together.
        """
        staged = self._staged.setdefault(key, deque())
        if not staged or not staged[0][1].query():  # the copy of a queued step is still to come
            staged.appendleft((driver.pinned((len(target),)), torch.cuda.Event()))
        pinned, is_read = staged[0]
        staged.rotate(-1)
        values, ranges = pinned.numpy(), list[tuple[int, int]]()
        is_whole = False
        for start, size, packed, what in sorted(parts, key=lambda part: part[0]):
            data = np.frombuffer(packed.data, dtype=np.uint8)
            if len(data) > size:
                message = f"{what} has {len(data)} bytes, the step {size}"
                raise WorkerError(message, "Give tensors of the shapes that were captured.")
            if not len(data):
                continue
            stop = start + len(data)
            values[start:stop] = data
            is_next = is_whole and start == -(-ranges[-1][1] // ALIGN) * ALIGN
            ranges = [*ranges[:-1], (ranges[-1][0], stop)] if is_next else [*ranges, (start, stop)]
            is_whole = len(data) == size
        for start, stop in ranges:
            target[start:stop].copy_(pinned[start:stop], non_blocking=True)
        is_read.record()

    def _end_runs(self) -> bool:
        ended = [x for x in self._running.values() if not x.is_open and x.done.query()]
        for running in ended:
            order = running.order
            del self._running[order.run]
            self._over(order.run, is_cancelled=False)
            spans, transfers = self._report(running)
            outputs = {name: messages.pack(t) for name, t in running.outputs.items()}
            state = {name: messages.pack(t) for name, t in running.state.items()}
            times = (self._busy_s(running), self._idle_s(running))
            self._engine.tell(messages.Done(order.run, outputs, state, spans, transfers, *times))
        return bool(ended)

    def _idle_s(self, running: _Running) -> float:
        """Since the end of the last run; 0 if they overlap."""
        last = self._last
        if last is None or last.stop.elapsed_time(running.stop) > 0.0:
            self._last = running
        return 0.0 if last is None else max(0.0, float(last.stop.elapsed_time(running.start))) * 1e-3

    def _report(self, running: _Running) -> Rows:
        if self._clock is None or running.graph is None or not running.order.wants_spans:
            return [], []
        device = self._setup.cluster.devices[self._setup.device]
        return rows_of(running.graph, self._setup.device, device.is_dilated, self._clock)

    def _busy_s(self, running: _Running) -> float:
        key = (running.order.lane, running.order.index)
        if key not in self._modelled_s:
            self._modelled_s[key] = self._modelled(running.program)
        modelled_s = self._modelled_s[key]
        if modelled_s is not None:
            return modelled_s
        ran_ms = float(running.start.elapsed_time(running.stop))
        if self._last is not None:  # without time that overlaps the previous run
            ran_ms = min(ran_ms, self._last.stop.elapsed_time(running.stop))
        return max(0.0, ran_ms) * 1e-3

    def _modelled(self, program: Program) -> float | None:
        """Busy time by the plan's costs; None if it is measured."""
        column = program.instructions[self._setup.device]
        device = self._setup.cluster.devices[self._setup.device]
        if not device.is_dilated and not any(isinstance(x, Recv) for x in column):
            return None
        us = self._setup.us[program.step] if self._setup.us else ()
        launches = [x.launch for x in column if isinstance(x, Run)]
        return sum(us[n] for n in launches) * 1e-6 * self._setup.scale if us else 0.0

    def _over(self, run: int, is_cancelled: bool) -> None:
        if self._graphs.transport is not None:
            self._graphs.transport.end(run, is_cancelled)

    def _cancel(self, run: int) -> None:
        running = self._running.pop(run, None)
        self._over(run, is_cancelled=True)
        if running is not None:
            self._end_stuck(running)
        # Also where it has ended or was not launched: peers set flags here, and this device set theirs.
        for microbatch, (last, number) in self._ordered.items():
            if last == run and self._graphs.transport is not None:
                self._graphs.transport.reset(microbatch, number)

    def _end_stuck(self, running: _Running) -> None:
        deadline = time.monotonic() + CANCEL_S
        transport = self._graphs.transport
        while not running.done.query():
            if transport is not None:
                transport.release(running.order.microbatch)
            if time.monotonic() > deadline:
                raise WorkerError(f"run {running.order.run} was cancelled and did not end", "")
            time.sleep(1e-3)

    def _clear(self, microbatch: int, lane: int) -> None:
        if microbatch in self._graphs.buffers:  # else the lane has nothing here
            with torch.cuda.stream(self._graphs.buffers[microbatch].origin):
                super()._clear(microbatch, lane)


class GpuCopier(PageCopier):
    """Copies pages on a stream of its own, beside the graphs, through pinned memory."""

    def __init__(self, device: GpuDevice) -> None:
        super().__init__(device.card)
        self._stream = device.plain_stream(device.priorities[1])

    def stream(self) -> Any:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def staging(self, size: int, path: Path | None) -> torch.Tensor:
        staging = super().staging(size, path)
        with suppress(WorkerError):  # copies are then slower
            driver.pin(staging)
        return staging


def _open_transport(
    setup: messages.Setup, engine: EngineConnection, links: Links, ordinal: int
) -> GpuTransport | None:
    if len(setup.cluster.devices) < 2:
        return None
    match setup.transport:
        case "ipc":
            return Ipc(setup, ordinal, engine)
        case "nvshmem":
            return Nvshmem(setup, ordinal, engine)
        case "shm":
            return Staged(setup, ordinal)
        case _:
            return Host(setup, ordinal, links)


def _hold_s(setup: messages.Setup) -> Callable[[int, int], tuple[float, float]]:
    """Modelled seconds of a piece on the wire, and of latency."""
    links = throttled_links(setup.cluster)

    def hold_s(device: int, size: int) -> tuple[float, float]:
        link = links.get((setup.device, device))
        if link is None:
            return 0.0, 0.0
        hold = link_hold(link, size, setup.scale)
        return hold.hold_ns * 1e-9, hold.extra_ns * 1e-9

    return hold_s


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return driver.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class GpuClock:
    zero_ns: int
    zero_s: float

    @classmethod
    def of(cls, device: GpuDevice) -> "GpuClock":
        record = torch.zeros(RECORD_WORDS, dtype=torch.int64, device=device.card)
        best = (float("inf"), 0, 0.0)
        for _ in range(CLOCK_LOOKS):
            device.synchronize()
            before = time.monotonic()
            device.pace_kernel(None, 0, None, record, 0)
            device.synchronize()
            after = time.monotonic()
            best = min(best, (after - before, int(record[STARTED].item()), (before + after) / 2))
        return cls(best[1], best[2])

    def seconds(self, time_ns: int) -> float:
        return self.zero_s + (time_ns - self.zero_ns) * 1e-9


def rows_of(graph: ShareGraph, device: int, is_dilated: bool, clock: GpuClock) -> Rows:
    records = graph.records.cpu().tolist()
    if not records:
        return [], []
    column, first = graph.program.instructions[device], len(graph.trace.launches)
    spans = []
    for launch in (x.launch for x in column if isinstance(x, Run)):
        if records[launch][STARTED]:
            start, stop = clock.seconds(records[launch][STARTED]), _stop(records[launch], is_dilated, clock)
            spans.append((launch, start, stop, stop - start))
    sends = []
    for number, transfer in enumerate(graph.program.transfers):
        row = records[first + number]
        if transfer.src == device and row[STARTED]:
            sends.append((number, clock.seconds(row[STARTED]), _stop(row, True, clock)))
    return spans, sends


def _stop(row: list[int], is_held: bool, clock: GpuClock) -> float:
    due, ended = row[DUE], row[ENDED]
    return clock.seconds(due if is_held and due > row[STARTED] else max(ended, due))
