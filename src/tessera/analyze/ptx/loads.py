"""What loads return and stores keep: parameters, module symbols, frames, and memory at large.

A load through a parameter's address gives that parameter's bytes; through a frame, what was stored
there; through anything else, a fresh `loaded` value that remembers the bases it was read through, so
that a pointer read from memory is reported with its table.
"""

from math import gcd
from typing import Any

from tessera.analyze.ptx.flatten import Flat
from tessera.analyze.ptx.frames import Frame, constant_offset
from tessera.analyze.ptx.syntax import Function, Mem, Module, Sym
from tessera.analyze.ptx.transfer import halves, pack, widen
from tessera.analyze.ptx.values import PER_THREAD, UNIFORM, Atoms, Key, Poly, Value

_SPACE_ANY = "?"


class LoadRules:
    """Loads and stores of one kernel."""

    def __init__(self, module: Module, entry: Function, flat: Flat, atoms: Atoms) -> None:
        self.module, self.entry, self.flat, self.atoms = module, entry, flat, atoms
        self.params = {p.name: (i, p) for i, p in enumerate(entry.params)}
        self.symbols = {v.name: v for v in module.variables}
        self.functions = {f.name for f in module.functions}
        self.frames: dict[tuple[str, str], Frame] = {}
        self.has_frames = any(
            v.space in ("shared", "local") for v in (*flat.variables.values(), *module.variables)
        )
        self._specials: dict[str, Value] = {}
        self._symbols: dict[Sym, Value] = {}

    # Names --------------------------------------------------------------------------------------------

    def special(self, name: str) -> Value:
        """The value of a special register."""
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
        """The address of a variable, parameter or function."""
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
            # Call parameters declared in a scope of an inlined copy, or a name nobody declared.
            return ("symbol", name)
        if variable.space in ("shared", "local", "param"):
            # All unsized shared arrays of a module begin at the same address.
            dynamic = variable.space == "shared" and variable.size == 0
            return ("frame", variable.space, "dynamic" if dynamic else name)
        return ("symbol", name)

    def is_local_param(self, operand: Mem) -> bool:
        """Whether the operand names a call parameter rather than one of the kernel's."""
        return isinstance(operand.base, Sym) and operand.base.name not in self.params

    # Loads --------------------------------------------------------------------------------------------

    def plain(self, key: Key, width: int, table: frozenset[int], signed: bool) -> Value:
        """A value of unknown contents."""
        return self.atoms.value(("loaded", key, width, table, signed))

    def load(self, node: Any, space: str, address: Value, width: int, signed: bool) -> Value:
        """The value a load node sees; the node is remembered as a reader of the frames it touches."""
        if not address:
            return ()
        found: list[Poly] = []
        table: set[int] = set()
        at = self.atoms
        for poly in address:
            base, rest = at.split(poly)
            frames = [at.atoms[n].item for n in base if at.atoms[n].item[0] == "frame"]
            if not frames and space in ("shared", "local", "param"):
                frames, rest = [("frame", space, _SPACE_ANY)], poly
            if not frames:
                table |= base or {-1}
            for _, frame_space, name in frames:
                if frame_space == "param" and name in self.params:
                    found += self._param(node, name, rest, width, signed)
                else:
                    found += self._frame(node, frame_space, name, rest, width)
        if table:
            found += self.plain(node.key, width, frozenset(table), signed)
        return at.join((node.key, "load"), tuple(found))

    def _param(self, node: Any, name: str, rest: Poly, width: int, signed: bool) -> Value:
        index, param = self.params[name]
        offset = constant_offset(rest)
        if offset is not None:
            if 0 <= offset and offset + width <= max(param.size, 1):
                item = self.atoms.poly(("param", index, offset, width))
                return (item if width >= 4 else widen(self.atoms, item, 8 * width, signed),)
            return self.atoms.opaque((node.key, "outside"))
        if width < 8:
            return self.plain((node.key, "field"), width, frozenset(), signed)
        start, step, count = _fields(rest, param.size)
        return self.atoms.value(("fields", index, start, step, count))

    def _frame(self, node: Any, space: str, name: str, rest: Poly, width: int) -> list[Poly]:
        """What may have been stored in these bytes."""
        offset = constant_offset(rest) if name != _SPACE_ANY else None
        values: list[Value] = []
        for frame in self._touched(space, name):
            frame.read_by(node, offset if frame is self._frame_of(space, name) else None, width)
            if offset is None or frame is not self._frame_of(space, name):
                values += self._whole(node, frame, rest if name != _SPACE_ANY else {(-1,): 1}, width)
            else:
                values += frame.exact(offset, width)
                values += self._pieces(node, frame, offset, width)
                values += frame.anywhere.values()
        # Local memory is the thread's own; shared memory holds what other threads stored.
        above = PER_THREAD if space in ("local", "param") else UNIFORM
        return [self.atoms.others(p, above, (node.key, "seen")) for v in values for p in v]

    def _touched(self, space: str, name: str) -> list[Frame]:
        if name == _SPACE_ANY:
            self._frame_of(space, name)
            return [f for (s, _), f in list(self.frames.items()) if s == space]
        return [self._frame_of(space, name), self._frame_of(space, _SPACE_ANY)]

    def _frame_of(self, space: str, name: str) -> Frame:
        frame = self.frames.get((space, name))
        if frame is None:
            frame = self.frames[(space, name)] = Frame()
        return frame

    def _whole(self, node: Any, frame: Frame, rest: Poly, width: int) -> list[Value]:
        """What a load at a dynamic offset may see: cells its stride can reach."""
        step, start = stride_of(rest), rest.get((), 0)
        values = list(frame.anywhere.values())
        for (offset, size), cell in frame.cells.items():
            if size == width:
                if (offset - start) % step == 0:
                    values += cell.values()
            elif any((offset - start + k) % step < size for k in range(-width + 1, 1)):
                values.append(self.atoms.opaque((node.key, "piece"), *cell.values()))
        return values

    def _pieces(self, node: Any, frame: Frame, offset: int, width: int) -> list[Value]:
        """Stores of other widths that share bytes with the load."""
        near = list(frame.overlapping(offset, width))
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
                return [tuple(halves(at, p, side) for p in near[0][2][0])]
        stored = [v for _, _, values in near for v in values]
        return [at.opaque((node.key, "piece", offset), *stored)]

    # Stores -------------------------------------------------------------------------------------------

    def store(self, writer: Any, space: str, address: Value, width: int, value: Value) -> list[Any]:
        """Records a store; returns the loads that must look again."""
        at = self.atoms
        woken: list[Any] = []
        if not value:
            return woken
        for poly in address:
            base, rest = at.split(poly)
            frames = [at.atoms[n].item for n in base if at.atoms[n].item[0] == "frame"]
            if not frames and space in ("shared", "local", "param"):
                frames, rest = [("frame", space, _SPACE_ANY)], poly
            for _, frame_space, name in frames:
                offset = constant_offset(rest) if name != _SPACE_ANY else None
                frame = self._frame_of(frame_space, name)
                if frame.write(writer, offset, width, value):
                    woken += frame.readers_of(offset, width)
                    for other in self._touched(frame_space, _SPACE_ANY):
                        woken += other.all_readers
        return woken


def stride_of(rest: Poly) -> int:
    """The distance between the places a dynamic offset may reach."""
    step = 0
    for mono, coeff in rest.items():
        if mono:
            step = gcd(step, coeff)
    return step or 1


def _fields(rest: Poly, size: int) -> tuple[int, int, int]:
    """Start, step and count of the 8-byte fields a dynamic offset may pick."""
    step = stride_of(rest)
    if step % 8:
        step, start = 8, 0
    else:
        start = rest.get((), 0) % step
    return start, step, max((size - 8 - start) // step + 1, 0)


__all__ = ["LoadRules"]
