"""Host reads of tensors while a step is recorded.

A value read on the host may decide a number, shape or branch, which a recording would keep as a constant. A
read of a tensor that depends on the request is refused with its line:

  values     item, bool, int, float, index, tolist, numpy, np.asarray, printing, pickling and copying
  addresses  data_ptr, DLPack, shared memory: reads through them are not seen
  in C++     tensor_split and ctc_loss read tensor arguments without an operator
  clocks     time, datetime, os.urandom: different in every call

Methods of torch's classes are replaced while a thread records; Python's profiling hook sees clocks and
methods saved earlier (docs/capture.md). While `traced`, libraries do not check inputs by value.
"""

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributions import Distribution
from torch.nn.functional import one_hot
from torch.utils import dlpack

from tessera.capture.operators import fail, is_program, is_python, is_users, refuse_read

# Held by the thread that records: what it replaces is replaced for all.
recording = threading.RLock()
IMPORTS = "transformers.utils.import_utils"
ANSWER = "is_jit_tracing"  # behind `is_tracing`, wherever imported
NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
VALUE = "reads"
ADDRESS = "exposes a tensor's memory, where reads are not seen"
_WITHIN = "Compute with torch's operators, or make a custom operator of it (torch.library.custom_op)."
_VALUES = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
           "__complex__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__")  # fmt: skip
_ADDRESSES = ("data_ptr", "__dlpack__", "share_memory_", "__cuda_array_interface__")
_STORAGE = ("data_ptr", "_write_file", "_share_fd_cpu_", "_share_filename_cpu_")
_CLOCKS: frozenset[Any] = frozenset(
    (*(getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter",
                                        "perf_counter_ns", "process_time", "gmtime", "localtime", "ctime")),
     datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today,
     os.urandom)
)  # fmt: skip
_TO_DLPACK = dlpack.to_dlpack  # type: ignore[attr-defined]


def _classes(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`one_hot`, which reads its values on a CPU to check them, and without `num_classes` to count them."""
    if num_classes < 0:
        return one_hot(tensor)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


@contextmanager
def traced() -> Iterator[None]:
    """Values are not checked: by distributions, by one_hot, nor by transformers where it is imported."""
    with (
        recording,
        patch.object(Distribution, "_validate_args", False),
        patch.object(torch.nn.functional, "one_hot", _classes),
        _transformers_traced(),
    ):
        yield


@contextmanager
def _transformers_traced() -> Iterator[None]:
    module = sys.modules.get(IMPORTS)
    checks = os.environ.get(NO_CHECKS)
    if not hasattr(module, ANSWER):
        yield
        return
    thread = threading.get_ident()
    written: Callable[[torch.Tensor, str], str] = torch.Tensor.__format__

    def write(tensor: torch.Tensor, how: str) -> str:
        is_mine = threading.get_ident() == thread and not is_users(sys._getframe(1).f_code.co_filename)
        return "tensor" if is_mine else written(tensor, how)

    os.environ[NO_CHECKS] = "1"
    try:
        with patch.object(module, ANSWER, lambda: True), patch.object(torch.Tensor, "__format__", write):
            yield
    finally:
        os.environ.pop(NO_CHECKS)
        os.environ.update({} if checks is None else {NO_CHECKS: checks})


Varies = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Reader:
    owner: Any
    name: str
    effect: str = VALUE
    first_tensor: int = 0

    @property
    def label(self) -> str:
        return {"__bool__": "bool()", "__float__": "float()", "__int__": "int()", "__repr__": "printing",
                "__format__": "printing", "__index__": "index()", "__array__": "np.asarray()",
                "__reduce_ex__": "pickling or copying", "__deepcopy__": "copy.deepcopy()"}.get(
                    self.name, f"{self.name}()")  # fmt: skip

    def refuse(self) -> NoReturn:
        if self.effect == VALUE:
            refuse_read(self.label)
        fail(f"{self.label} {self.effect}", _WITHIN)


_READERS = (
    *(_Reader(torch.Tensor, name) for name in _VALUES),
    *(_Reader(torch.Tensor, name, ADDRESS) for name in _ADDRESSES),
    *(_Reader(torch.UntypedStorage, name, ADDRESS) for name in _STORAGE),
    *(_Reader(owner, "to_dlpack", ADDRESS) for owner in (torch, dlpack)),
    *(_Reader(owner, "tensor_split", first_tensor=1) for owner in (torch, torch.Tensor)),
    _Reader(torch, "ctc_loss", first_tensor=2),
)

_READER_METHODS = {r.name: r for r in _READERS if not r.first_tensor and isinstance(r.owner, type)}


# They compute singular values or eigenvalues alone; under a dispatch mode torch computes vectors too.
_VALUES_ONLY = (
    (torch, "norm"), (torch, "nuclear_norm"),
    *((torch.linalg, n) for n in ("cond", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")),
)  # fmt: skip


class _Thread(threading.local):
    varies: Varies | None = None
    needs_vectors = True


_thread = _Thread()
# Made once: the hook sees every call of a step.
_HOLDERS, _OF_FUNCTIONS = (torch.Tensor, torch.UntypedStorage), (type(sys), type, type(None))
_lock = threading.Lock()
_patches = ExitStack()
_active: list[Varies] = []


@contextmanager
def reads_refused(varies: Varies) -> Iterator[None]:
    with _lock:
        _active.append(varies)
        if len(_active) == 1:
            for reader in _READERS:
                if hasattr(reader.owner, reader.name):
                    _patches.enter_context(_checked(reader))
            for owner, name in _VALUES_ONLY:
                _patches.enter_context(patch.object(owner, name, _without_vectors(getattr(owner, name))))
    try:
        with _varying_by(varies):
            yield
    finally:
        with _lock:
            _active.remove(varies)
            if not _active:
                _patches.close()


def reads_allowed() -> AbstractContextManager[None]:
    """Allows host reads by code that is part of one launch."""
    return _varying_by(None)


@contextmanager
def _varying_by(varies: Varies | None) -> Iterator[None]:
    before, _thread.varies = _thread.varies, varies
    try:
        yield
    finally:
        _thread.varies = before


def _checked(reader: _Reader) -> AbstractContextManager[Any]:
    """Replaces a function or method of torch by one that refuses to read what varies."""
    attribute = getattr(reader.owner, reader.name)
    original: Any = attribute.fget if isinstance(attribute, property) else attribute

    def checked(*args: Any, **kwargs: Any) -> Any:
        varies = _thread.varies
        if varies is not None and any(map(varies, (*args[reader.first_tensor :], *kwargs.values()))):
            reader.refuse()
        return original(*args, **kwargs)

    replacement = property(checked) if isinstance(attribute, property) else checked
    return patch.object(reader.owner, reader.name, replacement)


def _without_vectors(function: Callable[..., Any]) -> Callable[..., Any]:
    def values(*args: Any, **kwargs: Any) -> Any:
        before, _thread.needs_vectors = _thread.needs_vectors, False
        try:
            return function(*args, **kwargs)
        finally:
            _thread.needs_vectors = before

    return values


def vectors_needed() -> bool:
    return _thread.needs_vectors


@contextmanager
def calls_refused() -> Iterator[None]:
    before: Any = sys.getprofile()
    sys.setprofile(_check_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's hook is no function
            before.enable()
        else:
            sys.setprofile(before)


def _check_call(frame: FrameType, event: str, called: Any) -> None:
    if event != "c_call" or _thread.varies is None:
        return
    filename, holder = frame.f_code.co_filename, getattr(called, "__self__", None)
    if isinstance(holder, _HOLDERS):
        reader = _READER_METHODS.get(called.__name__)
        if reader is not None and is_program(filename) and _thread.varies(holder):
            reader.refuse()
        return
    is_seen = is_program(filename) or (called is os.urandom and is_python(filename))
    if not is_seen or type(holder) not in _OF_FUNCTIONS:
        return
    if called is _TO_DLPACK:
        _Reader(torch, "to_dlpack", ADDRESS).refuse()
    if called in _CLOCKS:
        message = f"{called.__qualname__}() returns a different value in every call"
        fail(message, "Call it outside of the step and pass the value as a tensor.")
