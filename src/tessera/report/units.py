"""Numbers and kernels' names as people read them: three significant digits and a unit. Bytes are decimal."""

import math

STEP = 1000.0
# Round numbers within a power of ten.
ROUND = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)


def duration(us: float) -> str:
    """Microseconds as "12.3 us", "4.56 ms" or "7.89 s"."""
    return _scaled(us, ("us", "ms", "s"))


def size(num_bytes: float) -> str:
    """Bytes as "512 B", "1.50 KB", "12.3 MB"; 1 KB is 1000 bytes."""
    if abs(num_bytes) < STEP:
        return f"{num_bytes:.0f} B"
    return _scaled(num_bytes / STEP, ("KB", "MB", "GB", "TB", "PB"))


def rate(per_s: float) -> str:
    """Work per second as "12.3/s" or "45,600/s"."""
    return f"{digits(per_s)}/s"


def ratio(value: float) -> str:
    """A factor as "1.18x"."""
    return f"{value:.2f}x"


def percent(fraction: float) -> str:
    """A fraction as "87 %", with one decimal below ten percent."""
    value = 100 * fraction
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def digits(value: float) -> str:
    """A plain number with three significant digits and thousands separated."""
    if value == 0:
        return "0"
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    if abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{places}f}"


def round_limits(least: float, most: float) -> list[float]:
    """Round numbers from the first that is not below the least to the first that is not below the most."""
    scale = 10.0 ** math.floor(math.log10(least))
    tens = range(math.ceil(math.log10(most / scale)) + 1)
    numbers = [scale * step * 10**n for n in tens for step in ROUND]
    end = next(x for x in numbers if x >= most)
    return [x for x in numbers if least <= x <= end]


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 lane", "2 lanes"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _scaled(value: float, names: tuple[str, ...]) -> str:
    for name in names[:-1]:
        if abs(value) < STEP - 0.5:  # what rounds to 1000 is one of the next unit
            return f"{digits(value)} {name}"
        value /= STEP
    return f"{digits(value)} {names[-1]}"


def short_name(name: str) -> str:
    """ "aten.mm.default" -> "mm", "aten._softmax.default" -> "softmax"; other names stay as they are."""
    parts = name.split(".")
    if len(parts) < 2 or parts[0] not in ("aten", "prims"):
        return name
    return parts[1].lstrip("_").replace("scaled_dot_product", "sdpa") or name
