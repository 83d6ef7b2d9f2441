"""Tessera makes heterogeneous GPUs work as one.

    trace = tessera.capture(fn, *args, **kwargs)                        # what a call launches
    model = torch.compile(model, backend="tessera", options={...})      # see tessera.compile
    scale = tessera.CudaKernel(source, "scale")                         # a CUDA kernel of one's own

`tessera.capture` is a package that can be called; it is loaded, and torch with it, when first asked for. With
it comes `tessera.flow`, which hands capture what it needs of other stages: proofs of PTX, and ways to run it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.capture.cuda_kernel import CudaKernel as CudaKernel
    from tessera.capture.function import CallablePackage

    capture: CallablePackage

__version__ = "0.1.0"


class _Package(ModuleType):
    """The package, whose `capture` is whole whichever module was imported first."""

    @property
    def capture(self) -> Any:
        """See `tessera.capture.function.capture`."""
        importlib.import_module("tessera.flow")
        return sys.modules["tessera.capture"]

    @capture.setter
    def capture(self, module: ModuleType) -> None:
        """Python puts an imported package here; the property finds it by itself."""

    @property
    def CudaKernel(self) -> Any:
        """See `tessera.capture.cuda_kernel.CudaKernel`."""
        importlib.import_module("tessera.flow")
        return sys.modules["tessera.capture.cuda_kernel"].CudaKernel


sys.modules[__name__].__class__ = _Package
