"""Sets of half-open byte intervals."""

from collections.abc import Iterable
from dataclasses import dataclass

from tessera_ptx.ranges import Range

MAX_SPANS = 4096


@dataclass(frozen=True, slots=True)
class Intervals:
    """Half-open intervals in ascending order, apart from one another; None is "no bound"."""

    spans: tuple[tuple[int | None, int | None], ...]
    # Every byte inside is really touched; else the set only covers what is.
    exact: bool

    def inside(self, low: int, high: int) -> list[tuple[int, int]]:
        """The intervals cut off at two bounds; an end that is None is the bound."""
        spans = [
            (low if a is None else max(low, a), high if b is None else min(high, b)) for a, b in self.spans
        ]
        return [(a, b) for a, b in spans if a < b]

    def covers(self, low: int, high: int) -> bool:
        """Whether all bytes from low to high (exclusive) are in the set."""
        return any((a is None or a <= low) and (b is None or high <= b) for a, b in self.spans)

    @property
    def num_bytes(self) -> int | None:
        """How many bytes, None when unbounded."""
        total = 0
        for low, high in self.spans:
            if low is None or high is None:
                return None
            total += high - low
        return total


def merge(spans: list[tuple[int | None, int | None]], exact: bool) -> Intervals:
    """The union, with touching intervals joined; too many are replaced by what covers them."""
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
    """The union of [v, v + width) over v = start + sum of factor * x, each x within its bounds.

    None when it has too many pieces to list. Bounds must be numbers.
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
    """Ascending intervals, apart from one another, that cover the same numbers."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out
