"""Values exchanged through shared memory: stores, a barrier, loads.

Compilers reuse scratch memory to change the layout of pointer tensors. `frames` ignores order, so a load
would see all earlier contents. Here a load sees only the stores of the phase before the last barrier, if

    the stores, the barrier and the load follow one another without a branch, where every thread comes by, and
    not in a loop; nothing else writes shared memory between the first of the stores and the load;
    the offsets depend on %tid.x alone, whose range `.reqntid` gives, and for every thread the bytes stored
    cover the bytes loaded.

In a program without races, older stores come before those of the phase.
"""

from collections.abc import Callable, Iterator

from tessera_ptx.cfg import FlowGraph
from tessera_ptx.flatten import Flat
from tessera_ptx.poly import Frozen, Poly, freeze
from tessera_ptx.scan import Scan
from tessera_ptx.syntax import Imm
from tessera_ptx.values import Atoms

_WARP = 32
# The corpus has at most 10.
_MAX_SIZE = 64


class Exchanges:
    def __init__(self, flat: Flat, graph: FlowGraph, scan: Scan, sizes: tuple[int, ...]) -> None:
        self.flat, self.graph, self.scan = flat, graph, scan
        # 0 if unknown or multi-dimensional.
        self.threads = sizes[0] if sizes and set(sizes[1:]) <= {1} else 0
        self._writers = {a.at for a in scan.accesses if a.effect != "r" and a.space in ("shared", "")}
        self._writers |= set(scan.tensors)
        self._passed: dict[int, bool] = {}
        self._offsets: dict[Frozen, tuple[int, list[int]] | None] = {}

    def stores_before(self, load: int) -> tuple[int, ...]:
        if not self.threads or not self._by_all(self.graph.block_of[load]):
            return ()
        found: list[int] = []
        behind = False  # the barrier
        for index in self._backwards(load):
            if self.flat.body[index].op.name in ("bar", "barrier"):
                if behind or not self._is_barrier(index):
                    return tuple(found)
                behind = True
            elif self.flat.body[index].op.name == "call":
                return ()
            elif index in self._writers:
                if not behind or not self._is_plain(index):
                    return ()
                found.append(index)
        return tuple(found)

    def offsets(self, at: Atoms, poly: Poly) -> tuple[int, list[int]] | None:
        """Variable and offsets of all threads; None if they depend on more."""
        key = freeze(poly)
        if key not in self._offsets:
            self._offsets[key] = self._all_offsets(at, poly)
        return self._offsets[key]

    def _all_offsets(self, at: Atoms, poly: Poly) -> tuple[int, list[int]] | None:
        base = [n for n in at.base_of(poly) if at.atoms[n].item[0] == "frame"]
        if len(base) != 1:
            return None
        rest = {m: c for m, c in poly.items() if m != (base[0],)}
        if any(at.atoms[n].size > _MAX_SIZE for mono in rest for n in mono):
            return None
        found = [_value(at, rest, thread) for thread in range(self.threads)]
        known = [value for value in found if value is not None]
        return (base[0], known) if len(known) == self.threads else None

    def _backwards(self, index: int) -> Iterator[int]:
        """Certainly executed before, in reverse, up to a join."""
        blocks = self.graph.blocks
        number = self.graph.block_of[index]
        while True:
            yield from range(index - 1, blocks[number].start - 1, -1)
            before = blocks[number].preds
            if number == 0 or len(before) != 1 or len(blocks[before[0]].succs) != 1:
                return
            number = before[0]
            index = blocks[number].stop

    def _is_barrier(self, index: int) -> bool:
        instruction = self.flat.body[index]
        mods, operands = instruction.op.mods, instruction.operands
        if instruction.guard is not None or "sync" not in mods:
            return False
        if "warp" in mods:
            return self.threads <= _WARP and operands == (Imm(-1),)
        return "cluster" not in mods and len(operands) == 1

    def _is_plain(self, index: int) -> bool:
        instruction, info = self.flat.body[index], self.scan.infos[index]
        assert info is not None
        plain = instruction.op.name == "st" and info.uses[0][1] == "shared" and info.width == 8
        return plain and instruction.guard is None

    def _by_all(self, block: int) -> bool:
        """Every thread runs this block exactly once."""
        known = self._passed.get(block)
        if known is None:
            seen = self._reachable(0, block)
            blocks = self.graph.blocks
            ends = any(not blocks[b].succs or self._may_end(b) for b in seen)
            again = any(block in self._reachable(s, -1) for s in blocks[block].succs)
            known = self._passed[block] = not ends and not again
        return known

    def _may_end(self, block: int) -> bool:
        last = self.flat.body[self.graph.blocks[block].stop - 1]
        return last.op.name in ("ret", "exit", "trap")

    def _reachable(self, start: int, without: int) -> set[int]:
        seen: set[int] = set()
        stack = [start]
        while stack:
            block = stack.pop()
            if block not in seen and block != without:
                seen.add(block)
                stack += self.graph.blocks[block].succs
        return seen


def _value(at: Atoms, poly: Poly, thread: int) -> int | None:
    total = 0
    for mono, coeff in poly.items():
        product = coeff
        for number in mono:
            value = _atom(at, number, thread)
            if value is None:
                return None
            product *= value
        total += product
    return total


def _atom(at: Atoms, number: int, thread: int) -> int | None:
    item = at.atoms[number].item
    if item == ("special", "%tid.x"):
        return thread
    if item[0] != "op" or item[1] not in _OPERATIONS:
        return None
    args = [a if isinstance(a, int) else _value(at, dict(a), thread) for a in item[4:]]
    if any(a is None for a in args):
        return None
    return _OPERATIONS[item[1]](item[2], *args)


def _signed(bits: int, value: int) -> int:
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


def _unsigned(bits: int, value: int) -> int:
    return value & ((1 << bits) - 1)


_OPERATIONS: dict[str, Callable[..., int]] = {
    "and": lambda bits, a, b: _unsigned(bits, a & b),
    "or": lambda bits, a, b: _unsigned(bits, a | b),
    "xor": lambda bits, a, b: _unsigned(bits, a ^ b),
    "shr_u": lambda bits, a, b: _unsigned(bits, a) >> b,
    "shr_s": lambda bits, a, b: _signed(bits, a) >> b,
    "sext": _signed,
    "zext": _unsigned,
    "lo": _unsigned,
}
