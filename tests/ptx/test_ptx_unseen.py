"""Kernels written by somebody who tried to break the analyzer: pointer arithmetic nobody expects.

Each is a few lines of PTX in the shape compilers gave the CUDA C++ in its docstring. Sound is either
the right flags or an immovable kernel; a test says which of the two it accepts.
"""

import time

import pytest

from ptx_factory import THREAD, flags, make_module, pointers, report_of
from tessera_ptx import analyze
from tessera_ptx.errors import ParseError
from tessera_ptx.report import KernelReport

SHARED = ".shared .align 16 .b8 buf[1024];"
FLAG = "ld.param.u32 %r9, [k_param_3]; cvt.u64.u32 %rd40, %r9;\n"


def covers(report: KernelReport, param: int, wanted: str) -> bool:
    """Whether the report is sound for this access: it shows the flags, or the kernel does not move."""
    return not report.movable or set(wanted) <= set(flags(report).get(param, ""))


# A second pointer hidden in the offset ---------------------------------------------------------------


def test_a_buffer_chosen_by_multiplying_the_distance_is_not_missed() -> None:
    """`a + flag * (b - a)` is b when the flag is one."""
    report = report_of(
        pointers(0, 1)
        + FLAG
        + """sub.s64 %rd21, %rd12, %rd11; mul.lo.s64 %rd22, %rd21, %rd40;
        add.s64 %rd23, %rd11, %rd22; st.global.u32 [%rd23], %r1;"""
    )

    assert covers(report, 1, "w")


def test_a_distance_in_elements_keeps_the_second_buffer() -> None:
    """`a + (b - a)` on float pointers shifts the distance right and left again."""
    report = report_of(
        pointers(0, 1)
        + """ld.global.u32 %r8, [%rd12]; sub.s64 %rd20, %rd12, %rd11; shr.s64 %rd21, %rd20, 2;
        shl.b64 %rd22, %rd21, 2; add.s64 %rd23, %rd11, %rd22; st.global.u32 [%rd23], %r1;"""
    )

    assert covers(report, 1, "rw")


def test_a_distance_of_low_halves_keeps_the_second_buffer() -> None:
    """`a + (int)((int)b - (int)a)` is b when both lie within 2 GiB."""
    report = report_of(
        pointers(0, 1)
        + """ld.global.u32 %r8, [%rd12]; cvt.u32.u64 %r1, %rd11; cvt.u32.u64 %r2, %rd12;
        sub.s32 %r3, %r2, %r1; cvt.s64.s32 %rd20, %r3; add.s64 %rd21, %rd11, %rd20;
        st.global.u32 [%rd21], %r1;"""
    )

    assert covers(report, 1, "rw")


def test_a_distance_passed_through_shared_memory_keeps_the_second_buffer() -> None:
    """Another thread computed `b - a`; `a` plus that is b."""
    report = report_of(
        pointers(0, 1)
        + """mov.u32 %r9, buf; sub.s64 %rd20, %rd12, %rd11; st.shared.u64 [%r9], %rd20; bar.sync 0;
        ld.shared.u64 %rd21, [%r9]; add.s64 %rd22, %rd11, %rd21; st.global.u32 [%rd22], %r1;""",
        before=SHARED,
    )

    assert covers(report, 1, "w")


def test_the_low_half_of_one_pointer_under_the_high_half_of_another_is_not_missed() -> None:
    """`bfi` puts the low 32 bits of b under the high bits of a: b, when they share those."""
    report = report_of(
        pointers(0, 1) + "ld.global.u32 %r9, [%rd12]; bfi.b64 %rd22, %rd12, %rd11, 0, 32;"
        "st.global.u32 [%rd22], %r9;"
    )

    assert covers(report, 1, "rw")


def test_buffers_swapped_by_adding_the_distance_are_both_written() -> None:
    """`p += d; d = -d` walks between two buffers."""
    report = report_of(
        pointers(0, 1)
        + """mov.u32 %r5, 0; mov.u64 %rd20, %rd11; sub.s64 %rd21, %rd12, %rd11;
        L: st.global.u32 [%rd20], %r5; add.s64 %rd20, %rd20, %rd21; neg.s64 %rd21, %rd21;
        add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, 9; @%p1 bra L;"""
    )

    assert covers(report, 0, "w")
    assert covers(report, 1, "w")


def test_a_pointer_chosen_by_masks_is_not_missed() -> None:
    """`a ^ ((a ^ b) & -flag)` is a or b."""
    report = report_of(
        pointers(0, 1)
        + FLAG
        + """xor.b64 %rd21, %rd11, %rd12; neg.s64 %rd22, %rd40; and.b64 %rd23, %rd21, %rd22;
        xor.b64 %rd24, %rd11, %rd23; st.global.u32 [%rd24], %r1;"""
    )

    assert covers(report, 0, "w")
    assert covers(report, 1, "w")


# A base that stands with another coefficient ---------------------------------------------------------


@pytest.mark.parametrize(
    "align",
    [
        "shr.u64 %rd3, %rd1, 4; shl.b64 %rd4, %rd3, 4;",
        "div.u64 %rd3, %rd1, 48; mul.lo.s64 %rd4, %rd3, 48;",
        "rem.u64 %rd3, %rd1, 48; sub.s64 %rd4, %rd1, %rd3;",
    ],
)
def test_a_rounded_pointer_plus_a_size_is_an_access_to_the_pointer(align: str) -> None:
    """`(q / 48 * 48)[n]`: the 64-bit size is not the base."""
    report = report_of(
        f"ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1]; {align}"
        "add.s64 %rd5, %rd4, %rd2; st.global.u8 [%rd5], %rs1;"
    )

    assert covers(report, 0, "w")


# Distances as indices --------------------------------------------------------------------------------


def test_an_index_made_of_two_pointers_writes_the_array_it_indexes() -> None:
    """`out[last - first] = *first`, as nvcc compiles it: only out is written."""
    report = report_of(
        """ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1]; ld.param.u64 %rd3, [k_param_2];
        cvta.to.global.u64 %rd4, %rd1; cvta.to.global.u64 %rd5, %rd2; ld.global.u8 %rs1, [%rd5];
        sub.s64 %rd6, %rd3, %rd2; add.s64 %rd7, %rd4, %rd6; st.global.u8 [%rd7], %rs1;"""
    )

    assert covers(report, 0, "w")


def test_generic_code_with_an_index_of_two_pointers_writes_the_array() -> None:
    """`out[last - first] = *last` of a debug build: no cvta tells pointers from numbers."""
    report = report_of(
        pointers(0, 1, 2, generic=True)
        + "ld.u8 %rs1, [%rd3]; sub.s64 %rd6, %rd3, %rd2; add.s64 %rd7, %rd1, %rd6; st.u8 [%rd7], %rs1;"
    )

    assert covers(report, 0, "w")


# Fields of structs -----------------------------------------------------------------------------------


def test_a_pointer_field_whose_low_half_is_tested_is_still_a_pointer() -> None:
    """`s.p[i][t]` beside `(unsigned)s.p[0] & 15`: reading half of a field does not make it a number."""
    report = report_of(
        """ld.param.u32 %r5, [k_param_0+8]; and.b32 %r6, %r5, 15; mov.b64 %rd1, k_param_0;
        ld.param.u32 %r1, [k_param_1]; mul.wide.s32 %rd2, %r1, 8; add.s64 %rd3, %rd1, %rd2;
        ld.param.u64 %rd4, [%rd3+8]; cvta.to.global.u64 %rd5, %rd4; st.global.u32 [%rd5], %r6;""",
        params="b8[48] u32",
    )

    assert not report.movable or flags(report).get((0, 8)) == "w"


def test_pointers_loaded_as_a_vector_of_words_are_followed() -> None:
    """A 16-byte struct read as four words holds two pointers."""
    report = report_of(
        """ld.param.v4.u32 {%r1, %r2, %r3, %r4}, [k_param_0]; mov.b64 %rd21, {%r3, %r4};
        st.global.u32 [%rd21], %r9;""",
        params="b8[16] u32",
    )

    assert {(0, 8): "w"} == flags(report)


def test_a_field_read_through_a_generic_parameter_address_is_that_field() -> None:
    """`cvta.param` makes a generic address of the parameter."""
    report = report_of(
        """mov.b64 %rd1, k_param_0; cvta.param.u64 %rd2, %rd1; ld.u64 %rd3, [%rd2+8];
        st.global.u32 [%rd3], %r1;""",
        params="b8[24] u32",
    )

    assert {(0, 8): "w"} == flags(report)


# Instructions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("st.async.mmio.release.sys.global.u32 [%rd11], %r1;", "w"),
        ("red.async.mmio.release.gpu.global.add.u32 [%rd11], %r1;", "rwa"),
        ("red.global.v4.f32.add [%rd11], {%f1, %f2, %f3, %f4};", "rwa"),
        ("atom.global.v2.f32.add {%f1, %f2}, [%rd11], {%f3, %f4};", "rwa"),
        ("discard.global.L2 [%rd11], 128;", "w"),
        ("ldu.global.f32 %f1, [%rd11];", "r"),
    ],
)
def test_rare_instructions_on_global_memory_are_accesses(instruction: str, wanted: str) -> None:
    """st.async and red.async go to global memory when they say so; vectors of atomics exist."""
    assert covers(report_of(pointers(0) + instruction), 0, wanted)


def test_a_pointer_stored_as_two_floats_is_not_forgotten() -> None:
    """The halves of b, held in float registers, replace a in shared memory."""
    report = report_of(
        pointers(0, 1)
        + """mov.u32 %r9, buf; st.shared.u64 [%r9], %rd11; mov.b64 {%r1, %r2}, %rd12; mov.b32 %f1, %r1;
        mov.b32 %f2, %r2; st.shared.f32 [%r9], %f1; st.shared.f32 [%r9+4], %f2; bar.sync 0;
        ld.shared.u64 %rd20, [%r9]; st.global.u32 [%rd20], %r9;""",
        before=SHARED,
    )

    assert covers(report, 1, "w")


@pytest.mark.parametrize(
    "fill",
    [
        "cp.async.ca.shared.global [%r9], [%rd11], 8; cp.async.wait_all;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd11], 16, [%r9+64];",
    ],
)
def test_a_pointer_copied_into_shared_memory_stops_the_kernel(fill: str) -> None:
    """An asynchronous copy may bring pointers, also where a known pointer was stored before."""
    report = report_of(
        pointers(0, 1)
        + f"mov.u32 %r9, buf; st.shared.u64 [%r9], %rd12; {fill}"
        + "bar.sync 0; ld.shared.u64 %rd20, [%r9]; st.global.u32 [%rd20], %r9;",
        before=SHARED,
    )

    assert not report.movable


@pytest.mark.parametrize("declared", [".const", ".global"])
def test_a_variable_with_a_first_value_may_have_been_set_by_the_host(declared: str) -> None:
    """`__constant__ float c[2] = {1, 2}` has no linkage in whole-program PTX; the host may still set it."""
    space = declared[1:]
    report = report_of(
        pointers(0) + f"ld.{space}.u32 %r1, [coef]; st.global.u32 [%rd11], %r1;",
        before=f"{declared} .align 4 .b8 coef[8] = {{0, 0, 128, 63, 0, 0, 0, 64}};",
    )

    assert not report.movable


def test_a_table_of_addresses_in_the_module_stops_the_kernel() -> None:
    """A pointer read from an initialised variable leads out of the parameters."""
    report = report_of(
        "ld.global.u64 %rd20, [table+8]; st.global.u32 [%rd20], %r1;",
        before=".global .align 4 .b8 gb[64];\n.global .align 8 .u64 table[2] = {generic(gb), gb};",
    )

    assert not report.movable


# Control flow and scopes -----------------------------------------------------------------------------


def test_a_jump_table_that_chooses_a_buffer_reaches_all_of_them() -> None:
    """`brx.idx` over three assignments of one register."""
    report = report_of(
        pointers(0, 1, 2)
        + """ts: .branchtargets L0, L1, L2; brx.idx %r1, ts;
        L0: mov.u64 %rd20, %rd11; bra E; L1: mov.u64 %rd20, %rd12; bra E; L2: mov.u64 %rd20, %rd13;
        E: red.global.add.u32 [%rd20], 1;"""
    )

    assert {0: "rwa", 1: "rwa", 2: "rwa"} == flags(report)


def test_a_register_declared_again_in_a_scope_is_another_register() -> None:
    """Inner declarations hide outer ones and end with their scope."""
    report = report_of(
        pointers(0, 1)
        + """{ .reg .b64 %rd11; mov.u64 %rd11, %rd12; { .reg .b64 %rd12; mov.u64 %rd12, %rd11;
        st.global.u32 [%rd12], %r1; } } ld.global.u32 %r1, [%rd11];"""
    )

    assert {0: "r", 1: "w"} == flags(report)


def test_a_function_with_register_arguments_returns_either_pointer() -> None:
    """The old calling convention passes and returns registers."""
    report = report_of(
        pointers(0, 1, generic=True) + "call.uni (%rd20), ff, (%rd1, %rd2); st.global.u32 [%rd20], %r1;",
        before=""".func (.reg .b64 r) ff(.reg .b64 a, .reg .b64 b)
        { .reg .pred %p; setp.lt.u64 %p, a, b; selp.b64 r, a, b, %p; ret; }""",
    )

    assert {0: "w", 1: "w"} == flags(report)


def test_minimum_and_maximum_of_two_pointers_are_both() -> None:
    """`min(a, b)` is one of them, nobody knows which."""
    report = report_of(
        pointers(0, 1)
        + """max.u64 %rd20, %rd11, %rd12; st.global.u32 [%rd20], %r1; min.u64 %rd21, %rd11, %rd12;
        ld.global.u32 %r1, [%rd21];"""
    )

    assert {0: "rw", 1: "rw"} == flags(report)


# Bad input and time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        "add.s64 %rd20, %rd11;",
        "mad.lo.s64 %rd20, %rd11, %rd12;",
        "shl.b64 %rd20, %rd11;",
        "and.b64 %rd20, %rd11;",
        "selp.b64 %rd20, %rd11;",
        "bfe.u64 %rd20, %rd11, 3;",
        "rem.u64 %rd20, %rd11;",
        "mov.u64 %rd20, %rd11; setp.lt.s32 %p1, %r1;",
        "mov.u64 %rd20, %rd11; st.global.u32 [%rd11];",
        "mov.u64 %rd20, %rd11; and.pred %p1, %p2; @%p1 bra E; E:",
    ],
)
def test_an_instruction_with_too_few_operands_is_refused_or_stops(instruction: str) -> None:
    """Mutated text ends in a ParseError or an immovable kernel, never in another exception."""
    text = make_module(pointers(0, 1) + instruction + "st.global.u32 [%rd20], %r1;")
    try:
        report = analyze(text)[0]
    except ParseError:
        return

    assert not report.movable


def test_many_swaps_through_local_memory_take_little_time() -> None:
    """Debug builds and unrolled calls swap pointers in stack slots again and again."""
    swap = """ld.local.u64 %rd30, [stk]; ld.local.u64 %rd31, [stk+8]; add.s64 %rd32, %rd30, %rd20;
    st.u32 [%rd32], %r1; st.local.u64 [stk], %rd31; st.local.u64 [stk+8], %rd30;\n"""
    body = (
        ".local .align 8 .b8 stk[16];\n"
        + pointers(0, 1, generic=True)
        + "st.local.u64 [stk], %rd1; st.local.u64 [stk+8], %rd2;\n"
        + THREAD
        + 12 * swap
    )
    start = time.process_time()
    report = report_of(body)

    assert {0: "w", 1: "w"} == flags(report)
    assert time.process_time() - start < 2


def test_a_kernel_that_is_too_complex_is_given_up_by_name() -> None:
    """Differences of pointers that go round through computed stack slots never settle: immovable, in time."""
    mix = """ld.local.u64 %rd30, [%rd42]; ld.local.u64 %rd33, [stk+{0}]; st.u32 [%rd30], %r1;
    sub.s64 %rd31, %rd30, %rd33; add.s64 %rd31, %rd31, %rd3; st.local.u64 [stk+{1}], %rd31;\n"""
    body = (
        ".local .align 8 .b8 stk[512];\n"
        + pointers(0, 1, 2, generic=True)
        + THREAD
        + "st.local.u64 [stk], %rd1; st.local.u64 [stk+8], %rd2; mov.u64 %rd40, stk;"
        + "mul.wide.u32 %rd41, %r1, 8; add.s64 %rd42, %rd40, %rd41;\n"
        + "".join(mix.format(8 * (k % 50), 8 * ((k + 1) % 50)) for k in range(60))
    )
    start = time.process_time()
    report = report_of(body)

    assert any("too complex to follow" in reason for reason in report.why)
    assert time.process_time() - start < 4


def test_a_pointer_that_moves_in_a_stack_slot_stays_that_pointer() -> None:
    """`p += 4` in a slot, a hundred times: the offset is given up, the buffer is not."""
    step = """ld.local.u64 %rd30, [stk]; st.u32 [%rd30], %r1; add.s64 %rd31, %rd30, 4;
    st.local.u64 [stk], %rd31;\n"""
    start = ".local .align 8 .b8 stk[8];\n" + pointers(0, 1, generic=True) + "st.local.u64 [stk], %rd1;\n"

    report = report_of(start + 100 * step)

    assert report.movable
    assert {0: "w"} == flags(report)
