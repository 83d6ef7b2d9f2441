"""Interval arithmetic. A range is (low, high), inclusive, None for unbounded."""

Range = tuple[int | None, int | None]
FULL: Range = (None, None)
# Limits the digits of repeated squares.
_LARGEST = 1 << 128

_BLOCK = {"x": 1024, "y": 1024, "z": 64}
_GRID = {"x": (1 << 31) - 1, "y": 65535, "z": 65535}
_SMALL = {
    "%laneid": 32, "%warpid": 64, "%nwarpid": 65, "%smid": 4096, "%nsmid": 4097,
    "%cluster_ctarank": 32, "%cluster_nctarank": 33,
}  # fmt: skip
# Unknown factors of `weights`.
_FACTORS: dict[str, Range] = {"inverse": (-1, 1), "chosen": (0, 1)}
PER_LAUNCH = ("%ntid", "%nctaid", "%nclusterid", "%cluster_nctaid", "%cluster_nctarank", "%gridid")


def special_range(name: str, limit: int | None) -> tuple[Range, int]:
    """Bounds and level (0 launch, 1 thread, 2 time)."""
    register, _, axis = name.partition(".")
    if register == "%tid":
        return (0, (limit or _BLOCK.get(axis, 1024)) - 1), 1
    if register == "%ntid":
        return (1, limit or _BLOCK.get(axis, 1024)), 0
    if register == "%ctaid":
        return (0, _GRID.get(axis, 1) - 1), 1
    if register == "%nctaid":
        return (1, _GRID.get(axis, 1)), 0
    if register in ("%clusterid", "%cluster_ctaid"):
        return (0, _GRID.get(axis, 1) - 1), 1
    if register in ("%nclusterid", "%cluster_nctaid"):
        return (1, _GRID.get(axis, 1)), 0
    if name in _SMALL:
        return (0, _SMALL[name] - 1), 0 if name in PER_LAUNCH else 1
    return FULL, 2


def add_ranges(a: Range, b: Range) -> Range:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def mul_ranges(a: Range, b: Range) -> Range:
    if a == (0, 0) or b == (0, 0):
        return (0, 0)
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        high = None if a[1] is None or b[1] is None else a[1] * b[1]
        return a[0] * b[0], high
    if None in a or None in b:
        for one, other in ((a, b), (b, a)):
            if one[0] is not None and one[0] == one[1]:
                return scale_range(other, one[0])
        return FULL
    ends = [x * y for x in a for y in b if x is not None and y is not None]
    return min(ends), max(ends)


def scale_range(a: Range, by: int) -> Range:
    if by == 0:
        return (0, 0)
    low = None if a[0] is None else a[0] * by
    high = None if a[1] is None else a[1] * by
    return (low, high) if by > 0 else (high, low)


def hull(ranges: list[Range]) -> Range:
    lows = [r[0] for r in ranges]
    highs = [r[1] for r in ranges]
    low = None if None in lows or not lows else min(x for x in lows if x is not None)
    high = None if None in highs or not highs else max(x for x in highs if x is not None)
    return low, high


def intersect(a: Range, b: Range) -> Range:
    """May be empty (low > high)."""
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return (max(lows) if lows else None, min(highs) if highs else None)


def within(a: Range, low: int, high: int) -> bool:
    return a[0] is not None and a[1] is not None and low <= a[0] and a[1] <= high


def type_range(bits: int, signed: bool) -> Range:
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def _and(bits: int, a: Range, b: Range) -> Range:
    tops = [r[1] for r in (a, b) if r[0] is not None and r[0] >= 0 and r[1] is not None]
    if len(tops) == 2 and a[0] == a[1] and b[0] == b[1]:
        return tops[0] & tops[1], tops[0] & tops[1]
    return (0, min(tops)) if tops else type_range(bits, True)


def _or(bits: int, a: Range, b: Range) -> Range:
    if a[0] is None or b[0] is None or a[1] is None or b[1] is None or a[0] < 0 or b[0] < 0:
        return type_range(bits, True)
    return 0, (1 << max(a[1].bit_length(), b[1].bit_length())) - 1


def _shr(a: Range, by: Range) -> Range:
    known = by[0] is not None and by[0] == by[1]
    count = min(by[0] or 0, 64) if known and by[0] is not None and by[0] >= 0 else 0
    low, high = a
    if not known:
        low, high = (None if low is None else min(low, 0)), (None if high is None else max(high, 0))
    return None if low is None else low >> count, None if high is None else high >> count


def _shl(a: Range, by: Range) -> Range:
    if by[0] is None or by[1] is None or by[0] < 0 or by[1] > 63:
        return FULL
    return hull([scale_range(a, 1 << by[0]), scale_range(a, 1 << by[1])])


def _div(a: Range, b: Range) -> Range:
    if a[0] is None or a[0] < 0 or b[0] is None or b[0] < 0:
        return FULL
    low = 0 if b[1] is None else a[0] // max(b[1], 1)
    return low, None if a[1] is None else a[1] // max(b[0], 1)


def _rem(a: Range, b: Range) -> Range:
    if a[0] is None or a[0] < 0:
        if b[1] is None or b[0] is None:
            return FULL
        most = max(abs(b[0]), abs(b[1])) - 1
        return -most, most
    if b[0] is None or b[0] < 0 or b[1] is None:
        return 0, a[1]
    if a[1] is not None and a[1] < b[0]:
        return a
    tops = [x for x in (a[1], b[1] - 1) if x is not None]
    return 0, max(min(tops), 0)


def _min_max(name: str, a: Range, b: Range) -> Range:
    if name == "min":
        highs = [x for x in (a[1], b[1]) if x is not None]
        low = None if a[0] is None or b[0] is None else min(a[0], b[0])
        return low, min(highs) if highs else None
    lows = [x for x in (a[0], b[0]) if x is not None]
    high = None if a[1] is None or b[1] is None else max(a[1], b[1])
    return max(lows) if lows else None, high


def fit(a: Range, bits: int, signed: bool) -> Range:
    """The whole type if it does not fit."""
    whole = type_range(bits, signed)
    if whole[0] is not None and whole[1] is not None and within(a, whole[0], whole[1]):
        return a
    return whole


def op_range(name: str, bits: int, args: list[Range]) -> Range:
    """Unbounded beyond any address."""
    low, high = _op_range(name, bits, args)
    return (
        None if low is None or abs(low) > _LARGEST else low,
        None if high is None or abs(high) > _LARGEST else high,
    )


def _op_range(name: str, bits: int, args: list[Range]) -> Range:
    if name in ("sext", "zext"):
        return fit(args[0], bits, name == "sext")
    if name == "any":
        return hull(args)
    if name == "mul":
        return mul_ranges(args[0], args[1])
    args = [fit(a, bits, not name.endswith("_u")) for a in args]
    if name[:3] in ("min", "max"):
        return _min_max(name[:3], args[0], args[1])
    if name == "and":
        return _and(bits, args[0], args[1])
    if name in ("or", "xor"):
        return _or(bits, args[0], args[1])
    if name in ("shr_u", "shr_s"):
        return _shr(args[0], args[1])
    if name in ("div_u", "div_s"):
        return _div(args[0], args[1])
    if name in ("rem_u", "rem_s"):
        return _rem(args[0], args[1])
    if name in ("mulhi_u", "mulhi_s"):
        low, high = mul_ranges(args[0], args[1])
        return None if low is None else low >> bits, None if high is None else high >> bits
    if name == "shl":
        return _shl(args[0], args[1])
    return (0, (1 << bits) - 1) if name in ("lo", "hi", "bits") else _FACTORS.get(name, FULL)


def op_mask(name: str, bits: int, span: Range, masks: list[int]) -> int:
    known = [m for m in masks if m >= 0]
    if name == "and" and known:
        out = known[0]
        for mask in known[1:]:
            out &= mask
        return out
    if name in ("or", "xor", "any") and len(known) == len(masks) and known:
        out = 0
        for mask in known:
            out |= mask
        return out
    if span[0] is not None and span[0] >= 0 and span[1] is not None:
        return (1 << span[1].bit_length()) - 1
    return -1
