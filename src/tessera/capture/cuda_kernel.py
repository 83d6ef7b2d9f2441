"""CudaKernel: a CUDA kernel that a program launches itself.

    scale = tessera.CudaKernel(source, "scale")
    scale[grid, block](y, x, 2.0, n)

`source` is PTX, or CUDA C++ with `extern "C"` entries. Grid and block have one to three sizes. Arguments are
tensors for pointers, numbers, or a list of tensors for a table of addresses. CPU launches run in the PTX
interpreter; a capture records accesses proved from the code.

Not handled: struct parameters and textures.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessera.capture.own import OwnLaunch, launch
from tessera.errors import CaptureError
from tessera.ir import Kernel, Origin
from tessera.kernels.launch import Grid
from tessera_ptx import parse

# Every GPU since Ampere loads it.
ARCH = 80


class CudaKernel:
    """One entry of PTX or CUDA C++, launched as `kernel[grid, block]` with its arguments."""

    def __init__(self, code: str, name: str, *, shared_bytes: int = 0, arch: int = ARCH) -> None:
        self.name, self._shared_bytes = name, shared_bytes
        self.ptx = code if ".entry" in code and ".version" in code else _compiled(code, arch)
        self._types = _parameters(self.ptx, name)
        self._kernels: dict[tuple[str, ...], Kernel] = {}

    def __getitem__(self, shape: tuple[Any, Any]) -> Callable[..., None]:
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise self._shapeless()
        return partial(self.launch, _three(shape[0]), _three(shape[1]))

    def __call__(self, *args: Any) -> None:
        raise self._shapeless()

    def _shapeless(self) -> CaptureError:
        remedy = "Write kernel[grid, block](...)."
        return CaptureError(f"kernel {self.name} needs a grid and a block", remedy)

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
                raise CaptureError(
                    f"argument {place} of kernel {self.name} is a tensor, the parameter is a {kind}",
                    "Pass a number.",
                )
            return value
        if isinstance(value, list | tuple) and kind.endswith("64"):
            return tuple(self._entry(place, item) for item in value)
        if not isinstance(value, bool | int | float):
            message = f"argument {place} of kernel {self.name} is a {type(value).__name__}"
            raise CaptureError(message, "Pass a tensor or a number.")
        return float(value) if kind.startswith("f") else value

    def _entry(self, place: int, item: Any) -> Any:
        if not isinstance(item, torch.Tensor | int):
            message = f"the table in argument {place} of kernel {self.name} has a {type(item).__name__}"
            raise CaptureError(message, "Make it a list of tensors and whole numbers.")
        return item

    def _kernel(self, args: tuple[Any, ...]) -> Kernel:
        types = tuple(map(_type_of, self._types, args))
        if types not in self._kernels:
            signature = tuple((f"p{i}", kind) for i, kind in enumerate(types))
            self._kernels[types] = Kernel(
                self.name, Origin.PTX, ptx=self.ptx, signature=signature, shared_bytes=self._shared_bytes
            )
        return self._kernels[types]


def _three(sizes: Any) -> Grid:
    dims = tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,)
    x, y, z = (*map(int, dims), 1, 1)[:3]
    if min(x, y, z) < 1 or len(dims) > 3:
        raise CaptureError(f"grid and block must be 1 to 3 sizes, got {sizes}", "Use numbers of at least 1.")
    return x, y, z


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
        raise CaptureError(
            f"the code has no entry '{name}'; it has: {have}", 'Declare it extern "C" __global__.', name
        )
    for param in entries[name]:
        if param.is_array or not param.type[1:].isdigit():
            raise CaptureError(
                f"parameter '{param.name}' is neither a pointer nor a number",
                "Pass its parts one by one.",
                name,
            )
    return [param.type for param in entries[name]]


def _compiled(source: str, arch: int) -> str:
    if torch.version.cuda is not None and torch.cuda.is_available():
        return _by_nvrtc(source, arch)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CaptureError(
            "CUDA C++ needs a compiler, and there is neither NVRTC nor nvcc",
            "Install the CUDA toolkit, or pass PTX.",
        )
    with tempfile.TemporaryDirectory() as folder:
        source_file, ptx_file = Path(folder) / "kernel.cu", Path(folder) / "kernel.ptx"
        source_file.write_text(source, encoding="utf-8")
        command = [nvcc, "-ptx", f"-arch=compute_{arch}", "-o", str(ptx_file), str(source_file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise _uncompiled(result.stderr or result.stdout)
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
        raise _uncompiled(text)
    return text


def _text_of(compiler: Any, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def _uncompiled(said: str) -> CaptureError:
    first = next((line for line in said.splitlines() if "error" in line), said.strip()[:200])
    return CaptureError(f"the kernel could not be compiled: {first.strip()}", "Fix the source.")
