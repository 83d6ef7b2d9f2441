"""Weights of pointers in an address: which addends may be its base.

If all buffers moved by one byte, a valid address would too, so the weights (coefficients) of its pointers sum
to 1: `p + 4*n`, `p + i*n` and `p + (b - a)` are addresses of p; in `a + f*(b - a)` the weights are 1 - f and
f. An addend may be the base if some set of pointers with sum 1 contains it. All such are reported; certain
pointers are in every set.

A weight is a polynomial over the other factors with rational coefficients (`x >> 2` weighs a quarter).
Alternatives are examined one by one. Other operations (`sext`, `and`, opaque values) are `loose` if the term
can reach another buffer, `near` if it can only be a distance; without division inside, a multiple of four
weighs nothing. Terms within 64 KiB of zero are offsets. Too deep terms are loose: the kernel is immovable.

`followed` continues through divisions by unknowns (a factor `1/size`), widening and choices where a term is
not near: in `stride * (slot / size)` nothing cancels `stride/size`, so slot is no pointer. If no address is
left, it is not followed.
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
# Shared parts are examined each time, up to 2**30 in a chain of thirty instructions; compiled kernels stay
# below 5 and 2,500.
_MAX_DEPTH = 32
_MAX_WEIGHED = 1 << 15
_ORIGINS = frozenset({"param", "fields", "symbol", "frame", "loaded", "func"})
_ONE = {(): Fraction(1)}

Factors = dict[tuple[int, ...], Fraction]


@dataclass(slots=True)
class Weight:
    exact: Factors = field(default_factory=dict)
    loose: bool = False
    near: bool = False

    @property
    def plain(self) -> bool:
        return self.exact == _ONE and not self.loose and not self.near

    def is_index(self, at: Atoms) -> bool:
        """Only multiplied by unknowns that are not choices."""
        unknown = [any(not within(at.atoms[n].range, -1, 1) for n in key) for key in self.exact]
        return bool(unknown) and all(unknown) and not self.loose and not self.near

    def may_be(self, wanted: int) -> bool:
        return self.loose or self.near or _may_be(self.exact, wanted)


def _may_be(factors: Factors, wanted: int) -> bool:
    return any(factors) or factors.get((), Fraction(0)) == wanted


def choices(at: Atoms, poly: Poly) -> list[Poly]:
    done: list[Poly] = []
    queue = [poly]
    while queue:
        one = queue.pop()
        more = choose(at, one)
        if not more:
            done.append(one)
        elif len(done) + len(queue) + len(more) > _MAX_CHOICES or at.weighed > _MAX_WEIGHED:
            return [poly]
        else:
            at.weighed += len(more)
            queue += more
    return done


def choose(at: Atoms, poly: Poly, plain: bool = False) -> list[Poly]:
    """Alternatives of the first value that is one of several. `plain`: only of one added or subtracted."""
    for mono, coeff in poly.items():
        for number in mono if not plain or (len(mono) == 1 and coeff in (1, -1)) else ():
            atom = at.atoms[number]
            if atom.taint and atom.item[:2] == ("op", "any"):
                rest = {m: c for m, c in poly.items() if m != mono}
                factor = {_without(mono, number): coeff}
                parts = [multiply(factor, dict(one), 64) for one in atom.item[4:]]
                return [add(rest, part) for part in parts if part is not None] if None not in parts else []
    return []


def weights(at: Atoms, poly: Poly, followed: bool = False) -> dict[int, Weight]:
    collector = _Weigher(at, followed)
    collector.collect(poly, Fraction(1), ())
    return collector.found


class _Weigher:
    def __init__(self, at: Atoms, followed: bool) -> None:
        self.at, self.followed = at, followed
        self.found: dict[int, Weight] = {}
        self._depth = 0

    def collect(self, poly: Poly, scale: Fraction, factors: tuple[int, ...]) -> None:
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
                # In a 64-bit product either may be the scaled one.
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
                # The rounding remainder exceeds an alignment.
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
        """The rounded part of several pointers may be a distance, not of one."""
        if not self.followed or len(inside) > 1:
            self._hide(inside, near=True)

    def _hide(self, inside: Iterable[int], near: bool) -> None:
        for number in inside:
            weight = self.found.setdefault(number, Weight())
            weight.near |= near
            weight.loose |= not near

    def _follow(self, number: int, item: tuple[Any, ...], scale: Fraction, factors: tuple[int, ...]) -> bool:
        if item[0] != "op" or any(isinstance(part, int) for part in item[4:]):
            return False
        name, parts = item[1], [dict(part) for part in item[4:]]
        if name in ("sext", "zext", "lo") and len(parts) == 1:
            self.collect(parts[0], scale, factors)
            return True
        if name == "any":
            # A 0/1 factor for each alternative, the last one the rest of 1.
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
    return at.number(("op", "inverse", 64, None, freeze(poly)))


def _reduced(at: Atoms, factors: tuple[int, ...]) -> tuple[int, ...]:
    left = list(factors)
    for inverse in factors:
        item = at.atoms[inverse].item
        whole = [mono for mono, coeff in item[4] if coeff == 1] if item[:2] == ("op", "inverse") else []
        if len(whole) == 1 == len(item[4]) == len(whole[0]) and whole[0][0] in left:
            left.remove(inverse)
            left.remove(whole[0][0])
    return tuple(sorted(left))


def original(at: Atoms, number: int) -> tuple[Any, ...]:
    item = at.atoms[number].item
    while item[0] == "copy":
        item = at.atoms[item[1]].item
    return item


def _divisor(item: tuple[Any, ...]) -> int:
    """Divisor of a 64-bit shift or division, else 0."""
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
    """Empty if no choice of pointers makes an address.

    Beside a pointer with weight 1, a term multiplied by an unknown is an index.
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
    """Without weights that nothing else can cancel, as `n` in `p + i*n`."""
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
