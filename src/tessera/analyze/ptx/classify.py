"""Addresses to buffers: which parameter, symbol or table an address belongs to.

An address may have several candidate bases, since a 64-bit scalar looks like a pointer. They are
ranked by evidence: variables first; then parameters that are certainly pointers (declared `.ptr`,
converted by `cvta` as they stand, or the only candidate of some access); then all that is left. The
best rank wins and the rest is offset: the sum of two pointers is no address, while pointer plus scalar
is. Candidates of the same rank are all reported, which is sound and costs precision only.
"""

from dataclasses import dataclass
from typing import Any

from tessera.analyze.ptx.poly import Poly, add, scale
from tessera.analyze.ptx.ranges import within
from tessera.analyze.ptx.values import Atoms

_NEAR_NULL = 1 << 40
_MAX_EXPANSIONS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """One buffer an address may point into."""

    kind: str  # param, symbol, indirect, frame, unknown
    # param: (index, offset); symbol: name; frame: (space, name); indirect: table names; unknown: reason
    what: Any
    # Offset from the base; None when it is not known.
    offset: Poly | None


class Classifier:
    """Knows the evidence of one kernel; `learn` first, then `targets`."""

    def __init__(self, atoms: Atoms, declared: set[int], converted: set[int]) -> None:
        self.atoms = atoms
        # Parameter indices declared .ptr; atoms converted by cvta.
        self.declared, self.converted = declared, converted
        self.sole: set[int] = set()

    def item(self, number: int) -> tuple[Any, ...]:
        """The atom behind copies."""
        item = self.atoms.atoms[number].item
        while item[0] == "copy":
            item = self.atoms.atoms[item[1]].item
        return item

    def learn(self, poly: Poly) -> None:
        """An address with one candidate proves that the candidate is a pointer."""
        base = self.atoms.base_of(poly)
        if len(base) == 1:
            item = self.item(next(iter(base)))
            if item[0] == "param":
                self.sole.add(self.atoms.number(item))

    def _rank(self, number: int) -> int:
        item = self.item(number)
        if item[0] in ("frame", "symbol", "func"):
            return 0
        if item[0] == "param":
            original = self.atoms.number(item)
            if original in self.converted:
                return 1
            return 2 if item[1] in self.declared or original in self.sole else 3
        return 3

    def targets(self, poly: Poly, depth: int = 0) -> list[Target]:
        """Every buffer the address may be in."""
        chosen = self._choice(poly) if depth < _MAX_EXPANSIONS else None
        if chosen is not None:
            mono, alternatives = chosen
            coeff = poly[mono]
            rest = {m: c for m, c in poly.items() if m != mono}
            found: list[Target] = []
            for one in alternatives:
                found += self.targets(add(rest, scale(dict(one), coeff)), depth + 1)
            return found
        base = self.atoms.base_of(poly)
        if not base:
            return [self._baseless(poly)]
        out: list[Target] = []
        for number in self._likely(poly, base):
            rest = {m: c for m, c in poly.items() if m != (number,)}
            out += self._expand(number, rest)
        return out

    def _choice(self, poly: Poly) -> tuple[tuple[int, ...], list[frozenset[Any]]] | None:
        """An addend that is one of several sums with pointers in them: each has to be looked at."""
        for mono, coeff in poly.items():
            if len(mono) == 1 and coeff in (1, -1):
                atom = self.atoms.atoms[mono[0]]
                if atom.taint and atom.item[:2] == ("op", "any"):
                    return mono, list(atom.item[4:])
        return None

    def _hides_pointers(self, poly: Poly) -> bool:
        """Whether an addend is one of several values, nobody knows which, with pointers in them."""
        for mono, coeff in poly.items():
            if len(mono) == 1 and coeff in (1, -1):
                atom = self.atoms.atoms[mono[0]]
                if atom.taint and self.item(mono[0])[0] in ("opaque", "op") and self._is_joined(mono[0]):
                    return True
        return False

    def _likely(self, poly: Poly, base: frozenset[int]) -> list[int]:
        """The candidates of the best rank, after differences of pointers are taken out.

        In `p + b - a` a candidate of the rank of `a` is what `a` is subtracted from, unless there are
        more of them than are subtracted: then any may be the base.
        """
        if self._hides_pointers(poly):
            return sorted(base)
        plus: dict[int, list[int]] = {}
        for number in sorted(base):
            plus.setdefault(self._rank(number), []).append(number)
        minus: dict[int, int] = {}
        for mono, coeff in poly.items():
            if coeff == -1 and len(mono) == 1 and mono[0] in self.atoms.bases:
                rank = self._rank(mono[0])
                minus[rank] = minus.get(rank, 0) + 1
        left = {rank: found for rank, found in plus.items() if len(found) > minus.get(rank, 0)}
        return left[min(left)] if left else sorted(base)

    def _baseless(self, poly: Poly) -> Target:
        if within(self.atoms.range(poly), -_NEAR_NULL, _NEAR_NULL):
            return Target("null", "", None)
        return Target("unknown", "an address of unknown origin", None)

    def _expand(self, number: int, rest: Poly) -> list[Target]:
        item = self.item(number)
        kind = item[0]
        if kind == "param":
            return [Target("param", (item[1], item[2]), rest)]
        if kind == "fields":
            return [Target("param", (item[1], offset), None) for offset in item[2]]
        if kind == "symbol":
            return [Target("symbol", item[1], rest)]
        if kind == "frame":
            return [Target("frame", item[1:], rest)]
        if kind == "loaded":
            return [Target("indirect", self.table_names(item[3]), None)]
        if kind == "func":
            return [Target("unknown", "accesses code", None)]
        return self._tainted(number)

    def _tainted(self, number: int) -> list[Target]:
        """An opaque value may be any base that went into it; one computed from bases may be anything."""
        out: list[Target] = []
        for inner in sorted(self.atoms.atoms[number].taint):
            out += [Target(t.kind, t.what, None) for t in self._expand(inner, {})]
        if not self._is_joined(number):
            out.append(Target("unknown", "an address computed in a way that is not followed", None))
        return out or [Target("unknown", "an address of unknown origin", None)]

    def _is_joined(self, number: int) -> bool:
        item = self.item(number)
        return bool(item[3]) if item[0] == "opaque" else item[:2] == ("op", "any")

    def table_names(self, table: frozenset[int]) -> tuple[Any, ...]:
        """The bases a pointer was loaded through."""
        names: set[Any] = set()
        stack, seen = list(table), set(table)
        while stack:
            number = stack.pop()
            if number < 0:
                names.add(("unknown", ""))
                continue
            item = self.item(number)
            if item[0] == "param":
                names.add(("param", item[1], item[2]))
            elif item[0] == "fields":
                names |= {("param", item[1], offset) for offset in item[2]}
            elif item[0] == "symbol":
                names.add(("symbol", item[1]))
            elif item[0] == "frame":
                names.add(("frame", *item[1:]))
            else:
                inner = item[3] if item[0] == "loaded" else self.atoms.atoms[number].taint
                stack += [n for n in inner if n not in seen]
                seen |= set(inner)
        return tuple(sorted(names, key=repr))
