"""What a callable holds: tensors (`Finder`) and Python state (`PyState`).

Tensors are searched in modules and their lists and dicts, bound objects, closures, globals of the function's
file, `functools.partial`, plain objects and containers. A tensor without a holder (in a closure, tuple or
slot) can be read but not changed. Optimisers come last, so that modules name parameters. Not searched:
objects deeper than `MAX_DEPTH`, globals of other files.

Python state that every call changes is refused with its line.
"""

import dis
import functools
import itertools
import os
import pickle
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tessera.capture.operators import fail, is_program, is_users, is_wrapper, parts

MAX_DEPTH = 6
MAX_VALUES = 200_000
_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
_LEAVES = (*_PLAIN, float, complex, torch.Tensor, types.ModuleType)
_OPAQUE = (*_LEAVES, type, types.BuiltinFunctionType)
_CLOSED = ("torch", "logging", "threading", "weakref", "concurrent", "asyncio", "re", "typing")
_MISSING = object()
_TORCHS = frozenset(vars(torch.nn.Module())) - {"training"}


@dataclass(frozen=True, slots=True)
class Held:
    name: str
    tensor: torch.Tensor
    holder: Any = None
    key: Any = None

    @property
    def is_grad(self) -> bool:
        return isinstance(self.holder, GradOf)

    @property
    def current(self) -> Any:
        return self.tensor if self.holder is None else self.holder[self.key]

    def put_back(self) -> None:
        """A list that became shorter stays as it is."""
        if self.holder is None or (isinstance(self.holder, list) and self.key >= len(self.holder)):
            return
        self.holder[self.key] = self.tensor


class GradOf:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: str) -> torch.Tensor | None:
        return self._tensor.grad

    def __setitem__(self, key: str, value: torch.Tensor | None) -> None:
        self._tensor.grad = value


class Finder:
    """Tensors, modules and optimisers of a callable and its arguments."""

    def __init__(self, fn: Callable[..., Any] | None, named: Sequence[tuple[str, Any]]) -> None:
        self.tensors: list[Held] = []
        # Numbers of tensors that objects among the arguments hold, and no module.
        self.given: set[int] = set()
        self._in_modules: set[int] = set()
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._seen: dict[int, Any] = {}  # keeps ids from being reused
        self._look("", fn)
        for name, leaf in named:
            if isinstance(leaf, torch.Tensor):
                self._look_at_grad(name, leaf)
            else:
                first = len(self.tensors)
                self._look(name, leaf)
                self.given |= set(range(first, len(self.tensors))) - self._in_modules
        for name, optimizer in self.optimizers.items():
            for word, parts_of in (("group", optimizer.param_groups), ("state", optimizer.state.values())):
                for i, part in enumerate(parts_of):
                    self._look(_join(name, f"{word}.{i}"), part)

    def _look(self, name: str, value: Any, holder: Any = None, key: Any = None, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            self._hold(name, value, holder, key)
            return
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
            return
        if depth > MAX_DEPTH or isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._look_module(name, value)
            return
        for word, item, place, at in items_of(value):
            self._look(_join(name, word), item, place, at, depth + 1)

    def _look_at_grad(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_leaf and tensor.grad is not None and id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self.tensors.append(Held(f"{name}.grad", tensor.grad, GradOf(tensor), "grad"))

    def _hold(self, name: str, tensor: torch.Tensor, holder: Any, key: Any) -> None:
        if is_wrapper(tensor):  # parts are readable, not replaceable
            self.tensors += [Held(part, inner) for part, inner in parts(name, tensor)]
            return
        self.tensors.append(Held(name, tensor, holder, key))
        self._look_at_grad(name, tensor)

    def _look_module(self, name: str, module: torch.nn.Module) -> None:
        """Its tensors, then those in its lists and dicts."""
        root, first = name.replace(".", "_"), len(self.tensors)
        self.modules[root] = module
        parts = [(_join(root, path), part) for path, part in module.named_modules()]
        self._seen |= {id(part): part for _, part in parts}
        for kind in (torch.Tensor, list | tuple | dict):
            for where, part in parts:
                for key, value, holder in _attributes(part):
                    if isinstance(value, kind):
                        self._look(_join(where, key), value, holder, key, 1)
        self._in_modules.update(range(first, len(self.tensors)))


def _attributes(module: torch.nn.Module) -> list[tuple[str, Any, dict[str, Any]]]:
    """Names, values and holders, without torch's own."""
    holders: Sequence[dict[str, Any]] = (vars(module), module._parameters, module._buffers)
    return [(key, value, held) for held in holders for key, value in held.items() if key not in _TORCHS]


def _join(one: str, other: str) -> str:
    return f"{one}.{other}" if one and other else one or other


Item = tuple[str, Any, Any, Any]


def items_of(value: Any) -> Iterator[Item]:
    match value:
        case types.MethodType():
            yield "", value.__self__, None, None
            yield "", value.__func__, None, None
        case types.FunctionType():
            named = [(name, read()) for name, read in variables(value)]
            mine = [(n, v) for n, v in named if v is not _MISSING and not is_foreign(v, value)]
            yield from [(n, v, None, None) for n, v in mine]
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            yield from [("default", v, None, None) for v in defaults]
        case functools.partial():
            yield from [("", v, None, None) for v in (value.func, value.args, value.keywords)]
        case dict():
            yield from [(str(k), v, value, k) for k, v in value.items()]
        case list():
            yield from [(str(i), v, value, i) for i, v in enumerate(value)]
        case tuple() | set() | frozenset():
            yield from [(str(i), v, None, None) for i, v in enumerate(value)]
        case _:
            held = getattr(value, "__dict__", {})
            yield from [(k, v, held, k) for k, v in list(held.items())]
            slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
            yield from [(name, getattr(value, name, None), None, None) for name in slots]


def variables(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, partial(_contents, cell)
    for name in sorted(globals_of(function.__code__)):
        yield name, partial(function.__globals__.get, name, _MISSING)


def is_foreign(value: Any, function: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__ != function.__module__


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_of(constant)
    return frozenset(names)


def root(modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """The module whose paths name scopes and weights."""
    if "" in modules:
        return modules[""]
    root = torch.nn.Module()
    for name, module in modules.items():
        root._modules[name] = module  # a variable may be named like a method of Module
    return root


@dataclass(frozen=True, slots=True)
class PyValue:
    name: str
    read: Callable[[], Any]


# Values of the process, not of the program.
PROCESS_VALUES = (
    PyValue("Python's random numbers", random.getstate),
    PyValue("NumPy's random numbers", lambda: np.random.get_state(legacy=False)),
    PyValue("the environment", lambda: dict(os.environ)),
)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return 0, 0
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class Before:
    def __init__(self, held: list[PyValue]) -> None:
        self._values = [(value, seen(value.read())) for value in held]

    def changed(self) -> PyValue | None:
        return next((value for value, before in self._values if seen(value.read()) != before), None)


def refuse_change(value: PyValue, call: Callable[[], object]) -> None:
    before = value.read()
    place = line_that_changes(value, call)
    after = value.read()
    how = f" from {before!r} to {after!r}" if isinstance(before, int | float | str) else ""
    fail(
        f"the call changes {value.name}{how}: Python state is not recorded",
        "Keep it in a tensor that is changed in place (register_buffer), pass it as an argument, or change "
        "it outside of the step.",
        place,
    )


def line_that_changes(value: PyValue, call: Callable[[], object]) -> str:
    before, last, place = seen(value.read()), [""], [""]

    def look(frame: types.FrameType, event: str, arg: Any) -> Any:
        if not is_program(frame.f_code.co_filename):
            return None
        if not place[0] and last[0] and seen(value.read()) != before:
            place[0] = last[0]
        if event == "line":
            last[0] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return place[0] or (last[0] if seen(value.read()) != before else "")


class _Same:
    """Compared by identity, kept so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def seen(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN) or depth > MAX_DEPTH:
        return (type(value), value if depth <= MAX_DEPTH else None)
    match value:
        case float() | complex() | itertools.count():
            return (type(value), repr(value))
        case list() | tuple() | deque():
            return (type(value), [seen(item, depth + 1) for item in value])
        case dict():
            return (type(value), [(seen(k, depth + 1), seen(v, depth + 1)) for k, v in list(value.items())])
        case set() | frozenset():
            return (type(value), len(value), sorted(map(repr, value)))
        case random.SystemRandom():
            return _Same(value)
        case np.ndarray() | np.generic() if value.dtype != object:
            return pickle.dumps(value)
        case random.Random() | np.random.Generator() | np.random.RandomState() | bytearray():
            return pickle.dumps(value)
        case types.GeneratorType():
            frame = value.gi_frame
            return (type(value), frame and (frame.f_lasti, seen(frame.f_locals, depth + 1)))
        case Iterator() if type(value).__module__ in ("builtins", "itertools"):
            return (type(value), _place_in(value))
    return _Same(value)


def _place_in(iterator: Iterator[Any]) -> str:
    """Position of a built-in iterator; "" where Python does not tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return repr(iterator.__reduce__()[1:])
        except TypeError:
            return ""


class PyState:
    """Python values reached from roots."""

    def __init__(self, *roots: Any) -> None:
        self.values: list[PyValue] = []
        self.arrays: list[tuple[str, np.ndarray[Any, Any]]] = []
        self._seen: dict[int, Any] = {}
        for root in roots:
            self._look("", root, 0)

    def refuse_shared(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuses arrays over varying tensors: reads through them are invisible."""
        bounds = {name: _bounds(tensor) for name, tensor in tensors.items()}
        for name, array in self.arrays:
            start, stop = np.lib.array_utils.byte_bounds(array)
            shared = next((n for n, (low, high) in bounds.items() if start < high and low < stop), None)
            if shared is not None:
                message = (
                    f"'{name}' is a NumPy array over the memory of '{shared}', and reading it is not seen"
                )
                fail(message, "Compute with the tensor, or make the array of a copy.", "")

    def _look(self, name: str, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH or isinstance(value, _LEAVES):
            return
        if id(value) in self._seen or len(self.values) > MAX_VALUES:
            return
        self._seen[id(value)] = value
        if isinstance(value, memoryview):
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            self.arrays.append((name, value))
            return
        if isinstance(value, torch.nn.Module):
            self._look_module(name, value, depth)
        elif isinstance(value, torch.optim.Optimizer):
            for held in (*value.param_groups, *value.state.values()):
                for key in (k for k, v in held.items() if not isinstance(v, list | torch.Tensor)):
                    self._add(_join(name, key), held, key)
        elif isinstance(value, types.FunctionType):
            self._look_function(name, value, depth)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque | types.MethodType):
            for word, item, *_ in items_of(value):
                self._look(_join(name, word), item, depth + 1)
        elif not isinstance(value, type):
            self._look_object(name, value, depth)

    def _look_module(self, name: str, module: torch.nn.Module, depth: int) -> None:
        for path, part in module.named_modules():
            self._seen[id(part)] = part
            where = _join(name, path)
            if isinstance(part, torch.jit.ScriptModule):
                self._look_script(where, part)
                continue
            for held in (part._parameters, part._buffers):
                for key in held:
                    self._add(_join(where, key), held, key)
            self._look_object(where, part, depth)

    def _look_script(self, name: str, module: Any) -> None:
        """TorchScript keeps attributes outside of Python."""
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
        for key in kind.get_attributes():
            self.values.append(PyValue(f"'{_join(name, key)}'", partial(module._c.getattr, key)))

    def _look_object(self, name: str, value: Any, depth: int) -> None:
        if not isinstance(value, torch.nn.Module) and type(value).__module__.partition(".")[0] in _CLOSED:
            return
        held = getattr(value, "__dict__", {})
        if held:
            what = f"the attributes of '{name or type(value).__name__}'"
            self.values.append(PyValue(what, lambda: tuple(held)))
        for key in list(held):
            if not isinstance(value, torch.nn.Module) or key not in _TORCHS:
                self._add(_join(name, key), held, key)
                self._look(_join(name, key), held[key], depth + 1)
        for kind in type(value).__mro__:
            self._look_class(kind, value, name, depth)

    def _look_class(self, kind: type, value: Any, name: str, depth: int) -> None:
        for slot in _slots(kind):
            self.values.append(PyValue(f"'{_join(name, slot)}'", partial(getattr, value, slot, _MISSING)))
        if id(kind) in self._seen or kind.__module__.partition(".")[0] in (*_CLOSED, "builtins", "abc"):
            return
        self._seen[id(kind)] = kind
        for key, item in list(vars(kind).items()):
            if isinstance(item, types.FunctionType):
                self._look(kind.__name__, item, depth + 1)
            elif not key.startswith("__") and _is_data(item):
                self._add(f"{kind.__name__}.{key}", vars(kind), key)

    def _look_function(self, name: str, function: types.FunctionType, depth: int) -> None:
        for word, read in variables(function):
            self._look_variable(word, read, function, depth)
        for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            read = partial((item,).__getitem__, 0)
            self.values.append(PyValue(f"a default of '{function.__name__}'", read))

    def _look_variable(
        self, name: str, read: Callable[[], Any], function: types.FunctionType, depth: int
    ) -> None:
        value = read()
        is_file = isinstance(value, types.ModuleType) and is_users(getattr(value, "__file__", None) or "<")
        if is_file and id(value) not in self._seen:
            self._seen[id(value)] = value
            for key in [key for key, data in vars(value).items() if key[:2] != "__" and _is_data(data)]:
                self._add(f"{value.__name__}.{key}", vars(value), key)
        if _is_data(value):
            self.values.append(PyValue(f"'{name}'", read))
        kinds = torch.nn.Module | torch.optim.Optimizer | threading.local
        is_own = type(value).__module__ == function.__module__ or isinstance(value, kinds)
        is_function = isinstance(value, types.FunctionType | types.MethodType)
        if is_function and not is_foreign(value, function):
            is_own = True
        elif isinstance(value, types.FunctionType):
            is_own = is_users(value.__code__.co_filename)
        if _is_data(value) or is_own:
            self._look(name, value, depth + 1)

    def _add(self, name: str, holder: Any, key: Any) -> None:
        self.values.append(PyValue(f"'{name}'", partial(holder.get, key, _MISSING)))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _slots(kind: type) -> Iterator[str]:
    named = vars(kind).get("__slots__", ())
    if kind.__module__.partition(".")[0] not in (*_CLOSED, "builtins"):
        names = [named] if isinstance(named, str) else named
        yield from [name for name in names if not name.startswith("__")]


def _is_data(value: Any) -> bool:
    kinds = (list, tuple, dict, set, frozenset, deque, bytearray, random.Random, itertools.count)
    numpy = (np.ndarray, np.generic, np.random.Generator, np.random.RandomState)
    return isinstance(value, (*_PLAIN, float, complex, torch.Tensor, *kinds, *numpy, Iterator))
