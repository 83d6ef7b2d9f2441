"""Integer comparisons that hold where an access happens.

They come from the instruction's guard and branches that dominate its block; a back-edge condition bounds a
loop counter. A set is `complete` if nothing else decides the access; only then can an extent be exact. Not
handled: phis of predicates, floats, memory.
"""

from typing import NamedTuple

from tessera_ptx.cfg import dominators, targets_of
from tessera_ptx.fixpoint import Flow, Node
from tessera_ptx.poly import Poly, Value
from tessera_ptx.syntax import Instruction, Not, Operand, Pair, Reg
from tessera_ptx.transfer import form_of

_MAX_DEPTH = 8
_MAX_CONDITIONS = 12
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


class Condition(NamedTuple):
    """lt, le, gt, ge, eq or ne"""

    left: Poly
    relation: str
    right: Poly
    bits: int
    signed: bool


class _Wanted(NamedTuple):
    left: "Node | Value"
    relation: str
    right: "Node | Value"
    bits: int
    signed: bool


class Path(NamedTuple):
    wanted: tuple[_Wanted, ...] = ()
    complete: bool = True

    def and_also(self, other: "Path") -> "Path":
        wanted = (*self.wanted, *other.wanted)
        kept = wanted[-_MAX_CONDITIONS:]
        return Path(kept, self.complete and other.complete and len(kept) == len(wanted))


_UNKNOWN = Path((), False)


class Conditions:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._blocks: dict[int, Path] = {}
        self._predicates: dict[tuple[object, bool], Path] = {}
        self._idoms: list[int] | None = None

    def want(self, index: int) -> Path:
        """Requests the values compared on the way."""
        path = self._block(self.flow.graph.block_of[index])
        guard = self.flow.flat.body[index].guard
        if guard is None:
            return path
        return path.and_also(self._predicate(index, guard.reg, not guard.negated, 0))

    def want_loops(self) -> dict[int, Path]:
        """Conditions of single back edges, by loop header."""
        loops: dict[int, Path] = {}
        for header, block in enumerate(self.flow.graph.blocks):
            backs = [p for p in block.preds if p >= header]
            if len(backs) == 1:
                loops[header] = self._edge(backs[0], header)
        return loops

    def known(self, path: Path) -> tuple[Condition, ...]:
        out = []
        for left, relation, right, bits, signed in path.wanted:
            a = left.value if isinstance(left, Node) else left
            b = right.value if isinstance(right, Node) else right
            if len(a) == 1 and len(b) == 1:
                out.append(Condition(a[0], relation, b[0], bits, signed))
        return tuple(out)

    def _block(self, block: int) -> Path:
        chain = []
        while block not in self._blocks:
            chain.append(block)
            if block == 0:
                break
            block = self._above(block)
        for one in reversed(chain):
            self._blocks[one] = self._own(one)
        return self._blocks[chain[0]] if chain else self._blocks[block]

    def _own(self, block: int) -> Path:
        if block == 0:
            return Path() if not self.flow.graph.blocks[0].preds else _UNKNOWN
        preds = self.flow.graph.blocks[block].preds
        above = self._blocks[self._above(block)]
        # A loop is entered by one edge, whose condition is of values before it.
        entries = [p for p in preds if not self.dominates(block, p)]
        if len(entries) == 1:
            above = above.and_also(self._edge(entries[0], block))
        return above if len(preds) == 1 else above.and_also(_UNKNOWN)

    def _edge(self, source: int, target: int) -> Path:
        flow = self.flow
        last = flow.graph.blocks[source].stop - 1
        instruction = flow.flat.body[last]
        if len(set(flow.graph.blocks[source].succs)) < 2:
            return Path()
        if instruction.guard is None or instruction.op.name != "bra":
            # A guarded ret, exit or trap falls through if its guard is false.
            if instruction.guard is not None and instruction.op.name != "brx":
                return self._predicate(last, instruction.guard.reg, instruction.guard.negated, 0)
            return _UNKNOWN
        targets = targets_of(instruction, flow.flat) or []
        taken = any(t < len(flow.graph.block_of) and flow.graph.block_of[t] == target for t in targets)
        return self._predicate(last, instruction.guard.reg, taken != instruction.guard.negated, 0)

    def _predicate(self, index: int, reg: Reg, holds: bool, depth: int) -> Path:
        key = self.flow.defs.reaching(index, reg.name)
        known = self._predicates.get((key, holds))
        if known is None:
            known = self._predicates[key, holds] = self._definition(key, reg, holds, depth)
        return known

    def _definition(self, key: object, reg: Reg, holds: bool, depth: int) -> Path:
        flow = self.flow
        if key is None or depth > _MAX_DEPTH or (isinstance(key, tuple) and key[0] != "def"):
            return _UNKNOWN
        index = key[2] if isinstance(key, tuple) else flow.scan.defs[str(key)][0]
        instruction = flow.flat.body[index]
        if instruction.guard is not None or index in flow.scan.short:
            return _UNKNOWN
        name, operands = instruction.op.name, instruction.operands
        if name == "setp":
            return self._compare(index, instruction, reg, holds, depth)
        if name == "not":
            return self._operand(index, operands[1], not holds, depth)
        if name == "mov":
            return self._operand(index, operands[1], holds, depth)
        if (name == "and" and holds) or (name == "or" and not holds):
            first = self._operand(index, operands[1], holds, depth)
            return first.and_also(self._operand(index, operands[2], holds, depth))
        return _UNKNOWN

    def _operand(self, index: int, operand: Operand, holds: bool, depth: int) -> Path:
        if isinstance(operand, Not) and operand.sign == "!":
            return self._operand(index, operand.item, not holds, depth)
        return self._predicate(index, operand, holds, depth + 1) if isinstance(operand, Reg) else _UNKNOWN

    def _compare(self, index: int, instruction: Instruction, reg: Reg, holds: bool, depth: int) -> Path:
        op, operands = instruction.op, instruction.operands
        form = form_of(op)
        relation = op.mods[0] if op.mods else ""
        if form is None or (relation not in _NEGATED and relation not in _UNSIGNED) or len(operands) < 3:
            return _UNKNOWN
        if isinstance(operands[0], Pair) and operands[0].first != reg:
            holds = not holds
        also = Path()
        if len(operands) > 3:
            if "and" not in op.mods or not holds or isinstance(operands[0], Pair):
                return _UNKNOWN
            also = self._operand(index, operands[3], True, depth)
        signed = form.signed and relation not in _UNSIGNED
        relation = _UNSIGNED.get(relation, relation)
        relation = relation if holds else _NEGATED[relation]
        left, right = (self.flow.want(index, o) for o in operands[1:3])
        return also.and_also(Path((_Wanted(left, relation, right, form.source_bits, signed),)))

    def dominates(self, block: int, other: int) -> bool:
        while other > block:
            other = self._above(other)
        return other == block

    def _above(self, block: int) -> int:
        if self._idoms is None:
            self._idoms = dominators([b.preds for b in self.flow.graph.blocks])
        return self._idoms[block]
