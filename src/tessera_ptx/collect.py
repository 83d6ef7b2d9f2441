"""Accesses of a kernel, from its values.

An unclassified memory operand outside shared, local and parameter space makes the kernel immovable, with its
line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera_ptx.classify import AccessTarget, Classifier
from tessera_ptx.conditions import Condition, Conditions, Path
from tessera_ptx.fixpoint import Flow, Node
from tessera_ptx.nodes import ParamHints
from tessera_ptx.poly import Poly, Value
from tessera_ptx.scan import MemoryAccess
from tessera_ptx.syntax import Function, Imm, Instruction, Module, Operand, Sym
from tessera_ptx.tensormaps import TensorMaps
from tessera_ptx.transfer import OpInfo

_FAR_SPACES = frozenset({"global", "const", ""})


@dataclass(slots=True)
class Piece:
    """Offset None: anywhere; width 0: unknown."""

    offset: Poly | None
    width: int
    conditions: tuple[Condition, ...] = ()
    complete: bool = False


@dataclass(slots=True)
class Touch:
    read: bool = False
    write: bool = False
    atomic: bool = False
    pieces: list[Piece] = field(default_factory=list)
    # (line, r, w or a)
    lines: set[tuple[int, str]] = field(default_factory=set)
    # The buffer is behind a tensor map.
    by_map: bool = False

    def add(self, effect: str, line: int, piece: Piece) -> None:
        self.read |= effect in "ra"
        self.write |= effect in "wa"
        self.atomic |= effect == "a"
        self.lines.add((line, effect))
        self.pieces.append(piece)


@dataclass(slots=True)
class Facts:
    flow: Flow
    params: dict[tuple[int, int], Touch] = field(default_factory=dict)
    symbols: dict[str, Touch] = field(default_factory=dict)
    indirect: dict[tuple[Any, ...], Touch] = field(default_factory=dict)
    loops: dict[int, tuple[Condition, ...]] = field(default_factory=dict)
    stops: list[tuple[int, str]] = field(default_factory=list)


def collect(module: Module, entry: Function, given: ParamHints | None = None) -> Facts:
    """Without extents if values do not settle."""
    facts = read(Flow(module, entry, given))
    return facts if facts.flow.settled else read(Flow(module, entry, given, coarse=True))


def read(flow: Flow) -> Facts:
    return _Collector(flow).run()


class _Collector:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.facts = Facts(flow)
        self.conditions = Conditions(flow)
        self.maps = TensorMaps(flow, self.conditions)
        self.outside: set[MemoryAccess] = set()
        self.roots: list[tuple[MemoryAccess, Node | Value, Path]] = []
        # (line, 64-bit integer written to memory, access)
        self.stored: list[tuple[int, Node | Value, MemoryAccess]] = []

    def run(self) -> Facts:
        flow = self.flow
        for access in flow.scan.accesses:
            if access.space in _FAR_SPACES:
                conditions = self.conditions.want(access.at)
                self.roots.append((access, flow.want_address(access.at, access.operand), conditions))
                self._want_stored(access)
        self.maps.want()
        flow.want_calls()
        loops = self.conditions.want_loops() if self.roots else {}
        flow.run()
        if not flow.settled and not flow.coarse:
            return self.facts  # restarted
        self.facts.loops = {h: self.conditions.known(p) for h, p in loops.items() if p.wanted}
        self.facts.stops += flow.stops
        self._undeclared()
        self._classify()
        self._handed_over()
        self._escapes()
        if flow.atoms.cut:
            reason = "too complex to follow: its addresses are computed in too many steps"
            self.facts.stops.append((flow.entry.line, reason))
        return self.facts

    def _undeclared(self) -> None:
        """Undeclared names have no memory: stores to them would be lost."""
        for access in self.flow.scan.accesses:
            self._declared(access.at, access.operand.base)
        for index, info in enumerate(self.flow.scan.infos):
            if info is not None and info.op.name in ("mov", "cvta"):
                for operand in self.flow.flat.body[index].operands[1:]:
                    self._declared(index, operand)

    def _declared(self, index: int, operand: Operand) -> None:
        if isinstance(operand, Sym) and not self.flow.loads.declared(operand.name):
            self.facts.stops.append((self.flow.flat.body[index].line, f"'{operand.name}' is not declared"))

    def _want_stored(self, access: MemoryAccess) -> None:
        """Stored 64-bit integers may be addresses that leave the kernel."""
        instruction, info = self._at(access.at)
        if access.effect == "w" and instruction.op.name == "st" and info.width == 8 and info.form is not None:
            for item in _items(instruction.operands[1:2]):
                self.stored.append((instruction.line, self.flow.want(access.at, item), access))

    def _at(self, index: int) -> tuple[Instruction, OpInfo]:
        info = self.flow.scan.infos[index]
        assert info is not None
        return self.flow.flat.body[index], info

    def _classify(self) -> None:
        flow = self.flow
        declared = {i for i, p in enumerate(flow.entry.params) if p.is_pointer} | flow.given.pointers
        self.classifier = Classifier(flow.atoms, declared, flow.converted)
        addresses = [(a, flow.address(a, node), c) for a, node, c in self.roots]
        self.classifier.learn(poly for _, address, _ in addresses for poly in address)
        for access, address, wanted in addresses:
            self._access(access, address, wanted)
        for effect, line, target in self.maps.accesses(self.classifier):
            self._touch(effect, line, target, Piece(None, 0))

    def _access(self, access: MemoryAccess, address: Value, path: Path) -> None:
        instruction, info = self._at(access.at)
        if not address:
            self._stop(instruction, "an address that no definition reaches")
            return
        width = _width(instruction, info)
        conditions = self.conditions.known(path)
        complete = path.complete and len(conditions) == len(path.wanted) and len(address) == 1
        targets = [t for poly in address for t in self.classifier.targets(poly)]
        real = [t for t in targets if t.kind != "null"]
        if not real:
            self._stop(instruction, "an address near null")
        if any(t.kind != "frame" for t in real):
            self.outside.add(access)
        for target in real:
            piece = Piece(target.offset, width, conditions, complete)
            self._touch(access.effect, instruction.line, target, piece)

    def _stop(self, instruction: Instruction, reason: str) -> None:
        self.facts.stops.append((instruction.line, f"{reason} in '{instruction.op.text}'"))

    def _touch(self, effect: str, line: int, target: AccessTarget, piece: Piece) -> None:
        facts = self.facts
        if target.kind == "param":
            facts.params.setdefault(target.what, Touch()).add(effect, line, piece)
        elif target.kind == "map":
            touch = facts.params.setdefault(target.what, Touch())
            touch.by_map = True
            touch.add(effect, line, Piece(None, 0))
        elif target.kind == "symbol":
            facts.symbols.setdefault(target.what, Touch()).add(effect, line, piece)
        elif target.kind == "indirect":
            facts.indirect.setdefault(target.what, Touch()).add(effect, line, piece)
        elif target.kind == "unknown":
            facts.stops.append((line, target.what))

    def _handed_over(self) -> None:
        """Unknown functions may use every pointer argument."""
        for line, value in self.flow.call_arguments():
            for poly in value:
                if self.flow.atoms.base_of(poly) or self.classifier.bases(poly):
                    for target in self.classifier.targets(poly):
                        if target.kind in ("param", "indirect"):
                            self._touch("r", line, target, Piece(None, 0))
                            self._touch("w", line, target, Piece(None, 0))

    def _escapes(self) -> None:
        """Addresses written to memory differ on another device."""
        at = self.flow.atoms
        for line, node, access in self.stored:
            if access not in self.outside:
                continue
            value = node.value if isinstance(node, Node) else node
            for poly in value:
                for number in sorted(self.classifier.bases(poly) | at.base_of(poly)):
                    name = self._address_name(number)
                    if name:
                        self.facts.stops.append((line, f"stores {name}"))

    def _address_name(self, number: int) -> str:
        item = self.classifier.item(number)
        if item[0] == "symbol":
            return f"the address of '{item[1]}'"
        if item[0] == "func":
            return f"the address of function '{item[1]}'"
        if item[0] != "param":
            return ""
        touched = (item[1], item[2]) in self.facts.params
        if touched or item[1] in self.classifier.declared or number in self.flow.converted:
            return f"the address in parameter {item[1]}"
        return ""


def _items(operands: tuple[Operand, ...]) -> Iterator[Operand]:
    for operand in operands:
        yield from getattr(operand, "items", (operand,))


def _width(instruction: Instruction, info: OpInfo) -> int:
    op = info.op
    if op.name in ("wmma", "multimem") or op.text.startswith(("cp.async.bulk", "cp.reduce", "tensormap")):
        return 0
    if op.text.startswith("cp.async"):
        size = instruction.operands[2] if len(instruction.operands) > 2 else None
        return size.value if isinstance(size, Imm) else 16
    if op.name == "discard":
        return 128
    return info.width * info.vector
