"""Accesses of one launch: the analysis of its PTX with the launch's numbers put in."""

from ptx_factory import THREAD, make_module, pointers
from tessera.ir import Access, Buffer, BufferKind, Kernel, Launch, Origin, Region, View
from tessera.kernels.ptx import triton_accesses

COPY = f"""{pointers(0, 1)}{THREAD}add.s64 %rd21, %rd11, %rd20;
add.s64 %rd22, %rd12, %rd20;
ld.global.f32 %f1, [%rd21];
st.global.f32 [%rd22], %f1;"""
BUFFERS = [Buffer("x", BufferKind.INPUT, 4096), Buffer("y", BufferKind.TEMPORARY, 4096)]


def view(buffer: int, offset: int = 0) -> View:
    """The rest of a buffer from an element on."""
    return View(buffer, "float32", (1024 - offset,), (1,), offset)


def accesses(body: str, args: tuple[View | int, ...], params: str) -> tuple[tuple[Access, ...], str]:
    """Accesses of a launch of two blocks of 32 threads."""
    kernel = Kernel("k", Origin.TRITON, ptx=make_module(body, params))
    launch = Launch(0, args, (), (), (), grid=(2, 1, 1), block=(32, 1, 1))
    return triton_accesses(kernel, launch, BUFFERS, {1})


def test_bytes_are_those_of_the_launch() -> None:
    """64 threads read and write four bytes each, from where their views begin."""
    found, why = accesses(COPY, (view(0, 8), view(1)), "u64 u64")

    assert "" == why
    assert (Access(0, Region(32, 256), read=True), Access(1, Region(0, 256), write=True)) == found


def test_pointers_behind_the_arguments_must_not_be_touched() -> None:
    """Scratch memory has no buffer."""
    _, why = accesses(COPY, (view(0),), "u64 u64")

    assert "scratch" in why


def test_a_number_is_no_buffer() -> None:
    """An address that is computed by the program cannot be moved."""
    _, why = accesses(COPY, (view(0), 4096), "u64 u64")

    assert "no argument" in why


def test_numbers_of_the_launch_are_no_buffers() -> None:
    """The 64-bit addend that is a small number in the launch is the offset."""
    body = f"{pointers(0, 1, generic=True)}add.s64 %rd21, %rd1, %rd2; st.global.f32 [%rd21], %f1;"
    found, why = accesses(body, (view(0), 64), "u64 u64")

    assert "" == why
    assert (Access(0, Region(64, 4), write=True),) == found


def test_an_extent_ends_with_its_buffer() -> None:
    """An index read from memory may be anything; the bytes are those of the buffer, before the view too."""
    indexed = f"""{pointers(0, 1)}ld.global.s32 %r9, [%rd11]; mul.wide.s32 %rd20, %r9, 4096;
add.s64 %rd21, %rd12, %rd20;
st.global.f32 [%rd21], %f1;"""
    found, why = accesses(indexed, (view(0), view(1, 512)), "u64 u64")

    assert "" == why
    assert Access(1, Region(0, 4096), write=True) == found[1]


def test_what_is_no_ptx_is_a_reason() -> None:
    """Never silence."""
    launch = Launch(0, (), (), (), (), grid=(1, 1, 1), block=(32, 1, 1))
    _, why = triton_accesses(Kernel("k", Origin.TRITON, ptx="mov what"), launch, BUFFERS)

    assert "could not be read" in why


def test_a_write_that_may_leave_bytes_alone_reads_them() -> None:
    """Only in a buffer that holds something; an empty one has nothing to leave alone."""
    scattered = f"""{pointers(0, 1)}{THREAD}add.s64 %rd21, %rd11, %rd20;
ld.global.u32 %r9, [%rd21];
and.b32 %r10, %r9, 255;
mul.wide.u32 %rd23, %r10, 4;
add.s64 %rd22, %rd12, %rd23;
st.global.f32 [%rd22], %f1;"""
    kernel = Kernel("k", Origin.TRITON, ptx=make_module(scattered, "u64 u64"))
    launch = Launch(0, (view(0), view(1)), (), (), (), grid=(2, 1, 1), block=(32, 1, 1))
    full, _ = triton_accesses(kernel, launch, BUFFERS, frozenset())
    empty, _ = triton_accesses(kernel, launch, BUFFERS, {1})

    assert [(True, True)] == [(a.read, a.write) for a in full if a.buffer == 1]
    assert [(False, True)] == [(a.read, a.write) for a in empty if a.buffer == 1]
