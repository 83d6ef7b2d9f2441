"""Traces of one step at any batch, from its recordings at two.

A model's launches at two batches differ in numbers only: sizes, strides, offsets, extents. Each of those
grows evenly with the batch, so a trace between two recordings, or beyond them, can be written down without
recording it. Where the recordings differ in more than such numbers (another kernel, another number of
launches, a constant made for one batch) there is no such trace, and the place is said. Nothing proves that a
program has no other rule at a third batch: a trace that is to be run is recorded, and compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
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
            graph: Graph = _between(self.low, self.high, batch - first, second - first)
        except _Uneven as error:
            where = ".".join(str(part) for part in reversed(error.args))
            raise MismatchError(
                f"{self.low.trace.step.kind} is recorded differently at batch {first} and {second}: {where}",
                "Record it at the batch that is wanted.",
            ) from None
        return graph


def _between(one: Any, other: Any, part: int, whole: int) -> Any:
    """The value `part` of the way from one to the other, which may lie beyond it."""
    if one is other:
        return one
    if type(one) is not type(other):
        raise _Uneven
    if type(one) is int:
        grown, rest = divmod((other - one) * part, whole)
        if rest:
            raise _Uneven
        return one + grown
    if isinstance(one, tuple):
        if len(one) != len(other):
            raise _Uneven
        return tuple(_parts(enumerate(zip(one, other, strict=True)), part, whole))
    if is_dataclass(one) and not isinstance(one, type):
        pairs = ((f.name, (getattr(one, f.name), getattr(other, f.name))) for f in fields(one))
        return type(one)(*_parts(pairs, part, whole))
    if one != other:
        raise _Uneven
    return one


def _parts(pairs: Any, part: int, whole: int) -> Iterator[Any]:
    for name, (one, other) in pairs:
        try:
            yield _between(one, other, part, whole)
        except _Uneven as error:
            raise _Uneven(*error.args, name) from None
