"""Instruction forms with random operands: the interpreter's arithmetic against a GPU's.

`check_on_gpu.py` runs each form on both and compares bits; approximate instructions are compared within a
tolerance.
"""

from typing import Any

import numpy as np

_TWO = {
    "u32": "add sub mul.lo mul.hi min max and.b or.b xor.b div rem shl.b shr mul24.lo mul24.hi",
    "s32": "add sub mul.lo mul.hi min max div rem add.sat sub.sat mul24.lo mul24.hi",
    "u64": "add sub mul.lo mul.hi min max and.b or.b xor.b div rem",
    "s64": "add sub mul.lo mul.hi min max div rem",
    "u16": "add sub mul.lo mul.hi min max div rem",
    "s16": "add sub mul.lo mul.hi min max div rem",
    "f32": "add.rn add.rz add.rm add.rp sub.rn mul.rn mul.rz mul.rm mul.rp div.rn div.rz div.rm div.rp "
    "min max add.ftz mul.ftz min.ftz max.ftz min.NaN max.NaN max.xorsign.abs min.xorsign.abs add.sat mul.sat "
    "copysign",
    "f64": "add.rn sub.rn mul.rn div.rn min max",
    "f16": "add sub mul min max max.NaN",
    "f16x2": "add sub mul min max",
    "bf16x2": "min max",
    "bf16": "min max",
}
_ONE = {
    "u32": "not.b popc.b clz.b brev.b cnot.b bfind bfind.shiftamt",
    "s32": "abs neg bfind",
    "u64": "not.b popc.b clz.b brev.b bfind",
    "s64": "abs neg bfind",
    "f32": "abs neg sqrt.rn sqrt.rz sqrt.rm sqrt.rp rcp.rn rcp.rz rcp.rm rcp.rp abs.ftz",
    "f64": "abs neg sqrt.rn rcp.rn",
    "f16": "abs neg",
    "f16x2": "abs neg",
    "bf16x2": "abs neg",
}
_APPROX = {"f32": "rsqrt.approx sqrt.approx rcp.approx ex2.approx ex2.approx.ftz rsqrt.approx.ftz"}
_ROUGH = {"f32": "lg2.approx tanh.approx"}
_THREE = {
    "f32": "fma.rn fma.rz fma.rm fma.rp fma.rn.ftz fma.rn.sat",
    "f64": "fma.rn",
    "f16": "fma.rn fma.rn.relu",
    "f16x2": "fma.rn",
    "bf16x2": "fma.rn",
    "u32": "mad.lo mad.hi sad lop3 prmt.b shf.l.wrap.b shf.l.clamp.b shf.r.wrap.b shf.r.clamp.b bfe mad24.lo",
    "s32": "mad.lo mad.hi sad bfe",
    "u64": "mad.lo",
}
_CONVERSIONS = """
s32.rni.f32 s32.rzi.f32 s32.rmi.f32 s32.rpi.f32 u32.rni.f32 u32.rzi.f32 s64.rzi.f32 u64.rzi.f32
s16.rzi.f32 u16.rzi.f32 s32.rzi.f64 u64.rzi.f64 s64.rni.f64 f32.rn.s32 f32.rz.s32 f32.rm.s32
f32.rp.u32 f32.rn.u64 f32.rz.s64 f64.rn.s64 f64.rn.u64 f16.rn.f32 f16.rz.f32 f32..f16 bf16.rn.f32
bf16.rz.f32 f32..bf16 f32.rn.f64 f32.rz.f64 f32.rm.f64 f32.rp.f64 f64..f32 f32.rni.f32 f32.rzi.f32
f32.rmi.f32 f32.rpi.f32 f32.sat.f32 s32..s16 u32..u16 u64..u32 s64..s32 u16..u32 s16..s32 f16.rn.s32
f16.rn.u16 s32.rzi.f16 tf32.rna.f32
"""
_SIZES = {"u16": 2, "s16": 2, "f16": 2, "bf16": 2, "u64": 8, "s64": 8, "f64": 8}


def forms() -> list[tuple[str, str, list[str], float]]:
    """(instruction with registers %d, %a, %b, %c; result type; operand types; tolerance, 0: bit equality)."""
    found: list[tuple[str, str, list[str], float]] = []
    tables = (_ONE, 1, 0.0), (_TWO, 2, 0.0), (_THREE, 3, 0.0), (_APPROX, 1, 2e-6), (_ROUGH, 1, 1e-3)
    for table, count, tolerance in tables:
        for kind, names in table.items():
            found += [_form(name, kind, count, tolerance) for name in names.split()]
    for text in _CONVERSIONS.split():
        result, mode, source = text.split(".")
        mode = f".{mode}" if mode else ""
        found.append((f"cvt{mode}.{result}.{source} %d, %a;", result, [source], 0.0))
    found.append(("mul.wide.s32 %d, %a, %b;", "s64", ["s32", "s32"], 0.0))
    found.append(("mul.wide.u16 %d, %a, %b;", "u32", ["u16", "u16"], 0.0))
    found.append(("bfi.b32 %d, %a, %b, %c, 7;", "u32", ["u32", "u32", "u32"], 0.0))
    found.append(("cvt.rn.f16x2.f32 %d, %a, %b;", "u32", ["f32", "f32"], 0.0))
    found.append(("cvt.rn.bf16x2.f32 %d, %a, %b;", "u32", ["f32", "f32"], 0.0))
    found.append(("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;", "u16", ["f32", "f32"], 0.0))
    found.append(("cvt.rn.satfinite.e5m2x2.f32 %d, %a, %b;", "u16", ["f32", "f32"], 0.0))
    found.append(("cvt.rn.f16x2.e4m3x2 %d, %a;", "u32", ["u16"], 0.0))
    found.append(("cvt.rn.f16x2.e5m2x2 %d, %a;", "u32", ["u16"], 0.0))
    found.append(("dp4a.s32.s32 %d, %a, %b, %c;", "s32", ["s32", "s32", "s32"], 0.0))
    found.append(("dp4a.u32.u32 %d, %a, %b, %c;", "u32", ["u32", "u32", "u32"], 0.0))
    found.append(("dp2a.lo.s32.u32 %d, %a, %b, %c;", "s32", ["s32", "u32", "s32"], 0.0))
    for name in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]:
        found.append((f"setp.{name}.f32 %q, %a, %b; selp.u32 %d, 1, 0, %q;", "u32", ["f32", "f32"], 0.0))
    return found


def _form(name: str, kind: str, count: int, tolerance: float) -> tuple[str, str, list[str], float]:
    kinds = [kind] * count
    opcode = f"{name}{kind[1:]}" if name.endswith(".b") else f"{name}.{kind}"
    if name.startswith(("shl", "shr")):
        kinds[1] = "shift"
    if name == "bfe":
        kinds[1] = kinds[2] = "shift"
    last = ""
    if name == "lop3":
        opcode, last = "lop3.b32", ", 0x6A"
    result = "u32" if name.startswith(("popc", "clz", "bfind")) else kind
    registers = ", ".join(f"%{letter}" for letter in "dabc"[: count + 1])
    return f"{opcode} {registers}{last};", result, kinds, tolerance


def size_of(kind: str) -> int:
    """Bytes of a type."""
    return _SIZES.get(kind, 4)


def operands(kind: str, count: int, rng: np.random.Generator) -> Any:
    """Random bit patterns, half of them ordinary numbers, with the awkward ones among them."""
    size = size_of(kind)
    bits = rng.integers(0, 256, (count, size), dtype=np.uint8).view(f"u{size}").ravel().copy()
    if kind == "shift":
        return rng.integers(0, 50, count).astype(np.uint32)
    if kind in ("f16", "f32", "f64"):
        ordinary = (rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)).astype(f"f{size}")
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 0.5, 1.5, 2.5, -2.5], f"f{size}")
        bits[: count // 2] = ordinary.view(f"u{size}")[: count // 2]
        bits[: special.size] = special.view(f"u{size}")
        rng.shuffle(bits)
    elif kind in ("f16x2", "bf16", "bf16x2"):
        ordinary32 = rng.standard_normal(2 * count).astype(np.float32)
        halves = (
            ordinary32.astype(np.float16).view(np.uint16)
            if kind == "f16x2"
            else ordinary32.view(np.uint16)[1::2]
        )
        bits = np.ascontiguousarray(halves).view(f"u{size}")[:count].copy()
    elif kind[0] in "us":
        bits[: count // 2] = rng.integers(0, 100, count // 2)
        rng.shuffle(bits)
    return bits


def kernel(text: str, result: str, kinds: list[str]) -> str:
    """A kernel `k` that applies the form to element `global thread` of its arrays."""
    out = 8 * size_of(result)
    named = list(zip("abc", kinds, strict=False))
    declare = f".reg .b{out} %d;" + "".join(f".reg .b{8 * size_of(k)} %{n};" for n, k in named)
    loads = ""
    for i, (n, k) in enumerate(named, 1):
        loads += f"ld.param.u64 %p, [p{i}]; mad.wide.u32 %p, %t, {size_of(k)}, %p;"
        loads += f"ld.global.b{8 * size_of(k)} %{n}, [%p];\n"
    params = ", ".join(f".param .u64 p{i}" for i in range(len(kinds) + 1))
    return f""".version 8.0
.target sm_90
.address_size 64
.visible .entry k({params}) {{
.reg .b64 %p; .reg .b32 %t, %u, %v; .reg .pred %q; {declare}
mov.u32 %t, %tid.x; mov.u32 %u, %ctaid.x; mov.u32 %v, %ntid.x; mad.lo.u32 %t, %u, %v, %t;
{loads}{text}
ld.param.u64 %p, [p0]; mad.wide.u32 %p, %t, {out // 8}, %p; st.global.b{out} [%p], %d;
ret; }}
"""
