"""Kernels that a program launches itself, without the dispatcher.

    with own_launches(see):        `see` gets every launch of a CudaKernel or Triton kernel first
    with own_launches():           they run on the device of their tensors
    with inductor_launches(see):   `see` gets every launch of an Inductor-made kernel, after it ran

A launch runs on a GPU, in the PTX interpreter on a CPU, and not at all on fake tensors. Kernels launched by
an operator belong to it (`inside_operator`). Without a GPU, Triton compiles for `TARGET` and an autotuner
takes its first configuration.

Pointer tables are tensors of addresses. `read_table` replaces each entry by the tensor it points into, so a
recorded launch names buffers, and each run writes a table with its own addresses.

Refused: kernels of `torch.cuda._compile_kernel`, whose code torch does not keep. Not seen: kernels of CuPy,
Numba or ctypes.
"""

import contextlib
import gc
import inspect
import re
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from tessera.capture.blocks import part_of, raw
from tessera.capture.offline import compiling_for
from tessera.capture.operators import fail
from tessera.capture.reads import reads_allowed
from tessera.errors import CaptureError
from tessera.ir import Kernel, Origin
from tessera.kernels.launch import Grid, run_kernel
from tessera.kernels.ptx import FAR, tables_of

_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_PLAIN = (bool, int, float, str, type(None))
# Every GPU since Ampere runs this PTX.
TARGET = 80
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class OwnLaunch:
    kernel: Kernel
    # A tuple is a pointer table.
    args: tuple[Any, ...]
    grid: Grid
    block: Grid
    mutated: frozenset[int] = frozenset()
    # Tensors passed as tables, by index; and why some could not be read.
    tables: tuple[tuple[int, torch.Tensor], ...] = ()
    unread: str = ""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for arg in self.args for t in tensors_in(arg)]


@contextlib.contextmanager
def inductor_launches(see: Callable[[OwnLaunch], None]) -> Iterator[None]:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original: Any = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not kwargs.get("benchmark_run", False):
            see(_from_autotuner(self, args))
        return result

    with unittest.mock.patch.object(CachingAutotuner, "run", run):
        yield


def _from_autotuner(tuner: Any, args: tuple[Any, ...]) -> OwnLaunch:
    (launcher,) = tuner.launchers
    compiled = launcher.__globals__.get("bin")
    result = next((r for r in tuner.compile_results if r.kernel is compiled), None)
    if result is None:
        raise CaptureError(
            f"Inductor keeps no compiled kernel of {tuner.fn.__name__} to take the PTX from",
            "Switch its static launcher off (use_static_triton_launcher=False).",
        )
    code = launcher.__code__
    names = [n for n in code.co_varnames[: code.co_argcount] if n != "stream"]
    values = dict(zip(names, args, strict=True))
    _, grid = tuner._interpret_args_grid(args, launcher.config)
    meta = result.compile_meta
    signature = {n: meta["signature"].get(n, "constexpr") for n in tuner.fn.arg_names}
    constants = {n: meta["constants"].get(n) for n, kind in signature.items() if kind == "constexpr"}
    return _launch(compiled, tuner.fn, signature, constants, values, grid, frozenset(tuner.mutated_arg_names))


def from_jit(
    function: Any, compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], grid: Any
) -> OwnLaunch:
    names = function.arg_names
    mine = {k: v for k, v in kwargs.items() if k in names}
    bound = inspect.signature(function.fn).bind(*args, **mine)
    bound.apply_defaults()
    values = dict(bound.arguments)
    sizes = grid({**kwargs, **values}) if callable(grid) else grid
    sizes = (*sizes, 1, 1)[:3] if isinstance(sizes, tuple | list) else (sizes, 1, 1)
    signature = {n: compiled.src.signature.get(n, "constexpr") for n in names}
    inside = {path[0]: v for path, v in compiled.src.constants.items() if len(path) == 1}
    constants = {
        n: inside.get(place, values.get(n)) for place, n in enumerate(names) if signature[n] == "constexpr"
    }
    return _launch(compiled, function, signature, constants, values, sizes, frozenset())


def _launch(
    compiled: Any,
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    values: Mapping[str, Any],
    grid: Sequence[int],
    mutated: frozenset[str],
) -> OwnLaunch:
    metadata = compiled.metadata
    ptx = getattr(compiled, "asm", {}).get("ptx")
    if not ptx:
        raise CaptureError(
            f"Triton kernel {metadata.name} has no PTX",
            "Switch Inductor's static launcher off and empty its cache.",
        )
    kernel = Kernel(
        metadata.name,
        Origin.TRITON,
        ptx=ptx,
        source=str(getattr(function, "src", None) or ""),  # without decorators
        signature=tuple((n, str(kind)) for n, kind in signature.items()),
        constants=tuple((n, v if isinstance(v, _PLAIN) else str(v)) for n, v in constants.items()),
        num_warps=int(metadata.num_warps),
        num_stages=int(getattr(metadata, "num_stages", 0)),
        shared_bytes=int(metadata.shared),
    )
    params = [n for n, kind in signature.items() if kind != "constexpr"]
    return OwnLaunch(
        kernel,
        tuple(values[n] for n in params),
        (int(grid[0]), int(grid[1]), int(grid[2])),
        block_of(kernel),
        mutated=frozenset(i for i, n in enumerate(params) if n in mutated),
    )


def block_of(kernel: Kernel) -> Grid:
    required = _REQNTID.search(kernel.ptx)
    if required is None:
        return 32 * kernel.num_warps, 1, 1
    x, y, z = (int(n or 1) for n in required.groups())
    return x, y, z


# May return a function to call after the launch.
See = Callable[[OwnLaunch], Callable[[], None] | None]


_seeing: list[See | None] = []


def tensors_in(arg: Any) -> list[torch.Tensor]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def launch(seen: OwnLaunch, native: Callable[[], None] | None = None) -> None:
    see = _seeing[-1] if _seeing else None
    tensors = seen.tensors
    if see is not None or not any(t.is_cuda for t in tensors):
        seen = _with_tables(seen)
    after = see(seen) if see is not None else None
    if not any(isinstance(t, FakeTensor) for t in tensors):
        with reads_allowed():
            if native is not None and any(t.is_cuda for t in tensors):
                native()
            else:
                run_kernel(seen.kernel, seen.grid, seen.block, seen.args)
    if after is not None:
        after()


def _with_tables(seen: OwnLaunch) -> OwnLaunch:
    tables = [(i, seen.args[i]) for i in tables_of(seen.kernel) if isinstance(seen.args[i], torch.Tensor)]
    args, unread = list(seen.args), []
    with reads_allowed():
        for place, table in tables:
            entries = read_table(table)
            if isinstance(entries, str):
                unread.append(f"the table of addresses in argument {place} is not known: {entries}")
            else:
                args[place] = entries
    return replace(seen, args=tuple(args), tables=tuple(tables), unread="; ".join(unread))


def unchanged(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Checks after an unproved launch that read-only memory is unchanged."""
    if any(isinstance(t, FakeTensor) for t in tensors):
        return None
    with no_dispatch():
        before = [t.clone() for t in tensors]

    def check() -> None:
        with no_dispatch():
            same = all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        if not same:
            fail(f"kernel {name} writes a weight", "Pass it as an argument, or make a kernel that is proved.")

    return check


@contextlib.contextmanager
def own_launches(see: See | None = None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if "triton" in sys.modules:  # a program with Triton kernels has imported it
            stack.enter_context(triton_anywhere())
        if see is not None:
            stack.enter_context(_unknown_refused())
        stack.enter_context(_shown_to(see))
        yield


@contextlib.contextmanager
def _shown_to(see: See | None) -> Iterator[None]:
    _seeing.append(see)
    try:
        yield
    finally:
        _seeing.pop()


@contextlib.contextmanager
def triton_anywhere() -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run_kernel, try_config, tune = JITFunction.run, Autotuner._bench, Autotuner.run
    trying = [0]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or trying[0]:
            with reads_allowed():
                return run_kernel(self, *args, grid=grid, warmup=warmup, **kwargs)
        # Triton checks address alignment; fakes are always aligned.
        with reads_allowed(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            compiled = run_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        launch(
            from_jit(self, compiled, args, kwargs, grid),
            lambda: run_kernel(self, *args, grid=grid, warmup=False, **kwargs),
        )
        return compiled

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        trying[0] += 1
        try:
            return try_config(self, *args, **kwargs)
        finally:
            trying[0] -= 1

    def take_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    is_there = torch.cuda.is_available()
    with (
        contextlib.nullcontext() if is_there else compiling_for(TARGET),
        unittest.mock.patch.object(JITFunction, "run", run),
        unittest.mock.patch.object(Autotuner, "_bench", bench),
        unittest.mock.patch.object(Autotuner, "run", tune if is_there else take_first),
    ):
        yield


@contextlib.contextmanager
def inside_operator() -> Iterator[None]:
    """Launches and reads of an operator's code belong to it."""
    with _shown_to(None), reads_allowed():
        yield


@contextlib.contextmanager
def _unknown_refused() -> Iterator[None]:
    """Accesses of kernels that torch compiled by NVRTC are unknown."""
    from torch.cuda import _utils

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        fail(
            "a kernel of torch.cuda._compile_kernel is launched, whose code is not kept",
            "Make it with tessera.CudaKernel(source, name).",
        )

    unknown = getattr(_utils, "_CudaKernel", None)
    with unittest.mock.patch.object(unknown, "__call__", refuse) if unknown else contextlib.nullcontext():
        yield


# (original, replacement).
_standing: list[tuple[torch.Tensor, torch.Tensor]] = []


@contextlib.contextmanager
def standing_for(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """An address in the first of a pair means the same place in the second."""
    _standing.extend(pairs)
    try:
        yield
    finally:
        del _standing[len(_standing) - len(pairs) :]


def read_table(table: torch.Tensor) -> tuple[torch.Tensor | int, ...] | str:
    if isinstance(table, FakeTensor):
        return "it is fake and holds no addresses"
    if table.itemsize != _ENTRY_BYTES or table.storage_offset() or not table.is_contiguous():
        return "it is no whole tensor of int64"
    with no_dispatch():
        memory = _memory()
        entries: list[torch.Tensor | int] = []
        size = table.untyped_storage().nbytes() // _ENTRY_BYTES * _ENTRY_BYTES
        for number, address in enumerate(raw(table, 0, size).cpu().view(torch.int64).tolist()):
            entry = _entry(address, memory)
            if entry is None:
                return f"its entry {number} is not an address in a tensor"
            entries.append(entry)
    return tuple(entries)


def _entry(address: int, memory: Sequence[tuple[int, int, torch.Tensor]]) -> torch.Tensor | int | None:
    if abs(address) < FAR:
        return address
    for old, new in _standing:
        start, extent = address - old.data_ptr(), part_of(old)
        if 0 <= start < extent.stop - extent.start:
            return raw(new, part_of(new).start + start, new.untyped_storage().nbytes())
    for begin, size, tensor in memory:
        if begin <= address < begin + size:
            return raw(tensor, address - begin, size)
    return None


def _memory() -> list[tuple[int, int, torch.Tensor]]:
    storages: dict[int, tuple[int, int, torch.Tensor]] = {}
    kinds = _with_subclasses(torch.Tensor) - _with_subclasses(FakeTensor)
    for item in gc.get_objects():
        if type(item) in kinds:  # a million objects: must be fast
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors have no storage
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.data_ptr(), storage.nbytes(), item
    return list(storages.values())


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
