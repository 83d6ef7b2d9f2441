"""Memory that can hold pointers between instructions: shared, local and call-parameter variables.

A frame is one variable. Its cells are the (offset, width) of stores at known offsets; stores at other
offsets go everywhere in the frame. Order is not followed: a load may see any store to its bytes. That
is sound, and enough, because compilers give each variable its own bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera.analyze.ptx.values import Poly, Value

_WORD = 4


@dataclass(slots=True)
class Frame:
    """Stores into one variable; writers are store nodes, readers load nodes."""

    # (offset, width) -> {(writer, part): value}
    cells: dict[tuple[int, int], dict[Any, Value]] = field(default_factory=dict)
    # Writers whose offset is not constant.
    anywhere: dict[Any, Value] = field(default_factory=dict)
    readers: dict[int, list[Any]] = field(default_factory=dict)
    all_readers: list[Any] = field(default_factory=list)

    def write(self, writer: Any, offset: int | None, width: int, value: Value) -> bool:
        """Records a store; True when something changed."""
        cell = self.anywhere if offset is None else self.cells.setdefault((offset, width), {})
        if cell.get(writer) == value:
            return False
        cell[writer] = value
        return True

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

    def overlapping(self, offset: int, width: int) -> Iterator[tuple[int, int, list[Value]]]:
        """Cells that share some bytes with these but are not the same: (offset, width, values)."""
        for near in range(offset - 15, offset + width):
            for size in (1, 2, 4, 8, 16):
                if near + size > offset and (near, size) != (offset, width):
                    cell = self.cells.get((near, size))
                    if cell:
                        yield near, size, list(cell.values())

    def everything(self) -> list[Value]:
        """Every value stored anywhere in the frame."""
        values = list(self.anywhere.values())
        for cell in self.cells.values():
            values += cell.values()
        return values


def _words(offset: int, width: int) -> range:
    return range(offset // _WORD, (offset + max(width, 1) - 1) // _WORD + 1)


def constant_offset(rest: Poly) -> int | None:
    """The offset as a number, or None."""
    if not rest:
        return 0
    return rest.get(()) if len(rest) == 1 else None
