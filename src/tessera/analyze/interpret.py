"""interpret: one launch of a PTX kernel on the CPU, in place.

The `cpu` device of PTX kernels: `tessera.analyze.ptx.interp` runs the launch, and what it wrote is copied to
where it belongs. Pointers are (bytes of the whole storage, byte offset in it); the same storage may be given
more than once, as the same array. The interpreter is exact and slow: it is for tests and for machines
without a GPU.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.analyze.ptx.interp import Offset, run
from tessera.ir import Kernel

# A storage's bytes and where in them a pointer points.
Pointer = tuple[npt.NDArray[np.uint8], int]


def interpret(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
    """Runs the launch; arguments are pointers and numbers, in the order of the entry's parameters."""
    given = [Offset(a[0], a[1]) if isinstance(a, tuple) else a for a in args]
    x, y, z = (*grid, 1, 1, 1)[:3]
    u, v, w = (*block, 1, 1, 1)[:3]
    shared = kernel.shared_bytes or None
    result = run(kernel.ptx, kernel.name, (x, y, z), (u, v, w), given, shared_bytes=shared, file=kernel.name)
    for place, arg in enumerate(args):
        if isinstance(arg, tuple):
            touched = result.touched(place)
            if touched.write.any() or touched.atomic.any():
                arg[0][:] = result.buffers[result.pointers[place, 0][0]]
