"""CudaTimer: how long each launch of a trace takes on a GPU, or a part of one, inside a CUDA graph.

A sample is the difference between graphs that run the launch once and several times, so the start of a graph
drops out. Before each replay memory larger than the cache is read (not written: dirty lines would be written
back), and the queue is held until the replay is submitted. Buffers that a real step finds outside the cache
are another copy at each repeat.

Refused by name: launches that read results on the host.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tessera.errors import CannotTime, DeviceGone, first_line
from tessera.execute.launcher import generator_buffer
from tessera.execute.memory import Memory, Storage
from tessera.execute.timing import (
    LAUNCH_ERRORS,
    Enough,
    LaunchTimer,
    MakeTensors,
    StepMemory,
    Tensors,
    repeat,
)
from tessera.ir import Trace

GRAPH_US = 200.0
MIN_EXTRA, MAX_EXTRA = 2, 24
BATCH = 8
WARMUPS = 3
WARM_UP_S = 0.3
# Longer than submitting a replay takes.
GATE_CYCLES = 150_000
CLOCK_CYCLES = 1_500_000
# Counters and positions are restored before each run of the whole step.
SMALL_STATE_BYTES = 1 << 20
CACHE_BYTES = 64 << 20  # where torch does not say
CAPTURE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)

Events = tuple[torch.cuda.Event, torch.cuda.Event]


class CudaTimer(LaunchTimer):
    def __init__(
        self,
        trace: Trace,
        ordinal: int,
        make_tensors: MakeTensors,
        stream: torch.cuda.Stream | None = None,
        num_sms: int = 0,
    ) -> None:
        super().__init__(trace, torch.device("cuda", ordinal), make_tensors)
        self._num_sms = num_sms
        torch.cuda.set_device(self._device)
        self._stream = stream or torch.cuda.Stream(self._device)
        self._properties = torch.cuda.get_device_properties(self._device)
        self.cache_bytes = int(getattr(self._properties, "L2_cache_size", 0)) or CACHE_BYTES
        self._is_warm = False
        self._scratch = torch.zeros(2 * self.cache_bytes // 4, device=self._device)
        self._sink = torch.zeros((), device=self._device)
        self._graphs = GraphPool(self._stream, self._device)
        torch.cuda.synchronize(self._device)

    @cached_property
    def _tensors(self) -> Tensors | None:
        tensors, self.remarks = self._make_tensors()
        torch.cuda.synchronize(self._device)
        return tensors

    def identity(self) -> dict[str, str]:
        return {
            "device": self._properties.name,
            "sms": str(self._num_sms or self._properties.multi_processor_count),
            "driver": _driver(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
        }

    def clock_mhz(self) -> float | None:
        def spin() -> float:
            times = self._timed(lambda: torch.cuda._sleep(CLOCK_CYCLES))
            times[1].synchronize()
            return CLOCK_CYCLES / _us(*times)

        with self._guarded():
            if not self._is_warm:
                self._warm_up()
            return max(spin() for _ in range(3))

    def _warm_up(self) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP_S:
            for _ in range(BATCH):
                torch.sum(self._scratch, dim=0, out=self._sink)
            self._stream.synchronize()
        self._is_warm = True

    def _time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        if generator_buffer(self._trace, self._trace.launches[launch]) is not None:
            raise CannotTime("it draws random numbers, whose state is set outside of any graph")
        num = self._num_copies(cold, MAX_EXTRA + 1)
        first = self._memory.copies(launch, cold, 1)
        extra = self._extra(launch, first[0])
        copies = first if num == 1 else self._memory.copies(launch, cold, min(num, extra + 1))
        once = self._graphs.capture(lambda: self._repeat(launch, copies, 1))
        often = self._graphs.capture(lambda: self._repeat(launch, copies, 1 + extra))

        def sample() -> list[float]:
            pairs = [(self._replay(once), self._replay(often)) for _ in range(BATCH)]
            self._stream.synchronize()
            return [(_us(*longer) - _us(*shorter)) / extra for shorter, longer in pairs]

        return repeat(sample, enough)

    def _extra(self, launch: int, memory: Memory) -> int:
        """Repeats that fill the larger graph."""
        for _ in range(WARMUPS):
            self._repeat(launch, [memory], 1)
        with no_host_reads():
            self._repeat(launch, [memory], 1)
        torch.cuda._sleep(GATE_CYCLES)
        times = self._timed(lambda: self._repeat(launch, [memory], 1))
        times[1].synchronize()
        rough_us = max(1.0, _us(*times))
        return min(MAX_EXTRA, max(MIN_EXTRA, math.ceil(GRAPH_US / rough_us)))

    def _repeat(self, launch: int, copies: list[Memory], count: int) -> None:
        row = self._trace.launches[launch]
        results = {v.buffer for v in row.outputs if v is not None} - {v.buffer for v in row.arg_views}
        for number in range(count):
            memory = copies[number % len(copies)]
            self._launcher.run(launch, memory)
            for buffer in results:
                memory.free(buffer)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> Events:
        torch.sum(self._scratch, dim=0, out=self._sink)
        torch.cuda._sleep(GATE_CYCLES)
        return self._timed(graph.replay)

    def _timed(self, work: Callable[[], Any]) -> Events:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        return start, stop

    def _whole(self, tensors: Tensors, enough: Enough) -> list[float]:
        memory = StepMemory(self._trace, self._launcher, self._device, tensors)
        small = memory.small_state(SMALL_STATE_BYTES)
        for _ in range(WARMUPS):
            memory.run_all()
            _put_back(small)
        graph = self._graphs.capture(memory.run_all)

        def once() -> Events:
            _put_back(small)
            torch.cuda._sleep(4 * GATE_CYCLES)
            return self._timed(graph.replay)

        def sample() -> list[float]:
            pairs = [once() for _ in range(BATCH // 2)]
            self._stream.synchronize()
            return [_us(*pair) for pair in pairs]

        return repeat(sample, enough)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Tells a launch that cannot be timed from a lost device."""
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                yield
        except (CannotTime, DeviceGone):
            raise
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise CannotTime(f"{self._device} ran out of memory: {first_line(error)}") from error
        except LAUNCH_ERRORS as error:
            self._check_alive(error)
            raise CannotTime(first_line(error)) from error

    def _check_alive(self, error: BaseException) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as gone:
            message = f"{self._device} stopped answering: {first_line(error)}"
            remedy = "Earlier measurements are kept; run the same command again to continue."
            raise DeviceGone(message, remedy) from gone


def _put_back(saved: Sequence[tuple[Storage, Storage]]) -> None:
    for storage, copy in saved:
        storage.copy_(copy, non_blocking=True)


def _us(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
    return float(start.elapsed_time(stop)) * 1e3


def _driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())
    return next((w for w in words if w[:1].isdigit() and "." in w), "unknown")


class GraphPool:
    """Many small CUDA graphs on one stream.

    Unlike `torch.cuda.graph`, a capture collects no garbage. Graphs share one memory pool, so they must not
    be replayed concurrently. A failed capture costs its own pool only.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._pool = torch.cuda.graph_pool_handle()
        self._anchors: dict[Any, torch.cuda.CUDAGraph] = {}

    def capture(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        if self._pool not in self._anchors:
            self._anchors[self._pool] = self._record(lambda: torch.zeros(8, device=self._device))
        return self._record(work)

    def _record(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(*CAPTURE_ERRORS):
                    graph.capture_end()
                self._pool = torch.cuda.graph_pool_handle()
                raise
            graph.capture_end()
        return graph


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Operators that synchronise raise here, before they can break a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns each time that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
