"""PTX types in NumPy.

A register is an array of unsigned integers of its width, one per lane (predicates: bool). Instructions read
it as their own type: a `view`, or the low bits. Writes sign-extend signed types and zero-extend others. bf16
and packed pairs are bits, converted by `floats`.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Type(NamedTuple):
    name: str
    bits: int
    kind: str  # u, s, f, b (bits), p (predicate)
    dtype: np.dtype[Any]
    raw: np.dtype[Any]  # unsigned, of the same width


_RAW = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
_AS_BITS = {"bf16": 16, "f16x2": 32, "bf16x2": 32, "tf32": 32, "e4m3x2": 16, "e5m2x2": 16, "f32x2": 64}


def _make() -> dict[str, Type]:
    table = {"pred": Type("pred", 1, "p", np.dtype(bool), np.dtype(bool))}
    for bits in (8, 16, 32, 64):
        raw = np.dtype(_RAW[bits])
        table[f"u{bits}"] = Type(f"u{bits}", bits, "u", raw, raw)
        table[f"b{bits}"] = Type(f"b{bits}", bits, "b", raw, raw)
        table[f"s{bits}"] = Type(f"s{bits}", bits, "s", np.dtype(_SIGNED[bits]), raw)
        if bits in _FLOAT:
            table[f"f{bits}"] = Type(f"f{bits}", bits, "f", np.dtype(_FLOAT[bits]), raw)
    for name, bits in _AS_BITS.items():
        table[name] = Type(name, bits, "f", np.dtype(_RAW[bits]), np.dtype(_RAW[bits]))
    return table


TYPES = _make()
U8, U16, U32, U64 = (TYPES[f"u{bits}"] for bits in (8, 16, 32, 64))
S32, S64 = TYPES["s32"], TYPES["s64"]
F16, F32, F64 = TYPES["f16"], TYPES["f32"], TYPES["f64"]
PRED = TYPES["pred"]


def types_of(mods: tuple[str, ...]) -> list[Type]:
    return [TYPES[m] for m in mods if m in TYPES]


def narrow(value: Array, wanted: Type) -> Array:
    """Low bits of a wider register; zero-extended if narrower."""
    if wanted.bits == 1:
        return value if value.dtype.kind == "b" else value != 0
    if value.dtype.itemsize * 8 != wanted.bits:
        value = value.astype(wanted.raw)
    return value.view(wanted.dtype)


def widen(value: Array, given: Type, raw: np.dtype[Any]) -> Array:
    if raw.kind == "b":
        return value if value.dtype.kind == "b" else value != 0
    if value.dtype.kind == "b":
        return value.astype(raw)
    if value.dtype.itemsize == raw.itemsize:
        return value.view(raw)
    if given.kind == "s":
        return value.astype(f"i{raw.itemsize}").view(raw)
    return value.view(f"u{value.dtype.itemsize}").astype(raw)
