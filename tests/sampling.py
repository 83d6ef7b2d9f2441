"""How much of a slow proof runs: a sample, the same one every time, or all of it with `--whole`."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")

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
