"""Launches of kernels with PTX: on a GPU by the driver, on the CPU in an interpreter that is handed in.

Execute has no interpreter of its own; `tessera.flow` hands one in, once, and worker processes are given it
with everything else they are born with.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tessera.errors import WorkerError
from tessera.execute.ptx_module import PtxKernel
from tessera.ir import Kernel

Grid = tuple[int, int, int]
# (kernel, grid, block, arguments): a pointer is (bytes of the whole storage, byte offset).
Interpret = Callable[[Kernel, tuple[int, ...], tuple[int, ...], Sequence[Any]], None]

_handed: list[Interpret] = []


def hand_in(interpret: Interpret) -> None:
    """How kernels with PTX run on the CPU."""
    _handed[:] = [interpret]


def handed_in() -> Interpret | None:
    """What was handed in, if anything."""
    return _handed[0] if _handed else None


def run_kernel(
    kernel: Kernel,
    grid: Grid,
    block: Grid,
    args: Sequence[Any],
    interpret: Interpret | None = None,
) -> None:
    """Runs one launch where its tensors are."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if any(t.is_cuda for t in tensors):
        _loaded(kernel, block)(grid, args)
        return
    run = interpret or handed_in()
    if run is None:
        raise WorkerError(f"kernel {kernel.name} has PTX, and nothing here runs it", "Run it on a GPU.")
    run(kernel, grid, block, _pointers(args))


@functools.lru_cache(maxsize=256)
def _loaded(kernel: Kernel, block: Grid) -> PtxKernel:
    return PtxKernel(kernel, block)


def _pointers(args: Sequence[Any]) -> list[Any]:
    """Tensors as pointers into their storages; one array for each storage, without going through torch."""
    arrays: dict[int, Any] = {}
    made: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            storage = arg.untyped_storage()
            if storage.data_ptr() not in arrays:
                arrays[storage.data_ptr()] = _bytes(storage)
            made.append((arrays[storage.data_ptr()], arg.storage_offset() * arg.itemsize))
        else:
            made.append(arg)
    return made


def _bytes(storage: torch.UntypedStorage) -> Any:
    size = storage.nbytes()
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(storage.data_ptr()))
