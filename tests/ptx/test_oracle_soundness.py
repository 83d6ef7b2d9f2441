"""What the static analysis announces covers what the interpreter sees, byte by byte."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import examples
from tessera_ptx import analyze
from tessera_ptx.extent import LaunchConfig
from tessera_ptx.interp import run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))
checks: Any = importlib.import_module("checks")

RUNNABLE = [row for row in checks.rows() if checks.is_runnable(row)]


@settings(max_examples=examples(250, 40), deadline=None)
@given(st.sampled_from(RUNNABLE), st.integers(0, 2**32 - 1))
def test_static_covers_random_launches(row: dict[str, Any], seed: int) -> None:
    """The same for any kernel and any grid, sizes, strides and contents."""
    made, result = checks.run_row(row, seed)

    assert [] == checks.differences(made, result)
    assert [] == checks.uncovered(row, made, result)
    assert [] == checks.falsely_exact(row, made, result)


def test_a_missed_byte_is_found() -> None:
    """The comparison itself can fail: with one access left out of the report, it names the bytes."""
    row = next(r for r in RUNNABLE if r["kernel"] == "axpy")
    made, result = checks.run_row(row, 1)
    report = checks.report_of(row)
    masks = checks.static_masks(report, made, result)
    masks["1"][:] = False

    assert (result.masks["1"].read & ~masks["1"][0]).any()
    assert not (result.masks["0"].write & ~masks["0"][1]).any()


# ---- random kernels ------------------------------------------------------------------------------------

ELEMENTS = 4096
CONSTANTS = st.sampled_from(
    [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 127, 128, 255, 1000, -1, -4, -128, 0x7FFFFFFF]
)
BINARY = st.sampled_from(
    ["add.s32", "sub.s32", "mul.lo.s32", "and.b32", "or.b32", "xor.b32", "min.s32", "max.u32", "shl.b32",
     "shr.u32", "shr.s32", "min.u32", "rem.u32", "div.u32"]
)  # fmt: skip
SOURCES = ["%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x"]


@st.composite
def arithmetic(draw: st.DrawFn) -> tuple[list[str], int]:
    """Some integer instructions on registers %r0 .. and how many registers there are."""
    lines = [f"mov.u32 %r{k}, {name};" for k, name in enumerate(SOURCES)]
    lines += ["ld.param.u32 %r4, [n];", "ld.param.u32 %r5, [m];", "ld.global.u32 %r6, [%idx];"]
    count = 7
    for _ in range(draw(st.integers(1, 6))):
        op, a = draw(BINARY), draw(st.integers(0, count - 1))
        if op.startswith(("sh", "rem", "div")):
            b = str(draw(st.integers(1, 9)))
        else:
            b = draw(st.one_of(st.integers(0, count - 1).map(lambda k: f"%r{k}"), CONSTANTS.map(str)))
        lines.append(f"{op} %r{count}, %r{a}, {b};")
        count += 1
    return lines, count


@st.composite
def kernels(draw: st.DrawFn) -> str:
    """A kernel with one guarded load and one guarded store of out[f(thread, block, scalars, memory)]."""
    lines, count = draw(arithmetic())
    loop = draw(st.booleans())
    last = f"%r{count - 1}"
    if loop:
        step = draw(st.sampled_from([1, 3, 64]))
        lines += [f"mov.u32 %i, 0;\nloop: add.u32 %x, {last}, %i;"]
    else:
        lines += [f"mov.u32 %x, {last};"]
    guard = draw(st.sampled_from(["lt", "and", "rem", "signed"]))
    if guard == "and":
        lines += [
            f"and.b32 %x, %x, {draw(st.sampled_from([ELEMENTS - 1, 255, 60]))};",
            "setp.eq.u32 %p, %x, %x;",
        ]
    elif guard == "rem":
        lines += [f"rem.u32 %x, %x, {draw(st.sampled_from([ELEMENTS, 100, 7]))};", "setp.ge.u32 %p, %x, 0;"]
    elif guard == "signed":
        lines += ["setp.ge.s32 %q, %x, 0;", f"setp.lt.and.s32 %p, %x, {ELEMENTS}, %q;"]
    else:
        lines += [f"setp.lt.u32 %p, %x, {draw(st.sampled_from([ELEMENTS, 100]))};"]
    scale = draw(st.sampled_from(["mul.wide.u32 %a, %x, 4;", "cvt.u64.u32 %a, %x; shl.b64 %a, %a, 2;"]))
    lines += [scale, "add.s64 %a, %a, %out;", draw(st.sampled_from(["@%p ld.global.u32 %v, [%a];", ""]))]
    lines += [draw(st.sampled_from(["@%p st.global.u32 [%a], 7;", "@%p red.global.add.u32 [%a], 1;"]))]
    if loop:
        lines += [f"add.u32 %i, %i, {step};\nsetp.lt.u32 %q, %i, %r5;\n@%q bra loop;"]
    body = "\n".join(lines)
    return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 idx, .param .u32 n, .param .u32 m) {{
.reg .b64 %a, %out, %idx; .reg .b32 %r<32>, %x, %i, %v; .reg .pred %p, %q;
ld.param.u64 %out, [out]; ld.param.u64 %idx, [idx];
{body}
ret; }}"""


@settings(max_examples=examples(120, 15), deadline=None)
@given(
    kernels(),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(-5, 5000),
    st.integers(1, 200),
    st.integers(0, 99),
)
def test_random_kernels_are_covered(source: str, grid: int, block: int, n: int, m: int, index: int) -> None:
    """Wrapping arithmetic, masks, guards and loops: announced bytes cover the touched ones."""
    out, idx = np.zeros(ELEMENTS, np.uint32), np.array([index], np.uint32)
    result = run(source, "k", grid, block, [out, idx, n, m])
    (report,) = analyze(source)
    assert report.movable
    seen = result.masks["0"]
    touched = seen.read | seen.write | seen.atomic
    announced = np.zeros(touched.size, bool)
    access = report.access(0)
    if access is not None:
        numbers = LaunchConfig((grid, 1, 1), (block, 1, 1), {2: n & 0xFFFFFFFF, 3: m})
        extent = access.extent.resolve(numbers)
        for low, high in extent.spans:
            announced[max(low or 0, 0) : touched.size if high is None else max(high, 0)] = True
        assert not extent.exact or (announced == touched).all()
        flags = access.read or access.atomic, access.write or access.atomic, access.atomic
        assert not any(had and not told for had, told in zip(seen.any(), flags, strict=True))

    assert not (touched & ~announced).any()
