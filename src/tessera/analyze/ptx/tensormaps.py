"""Tensor copies: which buffer lies behind a tensor map.

A map that is a kernel parameter stands for its buffer: the access belongs to that parameter, at the
map's offset. A map in memory is followed when this kernel put the address into it
(`tensormap.replace ... global_address`), also through the copy from shared to global memory; else the
buffer is behind a pointer in memory, which is reported as indirect.
"""

from collections.abc import Iterator
from typing import Any

from tessera.analyze.ptx.classify import Classifier, Target
from tessera.analyze.ptx.fixpoint import Flow, Node
from tessera.analyze.ptx.frames import constant_offset
from tessera.analyze.ptx.loads import stride_of
from tessera.analyze.ptx.opcodes import spaces_of
from tessera.analyze.ptx.syntax import Mem
from tessera.analyze.ptx.values import Poly, Value, add, const

_MAP_BYTES = 128


class TensorMaps:
    """The tensor copies and map edits of one kernel."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        # (line, effect, map address)
        self.copies: list[tuple[int, str, Node | Value, int]] = []
        # (place, its offset, value): an address put into a map
        self.edits: list[tuple[Node | Value, int, Node | Value]] = []
        # (to, offset, from, offset): a map copied
        self.moves: list[tuple[Node | Value, int, Node | Value, int]] = []
        self.missing: list[int] = []

    def want(self) -> None:
        """Asks for the addresses and values that matter."""
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
            self.edits.append((place, operands[0].offset, flow.want(index, operands[-1])))
        elif "cp_fenceproxy" in instruction.op.mods and len(operands) > 1 and isinstance(operands[1], Mem):
            source = flow.want_address(index, operands[1])
            self.moves.append((place, operands[0].offset, source, operands[1].offset))

    def accesses(self, classifier: Classifier) -> Iterator[tuple[str, int, Target]]:
        """(effect, line, target) of every tensor copy."""
        self.classifier = classifier
        known = self._contents()
        for line in self.missing:
            yield "r", line, Target("unknown", "a tensor copy without a tensor map", None)
        for line, effect, node, offset in self.copies:
            places = [add(p, const(offset)) for p in _value(node)]
            if not places:
                yield (
                    effect,
                    line,
                    Target("unknown", "a tensor map whose address no definition reaches", None),
                )
            for place in places:
                for target in self._behind(place, known):
                    yield (effect if target.kind != "param_read" else "r"), line, _plain(target)

    def _contents(self) -> list[tuple[Poly, Value]]:
        """Places of maps that this kernel edits, with the addresses it puts there."""
        known: list[tuple[Poly, Value]] = []
        for node, offset, value in self.edits:
            known += [(add(p, const(offset)), _value(value)) for p in _value(node)]
        for to, to_offset, source, source_offset in self.moves:
            for origin in _value(source):
                place = add(origin, const(source_offset))
                found = [v for p, v in known if p == place]
                for target in _value(to):
                    known += [(add(target, const(to_offset)), v) for v in found]
        return known

    def _behind(self, place: Poly, known: list[tuple[Poly, Value]]) -> Iterator[Target]:
        base, rest = self.flow.atoms.split(place)
        items = [self.classifier.item(n) for n in sorted(base)]
        for _, space, name in [i for i in items if i[0] == "frame"]:
            if space == "param" and name in self.flow.loads.params:
                yield from self._parameter(name, rest)
                return
        # The map itself is read from memory.
        for target in self.classifier.targets(place):
            if target.kind in ("param", "symbol"):
                yield Target("param_read" if target.kind == "param" else "symbol", target.what, target.offset)
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
        yield Target("indirect", self.classifier.table_names(base or frozenset({-1})), None)

    def _parameter(self, name: str, rest: Poly) -> Iterator[Target]:
        index, param = self.flow.loads.params[name]
        offset = constant_offset(rest)
        if offset is not None:
            yield Target("map", (index, offset), None)
            return
        step = stride_of(rest)
        step = step if step % 64 == 0 else 64
        for start in range(rest.get((), 0) % step, max(param.size - _MAP_BYTES, 0) + 1, step):
            yield Target("map", (index, start), None)


def _plain(target: Target) -> Target:
    return Target("param", target.what, target.offset) if target.kind == "param_read" else target


def _value(node: "Node | Value") -> Value:
    return node.value if isinstance(node, Node) else node


__all__: list[Any] = ["TensorMaps"]
