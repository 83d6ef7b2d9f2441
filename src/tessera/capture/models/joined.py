"""Joined products: linear layers that read the same tensor become one.

Layers that an example calls with the same tensor (query, key and value; gate and up) form a group: the first
called multiplies by the concatenated weights, and each gets its columns. A layer called with another tensor
uses its own rows. Similar uncalled modules (unused experts) are joined likewise.

Not joined: subclasses of Linear; layers with hooks, called twice, or with shared weights; layers that differ
in type, device or bias; columns not aligned to 16 bytes; and kinds with which the example fails.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear
from torch.utils.weak import WeakTensorKeyDictionary

from tessera.capture.blocks import storage_key
from tessera.capture.models.packed import PackedWeight
from tessera.capture.workload import UNFIT

# Fake mode gives parameters its own class.
PLAIN = (torch.nn.Parameter, FakeTensor, PackedWeight)
ALIGNED_BYTES = 16


class JoinedLinear(torch.nn.Module):
    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        self.sizes = tuple(layer.out_features for layer in layers)
        self.joined_weight = _one_behind_the_other([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers]
        self.joined_bias = None if biases[0] is None else _one_behind_the_other(biases)
        # Columns not taken yet, by layer.
        self._waiting = WeakTensorKeyDictionary()
        self.train(layers[0].training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = linear(x, self.joined_weight, self.joined_bias).split(self.sizes, -1)
        self._waiting[x] = dict(enumerate(columns[1:], 1))
        return columns[0]  # type: ignore[no-any-return]

    def take(self, number: int, x: torch.Tensor) -> torch.Tensor:
        waiting = self._waiting.get(x, {})
        columns = waiting.pop(number, None)
        if not waiting:
            self._waiting.pop(x, None)
        return linear(x, *self.rows(number)) if columns is None else columns

    def rows(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        begin = sum(self.sizes[:number])
        rows = slice(begin, begin + self.sizes[number])
        return self.joined_weight[rows], None if self.joined_bias is None else self.joined_bias[rows]

    @property
    def weight(self) -> torch.Tensor:
        return self.rows(0)[0]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.rows(0)[1]


class JoinedPart(torch.nn.Module):
    def __init__(self, first: JoinedLinear, number: int) -> None:
        super().__init__()
        # A tuple hides it from submodules.
        self._first, self._number = (first,), number
        self.train(first.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._first[0].take(self._number, x)

    @property
    def weight(self) -> torch.Tensor:
        return self._first[0].rows(self._number)[0]

    @property
    def bias(self) -> torch.Tensor | None:
        return self._first[0].rows(self._number)[1]


def _one_behind_the_other(tensors: Sequence[torch.Tensor]) -> torch.nn.Parameter:
    with torch.no_grad():
        return torch.nn.Parameter(torch.cat(list(tensors)), tensors[0].requires_grad)


@dataclass(frozen=True)
class _Kind:
    owner: type
    paths: tuple[str, ...]


_Group = tuple[str, _Kind]


def join_products(model: torch.nn.Module, call: Callable[[], object]) -> int:
    """Nothing is joined if the example fails."""
    joinable = _joinable(model)
    try:
        with _called(joinable) as inputs:
            call()
    except UNFIT:
        return 0
    groups = _groups(model, joinable, inputs)
    first_of = {kind: (path, kind) for path, kind in reversed(groups)}
    # Mostly all kinds fit: one call tells.
    if first_of and not _runs(model, first_of.values(), call):
        fitting = [kind for kind, group in first_of.items() if _runs(model, [group], call)]
        groups = [(path, kind) for path, kind in groups if kind in fitting]
    for path, kind in groups:
        _join(model, path, kind)
    return len(groups)


def _joinable(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    owners = Counter(storage_key(t) for _, t in model.named_parameters(remove_duplicate=False))
    owners.update(storage_key(t) for _, t in model.named_buffers(remove_duplicate=False))
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and all(type(t) in PLAIN and owners[storage_key(t)] == 1 for t in module.parameters())
        and module.weight.is_floating_point()
        and module.out_features * module.weight.itemsize % ALIGNED_BYTES == 0
        and not (module._forward_hooks or module._forward_pre_hooks)
    }


@contextmanager
def _called(layers: dict[str, torch.nn.Linear]) -> Iterator[list[tuple[str, torch.Tensor, int]]]:
    inputs: list[tuple[str, torch.Tensor, int]] = []

    def note(path: str) -> Callable[[torch.nn.Module, Any], None]:
        return lambda _, args: inputs.append((path, args[0], args[0]._version))

    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(note(path)).remove)
        yield inputs


def _groups(
    model: torch.nn.Module,
    joinable: dict[str, torch.nn.Linear],
    inputs: Iterable[tuple[str, torch.Tensor, int]],
) -> list[_Group]:
    calls: Counter[str] = Counter()
    readers: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for path, tensor, version in inputs:
        calls[path] += 1
        readers[id(tensor), version].append(path)
    groups: list[_Group] = []
    for paths in readers.values():
        alike: dict[Any, list[str]] = defaultdict(list)
        for path in paths:
            if calls[path] == 1:
                alike[_traits(joinable[path])].append(path)
        for members in alike.values():
            if len(members) > 1:
                groups.append(_group(model, members))
    kinds = dict.fromkeys(kind for _, kind in groups)
    for path, module in model.named_modules():
        for kind in kinds:
            members = [f"{path}.{name}" if path else name for name in kind.paths]
            is_free = type(module) is kind.owner and all(m in joinable and not calls[m] for m in members)
            if is_free and len({_traits(joinable[m]) for m in members}) == 1:
                groups.append((path, kind))
    return groups


def _traits(layer: torch.nn.Linear) -> tuple[Any, ...]:
    weight = layer.weight
    form = weight.form if isinstance(weight, PackedWeight) else None
    return layer.in_features, weight.dtype, weight.device, weight.requires_grad, layer.bias is None, form


def _group(model: torch.nn.Module, members: Sequence[str]) -> _Group:
    parts = [member.split(".") for member in members]
    depth = next(i for i, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1)
    owner = ".".join(parts[0][:depth])
    return owner, _Kind(type(model.get_submodule(owner)), tuple(".".join(names[depth:]) for names in parts))


def _runs(model: torch.nn.Module, groups: Iterable[_Group], call: Callable[[], object]) -> bool:
    with ExitStack() as stack, suppress(*UNFIT):
        for path, kind in groups:
            stack.callback(_join(model, path, kind))
        call()
        return True
    return False


def _join(model: torch.nn.Module, owner: str, kind: _Kind) -> Callable[[], None]:
    paths = [f"{owner}.{path}" if owner else path for path in kind.paths]
    layers: list[Any] = [model.get_submodule(path) for path in paths]
    first = JoinedLinear(layers)
    for number, path in enumerate(paths):
        model.set_submodule(path, first if number == 0 else JoinedPart(first, number))

    def put_back() -> None:
        for path, layer in zip(paths, layers, strict=True):
            model.set_submodule(path, layer)

    return put_back
