"""The nouns of extents: one access with its limits, and the numbers of a launch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tessera_ptx.expression import Sum, text

_RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Limit(NamedTuple):
    """`left <relation> right` where the access happens."""

    left: Sum
    relation: str
    right: Sum
    bits: int
    signed: bool

    def __str__(self) -> str:
        return f"{text(self.left)} {_RELATIONS[self.relation]} {text(self.right)}"


class Part(NamedTuple):
    """One access: `width` bytes at `offset` under the limits; offset None is anywhere."""

    offset: Sum | None
    width: int
    limits: tuple[Limit, ...]
    complete: bool

    def __str__(self) -> str:
        if self.offset is None or self.width == 0:
            return "any"
        shown = f"{text(self.offset)} + [0, {self.width})"
        return f"{shown} where {' and '.join(map(str, self.limits))}" if self.limits else shown


@dataclass(frozen=True, slots=True)
class ParamHints:
    """What a launch says of the parameters: which are certainly pointers, and which plain numbers."""

    pointers: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The numbers of one launch; `params` maps a parameter index, or (index, byte offset), to its value."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: Mapping[int | tuple[int, int], int] = field(default_factory=dict)

    def param(self, index: int, offset: int) -> int | None:
        """The value of a scalar parameter, or None."""
        value = self.params.get((index, offset))
        return self.params.get(index) if value is None and offset == 0 else value
