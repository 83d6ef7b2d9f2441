"""Random kernels that move pointers about: what the analysis announces covers what the interpreter sees.

Each kernel takes four buffers, passes their addresses through moves, selections, swaps in loops, local and
shared memory, halves, generic conversions, structs and calls, adds small offsets, and at last reads and
writes through some of them. The analysis may stop on a kernel, but what it calls movable must be covered.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import examples
from tessera_ptx import KernelReport, analyze
from tessera_ptx.extent import LaunchConfig
from tessera_ptx.interp import Packed, Result, run

BUFFERS, SIZE = 4, 4096
HEAD = """.version 8.0
.target sm_80
.address_size 64
.func (.param .b64 r) pick(.param .b64 p, .param .b64 q, .param .b32 k) {
.reg .b64 %a, %b; .reg .b32 %c; .reg .pred %p;
ld.param.b64 %a, [p]; ld.param.b64 %b, [q]; ld.param.b32 %c, [k];
setp.gt.s32 %p, %c, 3; selp.b64 %a, %a, %b, %p; st.param.b64 [r], %a; ret; }
.func touch(.param .b64 p, .param .b32 k) {
.reg .b64 %a; .reg .b32 %c;
ld.param.b64 %a, [p]; ld.param.b32 %c, [k]; st.global.b32 [%a+64], %c; ret; }
"""


def pointer(draw: st.DrawFn) -> str:
    """One of the pointer registers."""
    return f"%p{draw(st.integers(0, BUFFERS - 1))}"


def add_offset(draw: st.DrawFn, number: int) -> list[str]:
    """A small offset, from the thread, the block, a scalar, memory or a constant."""
    p = pointer(draw)
    source = draw(st.sampled_from(["%t", "%b", "%k", "%m", "%h"]))
    mask, how = draw(st.sampled_from([60, 124, 28])), draw(st.integers(0, 4))
    low = f"and.b32 %x, {source}, {mask};" if source != "%t" else "shl.b32 %x, %t, 2;"
    forms = [
        "cvt.u64.u32 %o, %x; add.s64 {p}, {p}, %o;", "cvt.u64.u32 %o, %x; add.s64 {p}, %o, {p};",
        "and.b32 %x, %x, 124; mad.wide.u32 {p}, %x, 1, {p};", f"add.s64 {{p}}, {{p}}, {4 * number};",
        "cvt.u64.u32 %o, %x; sub.s64 %o, {p}, %o; sub.s64 %o, {p}, %o; add.s64 {p}, {p}, %o;",
    ]  # fmt: skip
    return [low, forms[how].format(p=p)]


def select(draw: st.DrawFn, number: int) -> list[str]:
    """One of two pointers by a predicate on the thread, the scalar or memory."""
    condition = draw(st.sampled_from(["%t, 5", "%k, 10", "%m, 50", "%b, 1"]))
    return [
        f"setp.lt.s32 %q, {condition};",
        f"selp.b64 {pointer(draw)}, {pointer(draw)}, {pointer(draw)}, %q;",
    ]


def branch(draw: st.DrawFn, number: int) -> list[str]:
    """A move on one side of a branch."""
    condition = draw(st.sampled_from(["%t, 9", "%k, 4", "%m, 20"]))
    move = f"mov.b64 {pointer(draw)}, {pointer(draw)};"
    return [f"setp.gt.s32 %q, {condition};", f"@%q bra skip{number};", move, f"skip{number}:"]


def swap_loop(draw: st.DrawFn, number: int) -> list[str]:
    """Pointers that change places in a loop, with a store inside."""
    a, b = pointer(draw), pointer(draw)
    inside = f"st.global.b32 [{a}+128], %k;" if draw(st.booleans()) else ""
    return [f"mov.u32 %i, 0;\nloop{number}: {inside} mov.b64 %s, {a}; mov.b64 {a}, {b}; mov.b64 {b}, %s;",
            f"add.u32 %i, %i, 1; setp.lt.u32 %q, %i, %n; @%q bra loop{number};"]  # fmt: skip


def through_memory(draw: st.DrawFn, number: int) -> list[str]:
    """Through a local frame or shared memory, at a fixed or a computed place."""
    a, b, c = pointer(draw), pointer(draw), pointer(draw)
    if draw(st.booleans()):
        return [f"st.local.b64 [frame], {a}; st.local.b64 [frame+8], {b};",
                "and.b32 %x, %k, 8; mov.u32 %y, frame; add.u32 %x, %x, %y;",
                f"ld.local.b64 {c}, [%x];"]  # fmt: skip
    return [f"shl.b32 %x, %t, 3; mov.u32 %y, tile; add.u32 %x, %x, %y; st.shared.b64 [%x], {a};",
            "bar.sync 0; xor.b32 %x, %t, 1; shl.b32 %x, %x, 3; add.u32 %x, %x, %y;",
            f"ld.shared.b64 {c}, [%x]; bar.sync 0;"]  # fmt: skip


def convert(draw: st.DrawFn, number: int) -> list[str]:
    """To a generic address and back, or through two halves, or through masked low bits."""
    p, how = pointer(draw), draw(st.integers(0, 2))
    forms = [
        "cvta.global.u64 {p}, {p}; cvta.to.global.u64 {p}, {p};",
        "mov.b64 {{%x, %y}}, {p}; mov.b64 {p}, {{%x, %y}};",
        "and.b64 {p}, {p}, -4;",
    ]  # fmt: skip
    return [forms[how].format(p=p)]


def call(draw: st.DrawFn, number: int) -> list[str]:
    """A device function that gives one of two pointers back, or one that writes."""
    a, b, c = pointer(draw), pointer(draw), pointer(draw)
    if draw(st.booleans()):
        return [f"{{ .param .b64 a0; .param .b32 a1; st.param.b64 [a0], {a}; st.param.b32 [a1], %k;",
                "call.uni touch, (a0, a1); }"]  # fmt: skip
    return [f"{{ .param .b64 a0; .param .b64 a1; .param .b32 a2; .param .b64 r0; st.param.b64 [a0], {a};",
            f"st.param.b64 [a1], {b}; st.param.b32 [a2], %k; call.uni (r0), pick, (a0, a1, a2);",
            f"ld.param.b64 {c}, [r0]; }}"]  # fmt: skip


def access(draw: st.DrawFn, number: int) -> list[str]:
    """A read, a write or an update through a pointer."""
    p, at = pointer(draw), draw(st.sampled_from(["", "+4", "+256"]))
    guard = draw(st.sampled_from(["", "setp.lt.u32 %q, %t, 7; @%q "]))
    forms = [
        "ld.global.b32 %v, [{p}{at}];", "st.global.b32 [{p}{at}], 7;", "red.global.add.u32 [{p}{at}], 1;",
        "ld.b32 %v, [{p}{at}];", "st.b16 [{p}{at}], 3;", "ld.global.nc.b8 %v, [{p}{at}];",
    ]  # fmt: skip
    return [guard + draw(st.sampled_from(forms)).format(p=p, at=at)]


MOVES = [add_offset, select, branch, swap_loop, through_memory, convert, call, access]


@st.composite
def kernels(draw: st.DrawFn) -> str:
    """A kernel of random pointer moves that ends in an access."""
    lines = [f"ld.param.b64 %p{k}, [s+{8 * k}];" for k in range(BUFFERS)]
    count = draw(st.integers(2, 7))
    for number in range(count):
        lines += draw(st.sampled_from(MOVES))(draw, number)
    lines += access(draw, count) + access(draw, count)
    body = "\n".join(lines)
    params = f".param .align 8 .b8 s[{8 * BUFFERS}], .param .b32 k, .param .b32 n, .param .b64 idx"
    return f"""{HEAD}.visible .entry k({params}) {{
.local .align 8 .b8 frame[16]; .shared .align 8 .b8 tile[512];
.reg .b64 %p<{BUFFERS}>, %o, %s, %idx; .reg .b32 %t, %b, %k, %n, %m, %h, %x, %y, %i, %v; .reg .pred %q;
ld.param.b64 %idx, [idx]; ld.param.b32 %k, [k]; ld.param.b32 %n, [n]; ld.global.b32 %m, [%idx];
mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %h, %ntid.x;
{body}
ret; }}"""


def announced(report: KernelReport, result: Result, numbers: LaunchConfig) -> dict[str, np.ndarray]:
    """Bytes that may be read and bytes that may be written, per buffer."""
    masks = {name: np.zeros((2, data.nbytes), bool) for name, data in result.buffers.items()}
    for found in report.accesses:
        buffer, start = result.pointers[found.param, found.offset]
        for low, high in found.extent.resolve(numbers).spans:
            first = 0 if low is None else max(start + low, 0)
            last = SIZE if high is None else max(start + high, 0)
            masks[buffer][0, first:last] |= found.read or found.atomic
            masks[buffer][1, first:last] |= found.write or found.atomic
    return masks


@settings(max_examples=examples(250, 50), deadline=None)
@given(
    kernels(),
    st.integers(1, 3),
    st.sampled_from([2, 8, 32, 64]),
    st.integers(0, 15),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_random_pointers_are_covered(source: str, grid: int, block: int, k: int, n: int, index: int) -> None:
    """However pointers travel, a kernel called movable touches only what is announced."""
    buffers = {8 * number: np.zeros(SIZE, np.uint8) for number in range(BUFFERS)}
    result = run(source, "k", grid, block, [Packed(buffers, 8 * BUFFERS), k, n, np.array([index], np.int32)])
    (report,) = analyze(source)
    if not report.movable:
        return
    masks = announced(report, result, LaunchConfig((grid, 1, 1), (block, 1, 1), {1: k, 2: n}))
    for name, seen in result.masks.items():
        assert not ((seen.read | seen.atomic) & ~masks[name][0]).any(), f"reads of {name}"
        assert not ((seen.write | seen.atomic) & ~masks[name][1]).any(), f"writes of {name}"


@settings(max_examples=examples(120, 25), deadline=None)
@given(kernels())
def test_most_pointer_kernels_are_followed(source: str) -> None:
    """None of these moves is beyond the analysis: it stops on no such kernel."""
    (report,) = analyze(source)

    assert report.movable, report.why
