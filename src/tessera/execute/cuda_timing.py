"""CudaTimer: how long each launch of a trace takes on a GPU, or on a part of one, inside a CUDA graph.

Two graphs are made of each launch, one that runs it once and one that runs it several times more; a sample is
the difference of their times, divided. So what a graph costs to start drops out, and what is left is what one
more launch adds to a step. Before each replay a piece of memory larger than the cache is read (read and not
written: dirty lines would have to be written back during the launch), and the queue is held shut until the
replay has been submitted, so that the CPU is never part of the time.

Buffers that a real step finds outside the cache are another copy at each repeat; all others stay in it, as
results that were just made do. Memory that a launch returns goes back to the graph's pool at once.

Not handled: launches that read results on the host, which no graph can hold. They are refused by name.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from tessera.errors import CannotTime, DeviceGone
from tessera.execute.launcher import Launcher, generator_buffer
from tessera.execute.memory import Memory, Storage
from tessera.execute.timing import LAUNCH_ERRORS, Enough, Own, Tensors, Walk, copies_needed, first_line
from tessera.ir import Trace

# The larger graph of a launch takes about this long.
GRAPH_US = 200.0
MIN_EXTRA, MAX_EXTRA = 2, 24
# Pairs of replays between two looks at how sure the median is.
BATCH = 8
WARMUPS = 3
# An idle GPU needs this long under load before its clocks are what they are in a run.
WARM_UP_S = 0.3
# The queue is held shut for this many cycles, longer than it takes to submit a replay.
GATE_CYCLES = 150_000
CLOCK_CYCLES = 1_500_000
# State up to this size is put back before each run of the whole step: counters and positions are small.
SMALL_STATE_BYTES = 1 << 20
CACHE_BYTES = 64 << 20  # where this torch does not tell
# What torch raises when work cannot be captured.
CAPTURE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)

Result = TypeVar("Result")


class CudaTimer:
    """Times the launches of one trace on one CUDA device, on a stream of that device."""

    def __init__(
        self,
        trace: Trace,
        ordinal: int,
        own: Own,
        stream: torch.cuda.Stream | None = None,
        num_sms: int = 0,
    ) -> None:
        """`stream` and `num_sms`: of a part of the card, if it is one."""
        self._trace, self._own, self._num_sms = trace, own, num_sms
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        self._stream = stream or torch.cuda.Stream(self._device)
        self._launcher = Launcher(trace, self._device)
        self._properties = torch.cuda.get_device_properties(self._device)
        self.cache_bytes = int(getattr(self._properties, "L2_cache_size", 0)) or CACHE_BYTES
        self.remarks: tuple[str, ...] = ()
        self._is_warm = False
        self._scratch = torch.zeros(2 * self.cache_bytes // 4, device=self._device)
        self._sink = torch.zeros((), device=self._device)
        self._graphs = GraphPool(self._stream, self._device)
        torch.cuda.synchronize(self._device)

    @cached_property
    def _given(self) -> Tensors | None:
        given, self.remarks = self._own()
        torch.cuda.synchronize(self._device)
        return given

    @cached_property
    def _walk(self) -> Walk:
        given = self._given
        with torch.cuda.stream(self._stream):
            return Walk(self._trace, self._launcher, self._device, given)

    def identity(self) -> dict[str, str]:
        found = {
            "device": self._properties.name,
            "sms": str(self._num_sms or self._properties.multi_processor_count),
            "driver": _driver(),
            "torch": torch.__version__,
        }
        return {**found, "cuda": str(torch.version.cuda)}

    def clock_mhz(self) -> float | None:
        """Cycles of a kernel that counts them, over the time it took; the best of three."""

        def spin() -> float:
            start, stop = self._events()
            with torch.cuda.stream(self._stream):
                start.record()
                torch.cuda._sleep(CLOCK_CYCLES)
                stop.record()
            stop.synchronize()
            return CLOCK_CYCLES / _us(start, stop)

        def settled() -> float:
            if not self._is_warm:
                self._warm_up()
            return max(spin() for _ in range(3))

        return self._guard(settled)

    def _warm_up(self) -> None:
        """Work until the clocks have risen from idle."""
        began = time.perf_counter()
        with torch.cuda.stream(self._stream):
            while time.perf_counter() - began < WARM_UP_S:
                for _ in range(BATCH):
                    torch.sum(self._scratch, dim=0, out=self._sink)
                self._stream.synchronize()
        self._is_warm = True

    def run(self, launch: int) -> None:

        def work() -> None:
            with torch.cuda.stream(self._stream):
                self._walk.run(launch)

        self._guard(work)

    def time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        return self._guard(lambda: self._time(launch, cold, enough))

    def whole(self, enough: Enough) -> list[float]:
        """Microseconds of the whole step as one graph, repeatedly."""
        given = self._given
        if given is None:
            raise CannotTime("the model's own inputs are not there")
        return self._guard(lambda: self._whole(given, enough))

    # One launch ---------------------------------------------------------------------------------------

    def _time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        if generator_buffer(self._trace, self._trace.launches[launch]) is not None:
            raise CannotTime("it draws random numbers, whose state is set outside of any graph")
        num = copies_needed(self._trace, cold, self.cache_bytes, MAX_EXTRA + 1)
        # All work on one stream: memory is handed round without waiting.
        with torch.cuda.stream(self._stream), torch.no_grad():
            first = self._walk.copies(launch, cold, 1)
            extra = self._extra(launch, first[0])
            copies = first if num == 1 else self._walk.copies(launch, cold, min(num, extra + 1))
            once = self._graphs.capture(lambda: self._repeat(launch, copies, 1))
            often = self._graphs.capture(lambda: self._repeat(launch, copies, 1 + extra))
            return self._differences(once, often, extra, enough)

    def _extra(self, launch: int, memory: Memory) -> int:
        """How many repeats fill the larger graph; found by running the launch as it is."""
        for _ in range(WARMUPS):
            self._repeat(launch, [memory], 1)
        with no_host_reads():
            self._repeat(launch, [memory], 1)
        start, stop = self._events()
        torch.cuda._sleep(GATE_CYCLES)
        start.record()
        self._repeat(launch, [memory], 1)
        stop.record()
        stop.synchronize()
        rough_us = max(1.0, _us(start, stop))
        return min(MAX_EXTRA, max(MIN_EXTRA, math.ceil(GRAPH_US / rough_us)))

    def _repeat(self, launch: int, copies: list[Memory], count: int) -> None:
        row = self._trace.launches[launch]
        made = {v.buffer for v in row.outputs if v is not None} - {v.buffer for v in row.given}
        for number in range(count):
            memory = copies[number % len(copies)]
            self._launcher.run(launch, memory)
            for buffer in made:
                memory.free(buffer)

    def _differences(
        self, once: torch.cuda.CUDAGraph, often: torch.cuda.CUDAGraph, extra: int, enough: Enough
    ) -> list[float]:
        samples: list[float] = []
        began = time.perf_counter()
        while not samples or not enough(samples, time.perf_counter() - began):
            pairs = [(self._replay(once), self._replay(often)) for _ in range(BATCH)]
            self._stream.synchronize()
            samples += [(_us(*longer) - _us(*shorter)) / extra for shorter, longer in pairs]
        return samples

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = self._events()
        torch.sum(self._scratch, dim=0, out=self._sink)
        torch.cuda._sleep(GATE_CYCLES)
        start.record()
        graph.replay()
        stop.record()
        return start, stop

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    # The whole step -----------------------------------------------------------------------------------

    def _whole(self, given: Tensors, enough: Enough) -> list[float]:
        samples: list[float] = []
        with torch.cuda.stream(self._stream), torch.no_grad():
            walk = Walk(self._trace, self._launcher, self._device, given)
            small = walk.small_state(SMALL_STATE_BYTES)
            for _ in range(WARMUPS):
                walk.run_all()
                _put_back(small)
            graph = self._graphs.capture(walk.run_all)
            began = time.perf_counter()
            while not samples or not enough(samples, time.perf_counter() - began):
                pairs = [self._whole_once(graph, small) for _ in range(BATCH // 2)]
                self._stream.synchronize()
                samples += [_us(start, stop) for start, stop in pairs]
        return samples

    def _whole_once(
        self, graph: torch.cuda.CUDAGraph, small: Sequence[tuple[Storage, Storage]]
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        _put_back(small)
        start, stop = self._events()
        torch.cuda._sleep(4 * GATE_CYCLES)
        start.record()
        graph.replay()
        stop.record()
        return start, stop

    # Failures -----------------------------------------------------------------------------------------

    def _guard(self, work: Callable[[], Result]) -> Result:
        """Does some work; tells a launch that cannot be timed from a device that is gone."""
        try:
            return work()
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
            remedy = "What was measured before is kept; run the same command again to go on."
            raise DeviceGone(message, remedy) from gone


def _put_back(saved: Sequence[tuple[Storage, Storage]]) -> None:
    for storage, copy in saved:
        storage.copy_(copy, non_blocking=True)


def _us(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
    return float(start.elapsed_time(stop)) * 1e3


def _driver() -> str:
    """The driver's version as it prints itself, else the CUDA version it knows."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())
    return next((w for w in words if w[:1].isdigit() and "." in w), "unknown")


class GraphPool:
    """CUDA graphs of small pieces of work on one stream, many of them, captured quickly one after the other.

    Not by `torch.cuda.graph`, which collects garbage and empties torch's cache at every capture. All graphs
    share one pool of memory, which a first graph keeps alive; so only graphs that are not replayed side by
    side may be made here. A capture that breaks costs its own pool and nothing else.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs that hold the pools, which would go with their last graph.
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
                # A capture that broke may hold on to its pool.
                self._pool = torch.cuda.graph_pool_handle()
                raise
            graph.capture_end()
        return graph


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Operators that wait for the device raise: inside a capture they would break more than themselves."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch calls this mode a prototype, each time
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
