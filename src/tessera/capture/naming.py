"""Names for the tensors of a call: the parameter and the path to the tensor in its nest."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def flatten(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of a call's arguments with their names."""
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    words = parameters(fn, len(args))
    named = []
    for (_, first, *rest), leaf in leaves:
        root = words[first.idx] if isinstance(first, pytree.SequenceKey) else path([first])
        named.append((".".join(filter(None, [root, path(rest)])), leaf))
    return named, spec


def parameters(fn: Callable[..., Any], num: int) -> list[str]:
    """Names for the first `num` positional arguments."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        signature = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have none
        signature = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    words = [p.name for p in signature if p.kind in kinds]
    return [words[i] if i < len(words) else f"arg{i}" for i in range(num)]


def path(keys: Sequence[Any]) -> str:
    """Keys of a nest, joined by dots."""
    words = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in keys)
    return ".".join(str(word) for word in words)


def unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    found = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken:
            candidate, number = f"{name}_{number}", number + 1
        taken.add(candidate)
        found.append(candidate)
    return found


def open_dataclasses(value: Any) -> None:
    """Has torch look into the dataclasses of a result as into dicts: their classes are registered with it."""
    while True:
        kinds = {type(leaf) for leaf in pytree.tree_leaves(value) if dataclasses.is_dataclass(leaf)}
        kinds -= {type, *pytree.SUPPORTED_NODES}
        if not kinds:
            return
        for kind in kinds:
            _register(kind)


def _register(kind: type[Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind) if field.init]

    def rebuild(values: Iterable[Any], _: Any) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    pytree.register_pytree_node(
        kind,
        lambda value: ([getattr(value, name) for name in names], None),
        rebuild,
        flatten_with_keys_fn=lambda value: (
            [(pytree.GetAttrKey(name), getattr(value, name)) for name in names],
            None,
        ),
    )
