"""Single instructions of the interpreter against exact arithmetic in Python."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_ptx.interp import run

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "u16": np.uint16, "s16": np.int16,
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "b32": np.uint32, "b64": np.uint64,
    "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "b16": np.uint16,
}  # fmt: skip
REGS = {2: "b16", 4: "b32", 8: "b64"}
EDGES = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFFFF,
    0x12345678,
    0x7FFFFFFF,
    0x80000000,
    0xDEADBEEF,
    0xFFFFFFFF,
]


def column(kind: str, values: list[Any] | Array) -> Array:
    """Values as an array of a PTX type; integers are wrapped."""
    dtype = np.dtype(DTYPES[kind])
    if dtype.kind == "f" or isinstance(values, np.ndarray):
        return np.array(values).astype(dtype)
    return np.array([int(v) & ((1 << 8 * dtype.itemsize) - 1) for v in values], f"u{dtype.itemsize}").view(
        dtype
    )


def compute(text: str, result: str, *columns: tuple[str, list[Any] | Array]) -> Array:
    """Run one instruction on columns of operands; `{d}`, `{a}`, `{b}`, `{c}`, `{e}` are its registers."""
    arrays = [column(kind, values) for kind, values in columns]
    out = np.zeros(arrays[0].shape, DTYPES[result])
    names = "abce"[: len(arrays)]
    declare = "".join(f".reg .{REGS[x.itemsize]} %{n};" for n, x in zip(names, arrays, strict=True))
    loads = ""
    for k, (n, x) in enumerate(zip(names, arrays, strict=True), 1):
        loads += f"ld.param.u64 %p, [p{k}]; mad.wide.u32 %p, %t, {x.itemsize}, %p;"
        loads += f"ld.global.{REGS[x.itemsize]} %{n}, [%p];\n"
    params = ", ".join(f".param .u64 p{k}" for k in range(len(arrays) + 1))
    body = text.format(d="%d", **{n: f"%{n}" for n in names})
    source = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry k({params}) {{
.reg .b64 %p; .reg .b32 %t; .reg .pred %q; .reg .{REGS[out.itemsize]} %d; {declare}
mov.u32 %t, %tid.x;
{loads} {body}
ld.param.u64 %p, [p0]; mad.wide.u32 %p, %t, {out.itemsize}, %p; st.global.{REGS[out.itemsize]} [%p], %d;
ret; }}"""
    done: Array = run(source, "k", 1, out.size, [out, *arrays]).arrays[0]
    return done


def signed(value: int, bits: int = 32) -> int:
    """The low bits as a two's-complement number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def pairs() -> tuple[list[int], list[int]]:
    """All pairs of edge values."""
    return [a for a in EDGES for _ in EDGES], EDGES * len(EDGES)


BINARY: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("add.u32", "u32", lambda a, b: a + b),
    ("sub.s32", "s32", lambda a, b: a - b),
    ("mul.lo.s32", "s32", lambda a, b: signed(a) * signed(b)),
    ("mul.hi.u32", "u32", lambda a, b: a * b >> 32),
    ("mul.hi.s32", "s32", lambda a, b: signed(a) * signed(b) >> 32),
    ("and.b32", "u32", lambda a, b: a & b),
    ("or.b32", "u32", lambda a, b: a | b),
    ("xor.b32", "u32", lambda a, b: a ^ b),
    ("shl.b32", "u32", lambda a, b: a << b if b < 32 else 0),
    ("shr.u32", "u32", lambda a, b: a >> min(b, 32)),
    ("shr.s32", "s32", lambda a, b: signed(a) >> min(b, 31)),
    ("min.s32", "s32", lambda a, b: min(signed(a), signed(b))),
    ("max.u32", "u32", max),
    ("div.u32", "u32", lambda a, b: a // b if b else 0xFFFFFFFF),
    ("rem.u32", "u32", lambda a, b: a % b if b else -1),
    ("div.s32", "s32", lambda a, b: int(Fraction(signed(a), signed(b))) if b else -1),
    ("rem.s32", "s32", lambda a, b: int(math.fmod(signed(a), signed(b))) if b else -1),
    ("mul24.lo.u32", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("add.sat.s32", "s32", lambda a, b: max(-(2**31), min(2**31 - 1, signed(a) + signed(b)))),
]


@pytest.mark.parametrize(("text", "kind", "reference"), BINARY, ids=[row[0] for row in BINARY])
def test_binary_integer(text: str, kind: str, reference: Callable[[int, int], int]) -> None:
    """Integer instructions of two operands agree with unbounded arithmetic, wrapped."""
    a, b = pairs()
    got = compute(text + " {d}, {a}, {b};", kind, (kind, a), (kind, b))

    want = [reference(x, y) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
    assert want == got.view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("text", "result", "reference"),
    [
        ("mul.wide.s32", "s64", lambda a, b: signed(a) * signed(b)),
        ("mul.wide.u32", "u64", lambda a, b: a * b),
    ],
)
def test_wide_product(text: str, result: str, reference: Callable[[int, int], int]) -> None:
    """A wide product keeps every bit."""
    a, b = pairs()
    kind = text[-3:]
    got = compute(text + " {d}, {a}, {b};", result, (kind, a), (kind, b))

    assert [reference(x, y) for x, y in zip(a, b, strict=True)] == got.tolist()


def test_high_product_of_64_bits() -> None:
    """The upper half of a 64-bit product is exact for both signs."""
    values = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0, 2**32 + 7]
    a, b = [x for x in values for _ in values], values * len(values)
    unsigned = compute("mul.hi.u64 {d}, {a}, {b};", "u64", ("u64", a), ("u64", b))
    with_sign = compute("mul.hi.s64 {d}, {a}, {b};", "s64", ("s64", a), ("s64", b))

    assert [x * y >> 64 for x, y in zip(a, b, strict=True)] == unsigned.tolist()
    assert [signed(x, 64) * signed(y, 64) >> 64 for x, y in zip(a, b, strict=True)] == with_sign.tolist()


UNARY: list[tuple[str, str, Callable[[int], int]]] = [
    ("popc.b32", "u32", lambda a: bin(a).count("1")),
    ("clz.b32", "u32", lambda a: 32 - a.bit_length()),
    ("brev.b32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("not.b32", "u32", lambda a: ~a),
    ("cnot.b32", "u32", lambda a: int(a == 0)),
    ("neg.s32", "s32", lambda a: -a),
    ("abs.s32", "s32", lambda a: abs(signed(a))),
    ("bfind.u32", "u32", lambda a: a.bit_length() - 1),
    ("bfind.s32", "s32", lambda a: (a if signed(a) >= 0 else ~a & 0xFFFFFFFF).bit_length() - 1),
    ("bfind.shiftamt.u32", "u32", lambda a: 32 - a.bit_length() if a else -1),
    ("cvt.s32.s8", "s32", lambda a: signed(a, 8)),
    ("cvt.u32.u16", "u32", lambda a: a & 0xFFFF),
    ("cvt.sat.s32.u32", "s32", lambda a: min(a, 2**31 - 1)),
]


@pytest.mark.parametrize(("text", "kind", "reference"), UNARY, ids=[row[0] for row in UNARY])
def test_unary_integer(text: str, kind: str, reference: Callable[[int], int]) -> None:
    """Integer instructions of one operand agree with unbounded arithmetic."""
    got = compute(text + " {d}, {a};", kind, (kind, EDGES))

    assert [reference(x) & 0xFFFFFFFF for x in EDGES] == got.view(np.uint32).tolist()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=64
    )
)
def test_bit_fields(rows: list[tuple[int, int, int]]) -> None:
    """bfe and bfi cut and place any field, also one that reaches over the end."""
    a, start, length = (list(column) for column in zip(*rows, strict=True))
    columns: list[tuple[str, list[Any]]] = [("u32", a), ("u32", start), ("u32", length)]
    plain = compute("bfe.u32 {d}, {a}, {b}, {c};", "u32", *columns)
    extended = compute("bfe.s32 {d}, {a}, {b}, {c};", "s32", *columns)
    placed = compute("bfi.b32 {d}, {e}, {a}, {b}, {c};", "u32", *columns, ("u32", a[::-1]))

    for i, (x, s, n) in enumerate(rows):
        field = (x >> s) & ((1 << n) - 1)
        assert plain[i] == field
        top = (x >> min(s + n - 1, 31)) & 1 if n else 0
        filled = (signed(x) >> min(s, 31)) & ((1 << n) - 1)
        assert int(extended[i]) & 0xFFFFFFFF == ((filled | (-1 << n)) & 0xFFFFFFFF if top else filled)
        mask = (((1 << n) - 1) << s) & 0xFFFFFFFF
        assert placed[i] == (x & ~mask) | ((a[::-1][i] << s) & mask)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 255), st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=32))
def test_lop3(table: int, rows: list[tuple[int, int, int]]) -> None:
    """lop3 looks every bit position up in its table."""
    columns: list[tuple[str, list[Any]]] = [("u32", list(column)) for column in zip(*rows, strict=True)]
    got = compute(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", "u32", *columns)

    for i, (x, y, z) in enumerate(rows):
        bits = [table >> ((x >> k & 1) * 4 + (y >> k & 1) * 2 + (z >> k & 1)) & 1 for k in range(32)]
        assert got[i] == sum(bit << k for k, bit in enumerate(bits))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=32))
def test_permute_and_funnel(rows: list[tuple[int, int, int]]) -> None:
    """prmt picks bytes, shf picks a window of two words."""
    columns: list[tuple[str, list[Any]]] = [("u32", list(column)) for column in zip(*rows, strict=True)]
    bytes_ = compute("prmt.b32 {d}, {a}, {b}, {c};", "u32", *columns)
    left = compute("shf.l.wrap.b32 {d}, {a}, {b}, {c};", "u32", *columns)
    right = compute("shf.r.clamp.b32 {d}, {a}, {b}, {c};", "u32", *columns)

    for i, (x, y, z) in enumerate(rows):
        both = y << 32 | x
        want = 0
        for k in range(4):
            code = z >> 4 * k & 15
            byte = both >> 8 * (code & 7) & 255
            want |= ((255 if byte & 128 else 0) if code & 8 else byte) << 8 * k
        assert bytes_[i] == want
        assert left[i] == (both << (z & 31)) >> 32 & 0xFFFFFFFF
        assert right[i] == both >> min(z, 32) & 0xFFFFFFFF


def test_carry_chain() -> None:
    """add.cc and addc add 64-bit numbers in halves."""
    values = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    a, b = [x for x in values for _ in values], values * len(values)
    text = """{{ .reg .b32 al, ah, bl, bh, dl, dh; mov.b64 {{al, ah}}, {a}; mov.b64 {{bl, bh}}, {b};
    add.cc.u32 dl, al, bl; addc.u32 dh, ah, bh; mov.b64 {d}, {{dl, dh}}; }}"""
    got = compute(text, "u64", ("u64", a), ("u64", b))

    assert [(x + y) & (2**64 - 1) for x, y in zip(a, b, strict=True)] == got.tolist()


def nearest(exact: Fraction, mode: str) -> np.float32:
    """The single that a rounding mode gives for an exact number."""
    near = np.float32(float(exact))
    low = near if Fraction(float(near)) <= exact else np.nextafter(near, np.float32(-np.inf))
    high = low if Fraction(float(low)) == exact else np.nextafter(low, np.float32(np.inf))
    if mode == "rz":
        mode = "rm" if exact >= 0 else "rp"
    if mode == "rn":
        below, above = exact - Fraction(float(low)), Fraction(float(high)) - exact
        even = int(np.float32(low).view(np.uint32)) % 2 == 0
        return low if below < above or (below == above and even) else high
    return low if mode == "rm" else high


finite = st.floats(-(2.0**50), 2.0**50, width=32).filter(lambda v: v == 0 or abs(v) > 1e-15)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=24))
def test_single_precision_rounds_once(mode: str, rows: list[tuple[float, float, float]]) -> None:
    """add, mul and fma give the exact result rounded once, in every direction."""
    columns: list[tuple[str, list[Any]]] = [("f32", list(column)) for column in zip(*rows, strict=True)]
    total = compute(f"add.{mode}.f32 {{d}}, {{a}}, {{b}};", "f32", *columns)
    product = compute(f"mul.{mode}.f32 {{d}}, {{a}}, {{b}};", "f32", *columns)
    both = compute(f"fma.{mode}.f32 {{d}}, {{a}}, {{b}}, {{c}};", "f32", *columns)

    for i, (x, y, z) in enumerate(rows):
        a, b, c = (Fraction(float(np.float32(v))) for v in (x, y, z))
        for got, exact in ((total, a + b), (product, a * b), (both, a * b + c)):
            if exact != 0:
                assert nearest(exact, mode) == got[i]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(finite, finite.filter(bool)), min_size=1, max_size=24))
def test_division_rounds_once(mode: str, rows: list[tuple[float, float]]) -> None:
    """div gives the exact quotient rounded once."""
    columns: list[tuple[str, list[Any]]] = [("f32", list(column)) for column in zip(*rows, strict=True)]
    got = compute(f"div.{mode}.f32 {{d}}, {{a}}, {{b}};", "f32", *columns)

    for i, (x, y) in enumerate(rows):
        exact = Fraction(float(np.float32(x))) / Fraction(float(np.float32(y)))
        if abs(exact) > Fraction(1, 10**30):
            assert nearest(exact, mode) == got[i]


FLOATS = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.7, -3.7, 1e10, -1e10, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
def test_float_to_integer(mode: str, function: Callable[[float], int]) -> None:
    """Conversions round as they say, clamp to the range, and make not-a-number zero."""
    got = compute(f"cvt.{mode}.s32.f32 {{d}}, {{a}};", "s32", ("f32", FLOATS))

    for value, result in zip(FLOATS, got.tolist(), strict=True):
        if math.isnan(value):
            assert result == 0
        elif math.isinf(value) or abs(value) > 2**31:
            assert result == (2**31 - 1 if value > 0 else -(2**31))
        else:
            assert result == function(value)


def test_minimum_prefers_numbers() -> None:
    """min and max drop not-a-number unless told to keep it."""
    got = compute("max.f32 {d}, {a}, {b};", "f32", ("f32", [math.nan, 1.0]), ("f32", [2.0, math.nan]))
    kept = compute("max.NaN.f32 {d}, {a}, {b};", "f32", ("f32", [math.nan, 1.0]), ("f32", [2.0, math.nan]))

    assert got.tolist() == [2.0, 1.0]
    assert np.isnan(kept).all()


@pytest.mark.parametrize(
    ("name", "want"),
    [("lt", [1, 0, 0, 0]), ("ltu", [1, 0, 0, 1]), ("ne", [1, 0, 1, 0]), ("neu", [1, 0, 1, 1]),
     ("num", [1, 1, 1, 0]), ("nan", [0, 0, 0, 1]), ("ge", [0, 1, 1, 0])],
)  # fmt: skip
def test_float_comparisons(name: str, want: list[int]) -> None:
    """Ordered comparisons fail on not-a-number, unordered ones hold."""
    text = f"setp.{name}.f32 %q, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %q;"
    got = compute(text, "u32", ("f32", [1.0, 2.0, 3.0, math.nan]), ("f32", [2.0, 2.0, 1.0, 0.0]))

    assert want == got.tolist()


def test_half_arithmetic_is_rounded_to_halves() -> None:
    """f16x2 works on both halves and rounds each to half precision."""
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
    a, b, c = (v.view(np.uint32) for v in values)
    got = compute("fma.rn.f16x2 {d}, {a}, {b}, {c};", "f16x2", ("f16x2", a), ("f16x2", b), ("f16x2", c))

    x, y, z = (v.astype(np.float64) for v in values)
    assert (got.view(np.float16) == (x * y + z).astype(np.float16)).all()


def test_bf16_round_trip() -> None:
    """cvt to bf16 rounds to nearest even, cvt back is exact."""
    values = [1.0, 1.00390625, 1.01171875, -2.7, 3e38, 1e-40]
    bits = compute("cvt.rn.bf16.f32 {d}, {a};", "b16", ("f32", values))
    back = compute("cvt.f32.bf16 {d}, {a};", "f32", ("b16", bits))

    assert [0x3F80, 0x3F80, 0x3F82] == bits[:3].tolist()
    assert np.allclose(back, values, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize(
    ("text", "function"),
    [("ex2.approx.f32", np.exp2), ("lg2.approx.f32", np.log2), ("sin.approx.f32", np.sin),
     ("cos.approx.f32", np.cos), ("rsqrt.approx.f32", lambda v: 1 / np.sqrt(v)), ("sqrt.approx.f32", np.sqrt),
     ("rcp.approx.f32", lambda v: 1 / v), ("tanh.approx.f32", np.tanh)],
)  # fmt: skip
def test_elementary_functions(text: str, function: Callable[[Array], Array]) -> None:
    """Approximate functions are within PTX's error bounds of the real ones."""
    values = np.linspace(0.1, 3.0, 64).astype(np.float32)
    got = compute(text + " {d}, {a};", "f32", ("f32", values))

    assert np.allclose(got, function(values.astype(np.float64)), rtol=1e-6, atol=1e-6)


def test_dot_products_of_bytes() -> None:
    """dp4a multiplies bytes with their signs."""
    a, b = [0x01FF7F80, 0x80808080], [0x01010101, 0x7F7F7F7F]
    got = compute("dp4a.s32.s32 {d}, {a}, {b}, {c};", "s32", ("u32", a), ("u32", b), ("s32", [10, 0]))

    assert [1 - 1 + 127 - 128 + 10, 4 * -128 * 127] == got.tolist()


def test_sign_extending_loads() -> None:
    """A narrow signed load fills a wide register with its sign, an unsigned one with zeros."""
    source = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b) {
.reg .b64 %p, %q; .reg .b32 %x, %y;
ld.param.u64 %p, [a]; ld.param.u64 %q, [b];
ld.global.s8 %x, [%p]; ld.global.u8 %y, [%p];
st.global.v2.u32 [%q], {%x, %y}; ret; }"""
    out = run(source, "k", 1, 1, [np.array([0xFE], np.uint8), np.zeros(2, np.uint32)]).arrays[1]

    assert [0xFFFFFFFE, 0xFE] == out.tolist()


def test_a_sum_over_the_warp_wraps() -> None:
    """redux adds modulo 2**32, with signs and without."""
    values = [0x7FFFFFFF, 0x7FFFFFFF, 5] + 29 * [0]
    got = [compute(f"redux.sync.add.{t} {{d}}, {{a}}, 0xffffffff;", t, (t, values)) for t in ("s32", "u32")]

    assert [[signed(0xFFFFFFFE + 5)] * 32, [3] * 32] == [g.tolist() for g in got]
