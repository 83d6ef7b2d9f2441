"""Traces of one step at any batch, from its recordings at two.

A model's launches at two batches differ in numbers only: sizes, strides, offsets, extents. Each of those
grows evenly with the batch, so a trace between two recordings, or beyond them, can be written down without
recording it. Where the recordings differ in more than such numbers (another kernel, another number of
launches, a constant made for one batch) there is no such trace, and the place is said. Nothing proves that a
program has no other rule at a third batch: a trace that is to be run is recorded, and compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from tessera.errors import MismatchError
from tessera.ir.graph import Graph


class _Uneven(Exception):
    """What differs in more than numbers; the path to it, innermost first."""


@dataclass(frozen=True, eq=False)
class Rebatched:
    """One step with its dependencies at every batch."""

    low: Graph
    high: Graph

    def __post_init__(self) -> None:
        if self.low.trace.step.batch >= self.high.trace.step.batch:
            raise ValueError("two batches are needed, the smaller first")

    def at(self, batch: int) -> Graph:
        """The step at one batch; MismatchError where the two recordings are not of one shape."""
        first, second = self.low.trace.step.batch, self.high.trace.step.batch
        if batch in (first, second):
            return self.low if batch == first else self.high
        try:
            graph: Graph = _Writing(batch - first, second - first).of(self._shape)
        except _Uneven as error:
            where = ".".join(str(part) for part in reversed(error.args))
            raise MismatchError(
                f"{self.low.trace.step.kind} is recorded differently at batch {first} and {second}: {where}",
                "Record it at the batch that is wanted.",
            ) from None
        return graph

    @cached_property
    def _shape(self) -> "_Shape":
        """What the two recordings share, found once."""
        return _Reading().of(self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What is the same in both recordings, a number that grows, or a record of such parts.

    Equal shapes are one object, so that what every layer repeats is written down once for a batch.
    """

    value: Any = None
    # What a number has at the higher batch beyond its value.
    growth: int = 0
    # How a record is made of its parts, with their names.
    make: Callable[..., Any] | None = None
    parts: tuple["_Shape", ...] = ()
    names: tuple[Any, ...] = ()


class _Reading:
    """Shapes of two recordings."""

    def __init__(self) -> None:
        self._known: dict[Any, _Shape] = {}

    def of(self, one: Any, other: Any) -> _Shape:
        """The shape of two values; _Uneven where they have none in common."""
        if type(one) is not type(other):
            raise _Uneven
        if type(one) is int:
            return self._kept((int, one, other - one), one, growth=other - one)
        if isinstance(one, tuple):
            if len(one) != len(other):
                raise _Uneven
            return self._record(_tuple, range(len(one)), zip(one, other, strict=True), one)
        if is_dataclass(one) and not isinstance(one, type):
            names = [f.name for f in fields(one)]
            pairs = ((getattr(one, name), getattr(other, name)) for name in names)
            return self._record(type(one), names, pairs, one)
        if one is not other and one != other:
            raise _Uneven
        return self._kept((type(one), one), one)

    def _record(self, make: Callable[..., Any], names: Any, pairs: Any, value: Any) -> _Shape:
        parts = []
        for name, (one, other) in zip(names, pairs, strict=True):
            try:
                parts.append(self.of(one, other))
            except _Uneven as error:
                raise _Uneven(*error.args, name) from None
        key = (make, tuple(id(part) for part in parts))
        if not any(part.growth or part.make for part in parts):
            return self._kept(key, value)
        return self._kept(key, make=make, parts=tuple(parts), names=tuple(names))

    def _kept(self, key: Any, *args: Any, **named: Any) -> _Shape:
        return self._known.setdefault(key, _Shape(*args, **named))


class _Writing:
    """A recording `part` of the way from the lower batch to the higher, or beyond it."""

    def __init__(self, part: int, whole: int) -> None:
        self._part, self._whole = part, whole
        self._known: dict[_Shape, Any] = {}

    def of(self, shape: _Shape) -> Any:
        """The value of a shape; _Uneven where a number would not be whole."""
        if shape.make is None and not shape.growth:
            return shape.value
        if shape not in self._known:
            self._known[shape] = self._made(shape)
        return self._known[shape]

    def _made(self, shape: _Shape) -> Any:
        if shape.make is None:
            grown, rest = divmod(shape.growth * self._part, self._whole)
            if rest:
                raise _Uneven
            return shape.value + grown
        values = []
        for name, part in zip(shape.names, shape.parts, strict=True):
            try:
                values.append(self.of(part))
            except _Uneven as error:
                raise _Uneven(*error.args, name) from None
        return shape.make(*values)


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values
