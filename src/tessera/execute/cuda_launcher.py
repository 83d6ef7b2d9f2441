"""CudaLauncher: the launches of a trace on one GPU, one by one, on torch's current stream.

As `Launcher`, whose tensors are the CPU's.
"""

import torch

from tessera.execute.launcher import Launcher, Make
from tessera.execute.memory import Memory
from tessera.ir import Arg, View


class CudaLauncher(Launcher):
    """The launches of one trace, ready to run on a GPU."""

    def _maker(self, arg: Arg) -> Make:
        if not isinstance(arg, View):
            return super()._maker(arg)
        view, dtype = arg, getattr(torch, arg.dtype)

        def tensor(memory: Memory) -> torch.Tensor:
            empty = torch.empty(0, dtype=dtype, device=self._device)
            return empty.set_(memory.get(view.buffer), view.offset, view.shape, view.stride)

        return tensor
