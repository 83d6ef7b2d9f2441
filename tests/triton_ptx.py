"""Triton kernels compiled without a GPU, for the analyzer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

import sampling
from tessera.capture.offline import compiling_for
from tessera.capture.own import own_launches


@contextmanager
def launches_anywhere() -> Iterator[None]:
    """Kernels run on tensors of the CPU; a sample makes no machine code of what is interpreted."""
    from triton import knobs

    hook = None if sampling.is_whole() else _as_far_as_ptx
    with own_launches(), mock.patch.object(knobs.runtime, "add_stages_inspection_hook", hook):
        yield


def _as_far_as_ptx(*given: Any) -> tuple[str, str]:
    """Triton calls it for its part of a kernel's name, and with the stages of a compilation."""
    if given:
        given[1]["cubin"] = lambda ptx, metadata: b""
    return "ptx", "ptx"


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Any]]:
    """The kernels that are launched here, compiled for a target as far as its machine code, and not run."""
    kernels: list[Any] = []
    run_kernel = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run_kernel(self, *args, grid=grid, warmup=True, **kwargs))

    from triton import knobs

    with (
        compiling_for(arch),
        mock.patch.object(knobs.runtime, "add_stages_inspection_hook", None),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield kernels
