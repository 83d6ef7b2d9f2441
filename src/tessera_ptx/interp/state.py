"""Decoded code and execution state; `load` and `store` access any state space, also by generic addresses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera_ptx.interp.memory import ARENA, FRAMES, LOCAL, PARAM, SHARED, Arena, BadAccess, Strips
from tessera_ptx.interp.types import Array
from tessera_ptx.syntax import Instruction

Step = Callable[["Frame", "Active"], None]


class Active:
    __slots__ = ("_index", "full", "mask")

    def __init__(self, mask: Array, full: bool = False) -> None:
        self.mask, self.full = mask, full
        self._index: Array | None = None

    @property
    def index(self) -> Array:
        if self._index is None:
            self._index = np.flatnonzero(self.mask)
        return self._index


@dataclass(slots=True)
class CodeBlock:
    first: int
    body: list[Instruction]
    end: Instruction | None = None
    kind: str = "plain"  # plain, collective, barrier, bra, brx, ret, exit, trap, call
    next: int = -1  # -1: none
    targets: tuple[int, ...] = ()
    rank: int = 0
    # (step, instruction, guard slot or -1, guard negated)
    steps: list[tuple[Step, Instruction, int, bool]] = field(default_factory=list)
    guard: int = -1
    negated: bool = False
    # Getter of the member mask (collective) or index (branch table), or a record of `engine`.
    info: Any = None


@dataclass(slots=True)
class DecodedFunction:
    name: str
    blocks: list[CodeBlock]
    # Name -> (slot, bit type).
    slots: dict[str, tuple[int, np.dtype[Any]]]
    dtypes: list[np.dtype[Any]]
    params: tuple[str, ...]
    returns: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]
    is_entry: bool
    first_line: int


@dataclass(slots=True, eq=False)
class Frame:
    """Shared by lanes with the same call chain."""

    machine: "InterpState"
    code: DecodedFunction
    regs: list[Array]
    parent: "Frame | None"
    call_block: int
    # Ranks of the call sites above; orders frames.
    prefix: tuple[int, ...]
    # Offsets in the lanes' strips or, for the entry's parameters, in the parameter block.
    places: dict[str, int]


@dataclass(slots=True)
class InterpState:
    file: str
    arena: Arena
    shared: Strips
    frames: Strips
    params: Array
    num_lanes: int
    threads: int  # of a block, padded to full warps
    exists: Array  # not padding
    special: dict[str, Array]
    symbols: dict[str, int]
    spaces: dict[str, str]
    functions: dict[int, str]
    codes: dict[str, DecodedFunction]
    block_of: Array  # row of `shared` of each lane
    alive: Array = field(init=False)
    top: int = 0  # in the lanes' strips
    cluster: int = 1
    clock: int = 0

    def __post_init__(self) -> None:
        self.alive = self.exists.copy()

    def reserve(self, size: int, align: int) -> int:
        at = -(-self.top // align) * align
        self.top = at + size
        self.frames.grow(self.top)
        return at + self.frames.base


SPACES = ("global", "shared", "local", "const", "param")
RANK_SHIFT = 24  # shared memory of cluster rank r begins at (r + 1) << RANK_SHIFT
_WINDOWS = {SHARED >> 44: ("shared", SHARED), LOCAL >> 44: ("local", LOCAL), PARAM >> 44: ("param", PARAM),
            ARENA >> 44: ("global", 0)}  # fmt: skip


def spaces_of(mods: tuple[str, ...]) -> list[str]:
    return [m.split("::")[0] for m in mods if m.split("::")[0] in SPACES]


def pick(value: Any, index: Array) -> Array:
    """A constant is repeated."""
    return value[index] if value.ndim else np.full(index.shape, value)


def spread(value: Array, index: Array, num_lanes: int) -> Array:
    if index.size == num_lanes:
        return value
    out = np.zeros(num_lanes, value.dtype)
    out[index] = value
    return out


def load(frame: Frame, space: str, lanes: Array, address: Array, size: int, mark: str = "r") -> Array:
    machine = frame.machine
    if space in ("global", "const"):
        return machine.arena.load(address, size, mark)
    if space == "shared":
        return machine.shared.load(*shared_place(frame, lanes, address), size)
    if space == "local" or (space == "param" and not frame.code.is_entry):
        return machine.frames.load(lanes, address, size)
    if space == "param":
        return _load_param(frame, lanes, address, size)
    out = np.zeros(address.shape, f"u{size}")
    for part, name, base in _split(address):
        out[part] = load(frame, name, lanes[part], address[part] - np.uint64(base), size, mark)
    return out


def store(
    frame: Frame, space: str, lanes: Array, address: Array, value: Array, size: int, mark: str = "w"
) -> None:
    machine = frame.machine
    if space == "global":
        machine.arena.store(address, value, size, mark)
    elif space == "shared":
        machine.shared.store(*shared_place(frame, lanes, address), value, size)
    elif space in ("local", "param"):
        machine.frames.store(lanes, address, value, size)
    elif space == "const":
        raise BadAccess("a store to constant memory", 0)
    else:
        for part, name, base in _split(address):
            store(frame, name, lanes[part], address[part] - np.uint64(base), value[part], size, mark)


def shared_place(frame: Frame, lanes: Array, address: Array) -> tuple[Array, Array]:
    """Block and offset; `mapa` puts a cluster rank above the offset."""
    block = frame.machine.block_of[lanes]
    remote = address >> np.uint64(RANK_SHIFT)
    if not remote.any():
        return block, address
    size = frame.machine.cluster
    if (remote > np.uint64(size)).any():
        lane = int(np.flatnonzero(remote > np.uint64(size))[0])
        raise BadAccess(f"shared address {int(address[lane]):#x} of a block outside the cluster", lane)
    there = block - block % size + remote.astype(np.int64) - 1
    return np.where(remote > 0, there, block), address & np.uint64((1 << RANK_SHIFT) - 1)


def _load_param(frame: Frame, lanes: Array, address: Array, size: int) -> Array:
    machine = frame.machine
    inside = address + np.uint64(size) <= np.uint64(machine.params.size)
    if np.all(inside) and not np.any(address & np.uint64(size - 1)):
        loaded: Array = machine.params.view(f"u{size}")[(address // np.uint64(size)).astype(np.intp)]
        return loaded
    if np.all(address >= np.uint64(FRAMES)):
        return machine.frames.load(lanes, address, size)
    raise BadAccess(f"access of {size} bytes outside the parameter block", int(np.flatnonzero(~inside)[0]))


def _split(address: Array) -> list[tuple[Any, str, int]]:
    window = address >> np.uint64(44)
    found = np.unique(window)
    for bad in found:
        if int(bad) not in _WINDOWS:
            lane = int(np.flatnonzero(window == bad)[0])
            raise BadAccess(f"generic address {int(address[lane]):#x} lies in no state space", lane)
    if found.size == 1:
        return [(slice(None), *_WINDOWS[int(found[0])])]
    return [(np.flatnonzero(window == w), *_WINDOWS[int(w)]) for w in found]
