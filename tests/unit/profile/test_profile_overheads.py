"""Overheads: what launches do beside moving bytes, and what that costs."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from scripts.launch_rows import read

from profile_factories import Shape, TraceMaker, attention_trace, contiguous, emulated, estimate, unary_trace
from tessera.ir import Arg, Origin, Source, Trace, View
from tessera.profile import Work, works
from tessera.profile.corrections import Corrections, packaged
from tessera.profile.estimate import price_works
from tessera.profile.gpus import GPUS, clock_ghz, gpu
from tessera.profile.overheads import TERMS, fused_overhead, joined_dims

ROWS = Path(__file__).parents[3] / "benchmarks" / "results" / "launches_h200_202611.json"


def strided(make: TraceMaker, shape: Shape, stride: Shape, dtype: str = "bfloat16") -> View:
    """A tensor that lies in memory as its strides say."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return msgspec.structs.replace(make.tensor((size,), dtype), shape=shape, stride=stride)


@dataclass(frozen=True, slots=True)
class Lie:
    """How a tensor lies in memory."""

    shape: Shape
    stride: Shape


def dense(*shape: int) -> Lie:
    """A tensor without gaps."""
    return Lie(shape, contiguous(shape))


def overhead(name: str, *args: Arg | Lie, out: Shape, dtype: str = "bfloat16") -> dict[str, float]:
    """The overhead of one launch on new tensors that lie as given."""
    make = TraceMaker()
    given = tuple(strided(make, x.shape, x.stride, dtype) if isinstance(x, Lie) else x for x in args)
    make.launch(name, given, make.tensor(out, dtype))
    (work,) = works(make.done())
    return dict(work.overhead)


def test_dense_operands_of_one_dtype_have_no_overhead() -> None:
    """PyTorch vectorises them, so bytes say it all."""
    assert {} == overhead("aten.add.Tensor", dense(64, 128), dense(64, 128), out=(64, 128))


def test_a_broadcast_row_pays_for_the_index_of_every_element() -> None:
    """Two dimensions are left when a row is added to a matrix."""
    found = overhead("aten.add.Tensor", dense(4, 16, 128), dense(128), out=(4, 16, 128))

    assert {"index": 8192, "dim": 2 * 8192, "indexing": 1} == found


def test_a_transposed_operand_pays_for_memory_transactions() -> None:
    """An operand read across its rows moves a whole sector for every element."""
    found = overhead("aten.add.Tensor", dense(64, 128), Lie((64, 128), (1, 64)), out=(64, 128))

    assert found["sector"] == 64 * 128


def test_half_a_row_is_indexed_in_two_dimensions() -> None:
    """A slice of wider rows cannot be read as one run."""
    found = overhead("aten.neg.default", Lie((64, 32), (64, 1)), out=(64, 32))

    assert (2048, 4096) == (found["index"], found["dim"])


def test_widening_converts_element_by_element_and_narrowing_does_not() -> None:
    """PyTorch has a vectorised kernel for fp32 to bf16, and none for the way back."""
    make = TraceMaker()
    narrow, wide = make.tensor((4096,)), make.tensor((4096,), "float32")
    make.launch("aten._to_copy.default", (narrow,), make.tensor((4096,), "float32"))
    make.launch("aten._to_copy.default", (wide,), make.tensor((4096,)))
    up, down = works(make.done())

    assert {"cast": 4096, "indexing": 1} == dict(up.overhead)
    assert () == down.overhead


def test_joining_pays_for_all_elements_and_for_the_largest_part() -> None:
    """Every part gets as many blocks as the largest."""
    make = TraceMaker()
    parts = (make.tensor((64, 96)), make.tensor((64, 32)))
    make.launch("aten.cat.default", (parts, -1), make.tensor((64, 128)))
    (work,) = works(make.done())

    assert {"cat": 64 * 128, "cat_part": 64 * 96} == dict(work.overhead)


@pytest.mark.parametrize(
    ("width", "dims", "found"),
    [(128, (-1,), {"row": 64}), (4096, (-1,), {"warp_row": 4096}), (8192, (-1,), {}), (128, (0,), {})],
    ids=["short row", "a warp a row", "split row", "column"],
)
def test_rows_are_reduced_by_their_length(width: int, dims: Shape, found: dict[str, float]) -> None:
    """Short rows count by their number, longer ones by their length, those beyond are split."""
    out = (64, 1) if dims == (-1,) else (1, width)

    assert found == overhead("aten.mean.dim", dense(64, width), dims, True, out=out)


def test_rows_that_vectors_do_not_fit_are_indexed_one_by_one() -> None:
    """A softmax over 1025 elements cannot load vectors, one over 1024 can."""
    uneven = overhead("aten._softmax.default", dense(8, 1025), -1, False, out=(8, 1025))
    even = overhead("aten._softmax.default", dense(8, 1024), -1, False, out=(8, 1024))

    assert ({"uneven_row": 8 * 1025}, {}) == (uneven, even)


def test_a_gemm_whose_rows_start_between_vectors_is_marked() -> None:
    """Rows of 1025 elements of 2 bytes begin at odd places."""
    left = Lie((16, 64, 1024), (64 * 1025, 1025, 1))

    assert {"unaligned": 1} == overhead("aten.bmm.default", left, dense(16, 1024, 64), out=(16, 64, 64))
    assert {} == overhead("aten.bmm.default", dense(16, 64, 1024), dense(16, 1024, 64), out=(16, 64, 64))


def test_out_of_place_masking_copies_first() -> None:
    """`masked_fill` clones its input, `masked_fill_` does not: twice the bytes more."""
    make = TraceMaker()
    x, mask = make.tensor((64, 128)), make.tensor((64, 128), "bool")
    make.launch("aten.masked_fill.Scalar", (x, mask, 0.0), make.tensor((64, 128)))
    make.launch("aten.masked_fill_.Scalar", (x, mask, 0.0), make.tensor((64, 128)))
    copied, in_place = works(make.done())

    assert copied.num_bytes == in_place.num_bytes + 2 * 64 * 128 * 2


def test_compiled_kernels_have_no_overhead() -> None:
    """What Inductor's kernels do with indices is not PyTorch's way."""
    make = TraceMaker()
    x = strided(make, (64, 32), (64, 1))
    launch = make.launch("triton_poi_fused_neg_0", (x, 2048), make.tensor((64, 32)))
    trace = make.done()
    compiled = replace(trace, kernels=(replace(trace.kernels[launch.kernel], origin=Origin.TRITON),))

    assert () == works(compiled)[0].overhead


def test_dimensions_contiguous_in_all_operands_are_joined() -> None:
    """A dense tensor and one broadcast along its first dimension share the last two."""
    make = TraceMaker()
    out, row = make.tensor((4, 8, 16)), make.tensor((8, 16))

    assert ([128, 4], [[1, 128], [1, 0]]) == joined_dims((out, row), out)


# Costs ----------------------------------------------------------------------------------------------------


def price_of(trace: Trace, name: str, tables: bool = False) -> float:
    """Microseconds of the first launch."""
    return estimate(trace, emulated(name), tables).us(0, 0)


def broadcast_trace(elements: int) -> Trace:
    """A column times a matrix."""
    make = TraceMaker()
    rows = elements // 1024
    make.launch(
        "aten.mul.Tensor", (make.tensor((rows, 1024)), make.tensor((rows, 1))), make.tensor((rows, 1024))
    )
    return make.done()


def test_broadcasting_is_dearer_than_the_bytes_it_moves() -> None:
    """The H200 took 2.5 times as long for a broadcast product as for a dense one of the same size."""
    ratio = price_of(broadcast_trace(1 << 25), "h200") / price_of(
        unary_trace("aten.neg.default", 1 << 25, "bfloat16"), "h200"
    )

    assert 2.0 < ratio < 4.0


def test_the_measured_gpu_is_surer_than_another() -> None:
    """Cycles carried over to another GPU have a wider error, and the price says so."""
    trace = broadcast_trace(1 << 25)
    own, other = (estimate(trace, emulated(name), False).costs[0][0] for name in ("h200", "l40s"))

    assert own.rel_error < other.rel_error
    assert "as measured on h200" in own.detail
    assert "at the SMs and clock of l40s" in other.detail


def test_attention_kernels_differ_on_new_gpus_only() -> None:
    """The tables of old GPUs are PyTorch's own flash kernel's."""
    work = replace(works(attention_trace(2, 32, 2048, 2048))[0], overhead=())
    flash = replace(work, overhead=(("flash", 1.0),))

    def slower(name: str) -> float:
        plain, by_flash = price_works([work, flash], name, None)
        return by_flash.us / plain.us

    assert slower("h200") > 1.1
    assert 1.0 == pytest.approx(slower("a100"))


def test_without_coefficients_nothing_changes() -> None:
    """An overhead that nobody measured costs nothing, and the price is as it was."""
    (work,) = works(broadcast_trace(1 << 20))
    costs = price_works([replace(work, overhead=())], "h200", None)

    assert costs == [Corrections("h200").apply(work, costs[0], gpu("h200"))]


def test_every_coefficient_belongs_to_a_term_and_has_an_error() -> None:
    """The file in the package and the list of terms agree."""
    terms = packaged().terms

    assert set(terms) <= set(TERMS)
    assert all(term.coefficient > 0 for term in terms.values())
    assert all(0 <= term.rel_error < 1 for term in terms.values())


def test_clocks_come_from_the_data_sheet() -> None:
    """Every known GPU has a plausible boost clock."""
    assert 1.41 == pytest.approx(clock_ghz(gpu("a100")), abs=0.01)
    assert all(1.0 < clock_ghz(spec) < 3.2 for spec in GPUS.values())


def test_work_with_an_overhead_still_prices_by_source() -> None:
    """Overheads change the time, not where the rest of it came from."""
    work: Work = works(broadcast_trace(1 << 20))[0]

    assert price_works([work], "h100", None)[0].source in (Source.FITTED, Source.CLASS)


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("triton_poi_fused_add_cat_cos_mul_sin_3", "fused_angle"),
        ("triton_red_fused__softmax_add_cat_exp_7", "fused_softmax"),
        ("triton_poi_fused_add_clamp_index_masked_fill_2", "fused_index"),
        ("triton_red_fused_argmax_9", "fused_argmax"),
    ],
)
def test_a_fused_kernels_name_says_what_it_computes(name: str, term: str) -> None:
    """Inductor lists the operators that it fuses; a few of them take longer than their bytes."""
    assert term in dict(fused_overhead(name, 4096))


def test_fused_kernels_of_plain_arithmetic_have_no_overhead() -> None:
    """Additions and products hide behind the loads."""
    assert () == fused_overhead("triton_poi_fused_add_mul_silu_1", 4096)


@pytest.mark.parametrize("step", ["gpt-oss-20b prefill, inductor", "llama-3-8b decode, inductor"])
def test_a_compiled_step_adds_up_to_what_was_measured(step: str) -> None:
    """Every launch timed on the H200, by the models alone; the first was 45 % low by bytes alone."""
    rows = [row for row in read(ROWS) if row.step == step]
    costs = price_works([row.work for row in rows], "h200", None)
    modelled = sum(cost.us * row.count for cost, row in zip(costs, rows, strict=True))

    assert sum(row.us * row.count for row in rows) == pytest.approx(modelled, rel=0.1)
