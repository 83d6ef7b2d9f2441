"""Polynomials with integer coefficients over numbered atoms.

    Poly    {monomial: coefficient}; a monomial is a sorted tuple of atom numbers, () the constant
    Value   tuple of polynomials with different bases; () is "no value reaches here"

Polynomials are immutable. Arithmetic is exact modulo 2**bits, with signed coefficients.
"""

Poly = dict[tuple[int, ...], int]
Value = tuple[Poly, ...]
Frozen = frozenset[tuple[tuple[int, ...], int]]

BOTTOM: Value = ()
ZERO: Poly = {}
_MAX_TERMS = 24
_MAX_DEGREE = 4


def freeze(poly: Poly) -> Frozen:
    return frozenset(poly.items())


def const(value: int) -> Poly:
    return {(): value} if value else ZERO


def constant_of(poly: Poly) -> int | None:
    if not poly:
        return 0
    return poly.get(()) if len(poly) == 1 else None


def add(a: Poly, b: Poly) -> Poly:
    if not a:
        return b
    if not b:
        return a
    if len(a) < len(b):
        a, b = b, a
    out = dict(a)
    for mono, coeff in b.items():
        total = out.get(mono, 0) + coeff
        if total:
            out[mono] = total
        else:
            del out[mono]
    return out


def scale(a: Poly, by: int, bits: int = 64) -> Poly:
    if by == 1:
        return a
    half, full = 1 << (bits - 1), 1 << bits
    out = {}
    for mono, coeff in a.items():
        product = ((coeff * by + half) % full) - half
        if product:
            out[mono] = product
    return out


def sub(a: Poly, b: Poly) -> Poly:
    return add(a, scale(b, -1))


def wrap(a: Poly, bits: int) -> Poly:
    half = 1 << (bits - 1)
    for coeff in a.values():
        if not -half <= coeff < half:
            return scale(a, 1, bits) if bits == 64 else _fold(a, half)
    return a


def _fold(a: Poly, half: int) -> Poly:
    folded = {m: ((c + half) % (2 * half)) - half for m, c in a.items()}
    return {m: c for m, c in folded.items() if c}


def multiply(a: Poly, b: Poly, bits: int) -> Poly | None:
    """None if too large."""
    known = constant_of(b)
    if known is not None:
        return scale(a, known, bits) if known else ZERO
    known = constant_of(a)
    if known is not None:
        return scale(b, known, bits) if known else ZERO
    if len(a) * len(b) > _MAX_TERMS:
        return None
    out: Poly = {}
    for mono_a, coeff_a in a.items():
        for mono_b, coeff_b in b.items():
            mono = tuple(sorted(mono_a + mono_b))
            if len(mono) > _MAX_DEGREE:
                return None
            out[mono] = out.get(mono, 0) + coeff_a * coeff_b
    return wrap({m: c for m, c in out.items() if c}, bits)
