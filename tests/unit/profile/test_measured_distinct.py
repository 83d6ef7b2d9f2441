"""Which launches are alike, and what each finds in the cache."""

from dataclasses import replace

import msgspec

from profile_factories import TraceMaker
from tessera.ir import Buffer, BufferKind, Kernel, Origin, Symbol, Trace
from tessera.profile.measured import cold_buffers, distinct

CACHE = 1 << 20


def chain(*sizes: int) -> Trace:
    """One unary operator after another, each on the last one's result, elements of four bytes."""
    make = TraceMaker()
    last = make.tensor((sizes[0],), "float32")
    for size in sizes:
        result = make.tensor((size,), "float32")
        make.launch("aten.relu.default", (last,), result)
        last = result
    return make.done()


def test_equal_launches_are_timed_once() -> None:
    """Shapes and kernel alike: one entry, whichever buffers they use."""
    groups = distinct(chain(64, 64, 64, 64), CACHE)

    # The first finds its input cold, the others find the last result in the cache.
    assert [(0,), (1, 2, 3)] == [g.launches for g in groups]


def test_another_shape_is_another_launch() -> None:
    """Sizes are part of the key."""
    assert 3 == len(distinct(chain(64, 128, 256), CACHE))


def test_the_recorded_device_does_not_matter() -> None:
    """A trace of a GPU and one of the CPU share measurements on a third device."""

    def trace(device: str) -> Trace:
        make = TraceMaker()
        out = make.tensor((8,), "float32")
        launch = make.launch("aten.arange.default", (8,), out)
        make.launches[0] = replace(launch, kwargs=(("device", Symbol("device", device)),))
        return make.done()

    assert distinct(trace("cuda:0"), CACHE)[0].key == distinct(trace("cpu"), CACHE)[0].key


def test_a_plain_argument_is_part_of_the_key() -> None:
    """The same shapes with another scalar may run another kernel."""

    def trace(dim: int) -> Trace:
        make = TraceMaker()
        make.launch("aten.sum.dim_IntList", (make.tensor((8, 8)), dim), make.tensor((8,)))
        return make.done()

    assert distinct(trace(0), CACHE)[0].key != distinct(trace(1), CACHE)[0].key


def test_ptx_kernels_of_one_name_are_told_apart_by_their_code() -> None:
    """Inductor gives the same name to different kernels."""

    def trace(ptx: str) -> Trace:
        make = TraceMaker()
        make.launch("triton_poi_0", (make.tensor((8,)),), make.tensor((8,)), origin=Origin.TRITON)
        return replace(make.done(), kernels=(Kernel("triton_poi_0", Origin.TRITON, ptx=ptx),))

    assert distinct(trace("a"), CACHE)[0].key != distinct(trace("b"), CACHE)[0].key


def test_arguments_that_share_memory_are_another_launch() -> None:
    """x * x reads half of what x * y reads."""
    make = TraceMaker()
    x, y = make.tensor((64,)), make.tensor((64,))
    make.launch("aten.mul.Tensor", (x, y), make.tensor((64,)))
    make.launch("aten.mul.Tensor", (x, x), make.tensor((64,)))
    make.launch("aten.mul.Tensor", (y, x), make.tensor((64,)))

    # Without a cache everything is cold, so that only the sharing differs.
    assert [(0, 2), (1,)] == [g.launches for g in distinct(make.done(), 0)]


def test_what_was_just_made_is_in_the_cache() -> None:
    """The first input is cold, the results are not."""
    trace = chain(64, 64)

    assert [{0}, set()] == [set(c) for c in cold_buffers(trace, CACHE)]


def test_what_much_else_has_passed_since_is_not() -> None:
    """After half a cache of other bytes, a result is cold again."""
    make = TraceMaker()
    early, out = make.tensor((64,), "float32"), make.tensor((64,), "float32")
    large, larger = (make.tensor((CACHE,), "float32") for _ in range(2))
    make.launch("aten.relu.default", (early,), out)
    make.launch("aten.relu.default", (large,), larger)
    make.launch("aten.relu.default", (out,), make.tensor((64,), "float32"))

    assert 1 in cold_buffers(make.done(), CACHE)[2]


def test_a_cache_that_was_touched_in_one_row_is_cold() -> None:
    """Writing one token's row does not bring in all the others."""
    make = TraceMaker()
    rows = make.tensor((1024, 64), "float32")
    one = msgspec.structs.replace(rows, shape=(1, 64), stride=(64, 1))
    make.launch("aten.relu.default", (make.tensor((1, 64), "float32"),), one)
    make.launch("aten.relu.default", (rows,), make.tensor((1024, 64), "float32"))
    trace = replace(make.done(), buffers=(Buffer("kv", BufferKind.STATE, 1024 * 256), *make.buffers[1:]))

    assert 0 in cold_buffers(trace, 1 << 24)[1]
