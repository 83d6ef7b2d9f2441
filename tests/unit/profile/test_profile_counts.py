"""Work is counted from a launch's own shapes and accesses."""

import math
from dataclasses import replace

import pytest

from profile_factories import TraceMaker, access, attention_trace, gemm_trace, unary_trace
from tessera.ir import Access, Kernel, Launch, Origin, Trace, View, region
from tessera.profile import OpClass, Work, class_of, works
from tessera.profile.counts import is_zero_size


def only(trace: Trace) -> Work:
    """The work of the single launch of a trace."""
    (work,) = works(trace)
    return work


def test_mm_counts_two_operations_a_product_and_each_matrix_once() -> None:
    """An m x n x k product is 2mnk operations over its three matrices."""
    work = only(gemm_trace(8, 16, 32))

    num_bytes = 2 * (8 * 32 + 32 * 16 + 8 * 16)
    assert Work(OpClass.GEMM, "bfloat16", 2.0 * 8 * 16 * 32, num_bytes, (1, 8, 16, 32)) == work


@pytest.mark.parametrize(
    ("name", "shapes", "out", "counted"),
    [
        ("aten.addmm.default", [(16,), (8, 32), (32, 16)], (8, 16), (1, 8, 16, 32)),
        ("aten.bmm.default", [(4, 8, 32), (4, 32, 16)], (4, 8, 16), (4, 8, 16, 32)),
        ("aten.baddbmm.default", [(4, 8, 16), (4, 8, 32), (4, 32, 16)], (4, 8, 16), (4, 8, 16, 32)),
        ("aten.addbmm.default", [(8, 16), (4, 8, 32), (4, 32, 16)], (8, 16), (4, 8, 16, 32)),
        ("aten.linear.default", [(2, 8, 32), (16, 32)], (2, 8, 16), (1, 16, 16, 32)),
        ("aten.matmul.default", [(2, 8, 32), (32, 16)], (2, 8, 16), (1, 16, 16, 32)),
        ("aten.mv.default", [(8, 32), (32,)], (8,), (1, 8, 1, 32)),
    ],
)
def test_every_gemm_form_is_counted(
    name: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], counted: tuple[int, ...]
) -> None:
    """Each overload of a matrix product has the operations and the shape of its product."""
    make = TraceMaker()
    make.launch(name, tuple(make.tensor(s) for s in shapes), make.tensor(out))
    work = only(make.done())

    assert (OpClass.GEMM, 2 * math.prod(counted), counted) == (work.op, work.flops, work.shape)


def test_experts_are_a_class_of_their_own() -> None:
    """A grouped GEMM counts every row once, and keeps how many groups there are."""
    make = TraceMaker()
    make.launch(
        "aten._grouped_mm.default", (make.tensor((8, 32)), make.tensor((4, 32, 16))), make.tensor((8, 16))
    )
    work = only(make.done())

    assert (OpClass.GROUPED, 2 * 8 * 16 * 32, (4, 8, 16, 32)) == (work.op, work.flops, work.shape)


def test_experts_that_no_row_reaches_are_not_read() -> None:
    """Two rows can visit two of eight experts at most."""
    make = TraceMaker()
    rows, experts, out = make.tensor((2, 32)), make.tensor((8, 32, 16)), make.tensor((2, 16))
    make.launch("aten._grouped_mm.default", (rows, experts), out)

    assert 2 * (2 * 32 + 2 * 32 * 16 + 2 * 16) == only(make.done()).num_bytes


def test_attention_of_one_query_is_decode() -> None:
    """A single query over a cache streams it; many queries compute."""
    ops = [only(attention_trace(1, 8, queries, 256)).op for queries in (1, 256)]

    assert [OpClass.DECODE, OpClass.PREFILL] == ops


def test_causal_attention_counts_half_the_square() -> None:
    """With a causal mask, query i meets i + 1 keys."""
    full, causal = (only(attention_trace(1, 1, 64, 64, flag)).flops for flag in (False, True))

    assert (4 * 128 * 64 * 64, 4 * 128 * (64 * 65 / 2)) == (full, causal)


@pytest.mark.parametrize(
    "name",
    [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten.scaled_dot_product_attention.default",
    ],
)
def test_every_attention_overload_is_known(name: str) -> None:
    """All forms of scaled dot-product attention are counted alike."""
    make = TraceMaker()
    q, k, v, out = (make.tensor((2, 4, n, 128)) for n in (1, 64, 64, 1))
    make.launch(name, (q, k, v), out)

    shape = (2, 1, 64, 4, 4, 128, 0)
    expected = Work(OpClass.DECODE, "bfloat16", 4.0 * 2 * 4 * 64 * 128, 2 * 128 * 2 * 4 * 130, shape)
    assert expected == replace(only(make.done()), overhead=())


def paged_work(tokens: int, sequences: int, window: int = 0) -> Work:
    """Attention over a pool of 4,096 positions, of sequences that are expected to have 256 tokens."""
    make = TraceMaker()
    query, out = make.tensor((tokens, 8, 64)), make.tensor((tokens, 8, 32))
    pool = make.tensor((256, 16, 2, 64)), make.tensor((256, 16, 2, 32))
    tables = [make.tensor((n,), "int32") for n in (512, sequences, sequences, sequences + 1)]
    rest = (0.125, window, 0.0, None, 256, tokens == sequences)
    make.launch("tessera.paged_attention.default", (query, *pool, *tables, *rest), out)
    return only(make.done())


def test_attention_over_pages_reads_as_much_as_sequences_are_expected_to_have() -> None:
    """The pool's size is not counted: each sequence's keys and values once, queries and results."""
    work = paged_work(8, 8)

    assert 2 * (8 * 256 * 2 * (64 + 32) + 8 * 8 * (64 + 32)) == work.num_bytes
    assert 2.0 * 8 * 8 * 256 * (64 + 32) == work.flops
    assert (OpClass.DECODE, (8, 1, 256, 8, 2, 64, 1)) == (work.op, work.shape)


def test_tokens_over_pages_are_shared_evenly_among_sequences() -> None:
    """Many tokens a sequence make a prompt's attention; each sees those before it."""
    work = paged_work(256, 4)

    assert OpClass.PREFILL is work.op
    assert 2.0 * 256 * 8 * (256 - 63 / 2) * (64 + 32) == work.flops


def test_a_window_bounds_what_attention_over_pages_reads() -> None:
    """No more than the window a query."""
    work = paged_work(8, 8, window=32)

    assert 2.0 * 8 * 8 * 32 * (64 + 32) == work.flops
    assert 2 * (8 * 32 * 2 * (64 + 32) + 8 * 8 * (64 + 32)) == work.num_bytes


def test_embedding_reads_the_rows_it_takes() -> None:
    """The table's access is the whole table, but only the chosen rows move."""
    make = TraceMaker()
    table, index, out = make.tensor((128_000, 64)), make.tensor((4,), "int64"), make.tensor((4, 64))
    make.launch("aten.embedding.default", (table, index), out)

    assert (OpClass.GATHER, 2 * (4 * 64 * 2) + 4 * 8) == (only(make.done()).op, only(make.done()).num_bytes)


def test_scatter_in_place_moves_the_new_rows_only() -> None:
    """Writing one row into a cache does not touch the rest of it; out of place it copies it all."""
    sizes = []
    for name in ("aten.index_copy_.default", "aten.index_copy.default"):
        make = TraceMaker()
        cache, index, row = make.tensor((512, 64)), make.tensor((1,), "int64"), make.tensor((1, 64))
        make.launch(name, (cache, 0, index, row), make.tensor((512, 64)))
        sizes.append(only(make.done()).num_bytes)

    assert [2 * (8 + 128), 2 * (8 + 128) + 2 * 512 * 64 * 2] == sizes


def test_a_tensor_read_twice_counts_once() -> None:
    """x + x reads x once."""
    make = TraceMaker()
    x = make.tensor((1024,), "float32")
    make.launch("aten.add.Tensor", (x, x), make.tensor((1024,), "float32"))

    assert 2 * 4096 == only(make.done()).num_bytes


def test_a_broadcast_tensor_counts_its_own_bytes() -> None:
    """A stride of zero reads the same bytes again, not more of them."""
    make = TraceMaker()
    bias, out = make.tensor((16,), "float32"), make.tensor((64, 16), "float32")
    spread = View(bias.buffer, "float32", (64, 16), (0, 1))
    make.launch("aten.clone.default", (spread,), out)

    assert 64 + 64 * 64 == only(make.done()).num_bytes


def test_convolution_counts_one_filter_an_output() -> None:
    """Each output element is a dot product with one filter."""
    make = TraceMaker()
    x, w, y = make.tensor((1, 8, 10, 10)), make.tensor((4, 8, 3, 3)), make.tensor((1, 4, 8, 8))
    make.launch("aten.convolution.default", (x, w), y)

    assert (OpClass.CONV, 2.0 * 4 * 64 * 72) == (only(make.done()).op, only(make.done()).flops)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("aten.add_.Tensor", OpClass.ELEMENTWISE),
        ("aten.__and__.Tensor", OpClass.ELEMENTWISE),
        ("aten.native_layer_norm.default", OpClass.NORM),
        ("aten._softmax.default", OpClass.SOFTMAX),
        ("aten.mean.dim", OpClass.REDUCTION),
        ("aten.argmax.default", OpClass.SAMPLING),
        ("aten.cumsum.default", OpClass.SCAN),
        ("aten.cat.default", OpClass.COPY),
        ("aten.index_put_.default", OpClass.SCATTER),
        ("aten.empty.memory_format", OpClass.ALLOCATION),
        ("aten.never_heard_of.default", OpClass.OTHER),
    ],
)
def test_class_by_name(name: str, op: OpClass) -> None:
    """Overload and in-place mark do not change a class; an unknown operator is `other`."""
    assert op is class_of(Kernel(name, Origin.ATEN))


def test_inductor_kernels_are_classed_by_their_prefix() -> None:
    """Generated kernels say what they fuse."""
    names = ("triton_poi_fused_add_0", "triton_red_fused_mean_1", "my_kernel")

    assert [OpClass.ELEMENTWISE, OpClass.REDUCTION, OpClass.OTHER] == [
        class_of(Kernel(name, Origin.TRITON)) for name in names
    ]


def test_a_launch_without_accesses_is_counted_from_its_tensors() -> None:
    """Where accesses are absent, arguments are read once and results written once."""
    trace = unary_trace("aten.relu.default", 256)
    launch = trace.launches[0]
    bare = type(launch)(launch.kernel, launch.args, (), launch.outputs, ())
    trace = Trace(trace.step, trace.kernels, trace.buffers, (bare,), ())

    assert 2 * 1024 == only(trace).num_bytes


def test_zero_size_means_every_result_is_empty() -> None:
    """A launch with only empty results is zero-size."""
    empty, full = unary_trace("aten.relu.default", 0), unary_trace("aten.relu.default", 1)

    assert (True, False) == (is_zero_size(empty.launches[0]), is_zero_size(full.launches[0]))


def inductor_trace(name: str, visited: int) -> Trace:
    """A fused kernel that puts rows into a cache, whose access must claim all of it."""
    make = TraceMaker()
    rows, cache = make.tensor((32, 1024)), make.tensor((32, 8, 2048, 128))
    whole = region(0, 2 * cache.num_elements, ())
    part = region(0, 2 * rows.num_elements, ())
    assert whole is not None
    assert part is not None
    accesses = (Access(rows.buffer, part, read=True), Access(cache.buffer, whole, write=True))
    launch = Launch(0, (rows, cache, visited), (), (), accesses)
    base = make.done()
    return Trace(base.step, (Kernel(name, Origin.TRITON),), base.buffers, (launch,), ())


def test_a_compiled_kernel_touches_what_it_visits() -> None:
    """A write of 32,768 bf16 elements into a 134 MB cache moves 128 KB, not 134 MB."""
    fused = works(inductor_trace("triton_poi_fused_index_put_3", 32768))[0]
    foreign = works(inductor_trace("my_kernel", 32768))[0]

    assert 2 * 2 * 32768 == fused.num_bytes
    assert 2 * 32768 + 2 * 32 * 8 * 2048 * 128 == foreign.num_bytes


def test_a_kernel_of_several_writes_no_more_to_unknown_places_than_elsewhere() -> None:
    """Its sizes are no arguments: keys of 32,768 elements are written beside queries of as many."""
    make = TraceMaker()
    rows, cache, queries = make.tensor((32768,)), make.tensor((2048, 32768)), make.tensor((32768,))
    places = tuple(
        access(view, read=view is not queries, write=view is not rows) for view in (rows, cache, queries)
    )
    names = tuple((name, "*bf16") for name in ("in_ptr0", "out_ptr0", "out_ptr1"))
    kernel = Kernel("triton_poi_fused_2", Origin.TRITON, signature=(*names, ("XBLOCK", "constexpr")))
    base = make.done()
    launch = Launch(0, (rows, cache, queries), (), (), places)
    moved, in_place = (
        works(Trace(base.step, (one,), base.buffers, (launch,), ()))[0].num_bytes
        for one in (kernel, replace(kernel, signature=(names[0], ("in_out_ptr0", "*bf16"), names[2])))
    )

    assert 3 * 2 * 32768 == moved
    assert 2 * 2 * 32768 + 2 * 2 * 2048 * 32768 == in_place


def test_a_kernel_of_several_reads_and_writes_all_of_a_state_that_it_is_given_to_read() -> None:
    """A recurrent state, updated in place: its argument is there twice."""
    make = TraceMaker()
    state, product = make.tensor((2048, 32768)), make.tensor((2048, 32768))
    places = (access(state, read=True, write=True), access(product, read=False, write=True))
    names = tuple((name, "*bf16") for name in ("in_ptr0", "out_ptr0", "out_ptr1"))
    kernel = Kernel("triton_poi_fused_4", Origin.TRITON, signature=(*names, ("XBLOCK", "constexpr")))
    base = make.done()
    launch = Launch(0, (state, product, state), (), (), places)

    assert (
        3 * 2 * 2048 * 32768 == works(Trace(base.step, (kernel,), base.buffers, (launch,), ()))[0].num_bytes
    )
