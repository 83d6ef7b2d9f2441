"""Memory of a launch: an arena for global buffers, a strip per block (shared) and per lane (local).

    global    ARENA + offset of the byte in the arena; buffers lie apart, so a step outside one is seen
    shared    offset in the block's own strip; generic form SHARED + offset
    local     offset in the lane's own strip; generic form LOCAL + offset
    param     offset in the kernel's parameter block below FRAMES, else an offset in the lane's strip,
              which also holds the parameters of device functions; generic form PARAM + offset

Every access must be inside one buffer and aligned. Three masks mark global bytes read, written and atomically
updated. Constant and module variables are arena buffers.
"""

import re
import struct
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from tessera_ptx.errors import BadLaunch
from tessera_ptx.interp.types import TYPES, Array
from tessera_ptx.syntax import Module, Variable

SHARED, LOCAL, PARAM, CODE, ARENA = (k << 44 for k in (1, 2, 3, 4, 5))
WINDOW = 1 << 44
FRAMES = 1 << 16  # lanes' strips, behind the parameter block
GAP, ALIGN = 256, 256
_ONES = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class BadAccess(Exception):
    """The engine adds place and lane."""

    def __init__(self, message: str, lane: int) -> None:
        super().__init__(message, lane)
        self.message, self.lane = message, lane


@dataclass(slots=True)
class ArenaRegion:
    name: str
    start: int
    size: int


@dataclass(slots=True)
class Arena:
    regions: list[ArenaRegion] = field(default_factory=list)
    data: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    marks: dict[str, Array] = field(default_factory=dict)
    starts: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    ends: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    _pending: list[Array] = field(default_factory=list)
    _top: int = GAP

    def add(self, name: str, content: Array) -> int:
        """Returns the address; `seal` must follow."""
        start = self._top
        self.regions.append(ArenaRegion(name, start, content.size))
        self._pending.append(content)
        self._top = -(-(start + content.size + GAP) // ALIGN) * ALIGN
        return ARENA + start

    def fill(self, index: int, content: Array) -> None:
        self._pending[index] = content

    def seal(self) -> None:
        self.data = np.zeros(self._top, np.uint8)
        for region, content in zip(self.regions, self._pending, strict=True):
            self.data[region.start : region.start + region.size] = content
        self.marks = {kind: np.zeros(self._top, np.uint8) for kind in "rwa"}
        self.starts = np.array([r.start for r in self.regions], np.uint64)
        self.ends = np.array([r.start + r.size for r in self.regions], np.uint64)

    def offsets(self, address: Array, size: int) -> Array:
        offset = address - np.uint64(ARENA)
        if offset.size == 0:
            return offset.view(np.int64)
        last = offset + np.uint64(size)
        found = np.searchsorted(self.starts, np.array([offset.min(), offset.max()]), side="right") - 1
        if found[0] < 0 or found[0] != found[1] or last.max() > self.ends[found[0]]:
            self._check(address, offset, last, size)
        if size > 1 and np.any(offset & np.uint64(size - 1)):
            bad = int(np.flatnonzero(offset & np.uint64(size - 1))[0])
            where = self.describe(int(address[bad]))
            raise BadAccess(f"misaligned access of {size} bytes at {where}", bad)
        return offset.view(np.int64)

    def _check(self, address: Array, offset: Array, last: Array, size: int) -> None:
        if not self.regions:
            self._outside(address, 0, size)
        found = np.searchsorted(self.starts, offset, side="right") - 1
        good = (found >= 0) & (last <= self.ends[np.maximum(found, 0)]) & (last >= offset)
        if not np.all(good):
            self._outside(address, int(np.flatnonzero(~good)[0]), size)

    def _outside(self, address: Array, lane: int, size: int) -> NoReturn:
        where = self.describe(int(address[lane]))
        raise BadAccess(f"access of {size} bytes outside every buffer, at {where}", lane)

    def describe(self, address: int) -> str:
        offset = address - ARENA
        if not self.regions or not 0 <= offset < WINDOW:
            return f"address {address:#x}"
        near = max(
            (r for r in self.regions if r.start - GAP <= offset),
            key=lambda r: r.start,
            default=self.regions[0],
        )
        return f"byte {offset - near.start} of {near.name} ({near.size} bytes)"

    def load(self, address: Array, size: int, mark: str = "r") -> Array:
        index = self.offsets(address, size) >> (size.bit_length() - 1)
        raw = np.dtype(f"u{size}")
        self.marks[mark].view(raw)[index] = _ONES[size]
        loaded: Array = self.data.view(raw)[index]
        return loaded

    def store(self, address: Array, value: Array, size: int, mark: str = "w") -> None:
        """The last lane wins."""
        index = self.offsets(address, size) >> (size.bit_length() - 1)
        raw = np.dtype(f"u{size}")
        self.marks[mark].view(raw)[index] = _ONES[size]
        self.data.view(raw)[index] = value


@dataclass(slots=True)
class Strips:
    """Rows per block (shared) or lane (local, frames)."""

    name: str
    rows: int
    size: int
    base: int = 0
    data: Array = field(init=False)

    def __post_init__(self) -> None:
        self.size = -(-max(self.size, 1) // 16) * 16
        self.data = np.zeros(self.rows * self.size, np.uint8)

    def grow(self, size: int) -> None:
        if size <= self.size:
            return
        old = self.data.reshape(self.rows, self.size)
        self.size = -(-max(size, 2 * self.size) // 16) * 16
        self.data = np.zeros(self.rows * self.size, np.uint8)
        self.data.reshape(self.rows, self.size)[:, : old.shape[1]] = old

    def _index(self, row: Array, offset: Array, size: int) -> Array:
        local = offset.astype(np.int64) - self.base
        bad = (local < 0) | (local > self.size - size) | ((local & (size - 1)) != 0)
        if np.any(bad):
            lane = int(np.flatnonzero(bad)[0])
            message = (
                f"access of {size} bytes at {self.name} offset {int(offset[lane])} of {self.size + self.base}"
            )
            raise BadAccess(message, lane)
        index: Array = (row * self.size + local) >> (size.bit_length() - 1)
        return index

    def load(self, row: Array, offset: Array, size: int) -> Array:
        loaded: Array = self.data.view(np.dtype(f"u{size}"))[self._index(row, offset, size)]
        return loaded

    def store(self, row: Array, offset: Array, value: Array, size: int) -> None:
        self.data.view(np.dtype(f"u{size}"))[self._index(row, offset, size)] = value


def as_bytes(value: Any) -> Array:
    return np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)


_TOKEN = re.compile(
    r"generic\s*\(\s*([\w$%.]+)\s*\)|mask\s*\([^)]*\)|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|[\w$%.+-]+"
)


@dataclass(slots=True)
class SymbolLayout:
    symbols: dict[str, int] = field(default_factory=dict)
    spaces: dict[str, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    shared_bytes: int = 0
    dynamic_bytes: int = 0
    variables: list[Variable] = field(default_factory=list)

    def initialise(self, arena: Arena) -> None:
        for variable in self.variables:
            if variable.initial:
                start = self.symbols[variable.name] - ARENA
                content = initial_bytes(variable, self)
                arena.data[start : start + content.size] = content


def place_symbols(module: Module, arena: Arena, dynamic_bytes: int) -> SymbolLayout:
    layout = SymbolLayout(dynamic_bytes=0)
    shared = [v for v in module.variables if v.space == "shared"]
    for number, function in enumerate(module.functions):
        layout.symbols[function.name] = CODE + 16 * number
        layout.functions[CODE + 16 * number] = function.name
        shared += [v for v in function.variables if v.space == "shared"]
        layout.variables += [v for v in function.variables if v.space in ("global", "const")]
    layout.variables += [v for v in module.variables if v.space in ("global", "const")]
    for variable in layout.variables:
        layout.symbols[variable.name] = arena.add(f":{variable.name}", np.zeros(variable.size, np.uint8))
        layout.spaces[variable.name] = variable.space
    _place_shared(layout, shared, dynamic_bytes)
    return layout


def _place_shared(layout: SymbolLayout, shared: list[Variable], dynamic_bytes: int) -> None:
    top = 0
    for variable in shared:
        if variable.size:
            top = -(-top // max(variable.align, 1)) * max(variable.align, 1)
            layout.symbols[variable.name] = top
            layout.spaces[variable.name] = "shared"
            top += variable.size
    unsized = [v for v in shared if not v.size]
    if unsized:
        align = max(1024, *(v.align for v in unsized))  # for swizzled tiles
        top = -(-top // align) * align
        for variable in unsized:
            layout.symbols[variable.name] = top
            layout.spaces[variable.name] = "shared"
        layout.dynamic_bytes = dynamic_bytes
        top += dynamic_bytes
    layout.shared_bytes = top


def initial_bytes(variable: Variable, layout: SymbolLayout) -> Array:
    """The rest of the variable is zero."""
    kind = TYPES[variable.type]
    out = bytearray()
    for match in _TOKEN.finditer(variable.initial):
        out += _element(match, kind.bits // 8, kind.kind, variable, layout)
    return np.frombuffer(bytes(out[: variable.size]), np.uint8)


def _element(match: re.Match[str], size: int, kind: str, variable: Variable, layout: SymbolLayout) -> bytes:
    text = match[0]
    if match[1] is not None:
        base = SHARED if layout.spaces.get(match[1]) == "shared" else 0
        return (layout.symbols[match[1]] + base).to_bytes(8, "little")
    if text[:2] in ("0f", "0F") and len(text) == 10 and kind == "f":
        return struct.pack("<I", int(text[2:], 16))
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return struct.pack("<Q", int(text[2:], 16))
    name, _, plus = text.partition("+")
    if name in layout.symbols:
        return (layout.symbols[name] + int(plus or "0", 0)).to_bytes(size, "little")
    if kind == "f":
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], float(text))
    try:
        return (int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    except ValueError:
        raise BadLaunch(
            f"the initial value of '{variable.name}' holds '{text}'", place=str(variable.line)
        ) from None
