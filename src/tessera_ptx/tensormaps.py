"""Buffers behind tensor maps.

A map parameter stands for its buffer, at the map's offset. A map in memory is followed if this kernel wrote
its address (`tensormap.replace ... global_address`), also through a copy from shared to global memory; else
the access is indirect. A copy of a reused map takes the last edit before it if, outside loops, some thread
certainly makes it (all, or `tid == 0`); else any.
"""

from collections.abc import Iterator

from tessera_ptx.classify import AccessTarget, Classifier
from tessera_ptx.conditions import Condition, Conditions, Path
from tessera_ptx.fixpoint import Flow, Node
from tessera_ptx.loads import stride_of
from tessera_ptx.opcodes import spaces_of
from tessera_ptx.poly import Poly, Value, add, const, constant_of
from tessera_ptx.syntax import Mem

_MAP_BYTES = 128


class TensorMaps:
    def __init__(self, flow: Flow, conditions: Conditions) -> None:
        self.flow, self.conditions = flow, conditions
        self.copies: list[tuple[int, str, Node | Value, int]] = []
        # (instruction, place, offset, value)
        self.edits: list[tuple[int, Node | Value, int, Node | Value]] = []
        # (instruction, to, offset, from, offset)
        self.moves: list[tuple[int, Node | Value, int, Node | Value, int]] = []
        self.paths: dict[int, Path] = {}
        self.missing: list[int] = []

    def want(self) -> None:
        flow = self.flow
        for index in flow.scan.tensors:
            instruction = flow.flat.body[index]
            spaces = spaces_of(instruction.op)
            stores = spaces[:1] == ("global",)
            place = 0 if stores else 1
            operand = instruction.operands[place] if len(instruction.operands) > place else None
            if not isinstance(operand, Mem):
                self.missing.append(instruction.line)
                continue
            effect = "a" if instruction.op.text.startswith("cp.reduce") else "w" if stores else "r"
            self.copies.append((instruction.line, effect, flow.want_address(index, operand), operand.offset))
        for index in flow.scan.maps:
            self._want_edit(index)

    def _want_edit(self, index: int) -> None:
        flow = self.flow
        instruction = flow.flat.body[index]
        operands = instruction.operands
        if not operands or not isinstance(operands[0], Mem):
            return
        place = flow.want_address(index, operands[0])
        if "global_address" in instruction.op.mods:
            self.edits.append((index, place, operands[0].offset, flow.want(index, operands[-1])))
            self.paths[index] = self.conditions.want(index)
        elif "cp_fenceproxy" in instruction.op.mods and len(operands) > 1 and isinstance(operands[1], Mem):
            source = flow.want_address(index, operands[1])
            self.moves.append((index, place, operands[0].offset, source, operands[1].offset))
            self.paths[index] = self.conditions.want(index)

    def accesses(self, classifier: Classifier) -> Iterator[tuple[str, int, AccessTarget]]:
        self.classifier = classifier
        known = self._contents()
        for line in self.missing:
            yield "r", line, AccessTarget("unknown", "a tensor copy without a tensor map", None)
        for line, effect, node, offset in self.copies:
            places = [add(p, const(offset)) for p in _value(node)]
            if not places:
                yield (
                    effect,
                    line,
                    AccessTarget("unknown", "a tensor map whose address no definition reaches", None),
                )
            for place in places:
                for target in self._behind(place, known):
                    yield (effect if target.kind != "param_read" else "r"), line, _plain(target)

    def _contents(self) -> list[tuple[Poly, Value]]:
        edits = [
            (index, add(p, const(offset)), _value(value))
            for index, node, offset, value in self.edits
            for p in _value(node)
        ]
        known = [(place, value) for _, place, value in edits]
        for index, to, to_offset, source, source_offset in self.moves:
            for origin in _value(source):
                place = add(origin, const(source_offset))
                found = self._last(index, [(i, v) for i, p, v in edits if p == place])
                for target in _value(to):
                    known += [(add(target, const(to_offset)), v) for v in found]
        return known

    def _last(self, move: int, edits: list[tuple[int, Value]]) -> list[Value]:
        everything = [value for _, value in edits]
        if self._in_loop(move) or any(self._in_loop(index) for index, _ in edits):
            return everything
        rank = self.flow.graph.block_of
        before = [(rank[i], i, value) for i, value in edits if (rank[i], i) < (rank[move], move)]
        if not before:
            return everything
        _, index, value = max(before, key=lambda e: e[:2])
        return [value] if self._surely(index, move) else everything

    def _in_loop(self, index: int) -> bool:
        rank = self.flow.graph.block_of[index]
        blocks = self.flow.graph.blocks
        return any(h <= rank <= p for h, block in enumerate(blocks) for p in block.preds if p >= h)

    def _surely(self, edit: int, move: int) -> bool:
        """Some thread of every copying block made the edit."""
        ours, theirs = self.paths[edit], self.paths[move]
        if len(self.conditions.known(ours)) != len(ours.wanted):
            return False
        shared = self.conditions.known(theirs)
        extra = [c for c in self.conditions.known(ours) if c not in shared]
        block = self.flow.graph.block_of[edit]
        while not self.conditions.dominates(block, self.flow.graph.block_of[move]):
            preds = self.flow.graph.blocks[block].preds
            if len(preds) != 1:
                return False
            block = preds[0]
        return all(self._holds_for_first_thread(c) for c in extra)

    def _holds_for_first_thread(self, condition: Condition) -> bool:
        sides = []
        for poly in (condition.left, condition.right):
            for mono in poly:
                for number in mono:
                    item = self.flow.atoms.atoms[number].item
                    if item[0] != "special" or not item[1].startswith(("%tid.", "%laneid")):
                        return False
            sides.append(poly.get((), 0))
        a, b = sides
        table = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        return table[condition.relation]

    def _behind(self, place: Poly, known: list[tuple[Poly, Value]]) -> Iterator[AccessTarget]:
        base, rest = self.flow.atoms.split(place)
        items = [self.classifier.item(n) for n in sorted(base)]
        for _, space, name in [i for i in items if i[0] == "frame"]:
            if space == "param" and name in self.flow.loads.params:
                yield from self._parameter(name, rest)
                return
        # The map itself is read from memory.
        for target in self.classifier.targets(place):
            if target.kind in ("param", "symbol"):
                yield AccessTarget(
                    "param_read" if target.kind == "param" else "symbol", target.what, target.offset
                )
        exact = [v for p, v in known if p == place]
        if exact:
            for value in exact:
                for poly in value:
                    yield from self.classifier.targets(poly)
            return
        for poly, value in known:
            if self.flow.atoms.base_of(poly) == base:
                for inner in value:
                    yield from self.classifier.targets(inner)
        yield AccessTarget("indirect", self.classifier.table_names(base or frozenset({-1})), None)

    def _parameter(self, name: str, rest: Poly) -> Iterator[AccessTarget]:
        index, param = self.flow.loads.params[name]
        offset = constant_of(rest)
        if offset is not None:
            yield AccessTarget("map", (index, offset), None)
            return
        step = stride_of(rest)
        step = step if step % 64 == 0 else 64
        for start in range(rest.get((), 0) % step, max(param.size - _MAP_BYTES, 0) + 1, step):
            yield AccessTarget("map", (index, start), None)


def _plain(target: AccessTarget) -> AccessTarget:
    return AccessTarget("param", target.what, target.offset) if target.kind == "param_read" else target


def _value(node: "Node | Value") -> Value:
    return node.value if isinstance(node, Node) else node
