"""How the interpreter schedules lanes: divergence, barriers, collectives, faults."""

from typing import Any

import numpy as np
import pytest

from tessera_ptx.interp import (
    BadLaunch,
    Deadlock,
    InterpreterFault,
    Offset,
    OutOfBounds,
    UnknownInstruction,
    run,
)

Array = np.ndarray[Any, np.dtype[Any]]
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def kernel(body: str, registers: str = "", params: str = ".param .u64 out") -> str:
    """A kernel `k` with the address of out[tid] in %o, tid in %t."""
    return f"""{HEAD}.visible .entry k({params}) {{
.reg .b64 %o, %a<8>; .reg .b32 %t, %c, %n, %x<16>; .reg .pred %p<8>; .reg .f32 %f<8>; {registers}
ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;
mad.lo.u32 %x15, %c, %n, %t; mad.wide.u32 %o, %x15, 4, %o;
{body}
ret; }}"""


def outcome(body: str, block: int = 64, grid: int = 1, registers: str = "", **options: Any) -> Array:
    """What the lanes of a launch stored."""
    out = np.zeros(grid * block, np.uint32)
    done: Array = run(kernel(body, registers), "k", grid, block, [out], **options).arrays[0]
    return done


def test_lanes_meet_behind_a_branch() -> None:
    """Behind if and else all lanes of a warp run together again."""
    body = """setp.lt.u32 %p1, %t, 5; @%p1 bra low; mov.u32 %x1, 1; bra.uni join; low: mov.u32 %x1, 2;
    join: activemask.b32 %x2; st.global.u32 [%o], %x2;"""

    assert (outcome(body) == 0xFFFFFFFF).all()


def test_lanes_are_apart_inside_a_branch() -> None:
    """Inside a branch only its own lanes are active."""
    body = """setp.lt.u32 %p1, %t, 5; mov.u32 %x2, 0; @!%p1 bra join; activemask.b32 %x2;
    join: st.global.u32 [%o], %x2;"""

    assert [31] * 5 + [0] * 27 == outcome(body, 32).tolist()


def test_lanes_meet_behind_a_loop() -> None:
    """Lanes that leave a loop at different times meet at its end."""
    body = """mov.u32 %x1, 0; loop: add.u32 %x1, %x1, 1; setp.le.u32 %p1, %x1, %t; @%p1 bra loop;
    activemask.b32 %x2; st.global.u32 [%o], %x2;"""

    assert (outcome(body, 32) == 0xFFFFFFFF).all()


def test_divergent_lanes_use_the_same_barrier() -> None:
    """Two branches with a barrier each: the barrier joins them."""
    body = """setp.lt.u32 %p1, %t, 32; @%p1 bra low; st.shared.u32 [s], 7; bar.sync 0; bra.uni join;
    low: bar.sync 0; join: ld.shared.u32 %x1, [s]; st.global.u32 [%o], %x1;"""

    assert (outcome(body, registers=".shared .u32 s;") == 7).all()


def test_named_barrier_with_a_count() -> None:
    """A barrier of 32 threads joins a producer warp that arrives and a consumer warp that waits."""
    body = """setp.lt.u32 %p1, %t, 32; @%p1 bra consumer;
    st.shared.u32 [s], 9; bar.arrive 1, 64; bra.uni done;
    consumer: bar.sync 1, 64; ld.shared.u32 %x1, [s]; st.global.u32 [%o], %x1; done:"""

    assert (outcome(body, registers=".shared .u32 s;")[:32] == 9).all()


def test_exited_lanes_are_not_waited_for() -> None:
    """A barrier does not wait for threads that have left."""
    body = "setp.ge.u32 %p1, %t, 40; @%p1 exit; bar.sync 0; st.global.u32 [%o], 1;"

    assert [1] * 40 + [0] * 24 == outcome(body).tolist()


def test_reducing_barrier() -> None:
    """bar.red counts the predicate over the whole block, each block for itself."""
    body = """setp.lt.u32 %p1, %t, 10; bar.red.popc.u32 %x1, 0, %p1; bar.red.and.pred %p2, 0, %p1;
    bar.red.or.pred %p3, 0, %p1; selp.u32 %x2, 100, 0, %p2; selp.u32 %x3, 1000, 0, %p3;
    add.u32 %x1, %x1, %x2; add.u32 %x1, %x1, %x3; st.global.u32 [%o], %x1;"""

    assert (outcome(body, grid=2) == 1010).all()


def test_barrier_that_never_completes() -> None:
    """A count that never comes together is a deadlock, named with its line."""
    body = "setp.lt.u32 %p1, %t, 32;\n@%p1 bar.sync 1, 64;\nbar.sync 0;"

    with pytest.raises(Deadlock, match=r"x\.ptx:\d+: lanes wait at line 9, 10"):
        outcome(body, file="x.ptx")


def test_spinning_lanes_let_others_run() -> None:
    """A warp that spins on memory does not keep the warp that writes it from running."""
    body = """setp.lt.u32 %p1, %t, 32; @!%p1 bra write;
    spin: ld.volatile.shared.u32 %x1, [s]; setp.eq.u32 %p2, %x1, 0; @%p2 bra spin; bra.uni done;
    write: st.volatile.shared.u32 [s], 3; mov.u32 %x1, 3; done: st.global.u32 [%o], %x1;"""

    assert (outcome(body, registers=".shared .u32 s;") == 3).all()


def test_endless_loop_is_stopped() -> None:
    """A loop without an end runs into the step limit."""
    with pytest.raises(Deadlock, match="step limit"):
        outcome("loop: add.u32 %x1, %x1, 1; bra.uni loop;", max_steps=10_000)


def test_shuffle_waits_for_its_members() -> None:
    """Lanes that come to a shuffle along different ways exchange values there."""
    body = """setp.lt.u32 %p1, %t, 16; mul.lo.u32 %x1, %t, 10; @%p1 bra a; add.u32 %x1, %x1, 1; a:
    shfl.sync.bfly.b32 %x2, %x1, 16, 31, -1; st.global.u32 [%o], %x2;"""
    t = np.arange(32) ^ 16

    assert (10 * t + (t >= 16)).tolist() == outcome(body, 32).tolist()


def test_shuffle_modes() -> None:
    """up, down and idx read within their segment, lanes outside keep their own value."""
    body = """shfl.sync.up.b32 %x1|%p1, %t, 3, 0, -1; shfl.sync.down.b32 %x2, %t, 30, 31, -1;
    shfl.sync.idx.b32 %x3, %t, 5, 0x181f, -1; selp.u32 %x4, 1000000, 0, %p1;
    mad.lo.u32 %x1, %x2, 100, %x1; mad.lo.u32 %x1, %x3, 10000, %x1;
    add.u32 %x1, %x1, %x4; st.global.u32 [%o], %x1;"""
    t = np.arange(32)
    up, down, index = np.where(t >= 3, t - 3, t), np.where(t + 30 < 32, t + 30, t), (t & 24) | 5

    want = up + 100 * down + 10000 * index + np.where(t >= 3, 1_000_000, 0)
    assert want.tolist() == outcome(body, 32).tolist()


def test_votes_of_a_part_of_a_warp() -> None:
    """A vote counts its members only."""
    body = """setp.lt.u32 %p1, %t, 20; @!%p1 bra out; setp.gt.u32 %p2, %t, 15;
    vote.sync.ballot.b32 %x1, %p2, 0xFFFFF; st.global.u32 [%o], %x1; out:"""

    assert [0xF0000] * 20 + [0] * 12 == outcome(body, 32).tolist()


def test_atomics_take_turns() -> None:
    """Lanes that update one address get different old values, and no update is lost, also across blocks."""
    source = kernel("ld.param.u64 %a1, [count]; atom.global.add.u32 %x1, [%a1], 2; st.global.u32 [%o], %x1;",
                    params=".param .u64 out, .param .u64 count")  # fmt: skip
    result = run(source, "k", 3, 50, [np.zeros(150, np.uint32), np.zeros(1, np.uint32)])

    assert [300] == result.arrays[1].tolist()
    assert list(range(0, 300, 2)) == sorted(result.arrays[0].tolist())


def test_batches_give_the_same_result() -> None:
    """Running blocks a few at a time or all together makes no difference."""
    body = "mul.lo.u32 %x1, %x15, 3; st.global.u32 [%o], %x1;"
    together, apart = outcome(body, 100, 7), outcome(body, 100, 7, lanes_at_once=256)

    assert (together == apart).all()
    assert (together == 3 * np.arange(700)).all()


def test_touched_bytes_are_exact() -> None:
    """Reads, writes and updates are marked byte by byte."""
    source = kernel(
        """ld.param.u64 %a1, [in]; ld.global.u8 %x1, [%a1+3]; ld.global.v2.u32 {%x2, %x3}, [%a1+8];
        st.global.u16 [%o], %x1; red.global.add.u32 [%a1+16], 1;""",
        params=".param .u64 out, .param .u64 in",
    )
    result = run(source, "k", 1, 1, [np.zeros(1, np.uint32), np.zeros(5, np.uint32)])

    assert [3, *range(8, 16)] == np.flatnonzero(result.touched(1).read).tolist()
    assert list(range(16, 20)) == np.flatnonzero(result.touched(1).atomic).tolist()
    assert [0, 1] == np.flatnonzero(result.touched(0).write).tolist()
    assert not result.touched(1).write.any()


def test_out_of_bounds_names_line_thread_and_buffer() -> None:
    """One byte beyond a buffer is refused, with the place, the thread and the buffer."""
    body = "add.u64 %o, %o, 4;\nst.global.u32 [%o], 1;"

    with pytest.raises(OutOfBounds, match=r"x\.ptx:9: .*byte 256 of 0 \(256 bytes\).*thread \(63, 0, 0\)"):
        outcome(body, file="x.ptx")


def test_null_pointer_is_out_of_bounds() -> None:
    """Address zero belongs to no buffer."""
    with pytest.raises(OutOfBounds, match="outside every buffer"):
        outcome("mov.u64 %o, 0; st.global.u32 [%o], 1;")


def test_misaligned_access() -> None:
    """An access must be aligned to its size."""
    with pytest.raises(OutOfBounds, match="misaligned"):
        outcome("add.u64 %o, %o, 2; setp.eq.u32 %p1, %t, 0; @%p1 st.global.u32 [%o], 1;")


def test_shared_memory_has_an_end() -> None:
    """Shared memory is checked as well."""
    with pytest.raises(OutOfBounds, match="shared"):
        outcome("st.shared.u32 [s+4096], 1;", registers=".shared .u32 s;")


def test_unknown_instruction_names_line() -> None:
    """An instruction without a rule stops the launch when a lane gets there, and only then."""
    with pytest.raises(UnknownInstruction, match=r"x\.ptx:8: .*'frobnicate\.u32'"):
        outcome("frobnicate.u32 %x1, %x2;", file="x.ptx")

    assert (outcome("bra.uni over; frobnicate.u32 %x1, %x2; over: st.global.u32 [%o], 1;") == 1).all()


def test_trap() -> None:
    """A kernel that traps raises."""
    with pytest.raises(InterpreterFault, match="trapped"):
        outcome("trap;")


def test_wrong_launches() -> None:
    """Unknown kernels, too many arguments and impossible blocks are refused."""
    source = kernel("")

    with pytest.raises(BadLaunch, match="no kernel 'nope'; the module has: k"):
        run(source, "nope", 1, 1, [])
    with pytest.raises(BadLaunch, match="2 arguments"):
        run(source, "k", 1, 1, [1, 2])
    with pytest.raises(BadLaunch, match="1025 threads"):
        run(source, "k", 1, 1025, [np.zeros(1)])
    with pytest.raises(BadLaunch, match="no launch shape"):
        run(source, "k", 0, 1, [np.zeros(1)])


def test_one_array_twice_is_one_buffer() -> None:
    """Two pointers into one array alias; arguments themselves stay unchanged."""
    source = kernel("ld.param.u64 %a1, [in]; ld.global.u32 %x1, [%a1]; st.global.u32 [%o], %x1;",
                    params=".param .u64 out, .param .u64 in")  # fmt: skip
    data = np.array([1, 2], np.uint32)
    result = run(source, "k", 1, 1, [data, Offset(data, 4)])

    assert [2, 2] == result.arrays[0].tolist()
    assert [1, 2] == data.tolist()
    assert ("0", 4) == result.pointers[1, 0]
    assert list(range(4, 8)) == np.flatnonzero(result.touched(1).read).tolist()


def test_same_launch_twice_is_the_same() -> None:
    """A module keeps no state between launches."""
    source = (
        HEAD
        + """.global .u32 seen = 5;
.visible .entry k(.param .u64 out) { .reg .b64 %o; .reg .b32 %x;
ld.param.u64 %o, [out]; atom.global.add.u32 %x, [seen], 1; st.global.u32 [%o], %x; ret; }"""
    )
    values = [int(run(source, "k", 1, 1, [np.zeros(1, np.uint32)]).arrays[0][0]) for _ in range(2)]

    assert [5, 5] == values
