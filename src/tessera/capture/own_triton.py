"""Triton kernels that a program launches itself, on whatever device its tensors are.

    with triton_anywhere(): kernel[grid](x, y, n)

Every launch goes through `own.launch`. On a GPU Triton launches as ever. On a machine without one, Triton
compiles for `own_triton.TARGET`; the kernel then runs in the PTX interpreter on tensors of the CPU, and not
at all on fake ones. Launches of an autotuner that tries configurations are not shown; without a GPU they
cannot be timed, so the first configuration is taken.
"""

import contextlib
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tessera.capture.inductor.offline import compiling_for
from tessera.capture.inductor.triton_kernels import from_jit
from tessera.capture.own import OwnLaunch, launch
from tessera.capture.reads import reads_allowed

# Compute capability whose PTX every GPU since Ampere can run.
TARGET = 80


@contextlib.contextmanager
def triton_anywhere() -> Iterator[None]:
    """While entered, the program's Triton launches go through `own.launch`."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run_kernel, try_config, tune = JITFunction.run, Autotuner._bench, Autotuner.run
    trying = [0]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or trying[0]:
            with reads_allowed():
                return run_kernel(self, *args, grid=grid, warmup=warmup, **kwargs)
        # Triton looks how addresses are aligned; that of a fake is always good.
        with reads_allowed(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            compiled = run_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        seen = from_jit(self, compiled, args, kwargs, grid)
        launch(
            OwnLaunch(seen.kernel, seen.args, seen.grid, seen.block),
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

    changed = {"JITFunction": run, "bench": bench, "tune": tune}
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(compiling_for(TARGET))
            changed["tune"] = take_first
        stack.enter_context(unittest.mock.patch.object(JITFunction, "run", changed["JITFunction"]))
        stack.enter_context(unittest.mock.patch.object(Autotuner, "_bench", changed["bench"]))
        stack.enter_context(unittest.mock.patch.object(Autotuner, "run", changed["tune"]))
        yield
