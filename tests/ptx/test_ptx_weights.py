"""Which addend of an address is its base: the weights of pointers."""

import pytest

from ptx_factory import THREAD, flags, pointers, report_of
from tessera_ptx.extent import LaunchConfig

FLAG = "ld.param.u32 %r9, [k_param_3]; cvt.u64.u32 %rd40, %r9;\n"
TWO = ".shared .align 8 .b8 s1[8];\n.shared .align 8 .b8 s2[8];"


@pytest.mark.parametrize(
    "offset",
    [
        "shl.b64 %rd20, %rd2, 2;",
        "mul.lo.s64 %rd20, %rd2, %rd40;",
        "cvt.u32.u64 %r8, %rd2; mul.wide.s32 %rd20, %r8, 4;",
        "and.b64 %rd20, %rd2, 15;",
        "shr.u64 %rd21, %rd2, 1; shl.b64 %rd20, %rd21, 2;",
    ],
)
def test_a_size_in_the_offset_is_no_base_without_any_conversion(offset: str) -> None:
    """`p[n]`, `p + i * n`, `p[(int)n]`, `p + (n & 15)` and `p[n / 2]` of a debug build are in p."""
    report = report_of(
        pointers(0, 1, generic=True) + FLAG + offset + "add.s64 %rd22, %rd1, %rd20; st.u32 [%rd22], %r1;"
    )

    assert report.movable
    assert {0: "w"} == flags(report)


def test_both_ends_of_a_distance_times_a_flag_are_written_and_no_more() -> None:
    """`a + flag * (b - a)` is a or b: the kernel stays movable with two buffers written."""
    report = report_of(
        pointers(0, 1)
        + FLAG
        + """sub.s64 %rd21, %rd12, %rd11; mul.lo.s64 %rd22, %rd21, %rd40;
        add.s64 %rd23, %rd11, %rd22; st.global.u32 [%rd23], %r1;"""
    )

    assert report.movable
    assert {0: "w", 1: "w"} == flags(report)


def test_peeling_to_an_alignment_stays_with_its_pointer() -> None:
    """`out[t + ((16 - (p & 15)) & 15)]` is in out whatever the address of p."""
    report = report_of(
        pointers(0, 1)
        + THREAD
        + """ld.global.u32 %r8, [%rd12]; and.b64 %rd20, %rd12, 15; sub.s64 %rd21, 16, %rd20;
        and.b64 %rd22, %rd21, 15; add.s64 %rd23, %rd11, %rd22; st.global.u32 [%rd23], %r8;"""
    )

    assert report.movable
    assert {0: "w", 1: "r"} == flags(report)


LOADED = "ld.global.u64 %rd30, [%rd12]; ld.param.u64 %rd31, [k_param_2]; ld.param.u32 %r9, [k_param_3];\n"


@pytest.mark.parametrize(
    "index",
    [
        "cvt.s64.s32 %rd40, %r9; div.s64 %rd41, %rd30, %rd40; mul.lo.s64 %rd42, %rd41, %rd31;",
        "cvt.s64.s32 %rd40, %r9; rem.s64 %rd41, %rd30, %rd40; mul.lo.s64 %rd42, %rd41, %rd31;",
        "shr.s64 %rd41, %rd30, 4; mul.lo.s64 %rd42, %rd41, %rd31;",
        "sub.s64 %rd41, %rd30, %rd31; cvt.s64.s32 %rd40, %r9; mul.lo.s64 %rd42, %rd41, %rd40;",
    ],
)
def test_a_product_of_unknowns_beside_a_pointer_is_an_index(index: str) -> None:
    """`p + stride * (slot / size)` is in p, though slot and stride are 64 bits of anything."""
    report = report_of(
        pointers(0, 1) + LOADED + index + "add.s64 %rd43, %rd11, %rd42; st.global.u32 [%rd43], %r1;"
    )

    assert report.movable
    assert {0: "w", 1: "r"} == flags(report)


TRUE = "mov.pred %p5, -1; mov.u64 %rd30, 0; @%p5 ld.global.u64 %rd30, [%rd12];\n"


@pytest.mark.parametrize(
    "offset",
    [
        "shl.b64 %rd41, %rd30, 9; and.b64 %rd42, %rd31, 508; or.b64 %rd43, %rd41, %rd42;",
        "shl.b64 %rd41, %rd30, 13; shl.b64 %rd42, %rd31, 9; or.b64 %rd43, %rd41, %rd42;",
        "shl.b64 %rd41, %rd30, 13; shl.b64 %rd42, %rd31, 9; xor.b64 %rd43, %rd41, 256;",
    ],
)
def test_shifted_indices_joined_by_bits_are_no_base(offset: str) -> None:
    """`p[page << 9 | place]` with no bound of either; a load under a true guard has one value."""
    report = report_of(
        pointers(0, 1)
        + TRUE
        + "ld.global.u64 %rd31, [%rd12 + 8];"
        + offset
        + "add.s64 %rd44, %rd11, %rd43; st.global.u32 [%rd44], %r1;"
    )

    assert report.movable
    assert {0: "w", 1: "r"} == flags(report)


def test_a_pointer_joined_from_bits_of_loads_is_one() -> None:
    """`lo | hi << 32`, with an index beside it, stays unknown."""
    report = report_of(
        pointers(0, 1)
        + TRUE
        + "ld.global.u64 %rd31, [%rd12 + 8]; shl.b64 %rd41, %rd31, 32; or.b64 %rd43, %rd30, %rd41;"
        + "st.global.u32 [%rd43], %r1;"
    )

    assert not report.movable


def test_a_distance_rounded_to_an_unknown_multiple_leads_to_either_end() -> None:
    """`p + (q - p) / n * n` may be near q, or p itself where n is large."""
    report = report_of(
        pointers(0, 1)
        + FLAG
        + """sub.s64 %rd21, %rd12, %rd11; div.s64 %rd22, %rd21, %rd40; mul.lo.s64 %rd23, %rd22, %rd40;
        add.s64 %rd24, %rd11, %rd23; st.global.u32 [%rd24], %r1;"""
    )

    assert {0: "w", 1: "w"} == flags(report)


def test_an_alignment_that_went_through_a_choice_and_a_loop_is_an_offset() -> None:
    """`out[i]` for i from min(n, distance of p to a multiple of 16): p is not written."""
    report = report_of(
        pointers(0, 1)
        + """ld.param.u32 %r9, [k_param_3]; ld.global.u32 %r8, [%rd12]; neg.s64 %rd20, %rd12;
        and.b64 %rd21, %rd20, 12; cvt.u32.u64 %r10, %rd21; setp.lt.u32 %p1, %r10, %r9;
        selp.b32 %r11, %r10, %r9, %p1;
        $L: mul.wide.s32 %rd22, %r11, 4; add.s64 %rd23, %rd11, %rd22; st.global.u32 [%rd23], %r8;
        mul.lo.s32 %r12, %r8, %r8; add.s32 %r11, %r11, %r12; setp.lt.s32 %p2, %r11, %r9; @%p2 bra $L;"""
    )

    assert report.movable
    assert {0: "w", 1: "r"} == flags(report)


def test_a_pointer_put_together_digit_by_digit_in_a_loop_is_not_lost() -> None:
    """`x = 16 * x + (p >> k & 15)`: small pieces of p become an address, beside which nothing is known."""
    report = report_of(
        pointers(0, 1)
        + """mov.u64 %rd20, 0; mov.u32 %r5, 60;
        $L: shr.u64 %rd21, %rd12, %r5; and.b64 %rd22, %rd21, 15; shl.b64 %rd23, %rd20, 4;
        add.s64 %rd20, %rd23, %rd22; sub.s32 %r5, %r5, 4; setp.ge.s32 %p1, %r5, 0; @%p1 bra $L;
        st.global.u32 [%rd20], %r1;"""
    )

    assert not report.movable or "w" in flags(report).get(1, "")


def test_a_shared_variable_chosen_by_multiplying_gives_either_pointer() -> None:
    """The pointers lie in two variables, and `s1 + flag * (s2 - s1)` picks one."""
    report = report_of(
        pointers(0, 1)
        + FLAG
        + """mov.u64 %rd20, s1; mov.u64 %rd21, s2; st.shared.u64 [s1], %rd11; st.shared.u64 [s2], %rd12;
        sub.s64 %rd22, %rd21, %rd20; mul.lo.s64 %rd23, %rd22, %rd40; add.s64 %rd24, %rd20, %rd23;
        ld.shared.u64 %rd25, [%rd24]; st.global.u32 [%rd25], %r1;""",
        before=TWO,
    )

    assert {0: "w", 1: "w"} == flags(report)


def test_a_field_used_as_a_number_is_no_pointer() -> None:
    """A field picked at a computed place cannot be the one whose half is multiplied by the thread."""
    report = report_of(
        """ld.param.u32 %r5, [k_param_0+16]; mov.u32 %r6, %tid.x; mul.lo.s32 %r7, %r5, %r6;
        mov.b64 %rd1, k_param_0; ld.param.u32 %r1, [k_param_1]; mul.wide.s32 %rd2, %r1, 8;
        add.s64 %rd3, %rd1, %rd2; ld.param.u64 %rd4, [%rd3]; cvta.to.global.u64 %rd5, %rd4;
        st.global.u32 [%rd5], %r7;""",
        params="b8[24] u32",
    )

    assert {0: "w", (0, 8): "w"} == flags(report)


def test_the_extent_of_a_rounded_pointer_is_not_claimed() -> None:
    """`(q / 48 * 48)[n]` may begin before q, so no bound is given."""
    report = report_of(
        pointers(0, 1, generic=True)
        + """div.u64 %rd3, %rd1, 48; mul.lo.s64 %rd4, %rd3, 48; add.s64 %rd5, %rd4, %rd2;
        st.u8 [%rd5], %rs1;"""
    )
    access = report.access(0)

    assert access is not None
    assert access.extent.resolve(LaunchConfig((1, 1, 1), (32, 1, 1), {1: 4})).spans[0][0] is None


def test_a_name_nobody_declared_stops_the_kernel() -> None:
    """What is stored under an unknown name would be lost."""
    report = report_of(pointers(0) + "st.shared.u64 [nowhere], %rd11; ld.global.u32 %r1, [%rd11];")

    assert not report.movable
    assert "'nowhere' is not declared" in report.why[0]
