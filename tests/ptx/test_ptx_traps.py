"""Every trap that defeats naive analyzers, as a small kernel with one fact each."""

import pytest

from ptx_factory import THREAD, flags, pointers, report_of


def test_pointers_swapped_in_a_loop_are_both_read_and_written() -> None:
    """Registers are assigned again: after one turn each pointer names the other buffer."""
    report = report_of(
        pointers(0, 1)
        + THREAD
        + """mov.u32 %r5, 0;
        $L: mov.u64 %rd30, %rd12;
        add.s64 %rd31, %rd11, %rd20; ld.global.f32 %f1, [%rd31];
        add.s64 %rd32, %rd30, %rd20; st.global.f32 [%rd32], %f1;
        mov.u64 %rd12, %rd11; mov.u64 %rd11, %rd30;
        add.s32 %r5, %r5, 1; setp.lt.s32 %p5, %r5, 10; @%p5 bra $L;"""
    )

    assert {0: "rw", 1: "rw"} == flags(report)


def test_use_before_definition_in_text_order_is_followed() -> None:
    """Blocks need not stand in the order in which they run."""
    report = report_of(
        "bra $START;\n$USE: st.global.f32 [%rd12], %f1; bra $END;\n$START:"
        + pointers(0, 1)
        + "bra $USE;\n$END:"
    )

    assert {1: "w"} == flags(report)


def test_a_register_used_for_two_buffers_in_turn_keeps_them_apart() -> None:
    """Hand-written code reuses registers: the load is of the first buffer only."""
    report = report_of(
        """ld.param.u64 %rd1, [k_param_0]; ld.global.f32 %f1, [%rd1];
        ld.param.u64 %rd1, [k_param_1]; st.global.f32 [%rd1], %f1;"""
    )

    assert {0: "r", 1: "w"} == flags(report)


def test_generic_store_to_shared_or_parameter_writes_the_parameter() -> None:
    """A space-less access may go to shared memory or to the buffer: the buffer may be written."""
    report = report_of(
        pointers(0, 1, generic=True)
        + """mov.u32 %r4, buf; cvt.u64.u32 %rd20, %r4; cvta.shared.u64 %rd7, %rd20;
        setp.eq.s32 %p1, %r1, 0; selp.b64 %rd8, %rd2, %rd7, %p1; st.u32 [%rd8], %r6;""",
        before=".shared .align 4 .b8 buf[64];",
    )

    assert {1: "w"} == flags(report)


def test_generic_atomic_of_inline_assembly_is_seen() -> None:
    """`atom` without a space, in a scope of its own, is an atomic update."""
    report = report_of(pointers(2, generic=True) + "{ atom.add.noftz.f16 %rs1, [%rd3], %rs2; }")

    assert {2: "rwa"} == flags(report)


def test_cp_async_reads_its_second_operand() -> None:
    """cp.async copies from global memory to shared memory."""
    report = report_of(
        pointers(0) + "mov.u32 %r9, buf; cp.async.cg.shared.global [ %r9 + 0 ], [ %rd11 + 0 ], 0x10, %r37;",
        before=".shared .align 16 .b8 buf[64];",
    )

    assert {0: "r"} == flags(report)


def test_pointer_passed_through_shared_memory_is_followed() -> None:
    """A thread may use the address another thread has put in shared memory."""
    report = report_of(
        pointers(0, 1)
        + THREAD
        + """mov.u32 %r38, buf; add.s64 %rd30, %rd11, %rd20;
        st.shared.b64 [%r38], %rd30; bar.sync 0; ld.shared.b64 %rd31, [%r38+8];
        ld.shared.b64 %rd33, [%r38]; atom.global.add.f32 %f2, [%rd33], %f1;""",
        before=".shared .align 16 .b8 buf[64];",
    )

    assert {0: "rwa"} == flags(report)


def test_address_of_parameter_selected_in_a_register() -> None:
    """Triton selects between the addresses of parameters and loads through them."""
    report = report_of(
        """mov.b32 %r24, k_param_1; mov.b32 %r25, k_param_0; setp.eq.s32 %p9, %r1, 0;
        selp.b32 %r26, %r25, %r24, %p9; ld.param.b64 %rd6, [%r26]; ld.global.b32 %r5, [%rd6];"""
    )

    assert {0: "r", 1: "r"} == flags(report)


def test_struct_field_through_a_parameter_address() -> None:
    """`mov` of a struct's address and a load at an offset give that field."""
    report = report_of(
        "mov.b64 %rd8, k_param_0; ld.param.u64 %rd9, [%rd8+504]; st.global.u32 [%rd9], %r1;", "b8[512]"
    )

    assert {(0, 504): "w"} == flags(report)


def test_struct_copied_to_local_memory_and_indexed() -> None:
    """Any field of the copy may be meant when the index is not known."""
    report = report_of(
        """.local .align 8 .b8 depot[16]; .reg .b64 %SPL; mov.u64 %SPL, depot;
        ld.param.u64 %rd7, [k_param_0]; st.local.u64 [%SPL], %rd7;
        ld.param.u64 %rd6, [k_param_0+8]; st.local.u64 [%SPL+8], %rd6;
        ld.param.u32 %r1, [k_param_1]; mul.wide.s32 %rd9, %r1, 8; add.s64 %rd10, %SPL, %rd9;
        ld.local.u64 %rd11, [%rd10]; ld.f32 %f1, [%rd11];""",
        "b8[16] u32",
    )

    assert report.movable
    assert {0: "r", (0, 8): "r"} == flags(report)


def test_pointer_difference_is_no_base() -> None:
    """`out[(b - a) + tid]` does not touch a; `b[out - a]` looks the same, so b is reported with out."""
    report = report_of(
        pointers(0, 1, generic=True)
        + """ld.param.u64 %rd3, [k_param_2]; cvta.to.global.u64 %rd4, %rd3; cvt.u64.u32 %rd5, %r1;
        sub.s64 %rd6, %rd5, %rd1; add.s64 %rd7, %rd6, %rd2; add.s64 %rd8, %rd4, %rd7;
        st.global.u8 [%rd8], %rs1;"""
    )

    assert {1: "w", 2: "w"} == flags(report)


def test_rebasing_cancels_the_first_buffer() -> None:
    """`b + (p - a)` with p in a is an address in b."""
    report = report_of(
        pointers(0, 1)
        + THREAD
        + "add.s64 %rd30, %rd11, %rd20; sub.s64 %rd31, %rd30, %rd11; add.s64 %rd32, %rd12, %rd31;"
        + "st.global.f32 [%rd32], %f1;"
    )

    assert {1: "w"} == flags(report)


@pytest.mark.parametrize("scale", ["shl.b64 %rd30, %rd2, 2;", "mul.lo.s64 %rd30, %rd2, 12;"])
def test_scaled_scalar_is_no_buffer(scale: str) -> None:
    """A 64-bit stride times a constant is an offset."""
    added = "add.s64 %rd31, %rd30, %rd11; st.global.f32 [%rd31], %f1;"
    report = report_of(pointers(0) + "ld.param.u64 %rd2, [k_param_1];" + scale + added)

    assert {0: "w"} == flags(report)


def test_byte_offset_scalar_beside_a_converted_pointer_is_no_buffer() -> None:
    """An unscaled 64-bit scalar is an offset when the other addend is certainly a pointer."""
    report = report_of(
        pointers(0)
        + "ld.param.u64 %rd2, [k_param_1]; add.s64 %rd31, %rd2, %rd11; st.global.u8 [%rd31], %rs1;"
    )

    assert {0: "w"} == flags(report)


def test_two_unknown_addends_are_both_reported() -> None:
    """When nothing tells pointer from scalar, both are reported: sound before precise."""
    report = report_of(pointers(0, 1, generic=True) + "add.s64 %rd9, %rd1, %rd2; st.global.u8 [%rd9], %rs1;")

    assert {0: "w", 1: "w"} == flags(report)


def test_index_loaded_from_memory_is_not_indirect() -> None:
    """A scaled 64-bit index read from memory is an offset of the other buffer."""
    report = report_of(
        pointers(0, 1) + "ld.global.u64 %rd20, [%rd11]; shl.b64 %rd21, %rd20, 2;"
        "add.s64 %rd22, %rd12, %rd21; st.global.f32 [%rd22], %f1;"
    )

    assert report.movable
    assert {0: "r", 1: "w"} == flags(report)


def test_pointer_loaded_from_memory_is_indirect_with_its_table() -> None:
    """A pointer table makes the kernel immovable and names the table."""
    report = report_of(
        pointers(0, 1) + "ld.global.b64 { %rd30 }, [ %rd11 + 0 ]; cvt.u64.u32 %rd40, %r1;"
        "add.s64 %rd31, %rd30, %rd40; @%p1 ld.global.b16 { %rs1 }, [ %rd31 + 0 ];"
    )

    assert not report.movable
    assert ((("param", 0, 0),), True, False) == (
        report.indirect[0].tables,
        report.indirect[0].read,
        report.indirect[0].write,
    )


def test_linked_list_walk_settles_and_is_indirect() -> None:
    """A pointer chase in a loop ends the analysis with the list's head as the table."""
    report = report_of(
        pointers(0) + "$L: ld.global.u64 %rd11, [%rd11]; setp.ne.s64 %p1, %rd11, 0; @%p1 bra $L; "
        "st.global.u32 [%rd11], %r1;"
    )

    assert {(("param", 0, 0),)} == {i.tables for i in report.indirect}


def test_pointer_table_staged_in_shared_memory_by_an_async_copy_is_indirect() -> None:
    """What cp.async leaves in shared memory may be pointers."""
    report = report_of(
        pointers(0, 1) + "mov.u32 %r9, buf; cp.async.cg.shared.global [%r9], [%rd11], 16;"
        "st.shared.u64 [%r9+32], %rd12; ld.shared.u64 %rd30, [%r9+8]; st.global.u32 [%rd30], %r1;",
        before=".shared .align 16 .b8 buf[64];",
    )

    assert not report.movable
    assert report.indirect[0].tables == (("param", 0, 0),)


def test_integer_parameter_masked_to_a_pointer() -> None:
    """Aligning an address down keeps its base."""
    report = report_of(
        "ld.param.u64 %rd1, [k_param_0]; and.b64 %rd3, %rd1, -8; cvta.to.global.u64 %rd4, %rd3;"
        "st.global.u32 [%rd4], %r2;"
    )

    assert report.movable
    assert {0: "w"} == flags(report)


def test_pointers_mixed_bitwise_stop_the_kernel() -> None:
    """The exclusive or of two addresses is followed by nobody."""
    report = report_of(pointers(0, 1, generic=True) + "xor.b64 %rd3, %rd1, %rd2; ld.global.u32 %r1, [%rd3];")

    assert not report.movable


def test_pointer_shuffled_in_two_halves_is_followed() -> None:
    """A 64-bit shuffle moves two 32-bit halves of another thread's pointer."""
    report = report_of(
        pointers(0) + THREAD + "add.s64 %rd30, %rd11, %rd20; mov.b64 {%r10, %r11}, %rd30;"
        "shfl.sync.idx.b32 %r12|%p1, %r10, 0, 31, -1; shfl.sync.idx.b32 %r13|%p2, %r11, 0, 31, -1;"
        "mov.b64 %rd31, {%r12, %r13}; st.global.f32 [%rd31], %f1;"
    )

    assert report.movable
    assert {0: "w"} == flags(report)


def test_or_of_disjoint_bits_is_a_sum() -> None:
    """Triton adds index bits with `or`: the extent stays affine."""
    report = report_of(
        pointers(0)
        + """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; shl.b32 %r3, %r2, 2; and.b32 %r5, %r1, 96;
        shl.b32 %r6, %r5, 4; or.b32 %r7, %r3, %r6; mul.wide.u32 %rd5, %r7, 4; add.s64 %rd6, %rd11, %rd5;
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd6];"""
    )

    assert "|" not in report.accesses[0].extent_text
    assert "[0, 16)" in report.accesses[0].extent_text


def test_vector_load_of_pointers_gives_each_its_field() -> None:
    """`ld.param.v2.u64` reads two pointers of a struct."""
    report = report_of(
        "ld.param.v2.u64 {%rd1, %rd2}, [k_param_0+16]; ld.global.f32 %f1, [%rd1]; st.global.f32 [%rd2], %f1;",
        "b8[32]",
    )

    assert {(0, 16): "r", (0, 24): "w"} == flags(report)


def test_pointer_read_in_two_words_is_one_parameter() -> None:
    """Two 32-bit loads of a parameter put together are the pointer."""
    report = report_of(
        "ld.param.u32 %r1, [k_param_0]; ld.param.u32 %r2, [k_param_0+4]; mov.b64 %rd1, {%r1, %r2};"
        "st.global.f32 [%rd1], %f1;"
    )

    assert {0: "w"} == flags(report)


def test_triton_default_value_does_not_hide_the_load() -> None:
    """`mov r, 0; @p ld r` defines the register twice; both definitions reach the use."""
    report = report_of(
        pointers(0, 1)
        + "mov.u64 %rd30, 0x0; @%p1 ld.global.b64 { %rd30 }, [ %rd11 + 0 ]; st.global.u32 [%rd30], %r1;"
    )

    assert report.indirect
    assert not report.movable


def test_null_alternative_is_no_access() -> None:
    """A pointer that may be null is accessed only where it is not."""
    report = report_of(
        pointers(0) + THREAD + "selp.b64 %rd30, %rd11, 0, %p1; add.s64 %rd31, %rd30, %rd20;"
        "st.global.f32 [%rd31], %f1;"
    )

    assert report.movable
    assert {0: "w"} == flags(report)


def test_struct_copied_to_local_memory_in_a_loop_keeps_its_fields() -> None:
    """A loop that copies a struct word by word leaves each field where it was."""
    report = report_of(
        """.local .align 8 .b8 depot[64]; mov.u64 %rd1, depot; mov.b64 %rd2, k_param_0; mov.u32 %r1, 0;
        $L: ld.param.v2.u32 {%r4, %r5}, [%rd2]; st.local.v2.u32 [%rd1], {%r4, %r5};
        add.s64 %rd1, %rd1, 8; add.s64 %rd2, %rd2, 8; add.s32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, 8; @%p1 bra $L;
        mov.u64 %rd5, depot; ld.local.u64 %rd6, [%rd5+16]; st.f32 [%rd6], %f1;""",
        "b8[64]",
    )

    assert report.movable
    assert {(0, 16): "w"} == flags(report)


def test_difference_hidden_in_a_selection_is_looked_into() -> None:
    """`p + (q - p)` is an address in q, whichever of two pointers p was."""
    report = report_of(
        pointers(0, 1, 2, generic=True)
        + """ld.global.f32 %f1, [%rd1]; ld.global.f32 %f1, [%rd2]; selp.b64 %rd5, %rd1, %rd2, %p1;
        sub.s64 %rd6, %rd3, %rd5; add.s64 %rd7, %rd5, %rd6; st.global.f32 [%rd7], %f1;"""
    )

    assert report.access(2) is not None
    assert "w" in flags(report)[2]
