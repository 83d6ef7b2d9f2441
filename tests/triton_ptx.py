"""Triton kernels compiled without a GPU, for the analyzer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from tessera.capture.offline import compiling_for


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Any]]:
    """The kernels that are launched here, compiled for a target as far as its machine code, and not run."""
    kernels: list[Any] = []
    run_kernel = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run_kernel(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        compiling_for(arch),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield kernels
