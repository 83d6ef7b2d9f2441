"""Host reads of tensors while a step is recorded.

A value read on the host may decide a number, shape or branch, which a recording keeps as a constant. A read
of a tensor that depends on the request is refused with its line:

  values     item, bool, int, float, index, tolist, numpy, np.asarray, printing, pickling and copying
  addresses  data_ptr, DLPack, shared memory: reads through them are not seen
  in C++     tensor_split and ctc_loss read tensor arguments without an operator
  clocks     time, datetime, os.urandom: different in every call

Methods of torch's classes are replaced while a thread records; Python's profiling hook sees clocks and
methods saved earlier (docs/capture.md). Functions of torch are met in the dispatcher, under any name, at a
key that only the recording thread has.
"""

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributions import Distribution
from torch.library import Library, fallthrough_kernel
from torch.utils import dlpack

from tessera.capture.operators import fail, is_program, is_python, is_users, refuse_read

# Held by the thread that records: what it replaces is replaced for all.
recording = threading.RLock()
IMPORTS = "transformers.utils.import_utils"
ANSWER = "is_jit_tracing"  # behind `is_tracing`, wherever imported
NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
VALIDATES = "_validate_args"
VALUE = "reads"
ADDRESS = "exposes a tensor's memory, where reads are not seen"
_WITHIN = "Compute with torch's operators, or make a custom operator of it (torch.library.custom_op)."
_VALUES = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
           "__complex__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__")  # fmt: skip
# A tensor in a message of transformers; as a key, it is told by the error.
UNREAD = "a tensor's value, which a step cannot read"
_ADDRESSES = ("data_ptr", "__dlpack__", "share_memory_", "__cuda_array_interface__")
_STORAGE = ("data_ptr", "_write_file", "_share_fd_cpu_", "_share_filename_cpu_")
_CLOCKS: frozenset[Any] = frozenset(
    (*(getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter",
                                        "perf_counter_ns", "process_time", "gmtime", "localtime", "ctime")),
     datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today,
     os.urandom)
)  # fmt: skip
_TO_DLPACK = dlpack.to_dlpack  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Whether this thread traces, or computes gradients for one that does."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_KEY))


@contextmanager
def traced() -> Iterator[None]:
    """Values are not checked: by distributions, by one_hot, nor by transformers where it is imported."""
    with (
        recording,
        torch._C._IncludeDispatchKeyGuard(_KEY),
        patch.object(Distribution, VALIDATES, _ValidatesElsewhere(vars(Distribution)[VALIDATES])),
        _transformers_traced(),
    ):
        yield


@dataclass(frozen=True)
class _ValidatesElsewhere:
    before: Any

    def __get__(self, distribution: Distribution | None, kind: type[Distribution]) -> bool:
        return self.before is not False and not is_traced()


@contextmanager
def _transformers_traced() -> Iterator[None]:
    module: Any = sys.modules.get(IMPORTS)
    checks = os.environ.get(NO_CHECKS)
    if not hasattr(module, ANSWER):
        yield
        return
    answer: Callable[[], bool] = getattr(module, ANSWER)
    written: Callable[[torch.Tensor, str], str] = torch.Tensor.__format__

    def write(tensor: torch.Tensor, how: str) -> str:
        is_mine = is_traced() and not is_users(sys._getframe(1).f_code.co_filename)
        return UNREAD if is_mine else written(tensor, how)

    os.environ[NO_CHECKS] = "1"
    try:
        with (
            patch.object(module, ANSWER, lambda: is_traced() or answer()),
            patch.object(torch.Tensor, "__format__", write),
        ):
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
)
_READER_METHODS = {r.name: r for r in _READERS if isinstance(r.owner, type)}


class _Thread(threading.local):
    varies: Varies | None = None


_thread = _Thread()
# Made once: the hook sees every call of a step.
_HOLDERS, _OF_FUNCTIONS = (torch.Tensor, torch.UntypedStorage), (type(sys), type, type(None))
_NAMES = frozenset((*_READER_METHODS, *(function.__name__ for function in (*_CLOCKS, _TO_DLPACK))))


@contextmanager
def reads_refused(varies: Varies) -> Iterator[None]:
    with recording, torch._C._IncludeDispatchKeyGuard(_KEY), _varying_by(varies), ExitStack() as patches:
        for reader in _READERS:
            if hasattr(reader.owner, reader.name):
                patches.enter_context(_checked(reader))
        yield


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
        if varies is not None and any(map(varies, (*args, *kwargs.values()))):
            reader.refuse()
        return original(*args, **kwargs)

    replacement = property(checked) if isinstance(attribute, property) else checked
    return patch.object(reader.owner, reader.name, replacement)


Function = Callable[..., Any]
_aten: Any = torch.ops.aten


def _singular_values(function: Function, matrix: torch.Tensor, *, driver: str | None = None) -> Any:
    return _aten._linalg_svd(matrix, False, _needs_vectors(matrix), driver=driver)[1]


def _eigenvalues(function: Function, matrix: torch.Tensor, uplo: str = "L") -> Any:
    return _aten._linalg_eigh(matrix, uplo, _needs_vectors(matrix))[0]


def _needs_vectors(matrix: torch.Tensor) -> bool:
    """Values alone have other last bits. Under a dispatch mode torch computes vectors too."""
    return is_functorch_wrapped_tensor(matrix) or (torch.is_grad_enabled() and matrix.requires_grad)


def _classes(function: Function, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """It reads its values on a CPU to check them, and without `num_classes` to count them."""
    if num_classes < 0:
        return function(tensor)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _product(function: Function, one: torch.Tensor, other: torch.Tensor) -> Any:
    """Under a dispatch mode torch folds rows that meet one matrix, with other last bits."""
    is_folded = other.requires_grad or any(map(is_functorch_wrapped_tensor, (one, other)))
    if one.dim() == other.dim() == 3 and other.shape[0] == 1 and one.shape[0] > 1 and not is_folded:
        return torch.bmm(one, other.expand(one.shape[0], -1, -1))
    return function(one, other)


def _host_tensors(first: int, function: Any, *args: Any) -> Any:
    """It reads tensors in C++, without an operator."""
    if _thread.varies is not None and any(map(_thread.varies, args[first:])):
        refuse_read(f"{function._schema.name.removeprefix('aten::')}()")
    return function(*args)


def _at_key(instead: Function, function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return instead(function, *args, **kwargs)

    return call


# Nothing else in torch uses this key; operators without a kernel pass it.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._parse_dispatch_key(_KEY_NAME)
_PASSED, _KERNELS = Library("_", "IMPL"), Library("aten", "IMPL")
_PASSED.fallback(fallthrough_kernel, _KEY_NAME)
for _function, _instead in (
    (_aten.linalg_svdvals.default, _singular_values),
    (_aten.linalg_eigvalsh.default, _eigenvalues),
    (_aten.one_hot.default, _classes),
    (_aten.matmul.default, _product),
    (_aten.tensor_split.tensor_indices_or_sections, partial(_host_tensors, 1)),
    (_aten.ctc_loss.Tensor, partial(_host_tensors, 2)),
):
    _KERNELS.impl(_function, _at_key(_instead, _function), _KEY_NAME)


def _check_call(frame: FrameType, event: str, called: Any) -> None:
    if event != "c_call" or called.__name__ not in _NAMES or _thread.varies is None:
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


@contextmanager
def calls_refused(hook: Any = _check_call) -> Iterator[None]:
    before: Any = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's hook is no function
            before.enable()
        else:
            sys.setprofile(before)


def calls_allowed() -> AbstractContextManager[None]:
    """Within an operator no call is the program's, and the hook is slow."""
    return calls_refused(None) if sys.getprofile() is _check_call else nullcontext()
