"""Loads and stores: parameters, module symbols, frames, other memory.

A load of a parameter gives its bytes, of a frame what was stored there; any other is a fresh `loaded` value
with the bases it was read through, so a pointer from memory is reported with its table.

A computed 8-byte field of a struct parameter may be any but those with a half that is loaded as a float,
multiplied by a register, or compared as signed. Reading a half proves nothing: `(unsigned)s.p & 15` tests
alignment.
"""

from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any

from tessera_ptx.bits import halves, pack, widen
from tessera_ptx.flatten import Flat
from tessera_ptx.frames import PointerFrame, Somewhere
from tessera_ptx.opcodes import vector_of, width_of
from tessera_ptx.poly import Poly, Value, add, const, constant_of, freeze, sub
from tessera_ptx.ranges import FULL, hull
from tessera_ptx.syntax import Function, Instruction, Mem, Module, Reg, Sym, Vec
from tessera_ptx.values import PER_THREAD, UNIFORM, Atoms, Key, by_base
from tessera_ptx.weights import candidates, weights

_ORDERED = frozenset({"lt", "le", "gt", "ge"})
_WORD = 4
_FIELD = 8


def number_fields(body: Iterable[Instruction], param: str) -> frozenset[int]:
    """Fields that are certainly numbers."""
    read: dict[str, int] = {}
    defined: dict[str, int] = {}
    numbers: set[int] = set()
    used: set[str] = set()
    for instruction in body:
        for name in _registers(instruction.operands[:1]):
            defined[name] = defined.get(name, 0) + 1
        used |= _used_as_number(instruction)
        for name, offset in _halves_read(instruction, param):
            read[name] = offset
            if "f32" in instruction.op.mods:
                numbers.add(offset // _FIELD * _FIELD)
    # A register written twice may hold another value where it is used.
    sure = {name for name in read if name in used and defined[name] == 1}
    return frozenset(numbers | {read[name] // _FIELD * _FIELD for name in sure})


def _halves_read(instruction: Instruction, param: str) -> list[tuple[str, int]]:
    """(register, offset) of 4-byte loads."""
    op, operands = instruction.op, instruction.operands
    if op.name != "ld" or len(operands) < 2 or not isinstance(operands[1], Mem) or width_of(op) != _WORD:
        return []
    base = operands[1].base
    if not isinstance(base, Sym) or base.name != param:
        return []
    place = base.offset + operands[1].offset
    names = _registers(operands[:1])
    if len(names) != vector_of(op):
        return []
    return [(name, place + _WORD * number) for number, name in enumerate(names)]


def _used_as_number(instruction: Instruction) -> set[str]:
    op = instruction.op
    sources = instruction.operands[1:3]
    if op.name in ("mul", "mad"):
        # A hash multiplies by a constant.
        return {s.name for s in sources if isinstance(s, Reg)} if _all_registers(sources) else set()
    if op.name == "setp" and "s32" in op.mods and _ORDERED.intersection(op.mods):
        return {s.name for s in sources if isinstance(s, Reg)}
    return set()


def _all_registers(operands: tuple[object, ...]) -> bool:
    return all(isinstance(o, Reg) for o in operands)


def _registers(operands: tuple[object, ...]) -> list[str]:
    found: list[str] = []
    for operand in operands:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        found += [i.name for i in items if isinstance(i, Reg)]
    return found


_SPACE_ANY = "?"


class LoadRules:
    def __init__(self, module: Module, entry: Function, flat: Flat, atoms: Atoms) -> None:
        self.module, self.entry, self.flat, self.atoms = module, entry, flat, atoms
        self.params = {p.name: (i, p) for i, p in enumerate(entry.params)}
        self.symbols = {v.name: v for v in module.variables}
        self.functions = {f.name for f in module.functions}
        self.frames: dict[tuple[str, str], PointerFrame] = {}
        # Loads from an unknown variable of a space see all of them.
        self.any_readers: dict[str, dict[Any, None]] = {}
        self.written: dict[Any, set[tuple[str, str]]] = {}
        self.has_frames = any(
            v.space in ("shared", "local") for v in (*flat.variables.values(), *module.variables)
        )
        self._specials: dict[str, Value] = {}
        self._narrow: dict[int, frozenset[int]] = {}
        self._symbols: dict[Sym, Value] = {}

    def special(self, name: str) -> Value:
        known = self._specials.get(name)
        if known is None:
            fixed = self.entry.attributes.get("reqntid")
            if fixed and name.startswith("%ntid."):
                known = ({(): (*fixed, 1, 1)["xyz".index(name[-1])]},)
            else:
                known = self.atoms.value(("special", name))
            self._specials[name] = known
        return known

    def symbol(self, symbol: Sym) -> Value:
        known = self._symbols.get(symbol)
        if known is None:
            poly = dict(self.atoms.poly(self._symbol_atom(symbol.name)))
            if symbol.offset:
                poly[()] = symbol.offset
            known = self._symbols[symbol] = (poly,)
        return known

    def _symbol_atom(self, name: str) -> tuple[Any, ...]:
        if name in self.params:
            return ("frame", "param", name)
        variable = self.flat.variables.get(name) or self.symbols.get(name)
        if variable is None:
            if name in self.functions:
                return ("func", name)
            # Call parameters of an inlined copy, or an undeclared name.
            return ("symbol", name)
        if variable.space in ("shared", "local", "param"):
            # Unsized shared arrays of a module share one address.
            dynamic = variable.space == "shared" and variable.size == 0
            return ("frame", variable.space, "dynamic" if dynamic else name)
        return ("symbol", name)

    def declared(self, name: str) -> bool:
        return (
            name in self.params
            or name in self.flat.variables
            or name in self.symbols
            or name in self.functions
        )

    def is_local_param(self, operand: Mem) -> bool:
        return isinstance(operand.base, Sym) and operand.base.name not in self.params

    def plain(self, key: Key, width: int, table: frozenset[int], signed: bool) -> Value:
        return self.atoms.value(("loaded", key, width, table, signed))

    def load(self, node: Any, space: str, address: Value, width: int, signed: bool) -> Value:
        if not address:
            return ()
        found: list[Poly] = []
        table: set[int] = set()
        at = self.atoms
        for poly in address:
            base = at.base_of(poly)
            frames, rest = self._places(space, poly)
            if not frames:
                table |= at.roots(base) or {-1}
            for _, frame_space, name in frames:
                if frame_space == "param" and name in self.params:
                    found += self._param(node, name, rest, width, signed)
                else:
                    found += self._frame(node, frame_space, name, rest, width)
        if table:
            found += self.plain(node.key, width, frozenset(table), signed)
        return at.join((node.key, "load"), tuple(found))

    def _places(self, space: str, poly: Poly) -> tuple[list[tuple[Any, ...]], Poly]:
        at = self.atoms
        base, rest = at.split(poly)
        frames = [n for n in base if at.atoms[n].item[0] == "frame"]
        if any(at.atoms[n].item[0] == "frame" and n not in frames for n in at.taint(rest)):
            # Others hide in the offset, as in `a + f * (b - a)`.
            parts = {n: w for n, w in weights(at, poly).items() if at.atoms[n].item[0] == "frame"}
            found = candidates(at, parts, lambda _: True) or set(parts)
            if not found.issubset(frames):
                frames, rest = sorted(found.union(frames)), poly
        if not frames and space in ("shared", "local", "param"):
            return [("frame", space, _SPACE_ANY)], poly
        return [at.atoms[n].item for n in frames], rest

    def _param(self, node: Any, name: str, rest: Poly, width: int, signed: bool) -> Value:
        index, param = self.params[name]
        offset = constant_of(rest)
        if offset is not None:
            if 0 <= offset and offset + width <= max(param.size, 1):
                item = self.atoms.poly(("param", index, offset, width))
                return (item if width >= 4 else widen(self.atoms, item, 8 * width, signed),)
            return self.atoms.opaque((node.key, "outside"))
        if width < 8:
            return self.atoms.value(("field", index, freeze(rest), width, signed))
        offsets = tuple(o for o in self._reachable(rest, param.size) if o not in self._numbers(index))
        return self.atoms.value(("fields", index, offsets, freeze(rest)))

    def _frame(self, node: Any, space: str, name: str, rest: Poly, width: int) -> list[Poly]:
        values: list[Value] = []
        if name == _SPACE_ANY:
            self.any_readers.setdefault(space, {})[node] = None
            for (other, _), frame in list(self.frames.items()):
                if other == space:
                    values += self._whole(node, frame, None, width)
        else:
            frame, wild = self._frame_of(space, name), self._frame_of(space, _SPACE_ANY)
            offset = constant_of(rest)
            frame.read_by(node, offset, width)
            wild.read_by(node, None, width)
            values = self._whole(node, wild, None, width)
            if offset is None:
                values += self._whole(node, frame, rest, width)
            else:
                values += frame.exact(offset, width)
                values += self._pieces(node, frame, offset, width)
                values += self._strays(node, frame, offset, width)
        # Local memory is per thread; shared memory holds other threads' stores.
        above = PER_THREAD if space in ("local", "param") else UNIFORM
        return [self.atoms.others(p, above, (node.key, "seen")) for v in values for p in v]

    def _strays(self, node: Any, frame: PointerFrame, offset: int, width: int) -> list[Value]:
        values: list[Value] = []
        for stray in frame.anywhere.values():
            if stray.reaches(offset, width):
                values += self._stray(node, stray, {(): offset}, width)
        return values

    def _stray(self, node: Any, stray: Somewhere, rest: Poly | None, width: int) -> list[Value]:
        if stray.mirror is not None and rest is not None:
            index, distance = stray.mirror
            place = add(rest, const(-distance))
            return [self._param(node, self.entry.params[index].name, place, width, False)]
        if stray.width == width:
            return [stray.value]
        # Computed narrow numbers are no part of a pointer.
        if stray.width < width and not self._any_carries([stray.value]):
            return []
        return [self.atoms.opaque((node.key, "piece"), stray.value)]

    def _any_carries(self, values: Iterable[Value]) -> bool:
        return any(self.atoms.may_carry(p) for value in values for p in value)

    def _frame_of(self, space: str, name: str) -> PointerFrame:
        frame = self.frames.get((space, name))
        if frame is None:
            frame = self.frames[space, name] = PointerFrame(
                lambda key, value: self._blurred((space, name, key), value)
            )
        return frame

    def _blurred(self, key: Key, value: Value) -> Value:
        """One alternative per origin in any thread or iteration."""
        at = self.atoms
        groups: dict[frozenset[int], list[Poly]] = {}
        followed: dict[frozenset[int], bool] = {}
        for poly in value:
            base, rest = at.split(at.others(poly, PER_THREAD, ("cell", key)))
            # Opaque addends would create a new base on every iteration.
            origin = frozenset(n for n in base if at.kind(n) not in ("opaque", "op"))
            # Without an origin, the value is computed from pointers that are not addends.
            plain = all(at.atoms[n].joined for n in base - origin) and (bool(origin) or not at.taint(rest))
            followed[origin] = followed.get(origin, True) and plain
            offsets = groups.setdefault(origin, [])
            whole = at.whole(base - origin, rest)
            if whole not in offsets:
                offsets.append(whole)
        return at.limited(
            ("cell", key),
            tuple(
                at.whole(origin, found[0])
                if len(found) == 1
                else at.whole(
                    origin, at.opaque(("cell", key, origin), tuple(found), joined=followed[origin])[0]
                )
                for origin, found in by_base(groups)
            ),
        )

    def _reachable(self, rest: Poly, size: int) -> Iterator[int]:
        step, start = self._stride(rest)
        step, start = (step, start % step) if step % 8 == 0 else (8, 0)
        low, high = self.atoms.range(rest)
        for offset in range(start, size - 7, step):
            if (low is None or low <= offset) and (high is None or offset <= high):
                yield offset

    def _numbers(self, index: int) -> frozenset[int]:
        known = self._narrow.get(index)
        if known is None:
            known = self._narrow[index] = number_fields(self.flat.body, self.entry.params[index].name)
        return known

    def _stride(self, rest: Poly) -> tuple[int, int]:
        step, start = stride_of(rest), rest.get((), 0)
        mask = self.atoms.mask(rest)
        if mask > 0:
            return max(mask & -mask, 1), 0
        return step, start

    def _whole(self, node: Any, frame: PointerFrame, rest: Poly | None, width: int) -> list[Value]:
        step, start = (1, 0) if rest is None else self._stride(rest)
        low, high = FULL if rest is None else self.atoms.range(rest)
        values: list[Value] = []
        for stray in frame.anywhere.values():
            values += self._stray(node, stray, rest, width)
        for (offset, size), cell in frame.cells.items():
            if (low is not None and offset + size <= low) or (high is not None and offset >= high + width):
                continue
            if size == width:
                if (offset - start) % step == 0:
                    values += cell.values()
            elif size < width and not self._any_carries(cell.values()):
                continue
            elif cell.values() and any((offset - start + k) % step == 0 for k in range(1 - width, size)):
                values.append(self.atoms.opaque((node.key, "piece"), *cell.values()))
        return values

    def _pieces(self, node: Any, frame: PointerFrame, offset: int, width: int) -> list[Value]:
        """Overlapping stores of other widths."""
        near = frame.overlapping(offset, width)
        if not near:
            return []
        halves_known = {(o, w): v for o, w, v in near}
        low, high = halves_known.get((offset, 4)), halves_known.get((offset + 4, 4))
        at = self.atoms
        if width == 8 and low and high and len(near) == 2 and len(low) == 1 and len(high) == 1:
            return [pack(at, (node.key, "pack"), low[0], high[0])]
        if width == 4 and len(near) == 1 and near[0][1] == 8 and len(near[0][2]) == 1:
            side = near[0][0] == offset - 4
            if side or near[0][0] == offset:
                return [halves(at, near[0][2][0], side)]
        stored = [v for _, _, values in near for v in values]
        return [at.opaque((node.key, "piece", offset), *stored)]

    def contents(self, name: str) -> list[Value]:
        frame = self.frames.get(("param", name))
        return [] if frame is None else [v for cell in frame.cells.values() for v in cell.values()]

    def store(self, writer: Any, space: str, address: Value, width: int, value: Value) -> list[Any]:
        """Returns the loads to update."""
        woken: list[Any] = []
        if not value:
            return woken
        places: dict[tuple[str, str], list[Poly]] = {}
        for poly in address:
            frames, rest = self._places(space, poly)
            for _, frame_space, name in frames:
                places.setdefault((frame_space, name), []).append(rest)
        for gone in self.written.get(writer, set()) - set(places):
            self.frames[gone].take_back(writer, set(), False)
        self.written[writer] = set(places)
        for place, offsets in places.items():
            woken += self._store_in(writer, place, offsets, width, value)
        return woken

    def _store_in(
        self, writer: Any, place: tuple[str, str], offsets: list[Poly], width: int, value: Value
    ) -> list[Any]:
        frame = self._frame_of(*place)
        woken: list[Any] = []
        changed = False
        known = {o for rest in offsets if (o := constant_of(rest)) is not None}
        unknown = [rest for rest in offsets if constant_of(rest) is None]
        if place[1] == _SPACE_ANY:
            known, unknown = set(), offsets
        frame.take_back(writer, {(o, width) for o in known}, bool(unknown))
        for offset in sorted(known):
            if frame.write(writer, offset, width, value):
                changed = True
                woken += frame.readers_of(offset, width)
        if unknown:
            span = FULL if place[1] == _SPACE_ANY else hull([self.atoms.range(r) for r in unknown])
            mirror = self._mirror(unknown, value)
            if frame.write_somewhere(writer, Somewhere(span, width, value, mirror)):
                changed = True
                woken += frame.readers_of(None, width)
        return [*woken, *self.any_readers.get(place[0], ())] if changed else woken

    def _mirror(self, offsets: list[Poly], value: Value) -> tuple[int, int] | None:
        """A parameter field is stored at the distance it was read from."""
        if len(offsets) != 1 or len(value) != 1 or len(value[0]) != 1:
            return None
        mono, coeff = next(iter(value[0].items()))
        item = self.atoms.atoms[mono[0]].item if len(mono) == 1 and coeff == 1 else ("",)
        if item[0] not in ("field", "fields"):
            return None
        distance = constant_of(sub(offsets[0], dict(item[3] if item[0] == "fields" else item[2])))
        return None if distance is None else (item[1], distance)


def stride_of(rest: Poly) -> int:
    step = 0
    for mono, coeff in rest.items():
        if mono:
            step = gcd(step, coeff)
    return step or 1
