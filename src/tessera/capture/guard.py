"""guard: lets fake CUDA tensors exist on a torch that was built without CUDA.

Slicing a CUDA tensor, or moving one, makes torch switch devices through a guard object of c10, also when
the tensor is fake. A CUDA build registers such a guard, and torch replaces it by one that does nothing when
there is no GPU. A CPU build has an empty place instead. Torch's own replacement is what we want, and it asks
the present guard only one question: how many devices are there? So the empty place is given, for the time of
that one call, an object all of whose methods return zero.

Nothing is touched unless fake tensors are asked for, and nothing at all on a CUDA build.
"""

import ctypes
import functools
from pathlib import Path

import torch

from tessera.errors import CaptureError

# c10::impl::device_guard_impl_registry, an array of pointers indexed by c10::DeviceType.
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA = 1
# More methods than c10's guard interface has.
_NUM_METHODS = 64

_REMEDY = "Install a CUDA build of torch (it needs no GPU), or capture with --device cpu."


@functools.cache
def ensure_cuda_guard() -> None:
    """Makes fake CUDA tensors usable in this process; done once."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None:
        raise CaptureError("this torch cannot hold fake CUDA tensors", _REMEDY)
    if torch.backends.cuda.is_built():
        ensure()
        return
    registry = _registry()
    if not registry[_CUDA]:
        _replace(registry, ensure)


def _replace(registry: "ctypes.Array[ctypes.c_void_p]", ensure: object) -> None:
    zero = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _NUM_METHODS)(*[address] * _NUM_METHODS)
    stand_in = ctypes.c_void_p(ctypes.addressof(methods))  # a C++ object: a pointer to its methods
    mine = ctypes.addressof(stand_in)
    registry[_CUDA] = ctypes.c_void_p(mine)
    assert callable(ensure)
    ensure()
    if registry[_CUDA] == mine:
        registry[_CUDA] = None
        raise CaptureError("this torch kept no guard for fake CUDA tensors", _REMEDY)


def _registry() -> "ctypes.Array[ctypes.c_void_p]":
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError) as error:
        raise CaptureError(
            "this torch was built without CUDA and hides its device guards", _REMEDY
        ) from error
