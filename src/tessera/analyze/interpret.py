"""interpret: one launch of a PTX kernel on the CPU, in place.

The `cpu` device of PTX kernels: `tessera_ptx.interp` runs the launch, and what it wrote is copied to
where it belongs. Pointers are (bytes of the whole storage, byte offset in it); the same storage may be given
more than once, as the same array. A list of pointers and numbers is a table of them. The interpreter is exact
and slow: it is for tests and for machines without a GPU.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import WorkerError
from tessera.ir import Kernel
from tessera_ptx import PtxError
from tessera_ptx.interp import ByPointer, Offset, Packed, run

# A storage's bytes and where in them a pointer points.
Pointer = tuple[npt.NDArray[np.uint8], int]


def interpret(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
    """Runs the launch; arguments are pointers and numbers, in the order of the entry's parameters."""
    given = [_argument(arg) for arg in args]
    x, y, z = (*grid, 1, 1, 1)[:3]
    u, v, w = (*block, 1, 1, 1)[:3]
    shared = kernel.shared_bytes or None
    try:
        result = run(
            kernel.ptx, kernel.name, (x, y, z), (u, v, w), given, shared_bytes=shared, file=kernel.name
        )
    except PtxError as error:
        raise WorkerError(error.message, place=error.place) from error
    for array, name in result.homes:
        touched = result.masks[name]
        if touched.write.any() or touched.atomic.any():
            array[:] = result.buffers[name]


def _argument(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return Offset(arg[0], arg[1])
    if not isinstance(arg, list):
        return arg
    entries = (_argument(entry) if isinstance(entry, tuple) else np.int64(entry) for entry in arg)
    return ByPointer(Packed({8 * k: entry for k, entry in enumerate(entries)}, max(8 * len(arg), 8)))
