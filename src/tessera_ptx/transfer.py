"""Value rules of integer instructions, and facts from their spelling.

A rule takes the atom table, the form, the definition's key and the source values. Instructions without a rule
give an opaque value tainted by its sources' bases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tessera_ptx.bits import (
    bit_and,
    bit_or,
    bit_xor,
    from_thread,
    low_half,
    product,
    recombine,
    shift_right,
    widen,
)
from tessera_ptx.opcodes import OpcodeRow, Use, row_of, space_of, vector_of, width_of
from tessera_ptx.poly import ZERO, Poly, Value, add, const, constant_of, scale, sub, wrap
from tessera_ptx.syntax import Op
from tessera_ptx.values import Atoms, Key


class Form(NamedTuple):
    op: Op
    bits: int  # of the result
    source_bits: int
    signed: bool
    wide: bool
    hi: bool


Rule = Callable[[Atoms, Form, Key, list[Value]], Value]
_TYPES = {
    "b8": (8, False), "u8": (8, False), "s8": (8, True), "b16": (16, False), "u16": (16, False),
    "s16": (16, True), "b32": (32, False), "u32": (32, False), "s32": (32, True), "b64": (64, False),
    "u64": (64, False), "s64": (64, True), "b128": (128, False), "u16x2": (0, False), "s16x2": (0, True),
}  # fmt: skip
_MAX_PAIRS = 64
_UPPER = 1 << 32


def form_of(op: Op) -> Form | None:
    types = [_TYPES[m] for m in op.mods if m in _TYPES]
    if not types or types[0][0] == 0:
        return None
    # cvt and set have the result's type first and the source's last.
    bits, _ = types[0]
    source_bits, signed = types[-1]
    if op.name in ("cvt", "set") and len(types) < 2:
        return None
    wide = "wide" in op.mods
    return Form(op, bits * 2 if wide else bits, source_bits, signed, wide, "hi" in op.mods)


def _each(at: Atoms, key: Key, a: Value, b: Value, rule: Callable[[Poly, Poly], Poly]) -> Value:
    if len(a) == 1 and len(b) == 1:
        return (rule(a[0], b[0]),)
    if len(a) * len(b) > _MAX_PAIRS:
        if len(b) > 1:
            b = at.opaque((key, "b"), b)
        if len(a) * len(b) > 4 * _MAX_PAIRS:
            return at.opaque(key, a, b)
    return at.join(key, tuple(rule(x, y) for x in a for y in b))


def _map(at: Atoms, key: Key, a: Value, rule: Callable[[Poly], Poly]) -> Value:
    if len(a) == 1:
        return (rule(a[0]),)
    return at.join(key, tuple(rule(x) for x in a))


def _add(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    a, b = args[:2]
    if len(a) == 1 and len(b) == 1:
        total = wrap(add(a[0], b[0]), form.bits)
        return (recombine(at, total) if _UPPER in total.values() else total,)
    return _each(at, key, a, b, lambda x, y: wrap(add(x, y), form.bits))


def _sub(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _each(at, key, args[0], args[1], lambda x, y: wrap(sub(x, y), form.bits))


def _mul(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    source, signed = form.source_bits, form.signed
    if form.wide:
        return _each(
            at, key, args[0], args[1],
            lambda x, y: product(at, widen(at, x, source, signed), widen(at, y, source, signed), form.bits),
        )  # fmt: skip
    if form.hi:
        name = "mulhi_s" if signed else "mulhi_u"
        return _each(at, key, args[0], args[1], lambda x, y: at.op(name, source, x, y))
    return _each(at, key, args[0], args[1], lambda x, y: product(at, x, y, form.bits))


def _mad(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    if "cc" in form.op.mods:
        return at.opaque(key, *args)
    return _add(at, form, key, [_mul(at, form, (key, "mul"), args), args[2]])


def _neg(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _map(at, key, args[0], lambda x: scale(x, -1, form.bits))


def _not(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _map(at, key, args[0], lambda x: add(scale(x, -1, form.bits), const(-1)))


def _abs(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    def rule(x: Poly) -> Poly:
        low, _ = at.range(x)
        return x if low is not None and low >= 0 else at.any(key, [x, scale(x, -1)])

    return _map(at, key, args[0], rule)


def _mov(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return args[0]


def _select(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return at.join(key, args[0] + args[1])


def _min_max(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    if any(at.taint(p) for value in args[:2] for p in value):
        return _select(at, form, key, args)
    name = f"{form.op.name}_{'s' if form.signed else 'u'}"
    return _each(at, key, args[0], args[1], lambda x, y: at.op(name, form.bits, x, y))


def _logic(operation: Callable[[Atoms, Poly, Poly, int], Poly]) -> Rule:
    def rule(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
        return _each(at, key, args[0], args[1], lambda x, y: operation(at, x, y, form.bits))

    return rule


def _shl(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    def rule(x: Poly, by: Poly) -> Poly:
        known = constant_of(by)
        if known is None:
            return at.op("shl", form.bits, x, by)
        return scale(x, 1 << known, form.bits) if 0 <= known < form.bits else ZERO

    return _each(at, key, args[0], args[1], rule)


def _shr(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _each(
        at, key, args[0], args[1], lambda x, y: shift_right(at, x, y, form.bits, form.signed)
    )  # fmt: skip


def _div_rem(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    name = f"{form.op.name}_{'s' if form.signed else 'u'}"
    return _each(at, key, args[0], args[1], lambda x, y: at.op(name, form.bits, x, y))


def _bfe(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    place, size = (constant_of(a[0]) if len(a) == 1 else None for a in args[1:3])
    if place is None or size is None or not 0 <= place < form.bits or not 0 < size <= form.bits - place:
        return at.opaque(key, *args)

    def rule(x: Poly) -> Poly:
        if form.signed:
            top = scale(x, 1 << (form.bits - place - size), form.bits)
            return shift_right(at, top, const(form.bits - size), form.bits, True)
        shifted = shift_right(at, x, const(place), form.bits, False)
        return bit_and(at, shifted, const((1 << size) - 1), form.bits)

    return _map(at, key, args[0], rule)


def _bfi(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    place, size = (constant_of(a[0]) if len(a) == 1 else None for a in args[2:4])
    if place is None or size is None or not 0 <= place < form.bits or not 0 < size <= form.bits - place:
        return at.opaque(key, *args)
    mask = (1 << size) - 1

    def rule(x: Poly, y: Poly) -> Poly:
        inserted = scale(bit_and(at, x, const(mask), form.bits), 1 << place, form.bits)
        return add(sub(y, bit_and(at, y, const(mask << place), form.bits)), inserted)

    return _each(at, key, args[0], args[1], rule)


def _lop3(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    """Tables used by compilers; others keep only the taint."""
    table = constant_of(args[3][0]) if len(args) > 3 and len(args[3]) == 1 else None
    if table is None or any(len(a) != 1 for a in args[:3]):
        return at.opaque(key, *args[:3])
    a, b, c = (v[0] for v in args[:3])
    n = form.bits
    if table == 0xF8:
        return (bit_or(at, a, bit_and(at, b, c, n), n),)
    if table == 0xEA:
        return (bit_or(at, bit_and(at, a, b, n), c, n),)
    if table == 0xFE:
        return (bit_or(at, bit_or(at, a, b, n), c, n),)
    if table == 0x80:
        return (bit_and(at, bit_and(at, a, b, n), c, n),)
    if table == 0xA8:
        return (bit_and(at, bit_or(at, a, b, n), c, n),)
    if table == 0xE0:
        return (bit_and(at, a, bit_or(at, b, c, n), n),)
    return at.opaque(key, *args[:3])


def _cvt(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    bits, source, signed = form.bits, form.source_bits, form.signed
    if bits == 128 or source == 128 or "pack" in form.op.mods:
        return at.opaque(key, *args)
    if bits > source or source < 16:
        return _map(at, key, args[0], lambda x: widen(at, x, source, signed))
    if bits == 8:
        return _map(at, key, args[0], lambda x: widen(at, x, 8, form.op.mods[0] == "s8"))
    if "sat" in form.op.mods:
        return at.opaque(key, *args)
    return _map(at, key, args[0], lambda x: low_half(at, x, bits) if bits < source else x)


def _shfl(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _map(at, key, args[0], lambda x: from_thread(at, x))


def _cvta(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    space = next((m.partition("::")[0] for m in form.op.mods if m != "to" and not m[1:].isdigit()), "")
    if space not in ("shared", "local", "param"):
        return args[0]

    def rule(x: Poly) -> Poly:
        return x if at.base_of(x) else add(x, at.poly(("frame", space, "?")))

    return _map(at, key, args[0], rule)


def _mapa(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return (add(at.poly(("frame", "shared", "?")), at.opaque(key)[0]),)


def _alloca(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return at.value(("frame", "local", "?"))


def _opaque(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return at.opaque(key, *args)


RULES: dict[str, Rule] = {
    "add": _add, "sub": _sub, "mul": _mul, "mad": _mad, "mul24": _opaque, "mad24": _opaque,
    "neg": _neg, "not": _not, "abs": _abs, "mov": _mov, "selp": _select, "slct": _select,
    "min": _min_max, "max": _min_max, "and": _logic(bit_and), "or": _logic(bit_or),
    "xor": _logic(bit_xor), "shl": _shl, "shr": _shr, "div": _div_rem, "rem": _div_rem, "bfe": _bfe,
    "bfi": _bfi, "lop3": _lop3, "cvt": _cvt, "cvta": _cvta, "shfl": _shfl, "mapa": _mapa,
    "alloca": _alloca,
}  # fmt: skip

# Results that never carry a pointer.
SCALAR_RESULTS = frozenset({
    "popc", "clz", "bfind", "fns", "dp2a", "dp4a", "vote", "match", "activemask", "redux", "elect", "set",
    "setp", "isspacep", "getctarank", "testp", "mma", "istypep", "bmsk", "mbarrier", "bar", "barrier",
    "tcgen05", "wmma", "wgmma", "ldmatrix", "movmatrix", "createpolicy", "clusterlaunchcontrol",
})  # fmt: skip


_FLOATS = frozenset({"f16", "f16x2", "bf16", "bf16x2", "f32", "tf32", "f64", "f32x2", "pred"})


@dataclass(frozen=True, slots=True)
class OpInfo:
    op: Op
    row: OpcodeRow | None
    writes: tuple[int, ...]
    uses: tuple[tuple[Use, str], ...]
    form: Form | None
    rule: Rule | None
    # The result holds no relevant integer.
    scalar: bool
    width: int
    vector: int
    signed: bool
    is_load: bool
    marks: frozenset[str]


@lru_cache(maxsize=65536)
def info_of(op: Op) -> OpInfo:
    row = row_of(op)
    form = form_of(op)
    is_load = row is not None and row.family in ("ld", "ldu", "atom")
    rule = RULES.get(op.name)
    floats = any(m in _FLOATS for m in op.mods) and form is None
    scalar = floats or op.name in SCALAR_RESULTS or row is None
    if op.name == "mov" and form is None and ("f64" in op.mods or "f32" in op.mods):
        scalar = False  # a pointer may be moved as a double, its halves as floats
    uses = () if row is None else tuple((u, space_of(op, u)) for u in row.uses if u.effect != "h")
    return OpInfo(
        op, row, () if row is None else row.writes, uses, form, rule, scalar, width_of(op), vector_of(op),
        op.mods[-1:] in (("s8",), ("s16",), ("s32",), ("s64",)), is_load,
        frozenset() if row is None else row.marks,
    )  # fmt: skip
