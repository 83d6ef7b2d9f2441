"""Decoded code, and the state that its steps work on: active lanes, frames of functions, the machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera_ptx.interp.memory import Arena, Strips
from tessera_ptx.interp.types import Array
from tessera_ptx.syntax import Instruction

# What one instruction does to the active lanes of a frame.
Step = Callable[["Frame", "Active"], None]


class Active:
    """The lanes that execute a step."""

    __slots__ = ("_index", "full", "mask")

    def __init__(self, mask: Array, full: bool = False) -> None:
        self.mask, self.full = mask, full
        self._index: Array | None = None

    @property
    def index(self) -> Array:
        """The numbers of the active lanes, ascending."""
        if self._index is None:
            self._index = np.flatnonzero(self.mask)
        return self._index


@dataclass(slots=True)
class Block:
    """Straight-line code; `end` is its last instruction when that moves control or waits."""

    first: int
    body: list[Instruction]
    end: Instruction | None = None
    kind: str = "plain"  # plain, collective, barrier, bra, brx, ret, exit, trap, call
    next: int = -1  # the block behind this one; -1 when there is none
    targets: tuple[int, ...] = ()
    rank: int = 0
    # Filled by the decoder: (step, instruction, guard slot or -1, guard negated).
    steps: list[tuple[Step, Instruction, int, bool]] = field(default_factory=list)
    guard: int = -1
    negated: bool = False
    # Of a collective: getter of the member mask; of a branch table: getter of the index; of barriers and
    # calls: a record of `control`.
    info: Any = None


@dataclass(slots=True)
class Code:
    """A decoded function."""

    name: str
    blocks: list[Block]
    # Register name -> (slot, type of its bits).
    slots: dict[str, tuple[int, np.dtype[Any]]]
    dtypes: list[np.dtype[Any]]
    # Formal parameters and results in order, and all variables of local or param space: name -> size, align.
    params: tuple[str, ...]
    returns: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]
    is_entry: bool
    first_line: int


@dataclass(slots=True, eq=False)
class Frame:
    """One activation of a function, for all lanes that came along the same chain of calls."""

    machine: "Machine"
    code: Code
    regs: list[Array]
    parent: "Frame | None"
    call_block: int
    # Ranks of the call sites above: orders frames among one another.
    prefix: tuple[int, ...]
    # Offsets of variables of local and param space in the lanes' strips; of the entry's parameters, in
    # the parameter block.
    places: dict[str, int]


@dataclass(slots=True)
class Machine:
    """One batch of blocks while it runs."""

    file: str
    arena: Arena
    shared: Strips
    frames: Strips
    # The kernel's parameter block, the same for all lanes.
    params: Array
    num_lanes: int
    threads: int  # lanes of a block, padding to full warps included
    exists: Array  # lanes that are threads, not padding
    special: dict[str, Array]
    # Module symbols, functions and shared variables by name -> address in their own space.
    symbols: dict[str, int]
    spaces: dict[str, str]
    functions: dict[int, str]
    codes: dict[str, Code]
    block_of: Array  # block (row of `shared`) of each lane
    alive: Array = field(init=False)
    top: int = 0  # first free byte of the lanes' strips
    # Threads of a cluster: blocks per cluster and each lane's rank in it.
    cluster: int = 1
    clock: int = 0

    def __post_init__(self) -> None:
        self.alive = self.exists.copy()

    def reserve(self, size: int, align: int) -> int:
        """Room in every lane's strip; gives its offset."""
        at = -(-self.top // align) * align
        self.top = at + size
        self.frames.grow(self.top)
        return at + self.frames.base
