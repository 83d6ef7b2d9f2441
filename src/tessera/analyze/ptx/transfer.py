"""What each integer instruction does to abstract values.

Every rule takes the atom table, the instruction's form, the key of the definition and the values of
its source operands, and returns the value of its result. Identities that hold for all integers are
preferred (`x & ~m = x - (x & m)`, `x | y = x + y - (x & y)`), since they keep a pointer's base.
What has no rule becomes opaque, tainted by the bases of its sources; nothing is dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tessera.analyze.ptx.ranges import within
from tessera.analyze.ptx.syntax import Op
from tessera.analyze.ptx.values import (
    UNIFORM,
    ZERO,
    Atoms,
    Key,
    Poly,
    Value,
    add,
    const,
    constant_of,
    freeze,
    multiply,
    scale,
    sub,
    wrap,
)


class Form(NamedTuple):
    """What the rules need to know of an opcode's spelling."""

    op: Op
    bits: int  # of the result
    source_bits: int
    signed: bool  # of the (source) type
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
    """The integer form of an opcode; None when it works on floats or predicates."""
    types = [_TYPES[m] for m in op.mods if m in _TYPES]
    if not types or types[0][0] == 0:
        return None
    # cvt and set name the result's type first and the source's last.
    bits, _ = types[0]
    source_bits, signed = types[-1]
    if op.name in ("cvt", "set") and len(types) < 2:
        return None
    wide = "wide" in op.mods
    return Form(op, bits * 2 if wide else bits, source_bits, signed, wide, "hi" in op.mods)


def widen(at: Atoms, poly: Poly, bits: int, signed: bool) -> Poly:
    """The number behind `bits` bits: itself where it provably fits, else `sext` or `zext` of it."""
    if bits >= 64:
        return poly
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if within(at.range(poly), low, high):
        return poly
    # A 32-bit address of a shared, local or param variable has no sign to extend.
    if any(at.atoms[n].item[0] == "frame" for n in at.base_of(poly)):
        return poly
    return at.op("sext" if signed else "zext", bits, poly)


def product(at: Atoms, a: Poly, b: Poly, bits: int) -> Poly:
    """The product; one atom where the polynomial would grow too large."""
    found = multiply(a, b, bits)
    return at.op("mul", bits, a, b) if found is None else found


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


# Address bits that distinguish buffers: a mask that keeps them keeps the pointer.
_HIGH_BITS = ((1 << 47) - 1) ^ ((1 << 40) - 1)
_NEAR = 1 << 40


def bit_and(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """`x & y`, simplified where the bits are known."""
    known = constant_of(y)
    if known is None:
        if constant_of(x) is not None or (at.taint(y) and not at.taint(x)):
            return bit_and(at, y, x, bits) if constant_of(x) is not None else _align(at, y, x, bits)
        return _align(at, x, y, bits) if at.taint(x) else at.op("and", bits, x, y)
    whole = (1 << bits) - 1
    known &= whole
    rest = known ^ whole
    if rest & (rest + 1) == 0 or (bits == 64 and known & _HIGH_BITS == _HIGH_BITS):
        # x & m = x - (x & ~m), which keeps the base of x.
        return sub(x, _masked(at, x, rest, bits))
    return _masked(at, x, known, bits)


def _masked(at: Atoms, x: Poly, known: int, bits: int) -> Poly:
    """`x & known` for a constant."""
    if not known:
        return ZERO
    possible = at.mask(x)
    if possible >= 0:
        if possible & known == 0:
            return ZERO
        if possible & known == possible:
            return x
    if x and known & (known + 1) == 0 and all(c & known == 0 for c in x.values()):
        return ZERO  # a multiple of 2**k has no low bits
    return at.op("and", bits, x, known)


def _align(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """A pointer under a computed mask: kept when the mask is a small negative number (an alignment)."""
    if within(at.range(y), -_NEAR, -1) and not at.taint(y):
        return sub(x, at.op("and", bits, x, add(scale(y, -1, bits), const(-1))))
    return at.op("and", bits, x, y)


def _shifts_little(at: Atoms, x: Poly, y: Poly) -> bool:
    """Whether one side is a pointer and the other a small non-negative number."""
    if at.taint(y):
        x, y = y, x
    return not at.taint(y) and within(at.range(y), 0, _NEAR)


def bit_or(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """`x | y`: a sum where no bit can be one in both."""
    mask_x, mask_y = at.mask(x), at.mask(y)
    if mask_x >= 0 and mask_y >= 0 and mask_x & mask_y == 0:
        return recombine(at, add(x, y))
    if (at.taint(x) or at.taint(y)) and _shifts_little(at, x, y):
        return sub(add(x, y), bit_and(at, x, y, bits))
    return at.op("or", bits, x, y)


def bit_xor(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """`x ^ y`."""
    if constant_of(y) in (-1, (1 << bits) - 1):
        return add(scale(x, -1, bits), const(-1))
    mask_x, mask_y = at.mask(x), at.mask(y)
    if mask_x >= 0 and mask_y >= 0 and mask_x & mask_y == 0:
        return add(x, y)
    if (at.taint(x) or at.taint(y)) and _shifts_little(at, x, y):
        return sub(add(x, y), scale(bit_and(at, x, y, bits), 2))
    return at.op("xor", bits, x, y)


def _logic(
    operation: Callable[[Atoms, Poly, Poly, int], Poly],
) -> Rule:
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


def shift_right(at: Atoms, x: Poly, by: Poly, bits: int, signed: bool) -> Poly:
    """`x >> by`; exact when the polynomial is a multiple and cannot wrap."""
    known = constant_of(by)
    if known is not None and 0 <= known < bits:
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        if all(c % (1 << known) == 0 for c in x.values()) and within(at.range(x), low, high):
            return {m: c >> known for m, c in x.items()}
        mask = at.mask(x)
        if mask >= 0 and mask >> known == 0:
            return ZERO
    return at.op("shr_s" if signed else "shr_u", bits, x, by)


def _shr(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _each(
        at, key, args[0], args[1], lambda x, y: shift_right(at, x, y, form.bits, form.signed)
    )  # fmt: skip


def _div_rem(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    name = f"{form.op.name}_{'s' if form.signed else 'u'}"
    return _each(at, key, args[0], args[1], lambda x, y: at.op(name, form.bits, x, y))


def _bfe(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    place, size = (constant_of(a[0]) if len(a) == 1 else None for a in args[1:3])
    if place is None or size is None or form.signed or not 0 <= place < form.bits or not 0 < size < form.bits:
        return at.opaque(key, *args)

    def rule(x: Poly) -> Poly:
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
    """The look-up tables compilers use; others keep only the taint."""
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


def low_half(at: Atoms, x: Poly, bits: int) -> Poly:
    """The low bits of a wider number; a pointer's low half remembers the pointer."""
    if not at.taint(x) or _is_frame(at, x):
        return wrap(x, bits)
    item = _sole(at, x)
    if bits == 32 and item[:2] == ("op", "shr_u") and item[5] == freeze(const(32)):
        return at.op("hi", 32, dict(item[4]))
    return at.op("lo", bits, x)


def _is_frame(at: Atoms, x: Poly) -> bool:
    return any(at.atoms[n].item[0] == "frame" for n in at.base_of(x))


def _shfl(at: Atoms, form: Form, key: Key, args: list[Value]) -> Value:
    return _map(at, key, args[0], lambda x: from_thread(at, x))


def from_thread(at: Atoms, x: Poly) -> Poly:
    """The value as another thread holds it; halves of a pointer stay halves of one pointer."""
    item = _sole(at, x)
    if item[:1] == ("op",) and item[1] in ("lo", "hi"):
        return at.op(item[1], item[2], *(at.others(dict(part), UNIFORM, "thread") for part in item[4:]))
    return at.others(x, UNIFORM, "thread")


def halves(at: Atoms, value: Value, high: bool) -> Value:
    """One 32-bit half of a 64-bit number, whichever of its alternatives it is."""
    if any(at.taint(p) and not _is_frame(at, p) for p in value):
        return (at.op("hi" if high else "lo", 32, *value),)
    if high:
        return tuple(shift_right(at, p, const(32), 64, False) for p in value)
    return tuple(low_half(at, p, 32) for p in value)


def pack(at: Atoms, key: Key, low: Value, high: Value) -> Value:
    """Two 32-bit halves as one 64-bit number."""
    if len(low) != 1 or len(high) != 1:
        return at.opaque(key, low, high)
    a, b = low[0], high[0]
    if not b:
        return (widen(at, a, 32, False),)
    whole = _halves_of(at, _sole(at, a), _sole(at, b))
    if whole:
        return at.join(key, whole)
    if at.taint(a) or at.taint(b):
        return at.opaque(key, low, high)
    return (add(widen(at, a, 32, False), scale(b, 1 << 32)),)


def _halves_of(at: Atoms, low: tuple[Any, ...], high: tuple[Any, ...]) -> Value:
    """The number of which these atoms are the halves, or ()."""
    if low[:2] == ("op", "lo") and high[:2] == ("op", "hi"):
        return tuple(dict(part) for part in dict.fromkeys((*low[4:], *high[4:])))
    low, high = _unextended(at, low), _unextended(at, high)
    if low[:1] == ("param",) and low[3] == 4 and high == (*low[:2], low[2] + 4, 4):
        return at.value(("param", low[1], low[2], 8))
    return ()


def _unextended(at: Atoms, item: tuple[Any, ...]) -> tuple[Any, ...]:
    return _sole(at, dict(item[4])) if item[:2] in (("op", "zext"), ("op", "sext")) else item


def recombine(at: Atoms, x: Poly) -> Poly:
    """`lo + (hi << 32)` as the pointer it is; other sums unchanged."""
    upper = next((m for m, c in x.items() if c == 1 << 32 and len(m) == 1), None)
    if upper is None:
        return x
    for mono, coeff in x.items():
        if coeff == 1 and len(mono) == 1:
            whole = _halves_of(at, at.atoms[mono[0]].item, at.atoms[upper[0]].item)
            if len(whole) == 1:
                return add({m: c for m, c in x.items() if m not in (mono, upper)}, whole[0])
    return x


def _sole(at: Atoms, x: Poly) -> tuple[Any, ...]:
    """The atom a polynomial consists of, or ()."""
    if len(x) == 1:
        mono, coeff = next(iter(x.items()))
        if coeff == 1 and len(mono) == 1:
            return at.atoms[mono[0]].item
    return ()


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

# Results that never carry a pointer and whose sources need not be followed.
SCALAR_RESULTS = frozenset({
    "popc", "clz", "bfind", "fns", "dp2a", "dp4a", "vote", "match", "activemask", "redux", "elect", "set",
    "setp", "isspacep", "getctarank", "testp", "mma", "istypep", "bmsk", "mbarrier", "bar", "barrier",
    "tcgen05", "wmma", "wgmma", "ldmatrix", "movmatrix", "createpolicy", "clusterlaunchcontrol",
})  # fmt: skip
__all__ = ["RULES", "SCALAR_RESULTS", "Form", "form_of", "freeze", "from_thread", "halves", "pack", "widen"]
