"""Holders: the tensors a callable can reach without being given them.

Looked through: a module or the module a method is bound to; what a function closes over or names as a
global, and likewise the functions of its own file that it names; the parts of a `functools.partial`; plain
objects, lists, tuples and dicts among these. A tensor is found together with the dictionary or list that
holds it, so that another can take its place for one call; where nothing can (a closure's variable, a tuple),
it can be read but not changed. A parameter's gradient is held by its parameter; an optimiser is looked at
last, so that parameters are named after their modules.

Not looked through: objects nested deeper than `MAX_DEPTH`, objects with __slots__, and global variables of
other files.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera.capture.schema import is_wrapper, parts

MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor by name, and where it is held: `holder[key]`, or nowhere that can be written."""

    name: str
    tensor: torch.Tensor
    holder: Any = None
    key: Any = None

    @property
    def is_grad(self) -> bool:
        """True for the gradient of a tensor."""
        return isinstance(self.holder, GradOf)

    @property
    def current(self) -> Any:
        """What is held there now."""
        return self.tensor if self.holder is None else self.holder[self.key]

    def put_back(self) -> None:
        """Undoes an exchange; a list that has become too short keeps its new contents."""
        if self.holder is None or (isinstance(self.holder, list) and self.key >= len(self.holder)):
            return
        self.holder[self.key] = self.tensor


class GradOf:
    """A tensor as the holder of its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: str) -> torch.Tensor | None:
        return self._tensor.grad

    def __setitem__(self, key: str, value: torch.Tensor | None) -> None:
        self._tensor.grad = value


class Finder:
    """Collects modules, optimisers and tensors by name."""

    def __init__(self) -> None:
        self.tensors: list[Held] = []
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._seen: dict[int, Any] = {}  # the values keep their ids from being used again

    def look(self, name: str, value: Any, holder: Any = None, key: Any = None, depth: int = 0) -> None:
        """Finds what one value holds."""
        if isinstance(value, torch.Tensor):
            self._hold(name, value, holder, key)
            return
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
            return
        if depth > MAX_DEPTH or _is_plain(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._look_module(name, value)
            return
        for word, item, place, at in items_of(value):
            self.look(_join(name, word), item, place, at, depth + 1)

    def look_at_optimizers(self) -> None:
        """Finds what the optimisers hold: their options, and what they keep of each parameter."""
        for name, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                self.look(_join(name, f"group.{i}"), group)
            for i, kept in enumerate(optimizer.state.values()):
                self.look(_join(name, f"state.{i}"), kept)

    def look_at_grad(self, name: str, tensor: torch.Tensor) -> None:
        """Finds a tensor's gradient, once."""
        if tensor.is_leaf and tensor.grad is not None and id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self.tensors.append(Held(f"{name}.grad", tensor.grad, GradOf(tensor), "grad"))

    def _hold(self, name: str, tensor: torch.Tensor, holder: Any, key: Any) -> None:
        if is_wrapper(tensor):  # its parts can be read, and nothing can take their place
            self.tensors += [Held(part, inner) for part, inner in parts(name, tensor)]
            return
        self.tensors.append(Held(name, tensor, holder, key))
        self.look_at_grad(name, tensor)

    def _look_module(self, name: str, module: torch.nn.Module) -> None:
        self.modules[name.replace(".", "_")] = module
        for path, part in module.named_modules():
            self._seen[id(part)] = part
            attributes = {k: v for k, v in vars(part).items() if isinstance(v, torch.Tensor)}
            for key in attributes:
                self._add(name, path, key, vars(part))
            for holder in (part._parameters, part._buffers):
                for key in holder:
                    self._add(name, path, key, holder)

    def _add(self, name: str, path: str, key: str, holder: Any) -> None:
        if isinstance(holder[key], torch.Tensor):
            full = _join(_join(name.replace(".", "_"), path), key)
            self._hold(full, holder[key], holder, key)


def _join(one: str, other: str) -> str:
    return f"{one}.{other}" if one and other else one or other


def _is_plain(value: Any) -> bool:
    kinds = (str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, torch.device)
    return value is None or isinstance(value, kinds)


# (word for the name, value, holder, key)
Item = tuple[str, Any, Any, Any]


def items_of(value: Any) -> Iterator[Item]:
    """What one value holds directly."""
    match value:
        case types.MethodType():
            yield "", value.__self__, None, None
            yield "", value.__func__, None, None
        case types.FunctionType():
            yield from _variables(value)
        case functools.partial():
            yield from [("", v, None, None) for v in (value.func, value.args, value.keywords)]
        case dict():
            yield from [(str(k), v, value, k) for k, v in value.items()]
        case list():
            yield from [(str(i), v, value, i) for i, v in enumerate(value)]
        case tuple() | set() | frozenset():
            yield from [(str(i), v, None, None) for i, v in enumerate(value)]
        case _ if hasattr(value, "__dict__"):
            yield from [(k, v, vars(value), k) for k, v in list(vars(value).items())]


def _variables(function: types.FunctionType) -> Iterator[Item]:
    """What a function closes over, its defaults, and the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not is_foreign(value, function):
            yield name, value, None, None
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from [("default", value, None, None) for value in defaults]
    for name in sorted(globals_of(function.__code__)):
        value = function.__globals__.get(name)
        if not is_foreign(value, function):
            yield name, value, None, None


def is_foreign(value: Any, function: types.FunctionType) -> bool:
    """True for functions of other files: what they reach is their own business."""
    return isinstance(value, types.FunctionType) and value.__module__ != function.__module__


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Names of the global variables that some code loads."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_of(constant)
    return frozenset(names)


def root(modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """One module that holds all: scopes and weights are named by their paths in it."""
    if "" in modules:
        return modules[""]
    root = torch.nn.Module()
    for name, module in modules.items():
        root._modules[name] = module  # a variable may have the name of one of Module's methods
    return root


def find(fn: Callable[..., Any], named: Sequence[tuple[str, Any]]) -> Finder:
    """What a callable and its arguments hold."""
    finder = Finder()
    finder.look("", fn)
    for name, leaf in named:
        if isinstance(leaf, torch.Tensor):
            finder.look_at_grad(name, leaf)
        else:
            finder.look(name, leaf)
    finder.look_at_optimizers()
    return finder
