"""Memory that can hold pointers between instructions: shared, local and call-parameter variables.

A frame is one variable. Its cells are the (offset, width) of stores at known offsets; a store at a
computed offset is kept with the bounds of that offset. Order is not followed: a load may see any store
to its bytes. That is sound, and enough, because compilers give each variable its own bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tessera.analyze.ptx.poly import Poly, Value
from tessera.analyze.ptx.ranges import Range

_WORD = 4


class Somewhere(NamedTuple):
    """A store at a computed offset."""

    span: Range  # of the offset
    width: int
    value: Value
    # (parameter, d): the loop copies the parameter, byte o of the frame being byte o - d of it.
    mirror: tuple[int, int] | None = None

    def reaches(self, offset: int, width: int) -> bool:
        """Whether it may touch these bytes."""
        low, high = self.span
        return (low is None or low < offset + width) and (high is None or high + self.width > offset)


@dataclass(slots=True)
class Frame:
    """Stores into one variable; writers are store nodes, readers load nodes."""

    # (offset, width) -> {writer: value}
    cells: dict[tuple[int, int], dict[Any, Value]] = field(default_factory=dict)
    # Writers whose offset is not constant.
    anywhere: dict[Any, Somewhere] = field(default_factory=dict)
    # Word -> cells that have bytes in it.
    by_word: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    # writer -> the cells it wrote, to take them back when its address changes.
    written: dict[Any, set[tuple[int, int]]] = field(default_factory=dict)
    readers: dict[int, list[Any]] = field(default_factory=dict)
    all_readers: list[Any] = field(default_factory=list)

    def write(self, writer: Any, offset: int, width: int, value: Value) -> bool:
        """Records a store at a known offset; True when something changed."""
        place = (offset, width)
        cell = self.cells.get(place)
        if cell is None:
            cell = self.cells[place] = {}
            for word in _words(offset, width):
                self.by_word.setdefault(word, set()).add(place)
        if cell.get(writer) == value:
            return False
        cell[writer] = value
        self.written.setdefault(writer, set()).add(place)
        return True

    def write_somewhere(self, writer: Any, somewhere: Somewhere) -> bool:
        """Records a store at a computed offset; True when something changed."""
        if self.anywhere.get(writer) == somewhere:
            return False
        self.anywhere[writer] = somewhere
        return True

    def take_back(self, writer: Any, kept: set[tuple[int, int]], dynamic: bool) -> None:
        """Forgets what a writer stored at places it no longer writes."""
        for place in self.written.get(writer, set()) - kept:
            self.cells[place].pop(writer, None)
            self.written[writer].discard(place)
        if not dynamic:
            self.anywhere.pop(writer, None)

    def read_by(self, reader: Any, offset: int | None, width: int) -> None:
        """Remembers who must look again when these bytes change."""
        if offset is None:
            if reader not in self.all_readers:
                self.all_readers.append(reader)
            return
        for word in _words(offset, width):
            known = self.readers.setdefault(word, [])
            if reader not in known:
                known.append(reader)

    def readers_of(self, offset: int | None, width: int) -> Iterator[Any]:
        """The loads that may see a store to these bytes."""
        yield from self.all_readers
        if offset is None:
            for readers in self.readers.values():
                yield from readers
        else:
            for word in _words(offset, width):
                yield from self.readers.get(word, ())

    def exact(self, offset: int, width: int) -> list[Value]:
        """Values stored to exactly these bytes."""
        return list(self.cells.get((offset, width), {}).values())

    def overlapping(self, offset: int, width: int) -> list[tuple[int, int, list[Value]]]:
        """Cells that share some bytes with these but are not the same: (offset, width, values)."""
        found = set[tuple[int, int]]()
        for word in _words(offset, width):
            found |= self.by_word.get(word, set())
        return [
            (near, size, list(self.cells[near, size].values()))
            for near, size in sorted(found)
            if (near, size) != (offset, width)
            and near < offset + width
            and near + size > offset
            and self.cells[near, size]
        ]


def _words(offset: int, width: int) -> range:
    return range(offset // _WORD, (offset + max(width, 1) - 1) // _WORD + 1)


def constant_offset(rest: Poly) -> int | None:
    """The offset as a number, or None."""
    if not rest:
        return 0
    return rest.get(()) if len(rest) == 1 else None
