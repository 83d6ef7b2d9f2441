"""reads: every way by which Python gets at the bytes of a tensor, seen while a step is recorded.

A value that the program has read on the host may decide anything: a number, a shape, a branch. A recording
would hold it as a constant, so a read of a tensor that depends on the request is refused with its line:

  values     item, bool, int, float, index, tolist, numpy, np.asarray, printing, pickling and copying
  addresses  data_ptr, DLPack, shared memory: whoever is given one reads what nobody sees
  in C++     tensor_split by a tensor, ctc_loss by tensors: they read their arguments without an operator
  clocks     time, datetime, os.urandom: no two calls get the same

The methods are exchanged on torch's classes for as long as a thread records; other threads are not looked at.
(A TorchFunctionMode would see the same, but models ask for such modes and then take other paths.) Reads of
what no request changes, weights and what is made of them or of Python's numbers, are let through: a program
that reads them does the same in every call. Operators that answer the host are `refuse`'s.

Not seen here: memory that a program reaches by other means, such as a NumPy array made over a tensor before.
`pystate` finds those that it holds, and `record` calls the step again with other values.
"""

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from tessera.capture.refuse import fail, is_program, refuse_read

Varies = Callable[[Any], bool]

VALUE = "reads"
ADDRESS = "hands out a tensor's memory, and what is read there is not seen"
_WITHIN = "Compute with torch's operators, or make a custom operator of it (torch.library.custom_op)."


@dataclass(frozen=True, slots=True)
class _Way:
    """One function to the bytes of a tensor: where it is found, its name, and what it does."""

    owner: Any
    name: str
    does: str = VALUE
    # The first argument that it reads; all before it are only computed with.
    first: int = 0

    @property
    def said(self) -> str:
        """As a user writes it."""
        return {"__bool__": "bool()", "__float__": "float()", "__int__": "int()", "__repr__": "printing",
                "__format__": "printing", "__index__": "index()", "__array__": "np.asarray()",
                "__reduce_ex__": "pickling or copying", "__deepcopy__": "copy.deepcopy()"}.get(
                    self.name, f"{self.name}()")  # fmt: skip


_VALUES = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
           "__complex__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__")  # fmt: skip
_ADDRESSES = ("data_ptr", "__dlpack__", "share_memory_")
_STORAGE = ("data_ptr", "_write_file", "_share_fd_cpu_", "_share_filename_cpu_")
_WAYS = (
    *(_Way(torch.Tensor, name) for name in _VALUES),
    *(_Way(torch.Tensor, name, ADDRESS) for name in _ADDRESSES),
    *(_Way(torch.UntypedStorage, name, ADDRESS) for name in _STORAGE),
    *(_Way(owner, "to_dlpack", ADDRESS) for owner in (torch, torch.utils.dlpack)),
    *(_Way(owner, "tensor_split", first=1) for owner in (torch, torch.Tensor)),
    _Way(torch, "ctc_loss", first=2),
)
_CLOCKS: frozenset[Any] = frozenset(
    (*(getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter",
                                        "perf_counter_ns", "process_time", "gmtime", "localtime", "ctime")),
     datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today,
     os.urandom)
)  # fmt: skip


class _Seeing(threading.local):
    """Who is asked in this thread whether a tensor depends on the request; nobody outside of recordings."""

    varies: Varies | None = None


_seeing = _Seeing()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_users: list[Varies] = []


@contextmanager
def reads_refused(varies: Varies) -> Iterator[None]:
    """While entered, this thread's host reads of tensors and storages that vary are refused."""
    with _lock:
        _users.append(varies)
        if len(_users) == 1:
            _undo[:] = [_exchange(way) for way in _WAYS if hasattr(way.owner, way.name)]
    before, _seeing.varies = _seeing.varies, varies
    try:
        yield
    finally:
        _seeing.varies = before
        with _lock:
            _users.remove(varies)
            if not _users:
                for undo in _undo:
                    undo()


@contextmanager
def reads_allowed() -> Iterator[None]:
    """While entered, this thread may read what it likes: code of a launch that is recorded as such."""
    before, _seeing.varies = _seeing.varies, None
    try:
        yield
    finally:
        _seeing.varies = before


def _exchange(way: _Way) -> Callable[[], None]:
    """Puts a function that asks first in the place of one; gives what undoes it."""
    own = vars(way.owner).get(way.name)
    original = getattr(way.owner, way.name)

    def ask(*args: Any, **kwargs: Any) -> Any:
        varies = _seeing.varies
        if varies is not None and any(map(varies, (*args[way.first :], *kwargs.values()))):
            refuse_read(way.said) if way.does == VALUE else fail(f"{way.said} {way.does}", _WITHIN)
        return original(*args, **kwargs)

    setattr(way.owner, way.name, ask)
    if own is None:
        return lambda: delattr(way.owner, way.name)
    return lambda: setattr(way.owner, way.name, own)


@contextmanager
def clocks_refused() -> Iterator[None]:
    """While entered, a program that asks for the time or for the system's random bytes is refused."""
    before: Any = sys.getprofile()
    sys.setprofile(_see_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's, which is no function
            before.enable()
        else:
            sys.setprofile(before)


def _see_call(frame: FrameType, event: str, called: Any) -> None:
    if event == "c_call" and _is_clock(called) and is_program(frame.f_code.co_filename):
        sys.setprofile(None)
        fail(
            f"{called.__qualname__}() is another value in every call",
            "Call it outside of the step and pass the value as a tensor.",
        )


def _is_clock(called: Any) -> bool:
    return type(getattr(called, "__self__", None)) in (type(sys), type) and called in _CLOCKS
