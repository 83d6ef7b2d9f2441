"""Maps addresses to parameters, symbols and tables.

An address can have several candidate bases: 64-bit scalars look like pointers, pointer differences are
offsets. `weights` selects the possible ones, given certain pointers: variables, `.ptr` parameters, direct
operands of `cvta`, or the only candidate of an access. All are reported, which is sound.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tessera_ptx.poly import Frozen, Poly, freeze
from tessera_ptx.ranges import within
from tessera_ptx.values import DEEP, Atoms
from tessera_ptx.weights import Weight, candidates, choices, choose, original, weights

_NEAR_NULL = 1 << 40
_MAX_EXPANSIONS = 3
# The corpus has at most 3.
_MAX_ALTERNATIVES = 16


@dataclass(frozen=True, slots=True)
class AccessTarget:
    kind: str  # param, symbol, indirect, frame, unknown
    # param: (index, offset); symbol: name; frame: (space, name); indirect: tables; unknown: reason
    what: Any
    offset: Poly | None


class Classifier:
    """Call `learn` before `targets`."""

    def __init__(self, atoms: Atoms, declared: set[int], converted: set[int]) -> None:
        self.atoms = atoms
        # Parameters declared .ptr; atoms converted by cvta.
        self.declared, self.converted = declared, converted
        self.sole: set[int] = set()
        self._found: dict[Frozen, dict[int, Weight]] = {}

    def item(self, number: int) -> tuple[Any, ...]:
        return original(self.atoms, number)

    def learn(self, addresses: Iterable[Poly]) -> None:
        """Marks sole candidates as pointers."""
        open_ = [
            poly
            for poly in {freeze(p): p for p in addresses}.values()
            if not choose(self.atoms, poly, plain=True)
        ]
        known = -1
        while open_ and known < len(self.sole):
            known = len(self.sole)
            open_ = [poly for poly in open_ if not self._learn(poly)]

    def _learn(self, poly: Poly) -> bool:
        base = self.bases(poly)
        if len(base) != 1:
            return False
        item = self.item(next(iter(base)))
        if item[0] == "param":
            self.sole.add(self.atoms.number(item))
        return True

    def _weights(self, poly: Poly) -> dict[int, Weight]:
        key = freeze(poly)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = weights(self.atoms, poly)
        return found

    def bases(self, poly: Poly) -> set[int]:
        found = self._weights(poly)
        own = [n for n in found if self.item(n)[0] in ("frame", "loaded")]
        if len(own) == 1 and found[own[0]].plain and self.item(own[0])[0] == "frame":
            # Nothing else points into block memory, so its address cannot cancel.
            return set(own)
        out: set[int] = set()
        for one in choices(self.atoms, poly):
            out |= self._candidates(one)
        return out

    def _candidates(self, poly: Poly) -> set[int]:
        found = self._weights(poly)
        if any(w.loose for w in found.values()):
            followed = candidates(self.atoms, weights(self.atoms, poly, followed=True), self._sure)
            if followed:
                return followed
        return candidates(self.atoms, found, self._sure)

    def _sure(self, number: int) -> bool:
        item = self.item(number)
        if item[0] == "param":
            original_number = self.atoms.number(item)
            return (
                item[1] in self.declared or original_number in self.converted or original_number in self.sole
            )
        return item[0] in ("frame", "symbol", "func")

    def targets(self, poly: Poly) -> list[AccessTarget]:
        out: list[AccessTarget] = []
        for one in self._alternatives(poly):
            out += self._targets(one)
        return out

    def _alternatives(self, poly: Poly) -> list[Poly]:
        done = [poly]
        for _ in range(_MAX_EXPANSIONS):
            every = [more for one in done for more in choose(self.atoms, one, plain=True) or [one]]
            if len(every) == len(done) or len(every) > _MAX_ALTERNATIVES:
                break
            done = every
        return done

    def _targets(self, poly: Poly) -> list[AccessTarget]:
        found = self._weights(poly)
        base = self.bases(poly) or self._contradictory(poly, found)
        if not base:
            return [self._baseless(poly)]
        out: list[AccessTarget] = []
        for number in sorted(base):
            plain = poly.get((number,)) == 1 and number in found and found[number].plain
            out += self._expand(number, {m: c for m, c in poly.items() if m != (number,)} if plain else None)
        if not any(n in found and found[n].exact for n in base) and not self._is_one_of(poly):
            out.append(AccessTarget("unknown", "an address computed in a way that is not followed", None))
        return out

    def _contradictory(self, poly: Poly, found: dict[int, Weight]) -> set[int]:
        """Without a consistent choice, all possible pointers are reported."""
        return set(self.atoms.base_of(poly)) | {n for n, w in found.items() if w.near and self._sure(n)}

    def _is_one_of(self, poly: Poly) -> bool:
        """Alternatives, not inputs of a computation."""
        hiding = [n for mono in poly for n in mono if self.atoms.atoms[n].taint]
        return all(self._is_joined(n) for n in hiding)

    def _baseless(self, poly: Poly) -> AccessTarget:
        if within(self.atoms.range(poly), -_NEAR_NULL, _NEAR_NULL):
            return AccessTarget("null", "", None)
        return AccessTarget("unknown", "an address of unknown origin", None)

    def _expand(self, number: int, rest: Poly | None) -> list[AccessTarget]:
        item = self.item(number)
        kind = item[0]
        if kind == "param":
            return [AccessTarget("param", (item[1], item[2]), rest)]
        if kind == "fields":
            return [AccessTarget("param", (item[1], offset), None) for offset in item[2]]
        if kind == "symbol":
            return [AccessTarget("symbol", item[1], rest)]
        if kind == "frame":
            return [AccessTarget("frame", item[1:], rest)]
        if kind == "loaded":
            return [AccessTarget("indirect", self.table_names(item[3]), None)]
        if kind == "func":
            return [AccessTarget("unknown", "accesses code", None)]
        return self._tainted(number)

    def _tainted(self, number: int) -> list[AccessTarget]:
        """An opaque value may be any of its bases, a computed one anything."""
        out: list[AccessTarget] = []
        for inner in sorted(self.atoms.atoms[number].taint):
            out += [AccessTarget(t.kind, t.what, None) for t in self._expand(inner, None)]
        if not self._is_joined(number):
            out.append(AccessTarget("unknown", "an address computed in a way that is not followed", None))
        return out or [AccessTarget("unknown", "an address of unknown origin", None)]

    def _is_joined(self, number: int) -> bool:
        item = self.item(number)
        return bool(item[3]) if item[0] == "opaque" else item[:2] == ("op", "any")

    def table_names(self, table: frozenset[int]) -> tuple[Any, ...]:
        names: set[Any] = set()
        stack, seen = list(table), set(table)
        while stack:
            number = stack.pop()
            if number < 0:
                names.add(("deep", "") if number == DEEP else ("unknown", ""))
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
