"""Tessera makes heterogeneous GPUs work as one.

    trace = tessera.capture(fn, *args, **kwargs)                        # what a call launches
    model = torch.compile(model, backend="tessera", options={...})      # see tessera.compile
    scale = tessera.CudaKernel(source, "scale")                         # a CUDA kernel of one's own

`tessera.capture` is a package that can be called. It is loaded, and torch with it, on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.capture.cuda_kernel import CudaKernel as CudaKernel
    from tessera.capture.record import CallablePackage

    capture: CallablePackage

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "capture":
        return importlib.import_module("tessera.capture")
    if name == "CudaKernel":
        return importlib.import_module("tessera.capture.cuda_kernel").CudaKernel
    raise AttributeError(f"module 'tessera' has no attribute '{name}'")
