"""Regions: strided sets of bytes, compared byte by byte."""

from hypothesis import example, given
from hypothesis import strategies as st

from tessera.ir import Region, region

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(-6, 6)), max_size=3)


def touched(start: int, item_bytes: int, dims: list[tuple[int, int]]) -> set[int]:
    """The bytes of a strided set, one by one."""
    starts = [start]
    for n, stride in dims:
        starts = [s + i * stride for s in starts for i in range(n)]
    return {s + i for s in starts for i in range(item_bytes)}


def test_contiguous_dimensions_become_one_range() -> None:
    """A row-major 4 x 8 matrix of floats is 128 bytes without a gap."""
    assert Region(0, 128) == region(0, 4, ((4, 32), (8, 4)))


def test_a_transposed_matrix_is_the_same_range() -> None:
    """The order of dimensions does not matter to which bytes are touched."""
    assert region(0, 4, ((4, 32), (8, 4))) == region(0, 4, ((8, 4), (4, 32)))


def test_an_expanded_dimension_touches_its_bytes_once() -> None:
    """A stride of zero repeats bytes and adds none."""
    assert Region(0, 4) == region(0, 4, ((100, 0),))


def test_an_empty_view_touches_nothing() -> None:
    """A dimension of size zero leaves no region."""
    assert region(0, 4, ((0, 4), (8, 4))) is None


def test_left_and_right_columns_do_not_overlap() -> None:
    """Two halves of every row interleave in memory and still share no byte."""
    left, right = region(0, 4, ((4, 32), (4, 4))), region(16, 4, ((4, 32), (4, 4)))
    assert left is not None
    assert right is not None

    assert not left.overlaps(right)


@given(st.integers(1, 4), DIMS, st.integers(1, 4), DIMS, st.integers(0, 20))
def test_overlap_agrees_with_counting_bytes(
    item_a: int, dims_a: list[tuple[int, int]], item_b: int, dims_b: list[tuple[int, int]], shift: int
) -> None:
    """For regions small enough to list, overlap is exact."""
    a, b = region(100, item_a, tuple(dims_a)), region(100 + shift, item_b, tuple(dims_b))
    shared = touched(100, item_a, dims_a) & touched(100 + shift, item_b, dims_b)

    assert bool(shared) == (a is not None and b is not None and a.overlaps(b))


@given(st.integers(1, 4), DIMS)
def test_start_and_stop_enclose_exactly(item: int, dims: list[tuple[int, int]]) -> None:
    """start is the first byte touched and stop is one past the last."""
    found, expected = region(100, item, tuple(dims)), touched(100, item, dims)

    assert (found is None) == (not expected)
    if found is not None:
        assert (min(expected), max(expected) + 1) == (found.start, found.stop)


@given(st.integers(1, 4), DIMS, st.integers(1, 4), DIMS)
def test_covers_is_never_wrong_when_it_says_yes(
    item_a: int, dims_a: list[tuple[int, int]], item_b: int, dims_b: list[tuple[int, int]]
) -> None:
    """A region that covers another contains all of its bytes."""
    a, b = region(100, item_a, tuple(dims_a)), region(100, item_b, tuple(dims_b))
    if a is not None and b is not None and a.covers(b):
        assert touched(100, item_b, dims_b) <= touched(100, item_a, dims_a)


LARGE = st.lists(st.tuples(st.integers(2, 40), st.integers(1, 700)), min_size=1, max_size=3)


def columns(first: int, count: int, rows: int = 4096, width: int = 4096) -> Region:
    """A block of columns of a row-major matrix of floats."""
    found = region(first * 4, 4, ((rows, width * 4), (count, 4)))
    assert found is not None
    return found


def test_column_blocks_of_a_large_matrix_do_not_overlap() -> None:
    """Rows of one stride are compared by their distance, however many there are."""
    assert not columns(0, 2048).overlaps(columns(2048, 2048))


def test_column_blocks_that_share_a_column_overlap() -> None:
    """One common column is enough."""
    assert columns(0, 2049).overlaps(columns(2048, 2048))


def test_heads_of_a_large_cache_do_not_overlap() -> None:
    """Slices along a middle dimension interleave at two strides."""
    heads = [region(h * 128 * 64 * 4, 4, ((64, 32 * 128 * 64 * 4), (64, 4), (9, 64 * 4))) for h in (3, 4)]
    assert heads[0] is not None
    assert heads[1] is not None

    assert not heads[0].overlaps(heads[1])


def test_what_is_too_dear_to_decide_overlaps() -> None:
    """Many rows at unlike strides: never False without proof."""
    odd, even = region(0, 1, ((200_000, 1_000_000),)), region(1, 1, ((200_000, 1_000_002),))
    assert odd is not None
    assert even is not None

    assert odd.overlaps(even)


@example(1, [(13, 91)] * 3, 4, [(20, 98), (13, 98)], 1)
@given(st.integers(1, 9), LARGE, st.integers(1, 9), LARGE, st.integers(0, 2000))
def test_overlap_of_wide_strides_agrees_with_counting_bytes(
    item_a: int, dims_a: list[tuple[int, int]], item_b: int, dims_b: list[tuple[int, int]], shift: int
) -> None:
    """Rows that reach past one another, unlike strides and dense sets are all decided exactly."""
    a, b = region(0, item_a, tuple(dims_a)), region(shift, item_b, tuple(dims_b))
    shared = touched(0, item_a, dims_a) & touched(shift, item_b, dims_b)

    assert a is not None
    assert b is not None
    assert bool(shared) == a.overlaps(b)


@given(st.integers(1, 9), LARGE, st.integers(1, 9), LARGE, st.integers(0, 2000))
def test_covering_wide_strides_is_never_wrong_when_it_says_yes(
    item_a: int, dims_a: list[tuple[int, int]], item_b: int, dims_b: list[tuple[int, int]], shift: int
) -> None:
    """A strided region that covers another contains all of its bytes."""
    a, b = region(0, item_a, tuple(dims_a)), region(shift, item_b, tuple(dims_b))
    if a is not None and b is not None and a.covers(b):
        assert touched(shift, item_b, dims_b) <= touched(0, item_a, dims_a)


def test_a_column_block_covers_rows_of_itself() -> None:
    """Every second row of a narrower block lies in the block."""
    inner = region(4 * 4, 4, ((2048, 2 * 4096 * 4), (8, 4)))
    assert inner is not None

    assert columns(0, 16).covers(inner)
    assert not columns(8, 16).covers(inner)


def test_rows_that_reach_past_the_next_leave_gaps_where_they_are() -> None:
    """Against every dense range, a region whose rows interleave overlaps iff they share a byte."""
    dims = [(4, 10), (5, 37)]
    a, mine = region(0, 1, tuple(dims)), touched(0, 1, dims)
    b, other = region(0, 1, ((5, 10), (5, 7))), touched(0, 1, [(5, 10), (5, 7)])
    assert a is not None
    assert b is not None
    for start in range(120):
        for size in range(1, 40):
            dense, span = Region(start, size), set(range(start, start + size))

            assert bool(mine & span) == a.overlaps(dense) == dense.overlaps(a)
            assert bool(other & span) == b.overlaps(dense) == dense.overlaps(b)
