"""Numbers for people: three significant digits and a unit; bytes are decimal."""

import math
from collections.abc import Iterable, Sequence

STEP = 1000.0


def duration(us: float) -> str:
    return _scaled(us, ("us", "ms", "s"))


def size(num_bytes: float) -> str:
    if abs(num_bytes) < STEP:
        return f"{num_bytes:.0f} B"
    return _scaled(num_bytes / STEP, ("KB", "MB", "GB", "TB", "PB"))


def digits(value: float) -> str:
    """Three significant digits with thousands separators."""
    if value == 0:
        return "0"
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    if abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{places}f}"


def _scaled(value: float, names: tuple[str, ...]) -> str:
    for name in names[:-1]:
        if abs(value) < STEP - 0.5:  # 1000 after rounding moves to the next unit
            return f"{digits(value)} {name}"
        value /= STEP
    return f"{digits(value)} {names[-1]}"


def rate(per_s: float) -> str:
    return f"{digits(per_s)}/s"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def percent(fraction: float) -> str:
    """One decimal below ten percent."""
    value = 100 * fraction
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def total(values: Iterable[float | None]) -> float | None:
    """None if one of them is unknown."""
    listed = list(values)
    numbers = [value for value in listed if value is not None]
    return sum(numbers) if len(numbers) == len(listed) else None


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
