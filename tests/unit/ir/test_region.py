"""Regions: strided sets of bytes, compared byte by byte."""

from hypothesis import given
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
