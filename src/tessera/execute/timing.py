"""CpuTimer: how long each launch of a trace takes on this machine's CPU, one thread.

What is timed is what a worker does for a launch, dispatch included. A launch is timed where it stands in the
step: `run` brings the step up to it. It works on copies of all that it writes, so timing changes nothing.

Buffers that a real step finds outside the cache are given as several copies, taken in turn; before each round
a larger piece of memory is read, so that each copy is out of the cache when its turn comes.

A launch that follows the step's own run gets the step's own tensors. Where these do not exist (a trace of a
model that cannot be built here, or a launch behind one that cannot run), tensors are made up (`made_up`) from
the types and shapes that were recorded: normal numbers for floats, true and false for flags, and for integers
what keeps the launch inside its memory:
  gathers and scatters   random indices below the least extent of the tensors they index
  grouped products       offsets that share the rows evenly among the groups
  PTX kernels            zeros, which are inside any tensor
  all others             small numbers above zero
Refused: operators whose integers say how long things are in ways not listed here.

Not handled: other work on this machine, which shows in the interval of the median only.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch

from tessera.errors import CannotTime, TesseraError
from tessera.execute.launcher import Launcher, generator_buffer
from tessera.execute.memory import Memory, Storage, constant, fresh
from tessera.ir import BufferKind, Kernel, Launch, Origin, Trace, View

Tensors = Mapping[str, torch.Tensor]
# Makes the weights, inputs and state of the step, by name, on the device; None, and words on why, where they
# cannot be had. Called when a first launch is run, since it may have to build a model.
Own = Callable[[], tuple[Tensors | None, tuple[str, ...]]]
# (samples so far, seconds they took) -> True to stop.
Enough = Callable[[Sequence[float], float], bool]

# What operators raise when they cannot run as asked; anything else is a bug.
LAUNCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, TesseraError)
MAX_COPIES = 16
# Taken where the system does not tell.
CPU_CACHE_BYTES = 32 << 20
WARMUPS = 2


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Walk:
    """The memory of a step as it stands before each launch, as far as its launches can be run here."""

    def __init__(self, trace: Trace, launcher: Launcher, device: torch.device, given: Tensors | None) -> None:
        """`given`: weights, inputs and state by name; without them every launch gets made-up tensors."""
        self._trace, self._launcher, self._device = trace, launcher, device
        self._is_real = given is not None
        self._fresh = fresh(trace, device)
        self._storages: dict[int, Storage] = {} if given is None else self._bind(given)
        self._last = last_uses(trace)
        # Buffers that each launch is given, and that it returns.
        self._given = [_arguments(trace, x) for x in trace.launches]
        self._made = [{v.buffer for v in x.outputs if v is not None} for x in trace.launches]

    def run(self, launch: int) -> None:
        """Runs a launch on the step's memory; where it cannot, later launches get made-up tensors."""
        if not self._is_real or not self._is_fed(launch):
            return
        memory = self._memory()
        try:
            with torch.no_grad():
                self._launcher.run(launch, memory)
        except LAUNCH_ERRORS:
            return
        for buffer in self._given[launch] | self._made[launch]:
            self._storages[buffer] = memory.get(buffer)
        for buffer in self._last.get(launch, ()):
            self._storages.pop(buffer, None)

    def copies(self, launch: int, cold: frozenset[int], num: int) -> list[Memory]:
        """Memory for one launch, `num` times: cold buffers another copy each time, written ones a copy."""
        base = self._memory() if self._is_fed(launch) else made_up(self._trace, launch, self._device)
        here = self._given[launch]
        written = {a.buffer for a in self._trace.launches[launch].accesses if a.write or a.atomic} & here
        shared = {b: base.get(b).clone() if b in written else base.get(b) for b in here}
        made = []
        for number in range(num):
            memory = Memory({})
            for buffer in here:
                again = number > 0 and buffer in cold
                memory.put(buffer, shared[buffer].clone() if again else shared[buffer])
            made.append(memory)
        return made

    def run_all(self) -> None:
        """The whole step, as a worker or a graph runs it; nothing is looked at in between."""
        memory = Memory(self._storages, self._fresh)
        for launch in range(len(self._trace.launches)):
            self._launcher.run(launch, memory)
            for buffer in self._last.get(launch, ()):
                memory.free(buffer)

    def small_state(self, most_bytes: int) -> list[tuple[Storage, Storage]]:
        """State of at most that size, each with a copy of what it holds now."""
        found = (self._storages[b] for b in self._trace.buffers_of(BufferKind.STATE) if b in self._storages)
        return [(storage, storage.clone()) for storage in found if storage.nbytes() <= most_bytes]

    def _is_fed(self, launch: int) -> bool:
        read = {a.buffer for a in self._trace.launches[launch].accesses if a.read or a.atomic}
        return self._is_real and read <= self._storages.keys()

    def _memory(self) -> Memory:
        # One that is not there is written only: a result that the launch does not bring itself.
        return Memory(dict(self._storages), self._fresh)

    def _bind(self, given: Tensors) -> dict[int, Storage]:
        bound: dict[int, Storage] = {}
        for index, buffer in enumerate(self._trace.buffers):
            if buffer.constant_hex:
                bound[index] = constant(buffer, self._device)
            elif buffer.name in given and buffer.kind not in (BufferKind.TEMPORARY, BufferKind.OUTPUT):
                storage = given[buffer.name].detach().untyped_storage()
                if storage.nbytes() == buffer.size_bytes:
                    # State is changed by the walk; the caller's stays as it is.
                    bound[index] = storage.clone() if buffer.kind is BufferKind.STATE else storage
        return bound


class CpuTimer:
    """Times the launches of one trace on the CPU."""

    def __init__(self, trace: Trace, own: Own) -> None:
        self._trace, self._own = trace, own
        self._device = torch.device("cpu")
        self._launcher = Launcher(trace, self._device)
        self.cache_bytes = _cache_bytes()
        self.remarks: tuple[str, ...] = ()

    @cached_property
    def _given(self) -> Tensors | None:
        given, self.remarks = self._own()
        return given

    @cached_property
    def _walk(self) -> Walk:
        return Walk(self._trace, self._launcher, self._device, self._given)

    @cached_property
    def _scratch(self) -> torch.Tensor:
        return torch.zeros(2 * self.cache_bytes // 4)

    def identity(self) -> dict[str, str]:
        return {"device": _cpu_name(), "torch": torch.__version__, "threads": "1"}

    def clock_mhz(self) -> float | None:
        """Where the system fixes it; a clock that changes by the moment says nothing."""
        try:
            low, high = (
                Path(f"/sys/devices/system/cpu/cpu0/cpufreq/scaling_{end}_freq").read_text(encoding="utf-8")
                for end in ("min", "max")
            )
        except OSError:
            return None
        return int(high) / 1e3 if low == high else None

    def run(self, launch: int) -> None:
        with _one_thread():
            self._walk.run(launch)

    def time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        try:
            with _one_thread(), torch.no_grad():
                return self._time(launch, cold, enough)
        except CannotTime:
            raise
        except LAUNCH_ERRORS as error:
            raise CannotTime(first_line(error)) from error

    def whole(self, enough: Enough) -> list[float]:
        """Microseconds of all launches one after the other, without a look at the clock between them."""
        if self._given is None:
            raise CannotTime("the model's own inputs are not there")
        samples: list[float] = []
        try:
            with _one_thread(), torch.no_grad():
                self._whole_us(self._given)
                began = time.perf_counter()
                while not samples or not enough(samples, time.perf_counter() - began):
                    samples.append(self._whole_us(self._given))
        except LAUNCH_ERRORS as error:
            raise CannotTime(first_line(error)) from error
        return samples

    def _whole_us(self, given: Tensors) -> float:
        walk = Walk(self._trace, self._launcher, self._device, given)
        start = time.perf_counter()
        walk.run_all()
        return (time.perf_counter() - start) * 1e6

    def _time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        num = copies_needed(self._trace, cold, self.cache_bytes, MAX_COPIES)
        copies = self._walk.copies(launch, cold, num)
        for turn in range(WARMUPS):
            self._launcher.run(launch, copies[turn % num])
        samples: list[float] = []
        began = time.perf_counter()
        while not samples or not enough(samples, time.perf_counter() - began):
            if cold:
                self._scratch.sum()
            for memory in copies:
                start = time.perf_counter()
                self._launcher.run(launch, memory)
                samples.append((time.perf_counter() - start) * 1e6)
        return samples


def copies_needed(trace: Trace, cold: frozenset[int], cache_bytes: int, most: int) -> int:
    """How many copies of the cold buffers push one another out of the cache."""
    size = sum(trace.buffers[b].size_bytes for b in cold)
    return 1 if size == 0 else min(most, 1 + -(-2 * cache_bytes // size))


class _one_thread:
    """One thread inside, as in the workers."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def _arguments(trace: Trace, launch: Launch) -> set[int]:
    """Buffers that a launch is given, the generator it draws from among them."""
    generator = generator_buffer(trace, launch)
    return {v.buffer for v in launch.given} | ({generator} if generator is not None else set())


def last_uses(trace: Trace) -> dict[int, list[int]]:
    """Launch -> temporaries that nobody needs after it."""
    last: dict[int, int] = {}
    for index, launch in enumerate(trace.launches):
        for view in launch.views:
            last[view.buffer] = index
    freed: dict[int, list[int]] = {}
    for buffer, index in last.items():
        if trace.buffers[buffer].kind in (BufferKind.TEMPORARY, BufferKind.OUTPUT):
            freed.setdefault(index, []).append(buffer)
    return freed


def _cache_bytes() -> int:
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        found = 0
    return found if found > 0 else CPU_CACHE_BYTES


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [x.partition(":")[2].strip() for x in text.splitlines() if x.lower().startswith("model name")]
    return names[0] if names else platform.machine()


INDEXED = (
    "embedding", "index", "index_select", "index_add", "index_copy", "index_put", "index_fill", "gather",
    "scatter", "scatter_add", "scatter_reduce", "take", "take_along_dim", "_unsafe_index", "_index_put_impl",
    "_unsafe_index_put", "masked_scatter",
)  # fmt: skip
GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm")
# Integers among their arguments are lengths, offsets or page tables.
LENGTHS = ("_flash_attention_forward", "_efficient_attention_forward", "_varlen", "embedding_bag",
           "paged_attention", "repeat_interleave", "bincount", "segment_reduce")  # fmt: skip
SMALL = 8


def made_up(trace: Trace, index: int, device: torch.device) -> Memory:
    """Memory that holds tensors made up for one launch."""
    launch, kernel = trace.launches[index], trace.kernel_of(index)
    if generator_buffer(trace, launch) is not None:
        raise CannotTime(f"{kernel.name} draws random numbers, from a state that cannot be made up")
    memory = Memory({})
    # Of its own: torch's default one cannot be used again after a graph capture that broke.
    chance = torch.Generator(device).manual_seed(index)
    known: set[int] = set()
    for view in launch.given:
        if view.buffer not in known:
            known.add(view.buffer)
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
    elif dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:  # no generator for 8-bit floats; these bytes are small numbers
            typed.view(torch.uint8).random_(32, 48, generator=chance)
        else:
            typed.normal_(generator=chance)
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
    if any(base.startswith(name) for name in LENGTHS):
        raise CannotTime(f"the integers of {kernel.name} are lengths or tables, which cannot be made up")
    if base in GROUPED:
        rows = next(v.shape[0] for v in launch.given if v.buffer != view.buffer)
        steps = torch.arange(1, count + 1, device=device)
        return steps * rows // count
    if base in INDEXED:
        return torch.randint(0, max(1, _least_extent(launch)), (count,), device=device, generator=chance)
    return torch.randint(1, SMALL, (count,), device=device, generator=chance)


def _least_extent(launch: Launch) -> int:
    """An index below this is inside every tensor along every dimension that is longer than one."""
    extents = [n for v in launch.given for n in v.shape if n > 1]
    return min(extents, default=1)
