"""Extents: expressions that resolve to the bytes a launch touches."""

import pytest

from ptx_factory import THREAD, make_module, pointers, report_of
from tessera_ptx import Extent, Intervals, LaunchConfig, analyze


def extent(body: str, param: int = 0, params: str = "u64 u64 u64 u32") -> Extent:
    """The extent of one parameter."""
    access = report_of(body, params).access(param)
    assert access is not None
    return access.extent


def launch(grid: int = 1, block: int = 1, **params: int) -> LaunchConfig:
    """A one-dimensional launch; params as p3=100."""
    return LaunchConfig((grid, 1, 1), (block, 1, 1), {int(name[1:]): value for name, value in params.items()})


GUARDED = (
    pointers(0)
    + THREAD
    + """ld.param.u32 %r9, [k_param_3]; setp.ge.s32 %p1, %r4, %r9; @%p1 bra $END;
    add.s64 %rd30, %rd11, %rd20; st.global.f32 [%rd30], %f1;
    $END:"""
)


def test_one_element_per_thread_is_exact() -> None:
    """Without a guard every thread touches its element."""
    found = extent(pointers(0) + THREAD + "add.s64 %rd30, %rd11, %rd20; st.global.f32 [%rd30], %f1;")

    assert Intervals(((0, 4 * 4 * 64),), True) == found.resolve(launch(4, 64))


def test_guard_cuts_the_extent() -> None:
    """`if (i < n)` bounds the bytes by n."""
    assert Intervals(((0, 400),), True) == extent(GUARDED).resolve(launch(4, 64, p3=100))


def test_guard_beyond_the_grid_changes_nothing() -> None:
    """A bound that is always met leaves all threads."""
    assert Intervals(((0, 1024),), True) == extent(GUARDED).resolve(launch(4, 64, p3=100000))


def test_guard_that_is_never_met_leaves_no_bytes() -> None:
    """With n = 0 nothing is written."""
    assert () == extent(GUARDED).resolve(launch(4, 64, p3=0)).spans


def test_unknown_scalar_over_approximates() -> None:
    """When n is not given, the grid bounds the bytes and the result is not exact."""
    found = extent(GUARDED).resolve(launch(4, 64))

    assert (found.covers(0, 1024), found.exact) == (True, False)


def test_wrapping_index_covers_the_whole_type() -> None:
    """An index that may pass 2**31 is not taken for a small one."""
    body = (
        pointers(0)
        + THREAD
        + "mul.lo.s32 %r5, %r4, 65536; mul.wide.s32 %rd5, %r5, 4; add.s64 %rd6, %rd11, %rd5; "
        "st.global.f32 [%rd6], %f1;"
    )
    found = extent(body).resolve(launch(1024, 1024))

    assert found.covers(-4 * 2**31, 4 * 2**31 - 4)


def test_rows_with_gaps_are_several_intervals() -> None:
    """A strided matrix is one interval per row."""
    body = (
        pointers(0)
        + """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; ld.param.u32 %r9, [k_param_3];
    mad.lo.s32 %r4, %r2, %r9, %r1; mul.wide.s32 %rd20, %r4, 4; add.s64 %rd30, %rd11, %rd20;
    ld.global.f32 %f1, [%rd30];"""
    )

    assert ((0, 32), (400, 432), (800, 832)) == extent(body).resolve(launch(3, 8, p3=100)).spans


LOOP = (
    pointers(0)
    + """ld.param.u32 %r9, [k_param_3]; mov.u32 %r5, 0;
    $L: ld.global.f32 %f1, [%rd11]; add.s64 %rd11, %rd11, 4; add.s32 %r5, %r5, 1;
    setp.lt.s32 %p1, %r5, %r9; @%p1 bra $L;"""
)


def test_loop_that_walks_a_pointer_is_bounded_by_its_count() -> None:
    """The condition on the back edge bounds the pointer that moves with the counter."""
    found = extent(LOOP).resolve(launch(p3=10))

    assert ((0, 40),) == found.spans


def test_loop_always_runs_once() -> None:
    """A do-while loop runs its body at least once."""
    assert extent(LOOP).resolve(launch(p3=0)).covers(0, 4)


def test_loop_without_a_known_end_is_open() -> None:
    """An unknown count leaves the extent open above."""
    assert ((0, None),) == extent(LOOP).resolve(launch()).spans


def test_countdown_to_zero_is_bounded() -> None:
    """`do ... while (--n != 0)` runs n times."""
    body = (
        pointers(0)
        + """ld.param.u32 %r9, [k_param_3];
    $L: st.global.f32 [%rd11], %f1; add.s64 %rd11, %rd11, 4; add.s32 %r9, %r9, -1;
    setp.ne.s32 %p1, %r9, 0; @%p1 bra $L;"""
    )

    assert ((0, 32),) == extent(body).resolve(launch(p3=8)).spans


STEPS_OF_TWO = (
    pointers(0)
    + """ld.param.u32 %r9, [k_param_3]; mov.u32 %r5, 0;
    $L: mul.wide.u32 %rd5, %r5, 4; add.s64 %rd6, %rd11, %rd5; st.global.f32 [%rd6], %f1;
    add.s32 %r5, %r5, 2; setp.ne.s32 %p1, %r5, %r9; @%p1 bra $L;"""
)


@pytest.mark.parametrize(("end", "high"), [(6, 20), (5, 4 << 32), (0, 4 << 32)])
def test_loop_until_equal_ends_only_if_it_meets_its_end(end: int, high: int) -> None:
    """`do i += 2; while (i != n)` passes by an odd n and by 0."""
    assert high == extent(STEPS_OF_TWO).resolve(launch(p3=end)).spans[-1][1]


def test_condition_of_entering_a_loop_bounds_its_count() -> None:
    """`for (k = tid & 3; k != 0; --k)` runs at most three times."""
    body = (
        pointers(0)
        + THREAD
        + """and.b32 %r5, %r4, 3; setp.eq.s32 %p2, %r5, 0; @%p2 bra $END;
    $L: st.global.f32 [%rd11], %f1; add.s64 %rd11, %rd11, 4; add.s32 %r5, %r5, -1;
    setp.ne.s32 %p1, %r5, 0; @%p1 bra $L;
    $END:"""
    )

    assert ((0, 12),) == extent(body).resolve(launch(1, 32)).spans


def test_grid_stride_loop_is_bounded_by_its_condition() -> None:
    """A loop that starts at the thread's index and strides by the grid stays below n."""
    body = (
        pointers(0)
        + THREAD
        + """ld.param.u32 %r9, [k_param_3]; mov.u32 %r10, %nctaid.x; mul.lo.s32 %r11, %r10, %r3;
    setp.ge.s32 %p1, %r4, %r9; @%p1 bra $END;
    $L: mul.wide.s32 %rd5, %r4, 4; add.s64 %rd6, %rd11, %rd5; st.global.f32 [%rd6], %f1;
    add.s32 %r4, %r4, %r11; setp.lt.s32 %p2, %r4, %r9; @%p2 bra $L;
    $END:"""
    )
    found = extent(body).resolve(launch(2, 32, p3=1000))

    assert found.covers(0, 4000)
    assert found.spans[-1][1] is not None
    assert found.spans[-1][1] <= 4 * (1000 + 64 + 64)


def test_masked_lane_bits_resolve_exactly() -> None:
    """`tid & 31` of a 32-thread block is the thread itself."""
    body = (
        pointers(0) + "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mul.wide.u32 %rd5, %r2, 4; "
        "add.s64 %rd6, %rd11, %rd5; st.global.f32 [%rd6], %f1;"
    )

    assert Intervals(((0, 128),), True) == extent(body).resolve(launch(1, 32))


def test_guard_does_not_bound_another_threads_index() -> None:
    """A shuffle before `if (tid < n)` brings the index of a thread that may be beyond n."""
    body = (
        pointers(0)
        + """mov.u32 %r4, %tid.x; shfl.sync.down.b32 %r5, %r4, 1, 31, -1; mul.wide.u32 %rd20, %r5, 4;
        add.s64 %rd30, %rd11, %rd20; ld.param.u32 %r9, [k_param_3]; setp.ge.s32 %p1, %r4, %r9;
        @%p1 bra $END; st.global.f32 [%rd30], %f1;
        $END:"""
    )

    assert extent(body).resolve(launch(1, 32, p3=5)).covers(4, 24)


def test_gather_is_open() -> None:
    """An index from memory may be anything of its type."""
    body = (
        pointers(0, 1) + "ld.global.u32 %r5, [%rd12]; mul.wide.u32 %rd5, %r5, 4; add.s64 %rd6, %rd11, %rd5; "
        "ld.global.f32 %f1, [%rd6];"
    )
    found = extent(body).resolve(launch())

    assert (found.covers(0, 4 * 2**32), found.exact) == (True, False)


def test_vector_access_has_its_width() -> None:
    """A v4 load of floats is sixteen bytes."""
    assert ((0, 16),) == extent(pointers(0) + "ld.global.v4.f32 {%f1,%f2,%f3,%f4}, [%rd11];").resolve(
        launch()
    ).spans


def test_reqntid_bounds_threads() -> None:
    """The block size of the kernel's head is known without a launch."""
    text = make_module(pointers(0) + THREAD + "add.s64 %rd30, %rd11, %rd20; st.global.f32 [%rd30], %f1;")
    text = text.replace(")\n{", ")\n.reqntid 128\n{", 1)

    assert "128*ctaid.x" in analyze(text)[0].accesses[0].extent_text


@pytest.mark.parametrize("op", ["add.s64 %rd5, %rd11, %rd20;", "sub.s64 %rd5, %rd11, %rd20;"])
def test_direction_of_the_offset_is_kept(op: str) -> None:
    """Subtracting an offset walks down."""
    found = extent(pointers(0) + THREAD + op + "st.global.f32 [%rd5], %f1;").resolve(launch(1, 8))

    assert (((0, 32),) if "add" in op else ((-28, 4),)) == found.spans
