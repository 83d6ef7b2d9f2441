"""Bit operations on abstract numbers: masks, shifts, widening, pointer halves.

Prefers identities that keep a pointer's base (`x & m = x - (x & ~m)`, `x | y = x + y - (x & y)`).
"""

from typing import Any

from tessera_ptx.poly import ZERO, Poly, Value, add, const, constant_of, freeze, multiply, scale, sub, wrap
from tessera_ptx.ranges import within
from tessera_ptx.values import UNIFORM, Atoms, Key


def widen(at: Atoms, poly: Poly, bits: int, signed: bool) -> Poly:
    """A number that fits is unchanged."""
    if bits >= 64:
        return poly
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if within(at.range(poly), low, high):
        return poly
    # 32-bit shared, local and param addresses are not sign-extended.
    if any(at.atoms[n].item[0] == "frame" for n in at.base_of(poly)):
        return poly
    return at.op("sext" if signed else "zext", bits, poly)


def product(at: Atoms, a: Poly, b: Poly, bits: int) -> Poly:
    """One atom if the polynomial would grow too large."""
    found = multiply(a, b, bits)
    return at.op("mul", bits, a, b) if found is None else found


# A mask with these bits keeps the pointer.
_HIGH_BITS = ((1 << 47) - 1) ^ ((1 << 40) - 1)
_NEAR = 1 << 40


def bit_and(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    known = constant_of(y)
    if known is None:
        if constant_of(x) is not None or (at.taint(y) and not at.taint(x)):
            return bit_and(at, y, x, bits) if constant_of(x) is not None else _align(at, y, x, bits)
        return _align(at, x, y, bits) if at.taint(x) else at.op("and", bits, x, y)
    whole = (1 << bits) - 1
    known &= whole
    rest = known ^ whole
    if rest & (rest + 1) == 0 or (bits == 64 and known & _HIGH_BITS == _HIGH_BITS):
        return sub(x, _masked(at, x, rest, bits))
    return _masked(at, x, known, bits)


def _masked(at: Atoms, x: Poly, known: int, bits: int) -> Poly:
    if not known:
        return ZERO
    possible = at.mask(x)
    if possible >= 0:
        if possible & known == 0:
            return ZERO
        if possible & known == possible:
            return x
    if x and known & (known + 1) == 0 and all(c & known == 0 for c in x.values()):
        return ZERO
    return at.op("and", bits, x, known)


def _align(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """Keeps the pointer if the mask is an alignment (a small negative number)."""
    if within(at.range(y), -_NEAR, -1) and not at.taint(y):
        return sub(x, at.op("and", bits, x, add(scale(y, -1, bits), const(-1))))
    return at.op("and", bits, x, y)


def _shifts_little(at: Atoms, x: Poly, y: Poly) -> bool:
    """A pointer and a small non-negative number."""
    if at.taint(y):
        x, y = y, x
    return not at.taint(y) and within(at.range(y), 0, _NEAR)


def bit_or(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    """A sum if no bit is set in both; else a multiple of the common unit."""
    if at.mask(x) & at.mask(y) == 0:
        return recombine(at, add(x, y))
    if not at.taint(x) and not at.taint(y):
        return at.op("or", bits, x, y)
    if _shifts_little(at, x, y):
        return sub(add(x, y), bit_and(at, x, y, bits))
    unit = min(c & -c for c in (*x.values(), *y.values()))
    x, y = ({m: c // unit for m, c in poly.items()} for poly in (x, y))
    return scale(at.op("or", bits, x, y), unit, bits)


def bit_xor(at: Atoms, x: Poly, y: Poly, bits: int) -> Poly:
    if constant_of(y) in (-1, (1 << bits) - 1):
        return add(scale(x, -1, bits), const(-1))
    if at.mask(x) & at.mask(y) == 0:
        return add(x, y)
    if (at.taint(x) or at.taint(y)) and _shifts_little(at, x, y):
        return sub(add(x, y), scale(bit_and(at, x, y, bits), 2))
    return at.op("xor", bits, x, y)


def shift_right(at: Atoms, x: Poly, by: Poly, bits: int, signed: bool) -> Poly:
    """Exact for a multiple that cannot wrap."""
    known = constant_of(by)
    if known is not None and 0 <= known < bits:
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        if all(c % (1 << known) == 0 for c in x.values()) and within(at.range(x), low, high):
            return {m: c >> known for m, c in x.items()}
        mask = at.mask(x)
        if mask >= 0 and mask >> known == 0:
            return ZERO
    return at.op("shr_s" if signed else "shr_u", bits, x, by)


def low_half(at: Atoms, x: Poly, bits: int) -> Poly:
    """A pointer's low half keeps the pointer."""
    if not at.taint(x) or _is_frame(at, x) or within(at.range(x), 0, (1 << (bits - 1)) - 1):
        return wrap(x, bits)
    item = _sole(at, x)
    if bits == 32 and item[:2] == ("op", "shr_u") and item[5] == freeze(const(32)):
        return at.op("hi", 32, dict(item[4]))
    return at.op("lo", bits, x)


def _is_frame(at: Atoms, x: Poly) -> bool:
    return any(at.atoms[n].item[0] == "frame" for n in at.base_of(x))


def from_thread(at: Atoms, x: Poly) -> Poly:
    item = _sole(at, x)
    if item[:1] == ("op",) and item[1] in ("lo", "hi"):
        return at.op(item[1], item[2], *(at.others(dict(part), UNIFORM, "thread") for part in item[4:]))
    return at.others(x, UNIFORM, "thread")


def halves(at: Atoms, value: Value, high: bool) -> Value:
    if any(at.taint(p) and not _is_frame(at, p) for p in value):
        return (at.op("hi" if high else "lo", 32, *value),)
    if high:
        return tuple(shift_right(at, p, const(32), 64, False) for p in value)
    return tuple(low_half(at, p, 32) for p in value)


def pack(at: Atoms, key: Key, low: Value, high: Value) -> Value:
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
    if low[:2] == ("op", "lo") and high[:2] == ("op", "hi"):
        return tuple(dict(part) for part in dict.fromkeys((*low[4:], *high[4:])))
    low, high = _unextended(at, low), _unextended(at, high)
    if low[:1] == ("param",) and low[3] == 4 and high == (*low[:2], low[2] + 4, 4):
        return at.value(("param", low[1], low[2], 8))
    return ()


def _unextended(at: Atoms, item: tuple[Any, ...]) -> tuple[Any, ...]:
    return _sole(at, dict(item[4])) if item[:2] in (("op", "zext"), ("op", "sext")) else item


def recombine(at: Atoms, x: Poly) -> Poly:
    """`lo + (hi << 32)` as the original pointer; other sums unchanged."""
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
    if len(x) == 1:
        mono, coeff = next(iter(x.items()))
        if coeff == 1 and len(mono) == 1:
            return at.atoms[mono[0]].item
    return ()
