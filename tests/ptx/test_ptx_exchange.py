"""Pointers that a block's threads exchange through shared memory that others use too."""

import pytest

from ptx_factory import flags, make_module, pointers
from tessera_ptx import KernelReport, analyze

BEFORE = ".extern .shared .align 16 .b8 smem[];"
# A table of pointers lies where the pointer to parameter 1 goes afterwards.
START = (
    pointers(0, 1)
    + """mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 3; mov.b32 %r3, smem; add.s32 %r4, %r3, %r2;
ld.global.u64 %rd30, [%rd11]; st.shared.b64 [%r4], %rd30; bar.sync 0;
setp.eq.u32 %p1, %r1, 0;
"""
)
# Each thread reads what its neighbour stored.
TURN = "xor.b32 %r5, %r2, 8; add.s32 %r6, %r3, %r5;\n"
END = "ld.shared.b64 %rd40, [%r6]; st.global.u32 [%rd40], %r1;"


def report_of(body: str, size: int = 64) -> KernelReport:
    """The report of a kernel of blocks of that many threads."""
    text = make_module(START + TURN + body, before=BEFORE)
    return analyze(text.replace(")\n{", f")\n.reqntid {size}\n{{"))[0]


def test_a_load_sees_what_was_stored_before_the_barrier() -> None:
    """Every byte it reads was written over by some thread."""
    report = report_of("st.shared.b64 [%r4], %rd12; bar.sync 0;" + END)

    assert report.movable
    assert {0: "r", 1: "w"} == flags(report)


@pytest.mark.parametrize(
    "body",
    [
        "@%p1 st.shared.b64 [%r4], %rd12; bar.sync 0;",
        "st.shared.b64 [%r4+512], %rd12; bar.sync 0;",
        "st.shared.b64 [%r4], %rd12;",
        "st.shared.b64 [%r4], %rd12; bar.sync 0, 32;",
        "st.shared.b64 [%r4], %rd12; bar.warp.sync -1;",
        "st.shared.b64 [%r4], %rd12; bar.sync 0; @%p1 st.shared.b64 [%r6], %rd30;",
        "@%p1 bra $E; st.shared.b64 [%r4], %rd12; bar.sync 0; $E:",
        "$L: st.shared.b64 [%r4], %rd12; bar.sync 0; @%p1 bra $L;",
    ],
    ids=["guarded", "elsewhere", "no barrier", "some threads", "one warp", "after", "branch", "loop"],
)
def test_otherwise_it_may_see_what_was_there_before(body: str) -> None:
    """The table's pointers may still be in some of the bytes."""
    report = report_of(body + END)

    assert not report.movable
    assert [(("param", 0, 0),)] == [item.tables for item in report.indirect]


def test_a_barrier_of_one_warp_is_enough_for_a_block_of_one() -> None:
    """With 32 threads all of them wait."""
    assert report_of("st.shared.b64 [%r4], %rd12; bar.warp.sync -1;" + END, 32).movable
