"""Byte ranges of an access: an expression, resolved to intervals for a launch.

    extent.resolve(LaunchConfig(grid, block, params)) -> Intervals

`Intervals` are half-open byte ranges from the pointer that cover all that the kernel can touch. An unbounded
end is None: the buffer's end.

Known numbers are substituted. A sum whose 32-bit parts cannot wrap is expanded, others range over their type.
Conditions clamp the sub-sums they compare. A loop is split into its first iteration and later ones, for which
the previous back-edge condition held. The rest is a sum of arithmetic progressions, merged into intervals.
Terms that share a variable are bounded independently, which only widens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from tessera_ptx.expression import ExtentLimit, ExtentPart, Sum, loops_in
from tessera_ptx.ranges import (
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

MAX_SPANS = 4096


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """params: index, or (index, byte offset) -> value."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: Mapping[int | tuple[int, int], int] = field(default_factory=dict)

    def param(self, index: int, offset: int) -> int | None:
        value = self.params.get((index, offset))
        return self.params.get(index) if value is None and offset == 0 else value


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint and ascending."""

    spans: tuple[tuple[int | None, int | None], ...]
    # Every byte is touched; else an over-approximation.
    exact: bool

    def inside(self, low: int, high: int) -> list[tuple[int, int]]:
        spans = [
            (low if a is None else max(low, a), high if b is None else min(high, b)) for a, b in self.spans
        ]
        return [(a, b) for a, b in spans if a < b]

    def covers(self, low: int, high: int) -> bool:
        return any((a is None or a <= low) and (b is None or high <= b) for a, b in self.spans)

    @property
    def num_bytes(self) -> int | None:
        total = 0
        for low, high in self.spans:
            if low is None or high is None:
                return None
            total += high - low
        return total


def merge(spans: list[tuple[int | None, int | None]], exact: bool) -> Intervals:
    """Too many are replaced by their cover."""
    out: list[tuple[int | None, int | None]] = []
    for low, high in sorted(spans, key=lambda s: (s[0] is not None, s[0] or 0)):
        if out:
            last_low, last_high = out[-1]
            if last_high is None or low is None or low <= last_high:
                joined = None if last_high is None or high is None else max(last_high, high)
                out[-1] = (last_low, joined)
                continue
        out.append((low, high))
    if len(out) > MAX_SPANS:
        return Intervals(((out[0][0], out[-1][1]),), False)
    return Intervals(tuple(out), exact)


def progressions(start: int, terms: list[tuple[int, Range]], width: int) -> list[tuple[int, int]] | None:
    """Union of [v, v + width) over v = start + sum of factor * x, each x within its bounds; None if there are
    too many pieces.
    """
    spans = [(start, start + width)]
    for factor, (low, high) in sorted(terms, key=lambda t: abs(t[0])):
        assert low is not None
        assert high is not None
        step, count = abs(factor), high - low + 1
        first = factor * low if factor > 0 else factor * high
        if len(spans) == 1 and spans[0][1] - spans[0][0] >= step:
            a, b = spans[0]
            spans = [(a + first, b + first + step * (count - 1))]
        elif count * len(spans) > MAX_SPANS:
            return None
        else:
            moved = [(a + first + k * step, b + first + k * step) for k in range(count) for a, b in spans]
            spans = union(moved)
    return spans


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


Mono = tuple[Any, ...]
Linear = dict[Mono, int]  # () is the constant


class _Group(NamedTuple):
    """A sub-sum as one variable: factor times a value within the span."""

    key: frozenset[tuple[Mono, int]]
    factor: int
    span: Range
    dense: bool


class Solver:
    def __init__(
        self,
        launch: LaunchConfig,
        loops: dict[int, tuple[ExtentLimit, ...]],
        later: dict[int, bool] | None = None,
    ) -> None:
        self.launch, self.loops = launch, loops
        # First iteration (False) or later ones (True).
        self.later = later or {}
        # Bounds of sums without their constants.
        self.active: dict[frozenset[tuple[Mono, int]], Range] = {}
        self._leaves: dict[Any, Linear] = {}
        self.ranges: dict[Any, Range] = {}
        self._open_loops: set[int] = set()

    def linear(self, total: Sum) -> Linear:
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
            later = self.later.get(leaf[1])
            if later is False:
                return {}
            low, high = self._loop(leaf[1])
            # Kept as a variable even with one possible value: `_before` needs it.
            self.ranges[leaf] = (1 if later else low, high)
            return {(leaf,): 1}
        if kind == "as":
            # The conditions and the turn of the access are not those of the other thread or iteration.
            there = Solver(self.launch, self.loops)
            inner = there._leaf(leaf[2])
            return inner if set(inner) <= {()} else self._variable(leaf, there.range(inner))
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
        limits = self.loops.get(loop, ())
        if not limits or loop in self._open_loops:
            return 0, None
        self._open_loops.add(loop)
        self._leaves[("loop", loop)] = {(("loop", loop),): 1}
        self.ranges[("loop", loop)] = (0, None)
        highs = [h for limit in limits if (h := self._last_turn(loop, limit)) is not None]
        self._open_loops.discard(loop)
        # Results from before the counter was bounded are stale.
        self._leaves.clear()
        return 0, min(highs) if highs else None

    def _last_turn(self, loop: int, limit: ExtentLimit) -> int | None:
        """The back edge is taken up to here."""
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
        # A sum that passes by zero, or begins beyond it, never equals it.
        is_met = high is not None and high <= 0 and (step == 1 or (low == high and high % step == 0))
        # step * k + rest < 0, with rest at least `low`.
        if low is None or relation not in (("lt", "le", "ne") if is_met else ("lt", "le")):
            return None
        last = (-low if relation == "le" else -low - 1) // step
        return max(last + 1, 0)

    def range(self, linear: Linear) -> Range:
        found = self._plain_range(linear)
        if self.active:
            bounds = self.active.get(_moving(linear))
            if bounds is not None:
                constant = linear.get((), 0)
                found = intersect(found, add_ranges(bounds, (constant, constant)))
        return found

    def _plain_range(self, linear: Linear) -> Range:
        total: Range = (0, 0)
        for mono, coeff in linear.items():
            span: Range = (1, 1)
            for leaf in mono:
                span = mul_ranges(span, self.ranges.get(leaf, FULL))
            total = add_ranges(total, scale_range(span, coeff))
        return total

    def _comparable(self, limit: ExtentLimit, left: Linear, right: Linear) -> bool:
        """Neither side wraps in its type."""
        if limit.bits >= 64 and limit.signed:
            return True
        for side in (left, right):
            span = self.range(side)
            if fit(span, limit.bits, limit.signed) != span:
                return False
        return True

    def part(self, part: ExtentPart) -> Intervals:
        assert part.offset is not None
        # Conditions may decide widening and masks inside the sums, also in conditions.
        for _ in range(2):
            self._leaves.clear()
            clamps, exact, possible = self._clamps(part)
            if not possible:
                return Intervals((), True)
            self.active.update((frozenset(linear.items()), span) for linear, span in clamps)
        offset = self.linear(part.offset)
        groups, used = self._group(offset, clamps)
        exact = exact and part.complete and used == len(clamps)
        return self._spans(offset.get((), 0), groups, part.width, exact)

    def _clamps(self, part: ExtentPart) -> tuple[list[tuple[Linear, Range]], bool, bool]:
        """Bounds; all conditions were usable; all can hold together."""
        clamps: list[tuple[Linear, Range]] = []
        usable = True
        sides = [(self.linear(c.left), self.linear(c.right), c) for c in part.limits]
        for loop, later in self.later.items():
            if later:
                sides += self._turn_before(loop)
        for left, right, limit in sides:
            clamp = self._clamp(left, right, limit)
            if clamp is None:
                usable = False
            elif clamp[0]:
                clamps.append(clamp)
            elif not within(clamp[1], 0, 0):
                return [], usable, False
        return clamps, usable, True

    def _turn_before(self, loop: int) -> list[tuple[Linear, Linear, ExtentLimit]]:
        found = []
        for limit in self.loops.get(loop, ()):
            left, right = (_before(loop, self.linear(side)) for side in (limit.left, limit.right))
            if left is not None and right is not None:
                found.append((left, right, limit))
        return found

    def _clamp(self, left: Linear, right: Linear, limit: ExtentLimit) -> tuple[Linear, Range] | None:
        """The sum, without its constant, is empty if the limit is decided."""
        if not self._comparable(limit, left, right):
            return None
        difference = _plus(left, right, -1)
        bound = -difference.pop((), 0)
        relation = limit.relation
        inside = self._plain_range(difference)
        below, above = (None, bound - 1), (bound + 1, None)
        spans: dict[str, Range] = {
            "lt": below, "le": (None, bound), "gt": above, "ge": (bound, None), "eq": (bound, bound),
            "ne": above if bound == inside[0] else below if bound == inside[1] else FULL,
        }  # fmt: skip
        span = spans[relation]
        if not difference:
            return {}, (0, 0) if intersect((0, 0), span) == (0, 0) else (1, 1)
        if span == FULL:
            return None
        if intersect(inside, span) == inside:
            return {}, (0, 0)
        return difference, intersect(inside, span)

    def _group(self, offset: Linear, clamps: list[tuple[Linear, Range]]) -> tuple[list[_Group], int]:
        """Grouped by clamp, and the number of clamps used."""
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
        """Takes every value between its bounds, as `ctaid * ntid + tid`."""
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


def _moving(linear: Linear) -> frozenset[tuple[Mono, int]]:
    return frozenset((m, c) for m, c in linear.items() if m)


def _before(loop: int, linear: Linear) -> Linear | None:
    """One iteration earlier; None if the counter is inside another operation."""
    leaf = ("loop", loop)
    out = dict(linear)
    for mono, coeff in linear.items():
        if mono.count(leaf) > 1 or any(m != leaf and loop in loops_in([((1, (m,)),)]) for m in mono):
            return None
        if leaf in mono:
            rest = tuple(m for m in mono if m != leaf)
            out[rest] = out.get(rest, 0) - coeff
    return {m: c for m, c in out.items() if c}


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


_MAX_TAKEN_APART = 2


@dataclass(frozen=True, slots=True)
class Extent:
    parts: tuple[ExtentPart, ...]
    loops: tuple[tuple[int, tuple[ExtentLimit, ...]], ...] = ()

    def __str__(self) -> str:
        shown = list(dict.fromkeys(str(p) for p in self.parts))
        if "any" in shown or not shown:
            return "any"
        return " | ".join(shown[:8]) + (f" | ... {len(shown) - 8} more" if len(shown) > 8 else "")

    def resolve(self, launch: LaunchConfig) -> Intervals:
        loops = dict(self.loops)
        spans: list[tuple[int | None, int | None]] = []
        exact = True
        for part in self.parts:
            if part.offset is None or part.width == 0:
                return Intervals(((None, None),), False)
            turning = sorted(loops_in([part.offset]) & set(loops))[:_MAX_TAKEN_APART]
            for later in product((False, True), repeat=len(turning)):
                solver = Solver(launch, loops, dict(zip(turning, later, strict=True)))
                found = solver.part(part)
                exact = exact and found.exact
                spans += found.spans
        return merge(spans, exact)
