"""Timers: how long each launch of a trace takes on one device, and the whole step.

`CpuTimer` reads a clock around each launch, with a worker's threads; if these are several, beside a process
that polls as a GPU's worker does. `cuda.timing.CudaTimer` uses CUDA events around graphs.

`run` brings the step up to a launch, which works on copies of what it writes. Buffers that a real step finds
outside the cache are several copies in turn; before each round a larger piece of memory is read to evict
them.

Where the step's own tensors do not exist, they are synthetic, from the recorded types and shapes. Floats are
normal, flags true and false, and integers keep the launch inside its memory:
  gathers and scatters   random indices below the least extent of the tensors they index
  grouped products       offsets that share the rows evenly among the groups
  PTX kernels            zeros, which are inside any tensor
  all others             small numbers above zero
Refused: operators whose integers are lengths, offsets or page tables in ways not listed here.
"""

import os
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch

from tessera.errors import CannotTime, TesseraError, first_line
from tessera.execute.driver import LOOK_S
from tessera.execute.launcher import Launcher, generator_buffer
from tessera.execute.memory import Memory, Storage, bind_storages, fresh
from tessera.ir import BufferKind, Kernel, Launch, Origin, Trace, View
from tessera.ir.files import packaged
from tessera.ir.host import cache_bytes, cpu_name

Tensors = Mapping[str, torch.Tensor]
# Weights, inputs and state on the device, or None and remarks. Called before the first launch, since it may
# build a model.
MakeTensors = Callable[[], tuple[Tensors | None, tuple[str, ...]]]
# (samples so far, seconds they took) -> True to stop.
Enough = Callable[[Sequence[float], float], bool]

LAUNCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, TesseraError)
MAX_COPIES = 16
WARMUPS = 2
# Operators whose integers index other tensors, are offsets of groups, or are lengths and page tables.
INTEGERS = packaged("execute", "integers.json", dict[str, tuple[str, ...]])
SMALL = 8
BLOCK = 1 << 20


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def repeat(sample: Callable[[], Sequence[float]], enough: Enough) -> list[float]:
    samples: list[float] = []
    began = time.perf_counter()
    while not samples or not enough(samples, time.perf_counter() - began):
        samples += sample()
    return samples


class StepMemory(Memory):
    """A buffer that is not there is only written: a result that the operator does not allocate."""

    def __init__(
        self, trace: Trace, launcher: Launcher, device: torch.device, tensors: Tensors | None
    ) -> None:
        super().__init__({}, fresh(trace, device))
        self._trace, self._launcher, self._device = trace, launcher, device
        self._is_real = tensors is not None
        self._storages.update(self._bind(tensors or {}))
        self._last = last_uses(trace)

    def run(self, launch: int) -> None:
        """Where a launch cannot run, later launches get synthetic tensors."""
        if not self._is_fed(launch):
            return
        before = set(self._storages)
        try:
            with torch.no_grad():
                self._launcher.run(launch, self)
        except LAUNCH_ERRORS:
            for buffer in self._storages.keys() - before:
                self.free(buffer)
        else:
            self._free_unused(launch)

    def copies(self, launch: int, cold: frozenset[int], num: int) -> list[Memory]:
        """Written buffers are copied once, cold buffers each time."""
        is_fed, row = self._is_fed(launch), self._trace.launches[launch]
        base = Memory(self._storages, self._make) if is_fed else synthetic(self._trace, launch, self._device)
        arguments = _arguments(self._trace, row)
        written = {a.buffer for a in row.accesses if a.write or a.atomic} & arguments
        shared = {b: base.get(b).clone() if b in written else base.get(b) for b in arguments}
        copies = []
        for number in range(num):
            memory = Memory({})
            for buffer in arguments:
                again = number > 0 and buffer in cold
                memory.put(buffer, shared[buffer].clone() if again else shared[buffer])
            copies.append(memory)
        return copies

    def run_all(self) -> None:
        for launch in range(len(self._trace.launches)):
            self._launcher.run(launch, self)
            self._free_unused(launch)

    def small_state(self, max_bytes: int) -> list[tuple[Storage, Storage]]:
        state = (self._storages[b] for b in self._trace.buffers_of(BufferKind.STATE) if b in self._storages)
        return [(storage, storage.clone()) for storage in state if storage.nbytes() <= max_bytes]

    def _is_fed(self, launch: int) -> bool:
        read = {a.buffer for a in self._trace.launches[launch].accesses if a.read or a.atomic}
        return self._is_real and read <= self._storages.keys()

    def _free_unused(self, launch: int) -> None:
        for buffer in self._last.get(launch, ()):
            self.free(buffer)

    def _bind(self, tensors: Tensors) -> dict[int, Storage]:
        buffers = self._trace.buffers
        kinds = (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)
        sizes = {b.name: b.size_bytes for b in buffers}
        fitting = {n: t for n, t in tensors.items() if t.untyped_storage().nbytes() == sizes.get(n)}
        bound = bind_storages(self._trace, kinds, fitting, self._device, is_partial=True)
        # The caller's state stays as it is.
        return {b: s.clone() if buffers[b].kind is BufferKind.STATE else s for b, s in bound.items()}


class LaunchTimer(ABC):
    cache_bytes: int

    def __init__(self, trace: Trace, device: torch.device, make_tensors: MakeTensors) -> None:
        self._trace, self._device, self._make_tensors = trace, device, make_tensors
        self._launcher = Launcher(trace, device)
        self.remarks: tuple[str, ...] = ()

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Model, SMs, driver, torch."""

    @abstractmethod
    def clock_mhz(self) -> float | None:
        """Under load; None where it cannot be read."""

    def run(self, launch: int) -> None:
        with self._guarded():
            self._memory.run(launch)

    def time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        with self._guarded():
            return self._time(launch, cold, enough)

    def whole(self, enough: Enough) -> list[float]:
        if self._tensors is None:
            raise CannotTime("the model's own inputs are not there")
        with self._guarded():
            return self._whole(self._tensors, enough)

    @cached_property
    def _tensors(self) -> Tensors | None:
        tensors, self.remarks = self._make_tensors()
        return tensors

    @cached_property
    def _memory(self) -> StepMemory:
        return StepMemory(self._trace, self._launcher, self._device, self._tensors)

    @abstractmethod
    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turns errors of launches into CannotTime."""

    @abstractmethod
    def _time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]: ...

    @abstractmethod
    def _whole(self, tensors: Tensors, enough: Enough) -> list[float]: ...

    def _num_copies(self, cold: frozenset[int], most: int) -> int:
        return copies_needed(self._trace, cold, self.cache_bytes, most)


class CpuTimer(LaunchTimer):
    def __init__(self, trace: Trace, make_tensors: MakeTensors, num_threads: int = 1) -> None:
        super().__init__(trace, torch.device("cpu"), make_tensors)
        self._num_threads = num_threads
        self.cache_bytes = cache_bytes()
        if num_threads > 1:
            weakref.finalize(self, _end, _neighbour())

    @cached_property
    def _scratch(self) -> torch.Tensor:
        return torch.ones(2 * self.cache_bytes // 4)

    def identity(self) -> dict[str, str]:
        threads = f"{self._num_threads} beside one" if self._num_threads > 1 else "1"
        return {"device": cpu_name(), "torch": str(torch.__version__), "threads": threads}

    def clock_mhz(self) -> float | None:
        """Only where the system fixes it."""
        try:
            low, high = (
                Path(f"/sys/devices/system/cpu/cpu0/cpufreq/scaling_{end}_freq").read_text(encoding="utf-8")
                for end in ("min", "max")
            )
        except OSError:
            return None
        return int(high) / 1e3 if low == high else None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with threads(self._num_threads), torch.no_grad():
                yield
        except CannotTime:
            raise
        except LAUNCH_ERRORS as error:
            raise CannotTime(first_line(error)) from error

    def _whole(self, tensors: Tensors, enough: Enough) -> list[float]:
        def sample() -> list[float]:
            memory = StepMemory(self._trace, self._launcher, self._device, tensors)
            return [_elapsed_us(memory.run_all)]

        sample()
        return repeat(sample, enough)

    def _time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        num = self._num_copies(cold, MAX_COPIES)
        copies = self._memory.copies(launch, cold, num)
        for turn in range(WARMUPS):
            self._launcher.run(launch, copies[turn % num])

        def sample() -> list[float]:
            if cold:
                self._scratch.sum()
            return [_elapsed_us(partial(self._launcher.run, launch, memory)) for memory in copies]

        return repeat(sample, enough)


def _neighbour() -> subprocess.Popen[bytes]:
    code = f"import os, time\nwhile os.getppid() == {os.getpid()}: time.sleep({LOOK_S})"
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _elapsed_us(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def copies_needed(trace: Trace, cold: frozenset[int], cache_bytes: int, most: int) -> int:
    size = sum(trace.buffers[b].size_bytes for b in cold)
    return 1 if size == 0 else min(most, 1 + -(-2 * cache_bytes // size))


def _arguments(trace: Trace, launch: Launch) -> set[int]:
    generator = generator_buffer(trace, launch)
    return {v.buffer for v in launch.arg_views} | ({generator} if generator is not None else set())


def last_uses(trace: Trace) -> dict[int, list[int]]:
    last: dict[int, int] = {}
    for index, launch in enumerate(trace.launches):
        for view in launch.views:
            last[view.buffer] = index
    freed: dict[int, list[int]] = {}
    for buffer, index in last.items():
        if trace.buffers[buffer].kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT):
            freed.setdefault(index, []).append(buffer)
    return freed


def synthetic(trace: Trace, index: int, device: torch.device) -> Memory:
    launch, kernel = trace.launches[index], trace.kernel_of(index)
    if generator_buffer(trace, launch) is not None:
        raise CannotTime(f"{kernel.name} draws random numbers from a state that cannot be synthesised")
    memory = Memory({})
    # Torch's default generator is unusable after a failed graph capture.
    chance = torch.Generator(device).manual_seed(index)
    filled: set[int] = set()
    for view in launch.arg_views:
        if view.buffer not in filled:
            filled.add(view.buffer)
            size = trace.buffers[view.buffer].size_bytes
            memory.put(view.buffer, _filled(kernel, launch, view, size, chance))
    return memory


def _filled(kernel: Kernel, launch: Launch, view: View, size_bytes: int, chance: torch.Generator) -> Storage:
    dtype = getattr(torch, view.dtype)
    flat = torch.empty(size_bytes, dtype=torch.uint8, device=chance.device)
    count = size_bytes // dtype.itemsize
    typed = flat[: count * dtype.itemsize].view(dtype)
    if dtype is torch.bool:
        typed.random_(0, 2, generator=chance)
    elif dtype.itemsize == 1 or dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:  # codes, or 8-bit floats, which have no generator
            typed.view(torch.uint8)[:BLOCK].random_(32, 48, generator=chance)
        else:
            typed[:BLOCK].normal_(generator=chance)
        for start in range(BLOCK, count, BLOCK):  # a generator is slow on a CPU
            typed[start : start + BLOCK] = typed[: min(BLOCK, count - start)]
    else:
        typed.copy_(_integers(kernel, launch, view, count, chance))
    return flat.untyped_storage()


def _integers(
    kernel: Kernel, launch: Launch, view: View, count: int, chance: torch.Generator
) -> torch.Tensor:
    device = chance.device
    if kernel.origin is not Origin.ATEN:
        return torch.zeros(count, dtype=torch.int64, device=device)
    base = kernel.name.split(".")[1].rstrip("_")
    if base.startswith(INTEGERS["lengths"]):
        raise CannotTime(f"the integers of {kernel.name} are lengths or tables, which cannot be synthesised")
    if base in INTEGERS["offsets"]:
        rows = next(v.shape[0] for v in launch.arg_views if v.buffer != view.buffer)
        # As many experts as rows that choose at random are expected to have, evenly.
        chosen = max(1, round(count * (1.0 - (1.0 - 1.0 / count) ** rows)))
        return torch.arange(1, count + 1, device=device) * chosen // count * rows // chosen
    if base in INTEGERS["index"]:
        # Valid in every other tensor along every dimension.
        most = min((n for v in launch.arg_views if v.buffer != view.buffer for n in v.shape), default=1)
        return torch.randint(0, max(1, most), (count,), device=device, generator=chance)
    return torch.randint(1, SMALL, (count,), device=device, generator=chance)
