"""Which bytes of a buffer an access reaches: an expression now, intervals once the launch is known.

    extent.resolve(Launch(grid, block, params)) -> Intervals

`Intervals` is a set of half-open byte ranges relative to the pointer; it always covers what the kernel
can touch there, and `exact` says that every byte in it is touched by some thread. An end that nothing
bounds is None: the consumer then takes the buffer's own end.

How: known numbers are put in; a sum whose 32-bit parts cannot wrap is expanded, otherwise it ranges over
the whole type; conditions clamp the sub-sums they compare; the rest is a sum of arithmetic progressions,
merged into intervals. Terms that share a variable are bounded as if they did not, which only widens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tessera.analyze.ptx.expression import Sum, text
from tessera.analyze.ptx.intervals import MAX_SPANS, Intervals, merge, progressions
from tessera.analyze.ptx.ranges import (
    FULL,
    Range,
    add_ranges,
    fit,
    intersect,
    mul_ranges,
    op_range,
    scale_range,
    type_range,
    within,
)

Mono = tuple[Any, ...]
Linear = dict[Mono, int]  # product of leaves -> coefficient, () the constant
_RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Limit(NamedTuple):
    """`left <relation> right` where the access happens."""

    left: Sum
    relation: str
    right: Sum
    bits: int
    signed: bool

    def __str__(self) -> str:
        return f"{text(self.left)} {_RELATIONS[self.relation]} {text(self.right)}"


class Part(NamedTuple):
    """One access: `width` bytes at `offset` under the limits; offset None is anywhere."""

    offset: Sum | None
    width: int
    limits: tuple[Limit, ...]
    complete: bool

    def __str__(self) -> str:
        if self.offset is None or self.width == 0:
            return "any"
        shown = f"{text(self.offset)} + [0, {self.width})"
        return f"{shown} where {' and '.join(map(str, self.limits))}" if self.limits else shown


@dataclass(frozen=True, slots=True)
class Launch:
    """The numbers of one launch; `params` maps a parameter index, or (index, byte offset), to its value."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: Mapping[int | tuple[int, int], int] = field(default_factory=dict)

    def param(self, index: int, offset: int) -> int | None:
        """The value of a scalar parameter, or None."""
        value = self.params.get((index, offset))
        return self.params.get(index) if value is None and offset == 0 else value


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes one kernel reaches through one pointer."""

    parts: tuple[Part, ...]
    # Conditions on the back edge of each loop that `parts` count, by loop.
    loops: tuple[tuple[int, tuple[Limit, ...]], ...] = ()

    def __str__(self) -> str:
        shown = list(dict.fromkeys(str(p) for p in self.parts))
        if "any" in shown or not shown:
            return "any"
        return " | ".join(shown[:8]) + (f" | ... {len(shown) - 8} more" if len(shown) > 8 else "")

    def resolve(self, launch: Launch) -> Intervals:
        """The bytes reached in a launch, relative to the pointer."""
        solver = _Solver(launch, dict(self.loops))
        spans: list[tuple[int | None, int | None]] = []
        exact = True
        for part in self.parts:
            found = solver.part(part)
            exact = exact and found.exact
            spans += found.spans
        return merge(spans, exact)


class _Group(NamedTuple):
    """A sub-sum that is treated as one variable: factor times a value within the span."""

    key: frozenset[tuple[Mono, int]]
    factor: int
    span: Range
    dense: bool


class _Solver:
    """Puts the numbers of one launch into expressions."""

    def __init__(self, launch: Launch, loops: dict[int, tuple[Limit, ...]]) -> None:
        self.launch, self.loops = launch, loops
        self._leaves: dict[Any, Linear] = {}
        self.ranges: dict[Any, Range] = {}
        self._open_loops: set[int] = set()

    # Numbers in ---------------------------------------------------------------------------------------

    def linear(self, total: Sum) -> Linear:
        """The sum with everything known put in."""
        out: Linear = {}
        for coeff, leaves in total:
            product: Linear = {(): coeff}
            for leaf in leaves:
                product = _times(product, self._leaf(leaf))
            for mono, c in product.items():
                out[mono] = out.get(mono, 0) + c
        return {m: c for m, c in out.items() if c}

    def _leaf(self, leaf: Any) -> Linear:
        known = self._leaves.get(leaf)
        if known is None:
            known = self._leaves[leaf] = self._make(leaf)
        return known

    def _make(self, leaf: Any) -> Linear:
        kind = leaf[0]
        if kind == "special":
            return self._special(leaf)
        if kind == "param":
            value = self.launch.param(leaf[1], leaf[2])
            return self._variable(leaf, FULL) if value is None else _number(value)
        if kind == "loop":
            return self._variable(leaf, self._loop(leaf[1]))
        if kind == "as":
            inner = self._leaf(leaf[2])
            return inner if set(inner) <= {()} else self._variable(leaf, self.range(inner))
        if kind == "op":
            return self._op(leaf)
        return self._variable(leaf, (leaf[2], leaf[3]))

    def _variable(self, leaf: Any, span: Range) -> Linear:
        if span[0] is not None and span[0] == span[1]:
            return _number(span[0])
        self.ranges[leaf] = span
        return {(leaf,): 1}

    def _special(self, leaf: Any) -> Linear:
        name, _, axis = leaf[1].partition(".")
        if axis in ("x", "y", "z"):
            place = "xyz".index(axis)
            block, grid = self.launch.block[place], self.launch.grid[place]
            sizes = {
                "tid": (0, block - 1),
                "ntid": (block, block),
                "ctaid": (0, grid - 1),
                "nctaid": (grid, grid),
            }
            if name in sizes:
                return self._variable(leaf, sizes[name])
        if name == "laneid":
            threads = self.launch.block[0] * self.launch.block[1] * self.launch.block[2]
            return self._variable(leaf, (0, min(31, threads - 1)))
        return self._variable(leaf, FULL)

    def _op(self, leaf: Any) -> Linear:
        _, _, name, bits, sums = leaf
        args = [self.linear(s) for s in sums]
        spans = [self.range(a) for a in args]
        if name in ("sext", "zext"):
            whole = type_range(bits, name == "sext")
            assert whole[0] is not None
            assert whole[1] is not None
            if within(spans[0], whole[0], whole[1]):
                return args[0]
        if name == "and" and set(args[1]) <= {()}:
            mask = args[1].get((), 0)
            if mask >= 0 and mask & (mask + 1) == 0 and within(spans[0], 0, mask):
                return args[0]
        return self._variable(leaf, op_range(name, bits, spans))

    def _loop(self, loop: int) -> Range:
        """Bounds of a loop's counter from the condition on its back edge."""
        limits = self.loops.get(loop, ())
        if not limits or loop in self._open_loops:
            return 0, None
        self._open_loops.add(loop)
        self._leaves[("loop", loop)] = {(("loop", loop),): 1}
        self.ranges[("loop", loop)] = (0, None)
        highs = [h for limit in limits if (h := self._last_turn(loop, limit)) is not None]
        self._open_loops.discard(loop)
        # Anything worked out while the counter had no bound must be worked out again.
        self._leaves.clear()
        return 0, min(highs) if highs else None

    def _last_turn(self, loop: int, limit: Limit) -> int | None:
        """The largest counter when the back edge is taken while the limit holds."""
        leaf = (("loop", loop),)
        left, right = self.linear(limit.left), self.linear(limit.right)
        difference = _plus(left, right, -1)
        step = difference.pop(leaf, 0)
        if not step or any(("loop", loop) in mono for mono in difference):
            return None
        if not self._comparable(limit, {**left, leaf: 0}, {**right, leaf: 0}):
            return None
        low, high = self.range(difference)
        relation = limit.relation
        if step < 0:
            low, high, step = (None if high is None else -high), (None if low is None else -low), -step
            relation = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(relation, relation)
        # step * k + rest < 0, with rest at least `low`.
        if low is None or relation not in ("lt", "le", "ne"):
            return None
        last = (-low if relation == "le" else -low - 1) // step
        return max(last + 1, 0)

    # Ranges -------------------------------------------------------------------------------------------

    def range(self, linear: Linear) -> Range:
        """Bounds of a sum."""
        total: Range = (0, 0)
        for mono, coeff in linear.items():
            span: Range = (1, 1)
            for leaf in mono:
                span = mul_ranges(span, self.ranges.get(leaf, FULL))
            total = add_ranges(total, scale_range(span, coeff))
        return total

    def _comparable(self, limit: Limit, left: Linear, right: Linear) -> bool:
        """Whether both sides are the numbers that were compared: no wrap-around in their type."""
        if limit.bits >= 64 and limit.signed:
            return True
        for side in (left, right):
            span = self.range(side)
            if fit(span, limit.bits, limit.signed) != span:
                return False
        return True

    # One access ---------------------------------------------------------------------------------------

    def part(self, part: Part) -> Intervals:
        """The bytes of one access."""
        if part.offset is None or part.width == 0:
            return Intervals(((None, None),), False)
        offset = self.linear(part.offset)
        exact = part.complete
        clamps: list[tuple[Linear, Range]] = []
        for limit in part.limits:
            clamp = self._clamp(limit)
            if clamp is None:
                exact = False
            elif clamp[0]:
                clamps.append(clamp)
            elif not within(clamp[1], 0, 0):
                return Intervals((), True)  # never true in this launch
        groups, used = self._group(offset, clamps)
        exact = exact and used == len(clamps)
        return self._spans(offset.get((), 0), groups, part.width, exact)

    def _clamp(self, limit: Limit) -> tuple[Linear, Range] | None:
        """A limit as (sum without its constant, bounds); the sum is empty when the limit is decided."""
        left, right = self.linear(limit.left), self.linear(limit.right)
        if not self._comparable(limit, left, right):
            return None
        difference = _plus(left, right, -1)
        bound = -difference.pop((), 0)
        relation = limit.relation
        spans: dict[str, Range] = {
            "lt": (None, bound - 1), "le": (None, bound), "gt": (bound + 1, None), "ge": (bound, None),
            "eq": (bound, bound),
        }  # fmt: skip
        if not difference:
            true = bound != 0 if relation == "ne" else intersect((0, 0), spans[relation]) == (0, 0)
            return {}, (0, 0) if true else (1, 1)
        span = spans.get(relation)
        if span is None:
            return None
        inside = self.range(difference)
        if intersect(inside, span) == inside:
            return {}, (0, 0)  # always true
        return difference, intersect(inside, span)

    def _group(self, offset: Linear, clamps: list[tuple[Linear, Range]]) -> tuple[list[_Group], int]:
        """The offset's terms, those that a clamp compares taken together; and how many clamps were used."""
        left = {m: c for m, c in offset.items() if m}
        groups: list[_Group] = []
        used = 0
        for linear, span in clamps:
            first = next(iter(linear))
            factor, remainder = divmod(left.get(first, 0), linear[first])
            if factor and not remainder and all(left.get(m) == factor * c for m, c in linear.items()):
                for mono in linear:
                    del left[mono]
                groups.append(_Group(frozenset(linear.items()), factor, span, self._is_dense(linear)))
                used += 1
                continue
            for k, group in enumerate(groups):
                same = frozenset(linear.items()) == group.key
                flipped = frozenset((m, -c) for m, c in linear.items()) == group.key
                if same or flipped:
                    other = span if same else scale_range(span, -1)
                    groups[k] = group._replace(span=intersect(group.span, other))
                    used += 1
        singles = [m for m in left if len(m) == 1]
        shared = len({leaf for m in left for leaf in m}) != sum(len(m) for m in left)
        for mono, coeff in left.items():
            span = self.range({mono: 1})
            dense = mono in singles and not shared and mono[0][0] == "special"
            groups.append(_Group(frozenset({(mono, 1)}), coeff, span, dense))
        return groups, used

    def _is_dense(self, linear: Linear) -> bool:
        """Whether the sum takes every value between its bounds, as `ctaid * ntid + tid` does."""
        if any(len(m) != 1 or m[0][0] != "special" for m in linear):
            return False
        terms = [(c, self.range({m: 1})) for m, c in linear.items()]
        found = progressions(0, terms, 1)
        return found is not None and len(found) == 1

    def _spans(self, constant: int, groups: list[_Group], width: int, exact: bool) -> Intervals:
        terms: list[tuple[int, Range]] = []
        for group in groups:
            if group.span[0] is not None and group.span[1] is not None and group.span[0] > group.span[1]:
                return Intervals((), True)
            terms.append((group.factor, group.span))
            exact = exact and group.dense
        if any(None in span for _, span in terms):
            total: Range = (constant, constant)
            for factor, span in terms:
                total = add_ranges(total, scale_range(span, factor))
            low, high = total
            return Intervals(((low, None if high is None else high + width),), False)
        names = [leaf for group in groups for leaf in {n for mono, _ in group.key for n in mono}]
        exact = exact and len(names) == len(set(names))
        spans = progressions(constant, terms, width)
        if spans is None or len(spans) > MAX_SPANS:
            total = (constant, constant)
            for factor, span in terms:
                total = add_ranges(total, scale_range(span, factor))
            assert total[1] is not None
            return Intervals(((total[0], total[1] + width),), False)
        return Intervals(tuple(spans), exact)


def _number(value: int) -> Linear:
    return {(): value} if value else {}


def _plus(a: Linear, b: Linear, factor: int) -> Linear:
    out = dict(a)
    for mono, coeff in b.items():
        out[mono] = out.get(mono, 0) + factor * coeff
    return {m: c for m, c in out.items() if c}


def _times(a: Linear, b: Linear) -> Linear:
    out: Linear = {}
    for mono_a, coeff_a in a.items():
        for mono_b, coeff_b in b.items():
            mono = tuple(sorted(mono_a + mono_b, key=repr)) if mono_a and mono_b else mono_a + mono_b
            out[mono] = out.get(mono, 0) + coeff_a * coeff_b
    return {m: c for m, c in out.items() if c}
