"""Which addends of an address may be its base: the weights of pointers.

If every buffer moved by one byte, a valid address would move by one byte too. So of the addends those
that are pointers have weights (coefficients) that sum to 1: `p + 4*n`, `p + i*n` and `p + (b - a)` are
addresses of p; in `a + f*(b - a)` the weights are 1 - f and f, and the address is in a or in b. An addend
may be the base when some set of pointers with that sum has it, the others cancelling. All such are
reported; a parameter known to be a pointer is in every set, which rules out most.

A weight is a polynomial over the other factors of the pointer's monomials, with rational coefficients:
`x >> 2` weighs a quarter of x. A value that is one of several is looked at one by one. Through any other
operation (`sext`, `and`, an opaque value) it is not followed: `loose` when the term can reach from one
buffer to another by itself, `near` when it is too small for an address and can only be a distance. If
nothing in there divides, four times it weighs a multiple of four, and so nothing. Terms within 64 KiB of
zero (alignment: `p & 15`) are taken for offsets. What lies deeper than
anybody computes is loose as well, and the kernel is given up by name.

An index such as `stride * (slot / size)`, with all three unknown, would be loose. `followed` goes on through
divisions by unknowns (a factor `1/size`), widening and choices (a factor for each), where a term is not near:
no other addend cancels `stride/size`, so slot is no pointer. If that leaves no address, it is not followed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any

from tessera_ptx.poly import Poly, add, constant_of, freeze, multiply
from tessera_ptx.ranges import Range, mul_ranges, scale_range, within
from tessera_ptx.values import SMALL, Atoms

_FAR = 1 << 40
_MAX_UNSURE = 8
_MAX_CHOICES = 16
# Operations that are looked into, one inside the other, and all that is looked at for the addresses of a
# kernel: addends, alternatives and sets of pointers. A part that is used twice is looked into twice, so in a
# chain of thirty instructions it can be 2**30; compiled kernels stay below 5 and 2,500 (corpus, attention).
_MAX_DEPTH = 32
_MAX_WEIGHED = 1 << 15
_ORIGINS = frozenset({"param", "fields", "symbol", "frame", "loaded", "func"})
_ONE = {(): Fraction(1)}

Factors = dict[tuple[int, ...], Fraction]


@dataclass(slots=True)
class Weight:
    """The weight of one pointer in an address."""

    exact: Factors = field(default_factory=dict)
    loose: bool = False
    near: bool = False

    @property
    def plain(self) -> bool:
        """Exactly one: everything else is offset."""
        return self.exact == _ONE and not self.loose and not self.near

    def is_index(self, at: Atoms) -> bool:
        """Only ever multiplied by an unknown that is more than a choice."""
        unknown = [any(not within(at.atoms[n].range, -1, 1) for n in key) for key in self.exact]
        return bool(unknown) and all(unknown) and not self.loose and not self.near

    def may_be(self, wanted: int) -> bool:
        """Whether it is or may turn out to be this number."""
        return self.loose or self.near or _may_be(self.exact, wanted)


def _may_be(factors: Factors, wanted: int) -> bool:
    return any(factors) or factors.get((), Fraction(0)) == wanted


def choices(at: Atoms, poly: Poly) -> list[Poly]:
    """The address with every addend that is one of several values replaced by each of them."""
    done: list[Poly] = []
    queue = [poly]
    while queue:
        one = queue.pop()
        more = _choose(at, one)
        if not more:
            done.append(one)
        elif len(done) + len(queue) + len(more) > _MAX_CHOICES or at.weighed > _MAX_WEIGHED:
            return [poly]
        else:
            at.weighed += len(more)
            queue += more
    return done


def _choose(at: Atoms, poly: Poly) -> list[Poly]:
    for mono, coeff in poly.items():
        for number in mono:
            atom = at.atoms[number]
            if atom.taint and atom.item[:2] == ("op", "any"):
                rest = {m: c for m, c in poly.items() if m != mono}
                factor = {_without(mono, number): coeff}
                parts = [multiply(factor, dict(one), 64) for one in atom.item[4:]]
                return [add(rest, part) for part in parts if part is not None] if None not in parts else []
    return []


def weights(at: Atoms, poly: Poly, followed: bool = False) -> dict[int, Weight]:
    """The weight of every pointer that has a part in the address, by atom."""
    collector = _Weigher(at, followed)
    collector.collect(poly, Fraction(1), ())
    return collector.found


class _Weigher:
    """Adds up the weights in one address."""

    def __init__(self, at: Atoms, followed: bool) -> None:
        self.at, self.followed = at, followed
        self.found: dict[int, Weight] = {}
        self._depth = 0

    def collect(self, poly: Poly, scale: Fraction, factors: tuple[int, ...]) -> None:
        """Takes in a sum that is multiplied by `scale` and by the factors."""
        self._depth += 1
        if self._depth > _MAX_DEPTH or self.at.weighed > _MAX_WEIGHED:
            self._hide(self.at.taint(poly), near=False)
            self.at.cut = True
        else:
            self._collect(poly, scale, factors)
        self._depth -= 1

    def _collect(self, poly: Poly, scale: Fraction, factors: tuple[int, ...]) -> None:
        at = self.at
        at.weighed += len(poly) * (1 + len(factors))
        for mono, coeff in poly.items():
            tainted = [n for n in mono if at.atoms[n].taint]
            span = _span(at, mono, coeff * scale, factors) if tainted else (0, 0)
            if not within(span, -SMALL, SMALL):
                # In a product of two 64-bit numbers each may be the number the other is scaled by.
                for number in tainted:
                    self._one(number, coeff * scale, _without(mono, number) + factors, span)

    def _one(self, number: int, scale: Fraction, factors: tuple[int, ...], span: Range) -> None:
        item = original(self.at, number)
        if item[0] in _ORIGINS:
            exact = self.found.setdefault(number, Weight()).exact
            key = _reduced(self.at, factors)
            total = exact.get(key, Fraction(0)) + scale
            exact[key] = total
            if not total:
                del exact[key]
            return
        by = _divisor(item)
        if by:
            self.collect(dict(item[4]), scale / by, factors)
            if factors or abs(scale) > SMALL:
                # What rounding leaves out is more than an alignment.
                self._rounded(self.at.atoms[number].taint)
            return
        near = within(span, -_FAR, _FAR)
        multiple = scale.denominator == 1 and abs(scale) > 1
        atom = self.at.atoms[number]
        hidden = atom.divided if multiple else atom.large
        if hidden and not near and self.followed and self._follow(number, item, scale, factors):
            self._rounded(hidden)
        else:
            self._hide(hidden, near)

    def _rounded(self, inside: frozenset[int]) -> None:
        """A part of these that is lost may still be a distance; of one pointer it is none."""
        if not self.followed or len(inside) > 1:
            self._hide(inside, near=True)

    def _hide(self, inside: Iterable[int], near: bool) -> None:
        for number in inside:
            weight = self.found.setdefault(number, Weight())
            weight.near |= near
            weight.loose |= not near

    def _follow(self, number: int, item: tuple[Any, ...], scale: Fraction, factors: tuple[int, ...]) -> bool:
        """Goes on inside an operation, with unknown factors for what it does; False where it cannot."""
        if item[0] != "op" or any(isinstance(part, int) for part in item[4:]):
            return False
        name, parts = item[1], [dict(part) for part in item[4:]]
        if name in ("sext", "zext", "lo") and len(parts) == 1:
            self.collect(parts[0], scale, factors)
            return True
        if name == "any":
            # One of several: a factor that is 0 or 1 for each, the last being what is left of 1.
            for place, part in enumerate(parts[:-1]):
                chosen = self.at.number(("op", "chosen", 1, (number, place)))
                self.collect(part, scale, (chosen, *factors))
                self.collect(parts[-1], -scale, (chosen, *factors))
            self.collect(parts[-1], scale, factors)
            return True
        if name in ("div_s", "div_u") and not self.at.taint(parts[1]):
            self.collect(parts[0], scale, (_inverse(self.at, parts[1]), *factors))
            return True
        # A remainder weighs `1 - size/size`, nothing.
        return name in ("rem_s", "rem_u") and not self.at.taint(parts[1])


def _inverse(at: Atoms, poly: Poly) -> int:
    """The atom that stands for one over a number."""
    return at.number(("op", "inverse", 64, None, freeze(poly)))


def _reduced(at: Atoms, factors: tuple[int, ...]) -> tuple[int, ...]:
    """The factors in order, without those that stand beside their inverse."""
    left = list(factors)
    for inverse in factors:
        item = at.atoms[inverse].item
        whole = [mono for mono, coeff in item[4] if coeff == 1] if item[:2] == ("op", "inverse") else []
        if len(whole) == 1 == len(item[4]) == len(whole[0]) and whole[0][0] in left:
            left.remove(inverse)
            left.remove(whole[0][0])
    return tuple(sorted(left))


def original(at: Atoms, number: int) -> tuple[Any, ...]:
    """The atom behind copies."""
    item = at.atoms[number].item
    while item[0] == "copy":
        item = at.atoms[item[1]].item
    return item


def _divisor(item: tuple[Any, ...]) -> int:
    """What the argument of a 64-bit shift or division is divided by; 0 for other operations."""
    if item[0] != "op" or item[2] != 64 or item[3] is not None or len(item) != 6:
        return 0
    by = item[5] if isinstance(item[5], int) else constant_of(dict(item[5]))
    if by is None or by <= 0:
        return 0
    if item[1] in ("shr_s", "shr_u"):
        return 1 << by if by < 64 else 0
    return by if item[1] in ("div_s", "div_u") else 0


def _span(at: Atoms, mono: tuple[int, ...], scale: Fraction, factors: tuple[int, ...]) -> Range:
    span: Range = (1, 1)
    for number in (*mono, *factors):
        span = mul_ranges(span, at.atoms[number].range)
    low, high = scale_range(span, scale.numerator)
    by = scale.denominator
    return None if low is None else low // by, None if high is None else -(-high // by)


def _without(mono: tuple[int, ...], number: int) -> tuple[int, ...]:
    at = mono.index(number)
    return mono[:at] + mono[at + 1 :]


def candidates(at: Atoms, found: dict[int, Weight], sure: Callable[[int], bool]) -> set[int]:
    """The atoms that may be the base; empty when no choice of pointers makes this an address.

    Beside a pointer with weight 1, what is multiplied by an unknown is an index.
    """
    certain = [n for n in found if sure(n)]
    unsure = [n for n in found if not sure(n)]
    if any(found[n].plain for n in certain):
        unsure = [n for n in unsure if not found[n].is_index(at)]
    unsure = _possible(found, unsure, certain)
    at.weighed += 1 << min(len(unsure), _MAX_UNSURE)
    if len(unsure) > _MAX_UNSURE or at.weighed > _MAX_WEIGHED:
        return {*certain, *unsure}
    out: set[int] = set()
    for count in range(len(unsure) + 1):
        for more in combinations(unsure, count):
            chosen = [*certain, *more]
            if chosen and not out.issuperset(chosen) and _is_address([found[n] for n in chosen]):
                # `2*a - b` is an address only if both are in one buffer.
                out |= {n for n in chosen if _is_base(found, n, chosen)} or set(chosen)
    return out


def _possible(found: dict[int, Weight], unsure: list[int], certain: list[int]) -> list[int]:
    """Without those whose weight has a part that nothing else can cancel, as `n` in `p + i*n`."""
    while True:
        all_left = [*unsure, *certain]
        if any(found[n].loose for n in all_left):
            return unsure
        parts: dict[tuple[int, ...], int] = {}
        for number in all_left:
            for key in found[number].exact:
                parts[key] = parts.get(key, 0) + 1
        kept = [n for n in unsure if all(not key or parts[key] > 1 for key in found[n].exact)]
        if len(kept) == len(unsure):
            return unsure
        unsure = kept


def _is_address(chosen: list[Weight]) -> bool:
    return any(w.loose for w in chosen) or _total(chosen) == _ONE


def _is_base(found: dict[int, Weight], number: int, chosen: list[int]) -> bool:
    others = [found[n] for n in chosen if n != number]
    cancels = any(w.loose or w.near for w in others) or _may_be(_total(others), 0)
    return cancels and found[number].may_be(1)


def _total(chosen: list[Weight]) -> Factors:
    total: Factors = {}
    for weight in chosen:
        for key, part in weight.exact.items():
            total[key] = total.get(key, Fraction(0)) + part
    return {key: part for key, part in total.items() if part}
