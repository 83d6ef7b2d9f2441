"""How much of a slow proof runs: a sample, the same one every time, or all of it with `--whole`."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# Sizes of the tiny built-in models in a sample: half their layers, of each kind one.
FEW_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "dual_attention_layers": [0],
    "fullatt_block_indexes": [1],
}

_is_whole = False


def set_whole(is_whole: bool) -> None:
    """Said once, before tests are collected."""
    global _is_whole  # noqa: PLW0603
    _is_whole = is_whole


def is_whole() -> bool:
    """Whether proofs are run whole."""
    return _is_whole


def examples(whole: int, sample: int) -> int:
    """How many examples of a property."""
    return whole if _is_whole else sample


def one_of_each(rows: Sequence[T], kind: Callable[[T], Hashable]) -> list[T]:
    """All rows, or of each kind one: the first, the second, ... in turn."""
    if _is_whole:
        return list(rows)
    kinds: dict[Hashable, list[T]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    return [alike[turn % len(alike)] for turn, alike in enumerate(kinds.values())]


def some_of(rows: Iterable[T], kept: Collection[T]) -> list[Any]:
    """Parameters of a test: all rows, of which those that are not kept are `slow`."""
    given = [(row, row if isinstance(row, tuple) else (row,)) for row in rows]
    return [pytest.param(*words, marks=() if row in kept else pytest.mark.slow) for row, words in given]


def num_layers() -> int:
    """Layers of each tiny built-in model."""
    return 4 if _is_whole else FEW_LAYERS["num_layers"]


def with_few_layers(sizes: dict[str, Any]) -> None:
    """Changes the sizes of a model, and of its parts."""
    for key, value in sizes.items():
        if isinstance(value, dict):
            with_few_layers(value)
        sizes[key] = FEW_LAYERS.get(key, value)
