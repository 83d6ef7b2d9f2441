"""Extents against brute force: random index arithmetic, guards and loops, every thread simulated."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_factory import pointers, report_of
from sampling import examples
from tessera_ptx import LaunchConfig

WIDTH = 4
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "ne": operator.ne,
}


@dataclass(frozen=True)
class Shape:
    """`for (j = start; ; j += step) { if (i < guard) x[i * by + j * stride + shift]; } while (j rel n)`."""

    per_thread: int
    per_block: int
    mask: int
    guard: int
    by: int
    stride: int
    shift: int
    start: int
    step: int
    relation: str
    test_first: bool


def code(shape: Shape) -> str:
    """The kernel: parameter 0 the buffer, parameter 3 the bound n."""
    test = f"setp.{shape.relation}.s32 %p1, %r5, %r9;"
    first = f"{test} @!%p1 bra $END;" if shape.test_first else ""
    masked = f"and.b32 %r1, %r1, {shape.mask};" if shape.mask else ""
    return (
        pointers(0)
        + f"""mov.u32 %r1, %tid.x; {masked} mov.u32 %r2, %ctaid.x; ld.param.u32 %r9, [k_param_3];
        mul.lo.s32 %r3, %r1, {shape.per_thread}; mad.lo.s32 %r4, %r2, {shape.per_block}, %r3;
        setp.ge.s32 %p2, %r4, {shape.guard}; @%p2 bra $END;
        mov.u32 %r5, {shape.start}; {first}
        $L: mul.lo.s32 %r6, %r4, {shape.by}; mad.lo.s32 %r7, %r5, {shape.stride}, %r6;
        add.s32 %r8, %r7, {shape.shift}; mul.wide.s32 %rd5, %r8, 4; add.s64 %rd6, %rd11, %rd5;
        st.global.f32 [%rd6], %f1; add.s32 %r5, %r5, {shape.step}; {test} @%p1 bra $L;
        $END:"""
    )


def touched(shape: Shape, grid: int, block: int, n: int) -> set[int] | None:
    """The bytes the kernel writes; None when a loop does not end soon."""
    found: set[int] = set()
    holds = RELATIONS[shape.relation]
    for cta in range(grid):
        for tid in range(block):
            i = (tid & shape.mask if shape.mask else tid) * shape.per_thread + cta * shape.per_block
            if i >= shape.guard:
                continue
            j = shape.start
            if shape.test_first and not holds(j, n):
                continue
            for _ in range(200):
                at = WIDTH * (i * shape.by + j * shape.stride + shape.shift)
                found |= set(range(at, at + WIDTH))
                j += shape.step
                if not holds(j, n):
                    break
            else:
                return None
    return found


SHAPES = st.builds(
    Shape,
    per_thread=st.integers(-3, 4),
    per_block=st.integers(0, 40),
    mask=st.sampled_from([0, 0, 1, 3, 7, 6]),
    guard=st.integers(-5, 60),
    by=st.integers(-2, 5),
    stride=st.integers(-3, 6),
    shift=st.integers(-9, 9),
    start=st.integers(-4, 12),
    step=st.sampled_from([1, 2, 3, 4, -1, -2, -4]),
    relation=st.sampled_from(sorted(RELATIONS)),
    test_first=st.booleans(),
)


@settings(max_examples=examples(500, 100), deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(1, 9), st.integers(-6, 24))
def test_extent_covers_every_byte(shape: Shape, grid: int, block: int, n: int) -> None:
    """No thread touches a byte outside the extent, and an exact extent has no byte that none touches."""
    bytes_ = touched(shape, grid, block, n)
    if bytes_ is None:
        return
    access = report_of(code(shape)).access(0)
    assert access is not None
    given_n: list[dict[int | tuple[int, int], int]] = [{3: n}, {}]
    for params in given_n:
        found = access.extent.resolve(LaunchConfig((grid, 1, 1), (block, 1, 1), params))

        assert all(found.covers(b, b + 1) for b in bytes_)
        if found.exact:
            assert len(bytes_) == found.num_bytes
