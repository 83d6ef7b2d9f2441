"""Offsets as self-contained expressions: nested tuples, ready for JSON.

    Sum     (Term, ...)                 Term    (coefficient, (Leaf, ...))
    Leaf    ("special", name)           ("param", index, offset, width)        ("loop", id)
            ("op", id, name, bits, (Sum, ...))
            ("other", id, low, high, label)    anything within bounds: loaded values and the like
            ("as", id, Leaf)                   the same, as another thread or iteration saw it

Leaves are the same quantity iff they are equal.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from tessera_ptx.poly import Poly
from tessera_ptx.values import Atoms

Leaf = tuple[Any, ...]
Term = tuple[int, tuple[Leaf, ...]]
Sum = tuple[Term, ...]

_INFIX = {"and": "&", "or": "|", "xor": "^", "shr_u": ">>", "shr_s": ">>", "shl": "<<", "div_u": "/",
          "div_s": "/", "rem_u": "%", "rem_s": "%", "mul": "*"}  # fmt: skip
_MAX_TEXT = 400
_MAX_SIZE = 60


class Exporter:
    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        self._leaves: dict[int, Leaf] = {}

    def sum(self, poly: Poly) -> Sum:
        ordered = sorted(poly.items(), key=lambda t: (not t[0], t[0]))
        return tuple((coeff, tuple(self.leaf(n) for n in mono)) for mono, coeff in ordered)

    def leaf(self, number: int) -> Leaf:
        known = self._leaves.get(number)
        if known is None:
            known = self._leaves[number] = self._make(number)
        return known

    def _make(self, number: int) -> Leaf:
        atom = self.atoms.atoms[number]
        kind = atom.item[0]
        if kind == "special":
            return ("special", atom.item[1][1:])
        if kind == "param":
            return ("param", *atom.item[1:])
        if kind == "counter":
            key = atom.item[1]
            return ("loop", key[1]) if key[0] == "loop" else ("other", number, 0, None, "count")
        if kind in ("copy", "op") and atom.size > _MAX_SIZE:
            return ("other", number, *atom.range, "?")
        if kind == "copy":
            return ("as", number, self.leaf(atom.item[1]))
        if kind == "op":
            _, name, bits, _, *args = atom.item
            sums = tuple(self.sum(dict(a)) if isinstance(a, frozenset) else ((a, ()),) for a in args)
            return ("op", number if name == "any" else 0, name, bits, sums)
        return ("other", number, *atom.range, "loaded" if kind == "loaded" else "?")


def loops_in(sums: Iterable[Sum]) -> set[int]:
    found: set[int] = set()
    stack: list[Leaf] = [leaf for total in sums for _, leaves in total for leaf in leaves]
    while stack:
        leaf = stack.pop()
        if leaf[0] == "loop":
            found.add(leaf[1])
        elif leaf[0] == "as":
            stack.append(leaf[2])
        elif leaf[0] == "op":
            stack += [inner for total in leaf[4] for _, leaves in total for inner in leaves]
    return found


def leaf_text(leaf: Leaf) -> str:
    kind = leaf[0]
    if kind == "special":
        return str(leaf[1])
    if kind == "param":
        return f"p{leaf[1]}" + (f"+{leaf[2]}" if leaf[2] else "")
    if kind == "loop":
        return f"k{leaf[1]}"
    if kind == "as":
        return leaf_text(leaf[2]) + "'"
    if kind == "op":
        return _op_text(leaf)
    return str(leaf[4])


def _op_text(leaf: Leaf) -> str:
    _, _, name, _, sums = leaf
    inner = [text(s) for s in sums]
    if name in ("sext", "zext"):
        return inner[0] if len(sums[0]) == 1 else f"({inner[0]})"
    if name in _INFIX:
        return f"({inner[0]} {_INFIX[name]} {inner[1]})"
    return f"{name.removesuffix('_s').removesuffix('_u')}({', '.join(inner)})"


def text(total: Sum) -> str:
    """Readable sum: `4*(ctaid.x*ntid.x + tid.x) + 8`."""
    parts: list[str] = []
    for coeff, leaves in total:
        product = "*".join(leaf_text(leaf) for leaf in leaves)
        sign = "-" if coeff < 0 else "+"
        size = abs(coeff)
        body = str(size) if not leaves else product if size == 1 else f"{size}*{product}"
        parts.append(f"{sign} {body}" if parts else f"-{body}" if coeff < 0 else body)
    out = " ".join(parts) or "0"
    return out if len(out) <= _MAX_TEXT else out[:_MAX_TEXT] + "..."


_RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class ExtentLimit(NamedTuple):
    left: Sum
    relation: str
    right: Sum
    bits: int
    signed: bool

    def __str__(self) -> str:
        return f"{text(self.left)} {_RELATIONS[self.relation]} {text(self.right)}"


class ExtentPart(NamedTuple):
    """`width` bytes at `offset` (None: anywhere) under the limits."""

    offset: Sum | None
    width: int
    limits: tuple[ExtentLimit, ...]
    complete: bool

    def __str__(self) -> str:
        if self.offset is None or self.width == 0:
            return "any"
        shown = f"{text(self.offset)} + [0, {self.width})"
        return f"{shown} where {' and '.join(map(str, self.limits))}" if self.limits else shown
