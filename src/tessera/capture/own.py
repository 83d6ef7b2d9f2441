"""Kernels that a program launches itself, without the dispatcher.

    with own_launches():           CudaKernels and Triton kernels run where their tensors are
    with inductor_launches(see):   `see` gets launches of Inductor's kernels, after they ran

The thread's innermost dispatch mode with a method `own_launch` gets every launch first.

A launch runs on a GPU, in the PTX interpreter on a CPU, and not at all on fake tensors. Kernels launched by
an operator belong to it. Without a GPU, Triton compiles for `TARGET` and an autotuner takes its first
configuration.

A `CudaKernel` is made of PTX, or of CUDA C++ with `extern "C"` entries:

    scale = tessera.CudaKernel(source, "scale")
    scale[grid, block](y, x, 2.0, n)

Arguments are tensors for pointers, numbers, or a list of tensors for a table of addresses. A capture records
accesses proved from the code. Not handled: struct parameters and textures.

`read_table` replaces each address in a table by the tensor it points into, so a launch names buffers, and
each run writes a table of its own addresses.

Refused: kernels of `torch.cuda._compile_kernel`, whose code torch does not keep. Not seen: kernels of CuPy,
Numba or ctypes.
"""

import contextlib
import ctypes
import gc
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tessera.capture.blocks import part_of, raw
from tessera.capture.offline import compiling_for
from tessera.capture.operators import fail
from tessera.capture.reads import is_traced, reads_allowed, recording
from tessera.errors import CaptureError
from tessera.ir import Kernel, Origin
from tessera.kernels.launch import Grid, run_kernel, three
from tessera.kernels.ptx import FAR, tables_of
from tessera_ptx import parse

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


def inductor_launches(see: Callable[[OwnLaunch], None]) -> contextlib.AbstractContextManager[Any]:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original: Any = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not kwargs.get("benchmark_run", False):
            see(_from_autotuner(self, args))
        return result

    return unittest.mock.patch.object(CachingAutotuner, "run", run)


def _from_autotuner(tuner: Any, args: tuple[Any, ...]) -> OwnLaunch:
    (launcher,) = tuner.launchers
    compiled = launcher.__globals__.get("bin")
    result = next((r for r in tuner.compile_results if r.kernel is compiled), None)
    if result is None:
        message = f"Inductor keeps no compiled kernel of {tuner.fn.__name__} to take the PTX from"
        raise CaptureError(message, "Switch its static launcher off (use_static_triton_launcher=False).")
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
    sizes = three(grid({**kwargs, **values}) if callable(grid) else grid)
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
        message = f"Triton kernel {metadata.name} has no PTX"
        raise CaptureError(message, "Switch Inductor's static launcher off and empty its cache.")
    kernel = Kernel(
        metadata.name,
        Origin.TRITON,
        ptx=ptx,
        source=str(getattr(function, "src", None) or ""),  # without decorators
        signature=tuple((n, str(kind)) for n, kind in signature.items()),
        constants=tuple((n, v if isinstance(v, _PLAIN) else str(v)) for n, v in constants.items()),
        num_warps=int(metadata.num_warps),
        shared_bytes=int(metadata.shared),
    )
    params = [n for n, kind in signature.items() if kind != "constexpr"]
    return OwnLaunch(
        kernel,
        tuple(values[n] for n in params),
        three(grid),
        block_of(kernel),
        mutated=frozenset(i for i, n in enumerate(params) if n in mutated),
    )


def block_of(kernel: Kernel) -> Grid:
    required = _REQNTID.search(kernel.ptx)
    if required is None:
        return 32 * kernel.num_warps, 1, 1
    x, y, z = (int(n or 1) for n in required.groups())
    return x, y, z


def _observer() -> Any:
    """The mode of this thread that records launches; none inside an operator."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if hasattr(mode, "own_launch")), None)


def tensors_in(arg: Any) -> list[torch.Tensor]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def launch(seen: OwnLaunch, native: Callable[[], None] | None = None) -> None:
    observer = _observer()
    tensors = seen.tensors
    if observer is not None or not any(t.is_cuda for t in tensors):
        seen = _with_tables(seen)
    after = observer.own_launch(seen) if observer is not None else None
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
        storages = [raw(tensor, 0, tensor.untyped_storage().nbytes()) for tensor in tensors]
        before = [storage.clone() for storage in storages]

    def check() -> None:
        with no_dispatch():
            is_same = all(map(torch.equal, before, storages))
        if not is_same:
            fail(f"kernel {name} writes a weight", "Pass it as an argument, or make a kernel that is proved.")

    return check


@contextlib.contextmanager
def own_launches() -> Iterator[None]:
    # A program with Triton kernels has imported it.
    kernels = triton_anywhere() if "triton" in sys.modules else contextlib.nullcontext()
    with recording, kernels, _unknown_refused():
        yield


class _Tuning(threading.local):
    depth = 0


_tuning = _Tuning()


@contextlib.contextmanager
def triton_anywhere() -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run_kernel, try_config, tune = JITFunction.run, Autotuner._bench, Autotuner.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or _tuning.depth:
            with reads_allowed():
                return run_kernel(self, *args, grid=grid, warmup=warmup, **kwargs)
        # Triton checks address alignment; fakes are always aligned.
        with reads_allowed(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            compiled = run_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        native = partial(run_kernel, self, *args, grid=grid, warmup=False, **kwargs)
        launch(from_jit(self, compiled, args, kwargs, grid), native)
        return compiled

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tuning.depth += 1
        try:
            return try_config(self, *args, **kwargs)
        finally:
            _tuning.depth -= 1

    def take_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    has_gpu = torch.cuda.is_available()
    with (
        contextlib.nullcontext() if has_gpu else compiling_for(TARGET),
        unittest.mock.patch.object(JITFunction, "run", run),
        unittest.mock.patch.object(Autotuner, "_bench", bench),
        unittest.mock.patch.object(Autotuner, "run", tune if has_gpu else take_first),
    ):
        yield


def _unknown_refused() -> contextlib.AbstractContextManager[Any]:
    """Accesses of kernels that torch compiled by NVRTC are unknown."""
    from torch.cuda import _utils

    call: Any = _utils._CudaKernel.__call__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        if _observer() is not None:
            message = "a kernel of torch.cuda._compile_kernel is launched, whose code is not kept"
            fail(message, "Make it with tessera.CudaKernel(source, name).")
        call(self, *args, **kwargs)

    return unittest.mock.patch.object(_utils._CudaKernel, "__call__", refuse)


# (original, replacement).
_moved: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


def standing_for(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> contextlib.AbstractContextManager[Any]:
    """Addresses in the first of a pair mean the same place in the second."""
    return unittest.mock.patch(f"{__name__}._moved", [*_moved, *pairs])


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
    for old, new in _moved if is_traced() else ():
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


class CudaKernel:
    """One entry of PTX or CUDA C++, launched as `kernel[grid, block]` with its arguments."""

    def __init__(self, code: str, name: str, *, shared_bytes: int = 0, arch: int = TARGET) -> None:
        self.name, self._shared_bytes = name, shared_bytes
        self.ptx = code if ".entry" in code and ".version" in code else _compiled(code, arch)
        self._types = _parameters(self.ptx, name)
        self._kernels: dict[tuple[str, ...], Kernel] = {}

    def __getitem__(self, shape: tuple[Any, Any]) -> Callable[..., None]:
        if not isinstance(shape, tuple) or len(shape) != 2:
            self()
        return partial(self.launch, *map(_checked_sizes, shape))

    def __call__(self, *args: Any) -> NoReturn:
        raise CaptureError(f"kernel {self.name} needs a grid and a block", "Write kernel[grid, block](...).")

    def launch(self, grid: Grid, block: Grid, *args: Any) -> None:
        if len(args) != len(self._types):
            message = f"kernel {self.name} has {len(self._types)} parameters, {len(args)} arguments are given"
            raise CaptureError(message, "Give one for each.")
        values = tuple(map(self._checked, range(len(args)), args))
        launch(OwnLaunch(self._kernel(values), values, grid, block))

    def _checked(self, place: int, value: Any) -> Any:
        kind = self._types[place]
        if isinstance(value, torch.Tensor):
            if not kind.endswith("64"):
                message = f"argument {place} of kernel {self.name} is a tensor, the parameter is a {kind}"
                raise CaptureError(message, "Pass a number.")
            return value
        if isinstance(value, list | tuple) and kind.endswith("64"):
            strange = [type(item).__name__ for item in value if not isinstance(item, torch.Tensor | int)]
            if strange:
                message = f"the table in argument {place} of kernel {self.name} has a {strange[0]}"
                raise CaptureError(message, "Make it a list of tensors and whole numbers.")
            return tuple(value)
        if not isinstance(value, bool | int | float):
            message = f"argument {place} of kernel {self.name} is a {type(value).__name__}"
            raise CaptureError(message, "Pass a tensor or a number.")
        return float(value) if kind.startswith("f") else value

    def _kernel(self, args: tuple[Any, ...]) -> Kernel:
        types = tuple(map(_type_of, self._types, args))
        if types not in self._kernels:
            signature = tuple((f"p{i}", kind) for i, kind in enumerate(types))
            self._kernels[types] = Kernel(
                self.name, Origin.PTX, ptx=self.ptx, signature=signature, shared_bytes=self._shared_bytes
            )
        return self._kernels[types]


def _checked_sizes(sizes: Any) -> Grid:
    if min(three(sizes)) < 1 or (isinstance(sizes, tuple | list) and len(sizes) > 3):
        raise CaptureError(f"grid and block must be 1 to 3 sizes, got {sizes}", "Use numbers of at least 1.")
    return three(sizes)


def _type_of(kind: str, value: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, torch.Tensor):
        return f"*{str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return "*int64"
    width = kind[1:]
    letter = "fp" if kind[0] == "f" or (kind[0] == "b" and isinstance(value, float)) else kind[0]
    return f"{ {'s': 'i', 'b': 'i'}.get(letter, letter) }{width}"


def _parameters(ptx: str, name: str) -> list[str]:
    entries = {entry.name: entry.params for entry in parse(ptx, name).entries}
    if name not in entries:
        have = ", ".join(entries) or "none"
        message = f"the code has no entry '{name}'; it has: {have}"
        raise CaptureError(message, 'Declare it extern "C" __global__.', name)
    for param in entries[name]:
        if param.is_array or not param.type[1:].isdigit():
            message = f"parameter '{param.name}' is neither a pointer nor a number"
            raise CaptureError(message, "Pass its parts one by one.", name)
    return [param.type for param in entries[name]]


def _compiled(source: str, arch: int) -> str:
    if torch.version.cuda is not None and torch.cuda.is_available():
        return _by_nvrtc(source, arch)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        message = "CUDA C++ needs a compiler, and there is neither NVRTC nor nvcc"
        raise CaptureError(message, "Install the CUDA toolkit, or pass PTX.")
    with tempfile.TemporaryDirectory() as folder:
        source_file, ptx_file = Path(folder) / "kernel.cu", Path(folder) / "kernel.ptx"
        source_file.write_text(source, encoding="utf-8")
        command = [nvcc, "-ptx", f"-arch=compute_{arch}", "-o", str(ptx_file), str(source_file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise _compile_error(result.stderr or result.stdout)
        return ptx_file.read_text(encoding="utf-8")


def _by_nvrtc(source: str, arch: int) -> str:
    compiler = ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}")
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=compute_{arch}".encode())
    failed = compiler.nvrtcCompileProgram(program, 1, options)
    text = _text_of(compiler, program, "ProgramLog" if failed else "PTX")
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise _compile_error(text)
    return text


def _text_of(compiler: Any, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def _compile_error(log: str) -> CaptureError:
    first = next((line for line in log.splitlines() if "error" in line), log.strip()[:200])
    return CaptureError(f"the kernel could not be compiled: {first.strip()}", "Fix the source.")
