"""Abstract domain: possible values of a register.

A value is a tuple of alternatives, each a polynomial over atoms (`poly`). An address is `base + offset`: the
base is a possible pointer with coefficient 1. Scaled pointers, pointer differences and loaded indices are
never bases; two bases are two alternatives.

    atom                                     meaning
    ("param", index, offset, width)          bytes of a kernel parameter
    ("fields", index, offsets, place)        one of several 8-byte fields, read at offset `place`
    ("field", index, place, width, signed)   a narrow field of a parameter at a computed place
    ("special", name)                        %tid.x, %ctaid.y, ...
    ("frame", space, name)                   address of a shared, local or param variable ("?" = any)
    ("symbol", name)                         address of a module variable
    ("loaded", key, width, table)            read from memory through the bases `table`
    ("counter", key)                         0, 1, 2, ... of a loop
    ("op", name, bits, tag, args...)         a function of polynomials: and, shr, sext, any, ...
    ("copy", atom, tag)                      the atom as another thread or an earlier iteration saw it
    ("opaque", key, taint, joined, carry,    anything; `taint`: bases that may be inside; `joined`: one of
      large)                                 several values, not computed from them; `carry`: may be a
                                             copied piece of a pointer; `large`: bases that went in
                                             otherwise than as a small number

Arithmetic is exact modulo 2**bits; only widening (`sext`, `zext`) checks for wrap-around, here if the ranges
exclude it, else in `extent.resolve`. Levels: 0 launch, 1 thread, 2 time.
"""

from typing import Any, NamedTuple, TypeVar

from tessera_ptx.poly import Poly, Value, add, const, freeze
from tessera_ptx.ranges import FULL, Range, op_mask, op_range, special_range, within

T = TypeVar("T")
Key = Any  # register name, or a tuple for one of several definitions, a phi or a cell

# Smaller numbers are offsets, whatever pointer they come from (`p & 15`).
SMALL = 1 << 16
# No division: weights stay integers.
WHOLE = frozenset({"and", "or", "xor", "sext", "zext", "any", "lo", "min_s", "min_u", "max_s", "max_u"})
# Small numbers stay small.
_NARROWING = WHOLE | {"shr_s", "shr_u", "div_s", "div_u", "rem_s", "rem_u"}
_FAR = 1 << 40
_MAX_TERMS = 24
_MAX_ALTERNATIVES = 64
# The corpus has at most 16.
MAX_POLY = 64
_MAX_SIZE = 1 << 20
UNIFORM, PER_THREAD, IN_TIME = 0, 1, 2
# Loaded through a loaded pointer.
DEEP = -2


class Atom(NamedTuple):
    item: tuple[Any, ...]
    range: Range
    mask: int  # bits that may be set; -1 if unknown
    base: bool  # may be a pointer
    level: int
    taint: frozenset[int]
    size: int = 1
    carry: bool = False  # may be a copied part of a pointer
    # Parts of the taint: without small contributions; the same if the atom is multiplied, since it may then
    # grow in a loop; possibly divided.
    large: frozenset[int] = frozenset()
    scaled: frozenset[int] = frozenset()
    divided: frozenset[int] = frozenset()
    joined: bool = True  # pointers are alternatives, not inputs of a computation


class Atoms:
    def __init__(self, limits: dict[str, int], numbers: frozenset[int] = frozenset()) -> None:
        # From .reqntid / .maxntid, exclusive: {"%tid.x": 128}.
        self.limits = limits
        self.atoms: list[Atom] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.bases: set[int] = set()
        # Alternatives examined.
        self.work = 0
        # Work of `weights`, and whether it gave up.
        self.weighed, self.cut = 0, False
        # Below eight bytes: no part of a pointer.
        self.narrow_params: set[int] = set()
        self.numbers = numbers

    def number(self, item: tuple[Any, ...]) -> int:
        known = self._numbers.get(item)
        return self._make(item) if known is None else known

    def poly(self, item: tuple[Any, ...]) -> Poly:
        return {(self.number(item),): 1}

    def value(self, item: tuple[Any, ...]) -> Value:
        return ({(self.number(item),): 1},)

    def _make(self, item: tuple[Any, ...]) -> int:
        atom = getattr(self, "_make_" + item[0])(item)
        number = self._numbers[item] = len(self.atoms)
        if atom.base:
            self.bases.add(number)
            if item[0] not in ("opaque", "op", "copy"):
                # Taint has origins only, else it would grow with every loop iteration.
                own = frozenset({number})
                atom = atom._replace(taint=own, large=own, scaled=own)
        self.atoms.append(atom)
        return number

    def _make_param(self, item: tuple[Any, ...]) -> Atom:
        number = item[1] in self.numbers
        carry = item[1] not in self.narrow_params and not number
        return Atom(item, FULL, -1, item[3] >= 8 and not number, UNIFORM, frozenset(), carry=carry)

    def _make_fields(self, item: tuple[Any, ...]) -> Atom:
        return Atom(item, FULL, -1, True, IN_TIME, frozenset())

    def _make_field(self, item: tuple[Any, ...]) -> Atom:
        return Atom(item, FULL, -1, False, IN_TIME, frozenset(), carry=True)

    def _make_special(self, item: tuple[Any, ...]) -> Atom:
        name = item[1]
        span, level = special_range(name, self.limits.get(name))
        mask = -1 if span[1] is None else (1 << span[1].bit_length()) - 1
        return Atom(item, span, mask, False, level, frozenset())

    def _make_frame(self, item: tuple[Any, ...]) -> Atom:
        return Atom(item, FULL, -1, True, UNIFORM, frozenset())

    _make_symbol = _make_frame
    _make_func = _make_frame

    def _make_loaded(self, item: tuple[Any, ...]) -> Atom:
        _, _, width, _, signed = item
        span: Range = FULL
        if 0 < width < 4:
            half = 1 << (8 * width - 1)
            span = (-half, half - 1) if signed else (0, 2 * half - 1)
        mask = -1 if span[0] != 0 or span[1] is None else span[1]
        return Atom(item, span, mask, width >= 8, IN_TIME, frozenset(), carry=True)

    def _make_counter(self, item: tuple[Any, ...]) -> Atom:
        return Atom(item, (0, None), -1, False, IN_TIME, frozenset())

    def _make_copy(self, item: tuple[Any, ...]) -> Atom:
        inner: Atom = self.atoms[item[1]]
        return inner._replace(item=item, level=IN_TIME, size=inner.size + 1)

    def _make_opaque(self, item: tuple[Any, ...]) -> Atom:
        _, _, taint, joined, carry, large = item
        return Atom(
            item, FULL, -1, bool(taint), IN_TIME, taint, carry=carry,
            large=large, scaled=taint, divided=large, joined=bool(joined),
        )  # fmt: skip

    def _make_op(self, item: tuple[Any, ...]) -> Atom:
        _, name, bits, tag, *args = item
        polys = [dict(a) if isinstance(a, frozenset) else const(a) for a in args]
        span = op_range(name, bits, [self.range(p) for p in polys])
        level = max((self.level(p) for p in polys), default=UNIFORM)
        taint = frozenset[int]().union(*(self.taint(p) for p in polys))
        mask = op_mask(name, bits, span, [self.mask(p) for p in polys])
        # A phi or selection keeps its base outside; a pointer inside is one only if the whole may be.
        base = bool(taint) and bits == 64 and not within(span, -_FAR, _FAR)
        size = 1 + sum(self.atoms[n].size for p in polys for mono in p for n in mono)
        level = IN_TIME if tag is not None else level
        carry = name == "any" and any(self.may_carry(p) for p in polys)
        atom = Atom(
            item, span, mask, base, level, taint, min(size, _MAX_SIZE), carry, taint, taint, taint, not base
        )
        return self._with_parts(atom, name, polys) if taint and name in _NARROWING else atom

    def _with_parts(self, atom: Atom, name: str, polys: list[Poly]) -> Atom:
        large = frozenset[int]().union(*map(self._large_of, polys))
        return atom._replace(
            large=large,
            scaled=frozenset[int]().union(*(self._large_of(p, scaled=True) for p in polys)),
            divided=frozenset[int]().union(*map(self._divided_of, polys)) if name in WHOLE else large,
            joined=atom.joined
            or (name == "any" and all(self.atoms[n].joined for p in polys for mono in p for n in mono)),
        )

    def range(self, poly: Poly) -> Range:
        low: int | None = 0
        high: int | None = 0
        for mono, coeff in poly.items():
            term_low, term_high = self._monomial_range(mono, coeff)
            low = None if low is None or term_low is None else low + term_low
            high = None if high is None or term_high is None else high + term_high
        return low, high

    def _monomial_range(self, mono: tuple[int, ...], coeff: int) -> Range:
        low: int | None = 1
        high: int | None = 1
        for number in mono:
            atom_low, atom_high = self.atoms[number].range
            # Products are bounded only for non-negative factors.
            if atom_low is None or low is None or atom_low < 0:
                if len(mono) > 1:
                    return FULL
                low, high = atom_low, atom_high
                break
            low *= atom_low
            high = None if high is None or atom_high is None else high * atom_high
        ends = (low if low is None else low * coeff, high if high is None else high * coeff)
        return ends if coeff >= 0 else (ends[1], ends[0])

    def mask(self, poly: Poly) -> int:
        """Bits that may be set; negative if there is no highest one."""
        total = 0
        for mono, coeff in poly.items():
            bits = self.atoms[mono[0]].mask * coeff if mono else coeff
            if len(mono) > 1 or (mono and coeff & (coeff - 1)) or bits < 0 or bits & total:
                return self._bound_mask(poly)
            total |= bits
        return total

    def _bound_mask(self, poly: Poly) -> int:
        low, high = self.range(poly)
        zeros = min((coeff & -coeff) for coeff in poly.values()) if poly else 1
        if low is None or high is None or low < 0:
            return -zeros
        return ((1 << high.bit_length()) - 1) & -zeros

    def level(self, poly: Poly) -> int:
        atoms = self.atoms
        return max((atoms[n].level for mono in poly for n in mono), default=UNIFORM)

    def taint(self, poly: Poly) -> frozenset[int]:
        found: set[int] = set()
        for mono in poly:
            for number in mono:
                found |= self.atoms[number].taint
        return frozenset(found)

    def base_of(self, poly: Poly) -> frozenset[int]:
        """Pointers with coefficient 1."""
        bases = self.bases
        return frozenset(m[0] for m, c in poly.items() if c == 1 and len(m) == 1 and m[0] in bases)

    def split(self, poly: Poly) -> tuple[frozenset[int], Poly]:
        self.work += 1 + len(poly) // 8
        base = self.base_of(poly)
        if not base:
            return base, poly
        return base, {m: c for m, c in poly.items() if not (len(m) == 1 and c == 1 and m[0] in base)}

    def opaque(self, key: Key, *values: Value, joined: bool = False) -> Value:
        """Tainted by its sources' bases."""
        taint: set[int] = set()
        large: set[int] = set()
        carry = False
        for value in values:
            for poly in value:
                taint |= self.taint(poly)
                large |= self._large_of(poly) if joined and taint else self.taint(poly)
                carry = carry or self.may_carry(poly)
        item = ("opaque", key, frozenset(taint), joined, carry or bool(taint), frozenset(large))
        return self.value(item)

    def _large_of(self, poly: Poly, scaled: bool = False) -> frozenset[int]:
        found: set[int] = set()
        for mono, coeff in poly.items():
            if mono and not within(self._monomial_range(mono, coeff), -SMALL, SMALL):
                if len(mono) > 1 or abs(coeff) > SMALL:
                    found |= self.taint({mono: coeff})
                else:
                    atom = self.atoms[mono[0]]
                    found |= atom.scaled if scaled or abs(coeff) != 1 else atom.large
        return frozenset(found)

    def _divided_of(self, poly: Poly) -> frozenset[int]:
        found: set[int] = set()
        for mono, coeff in poly.items():
            if not within(self._monomial_range(mono, coeff), -SMALL, SMALL):
                for number in mono:
                    found |= self.atoms[number].divided
        return frozenset(found)

    def may_carry(self, poly: Poly) -> bool:
        """Copied from memory, or cut from a pointer.

        Values computed from thread indices, narrow parameters and counters are not.
        """
        atoms = self.atoms
        return any(atoms[n].carry or atoms[n].taint for mono in poly for n in mono)

    def blur(self, key: Key, value: Value) -> Value:
        """Same bases at unknown offsets."""
        groups: dict[frozenset[int], Value] = {}
        for poly in value:
            base, rest = self.split(poly)
            groups[base] = (*groups.get(base, ()), rest)
        blurred = (
            self.whole(base, self.opaque((key, "blur", base), rests, joined=True)[0])
            for base, rests in by_base(groups)
        )
        return self.limited(key, tuple(blurred))

    def kind(self, number: int) -> str:
        item = self.atoms[number].item
        return str(self.atoms[item[1]].item[0] if item[0] == "copy" else item[0])

    def roots(self, numbers: frozenset[int]) -> frozenset[int]:
        """For loaded pointers, their tables and DEEP."""
        out: set[int] = set()
        for number in numbers:
            for origin in self.atoms[number].taint if number >= 0 else (number,):
                item = self.atoms[origin].item if origin >= 0 else ("",)
                out |= item[3] | {DEEP} if item[0] == "loaded" else {origin}
        return frozenset(out)

    def op(self, name: str, bits: int, *args: Poly | int) -> Poly:
        frozen = tuple(a if isinstance(a, int) else freeze(a) for a in args)
        return self.poly(("op", name, bits, None, *frozen))

    def join(self, key: Key, value: Value) -> Value:
        """Offsets of the same base become `any(...)`."""
        if len(value) < 2:
            return value
        groups: dict[frozenset[int], list[Poly]] = {}
        for poly in value:
            base, rest = self.split(poly)
            offsets = groups.setdefault(base, [])
            if rest not in offsets:
                offsets.append(rest)
        return self.limited(
            key, tuple(self.whole(base, self.any(key, offsets)) for base, offsets in by_base(groups))
        )

    def limited(self, key: Key, value: Value) -> Value:
        if len(value) > _MAX_ALTERNATIVES or any(len(p) > MAX_POLY for p in value):
            return self.opaque((key, "many"), value, joined=True)
        return value

    @staticmethod
    def whole(base: frozenset[int], rest: Poly) -> Poly:
        return rest if not base else add({(n,): 1 for n in base}, rest)

    def any(self, key: Key, offsets: list[Poly]) -> Poly:
        if len(offsets) == 1:
            return offsets[0]
        if len(offsets) > _MAX_TERMS or sum(map(len, offsets)) > 4 * _MAX_TERMS:
            return self.opaque(key, tuple(offsets), joined=True)[0]
        frozen = sorted((freeze(o) for o in offsets), key=sorted)
        return self.poly(("op", "any", 64, key, *frozen))

    def others(self, poly: Poly, above: int, tag: Key) -> Poly:
        """In another thread (above UNIFORM) or iteration (above PER_THREAD)."""
        if self.level(poly) <= above:
            return poly
        out: Poly = {}
        for mono, coeff in poly.items():
            renamed = tuple(
                self.number(("copy", self._original(n), tag)) if self.atoms[n].level > above else n
                for n in mono
            )
            other = tuple(sorted(renamed))
            out[other] = out.get(other, 0) + coeff
        return {m: c for m, c in out.items() if c}

    def _original(self, number: int) -> int:
        """Copies are one deep."""
        item = self.atoms[number].item
        return int(item[1]) if item[0] == "copy" else number


def by_base(found: dict[frozenset[int], T]) -> list[tuple[frozenset[int], T]]:
    return sorted(found.items(), key=lambda item: sorted(item[0])) if len(found) > 1 else list(found.items())
