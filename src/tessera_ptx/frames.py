"""Pointers in shared, local and call-parameter variables.

A frame is one variable, its cells are (offset, width) of stores; computed offsets keep their bounds. Order is
ignored: a load may see any store to its bytes, which is sound. A cell with many changes or values is blurred:
it keeps bases, drops offsets and only grows. Stores at computed offsets then become one store per width to
any byte. This ends cycles through memory (`p = p + 4` in a stack slot, swaps).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tessera_ptx.poly import Poly, Value, freeze
from tessera_ptx.ranges import FULL, Range

_WORD = 4
# Beyond these a cell is blurred.
_MAX_CHANGES = 8
_MAX_VALUES = 16


class Somewhere(NamedTuple):
    span: Range
    width: int
    value: Value
    # (parameter, d): a loop copies the parameter, byte o of the frame from its byte o - d.
    mirror: tuple[int, int] | None = None

    def reaches(self, offset: int, width: int) -> bool:
        low, high = self.span
        return (low is None or low < offset + width) and (high is None or high + self.width > offset)


Blur = Callable[[Any, Value], Value]


@dataclass(slots=True)
class Cell:
    stores: dict[Any, Value] = field(default_factory=dict)
    # Frozen value -> the value and its number of writers.
    distinct: dict[Any, tuple[Value, int]] = field(default_factory=dict)
    changes: int = 0
    blurred: Value = ()

    def values(self) -> list[Value]:
        return [self.blurred] if self.blurred else [value for value, _ in self.distinct.values()]

    def write(self, writer: Any, value: Value, key: Any, blur: Blur) -> bool:
        """True if loads may see a change."""
        old = self.stores.get(writer)
        if old == value:
            return False
        self.stores[writer] = value
        if self.blurred:
            merged = blur(key, self.blurred + value)
            changed, self.blurred = merged != self.blurred, merged
            return changed
        if old is not None:
            self.changes += 1
            self._drop(old)
        frozen = _frozen(value)
        count = self.distinct.get(frozen, (value, 0))[1]
        self.distinct[frozen] = value, count + 1
        if self.changes > _MAX_CHANGES or len(self.distinct) > _MAX_VALUES:
            self.blurred = blur(key, tuple(p for v, _ in self.distinct.values() for p in v))
        return count == 0 or old is not None

    def take_back(self, writer: Any) -> None:
        old = self.stores.pop(writer, None)
        if old is not None and not self.blurred:
            self.changes += 1
            self._drop(old)

    def _drop(self, old: Value) -> None:
        frozen = _frozen(old)
        value, count = self.distinct[frozen]
        if count > 1:
            self.distinct[frozen] = value, count - 1
        else:
            del self.distinct[frozen]


@dataclass(slots=True)
class PointerFrame:
    blur: Blur
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    # By writer; after many changes, by width.
    anywhere: dict[Any, Somewhere] = field(default_factory=dict)
    changes: int = 0
    # Word -> cells with bytes in it.
    by_word: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    written: dict[Any, set[tuple[int, int]]] = field(default_factory=dict)
    readers: dict[int, dict[Any, None]] = field(default_factory=dict)
    all_readers: dict[Any, None] = field(default_factory=dict)

    def write(self, writer: Any, offset: int, width: int, value: Value) -> bool:
        place = (offset, width)
        cell = self.cells.get(place)
        if cell is None:
            cell = self.cells[place] = Cell()
            for word in _words(offset, width):
                self.by_word.setdefault(word, set()).add(place)
        self.written.setdefault(writer, set()).add(place)
        return cell.write(writer, value, place, self.blur)

    def write_somewhere(self, writer: Any, somewhere: Somewhere) -> bool:
        if self._is_crowded():
            return self._merge(somewhere)
        old = self.anywhere.get(writer)
        if old == somewhere:
            return False
        self.anywhere[writer] = somewhere
        self.changes += old is not None
        if self._is_crowded():
            strays, self.anywhere = self.anywhere, {}
            for stray in strays.values():
                self._merge(stray)
        return True

    def _is_crowded(self) -> bool:
        return self.changes > _MAX_CHANGES or len(self.anywhere) > _MAX_VALUES

    def _merge(self, stray: Somewhere) -> bool:
        """Joins stores of one width."""
        self.changes = _MAX_CHANGES + 1
        old = self.anywhere.get(stray.width)
        before = old.value if old else ()
        value = self.blur(("anywhere", stray.width), before + stray.value)
        self.anywhere[stray.width] = Somewhere(FULL, stray.width, value)
        return value != before

    def take_back(self, writer: Any, kept: set[tuple[int, int]], dynamic: bool) -> None:
        for place in self.written.get(writer, set()) - kept:
            self.cells[place].take_back(writer)
            self.written[writer].discard(place)
        if not dynamic:
            self.anywhere.pop(writer, None)

    def read_by(self, reader: Any, offset: int | None, width: int) -> None:
        if offset is None:
            self.all_readers[reader] = None
            return
        for word in _words(offset, width):
            self.readers.setdefault(word, {})[reader] = None

    def readers_of(self, offset: int | None, width: int) -> Iterator[Any]:
        yield from self.all_readers
        if offset is None:
            for readers in self.readers.values():
                yield from readers
        else:
            for word in _words(offset, width):
                yield from self.readers.get(word, ())

    def exact(self, offset: int, width: int) -> list[Value]:
        cell = self.cells.get((offset, width))
        return cell.values() if cell else []

    def overlapping(self, offset: int, width: int) -> list[tuple[int, int, list[Value]]]:
        found = set[tuple[int, int]]()
        for word in _words(offset, width):
            found |= self.by_word.get(word, set())
        return [
            (near, size, values)
            for near, size in sorted(found)
            if (near, size) != (offset, width)
            and near < offset + width
            and near + size > offset
            and (values := self.cells[near, size].values())
        ]


def _words(offset: int, width: int) -> range:
    return range(offset // _WORD, (offset + max(width, 1) - 1) // _WORD + 1)


def _frozen(value: Iterable[Poly]) -> Any:
    return tuple(freeze(poly) for poly in value)
