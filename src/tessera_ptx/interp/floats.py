"""Floating-point operations missing in NumPy: rounding modes, fused multiply-add, small formats.

Directed rounding uses a pair (nearest double, sign of the remainder), so rounding to single is of the exact
result. Not exact: `f64` with directed rounding (nearest is used) and double fused multiply-add (within one
ulp). Approximate instructions (`ex2.approx`, ...) are correctly rounded, within PTX's error bounds.
"""

from typing import Any

import numpy as np

from tessera_ptx.interp.types import Array

# The integer forms (`rni`) round to an integer first.
MODES = {"rn": "n", "rz": "z", "rm": "m", "rp": "p", "rna": "a"}
WHOLE = {"rni": "n", "rzi": "z", "rmi": "m", "rpi": "p"}


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_single(value: Array, error: Array, mode: str = "n") -> Array:
    """Rounds `value + error` once."""
    near: Array = value.astype(np.float32)
    back = near.astype(np.float64)
    above = (back > value) | ((back == value) & (error < 0))
    below = (back < value) | ((back == value) & (error > 0))
    if mode == "n":
        return _nearest(near, back, value, error)
    if mode == "m":
        step = above, -np.inf
    elif mode == "p":
        step = below, np.inf
    else:
        step = (above & (value > 0)) | (below & (value < 0)), 0.0
    wrong = step[0] & np.isfinite(value)
    return np.where(wrong, np.nextafter(near, np.float32(step[1])), near)


def _nearest(near: Array, back: Array, value: Array, error: Array) -> Array:
    """Corrects double rounding if `value` is halfway between two singles."""
    odd = (error != 0) & (value != back) & np.isfinite(value)
    if not np.any(odd):
        return near
    other = np.nextafter(near, np.where(value > back, np.inf, -np.inf).astype(np.float32))
    tie = odd & (np.abs(value - back) == np.abs(other.astype(np.float64) - value))
    outward = (error > 0) == (value > back)
    return np.where(tie & outward, other, near)


def add(a: Array, b: Array, mode: str) -> Array:
    if mode == "n" or a.dtype != np.float32:
        return a + b
    return to_single(*two_sum(a.astype(np.float64), b.astype(np.float64)), mode)


def multiply(a: Array, b: Array, mode: str) -> Array:
    """A product of singles is exact in double."""
    if mode == "n" or a.dtype != np.float32:
        return a * b
    return to_single(a.astype(np.float64) * b.astype(np.float64), np.float64(0.0) * np.zeros(()), mode)


def fused(a: Array, b: Array, c: Array, mode: str = "n") -> Array:
    if a.dtype == np.float16:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)
    if a.dtype == np.float32:
        total, error = two_sum(a.astype(np.float64) * b.astype(np.float64), np.asarray(c).astype(np.float64))
        return to_single(total, error, mode)
    return _fused_double(a, b, c)


def _split(a: Array) -> tuple[Array, Array]:
    high = a * 134217729.0
    high = high - (high - a)
    return high, a - high


def _fused_double(a: Array, b: Array, c: Array) -> Array:
    product = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    low = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total, error = two_sum(product, c)
    fine = total + (error + low)
    return np.where(np.isfinite(fine), fine, product + c)


def divide(a: Array, b: Array, mode: str) -> Array:
    if mode == "n" or a.dtype != np.float32:
        return a / b
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    quotient = wide_a / wide_b
    rest = (wide_a - quotient * wide_b) * np.sign(wide_b)
    return to_single(quotient, rest, mode)


def root(a: Array, mode: str) -> Array:
    if mode == "n" or a.dtype != np.float32:
        return np.sqrt(a)
    wide = a.astype(np.float64)
    result = np.sqrt(wide)
    return to_single(result, wide - result * result, mode)


def flush(value: Array, ftz: bool) -> Array:
    """Subnormal singles become signed zeros."""
    if not ftz or value.dtype != np.float32:
        return value
    tiny = np.abs(value) < np.float32(1.1754943508222875e-38)
    return np.where(tiny, np.copysign(np.float32(0.0), value), value)


def saturate(value: Array) -> Array:
    """Clamps to [0, 1]; NaN and negative zero become 0."""
    return np.where(value > 0, np.minimum(value, 1), 0).astype(value.dtype)


def whole(value: Array, mode: str) -> Array:
    return {"n": np.rint, "z": np.trunc, "m": np.floor, "p": np.ceil}[mode](value)


def bf16_to_single(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def single_to_bf16(value: Array, mode: str = "n", relu: bool = False) -> Array:
    if relu:
        value = np.where(np.isnan(value), value, np.maximum(value, np.float32(0)))
    return _cut(value, 16, mode, 0x7FFF).astype(np.uint16)


def single_to_tf32(value: Array, mode: str = "a") -> Array:
    """As 32-bit patterns."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = _cut(value, 13, mode, 0) << np.uint32(13)
    return np.where(np.isnan(value), bits & np.uint32(0xFFFFE000), rounded)


def _cut(value: Array, drop: int, mode: str, nan: int) -> Array:
    bits = np.asarray(value, np.float32).view(np.uint32)
    half, shift = np.uint32(1 << (drop - 1)), np.uint32(drop)
    if mode == "n":
        rounded = bits + (half - np.uint32(1)) + ((bits >> shift) & np.uint32(1))
    elif mode == "a":
        rounded = bits + half
    else:
        rounded = bits
    return np.where(np.isnan(value), np.uint32(nan), rounded >> shift)


def to_half(value: Array, mode: str = "n") -> Array:
    near: Array = value.astype(np.float16)
    if mode == "z":
        back = near.astype(np.float64)
        over = (np.abs(back) > np.abs(value)) & ~np.isinf(value)
        near = np.where(over, np.nextafter(near, np.float16(0)), near)
    return np.where(np.isnan(near), np.uint16(0x7FFF).view(np.float16), near)


def halves(bits: Array) -> tuple[Array, Array]:
    return (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def join(low: Array, high: Array) -> Array:
    return low.view(np.uint16).astype(np.uint32) | (high.view(np.uint16).astype(np.uint32) << np.uint32(16))


def _small_table(exponent_bits: int, mantissa_bits: int, finite_only: bool) -> Array:
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    scale = 2.0 ** (np.maximum(exponent, 1) - bias)
    value: Array = sign * scale * (mantissa / (1 << mantissa_bits) + (exponent > 0))
    if finite_only:
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        value[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return value.astype(np.float32)


SMALL = {"e4m3": _small_table(4, 3, True), "e5m2": _small_table(5, 2, False)}


def small_to_single(code: Array, name: str) -> Array:
    value: Array = SMALL[name][code.astype(np.intp)]
    return value


def single_to_small(value: Array, name: str) -> Array:
    """Nearest even, saturating."""
    table = SMALL[name][:128]
    finite = table[np.isfinite(table)].astype(np.float64)
    size = np.minimum(np.abs(value.astype(np.float64)), finite[-1])
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code: Array = np.where(up, above, above - 1)
    code = code | np.where(np.signbit(value), 0x80, 0)
    return np.where(np.isnan(value), 0x7F, code).astype(np.uint8)


def constant(value: float, dtype: np.dtype[Any]) -> Any:
    return dtype.type(value)
