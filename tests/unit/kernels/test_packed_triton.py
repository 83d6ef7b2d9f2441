"""Kernels of packed weights without a GPU: run in the PTX interpreter, proved by the analyzer."""

import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from packed_factory import E2M1
from sampling import one_of_each, some_of
from tessera import flow  # hands the interpreter to capture
from tessera.capture.offline import compiling_for
from tessera.kernels import packed_triton
from tessera.kernels.packed_triton import (
    ProductTile,
    multiply,
    packed_grouped,
    packed_part,
    tile_for,
    tiled_product,
    unpack,
)
from tessera.kernels.packing import BITS, PLAIN, can_tile, dequantise, num_columns, tile, unpack_nibbles
from tessera_ptx import analyze
from triton_ptx import compiled_for, launches_anywhere

assert flow
SMALL = ProductTile(16, 16, 1)
ATOL = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
# Format -> rows and columns of a scale's block.
BLOCKS = {
    "int4": (1, 64), "int8": (1, 96), "fp8": (16, 32), "int4_tiled": (1, 128), "fp8_tiled": (16, 128),
    "fp8_blocks_tiled": (128, 128), "mxfp4_tiled": (1, 32),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def anywhere() -> Iterator[None]:
    with launches_anywhere():
        yield


def make_weight(form: str, experts: int = 1, outputs: int = 0, columns: int = 0, zeros: bool = False) -> Any:
    """Codes, scales, zeros, format and block."""
    random = torch.Generator().manual_seed(1)
    rows, width = BLOCKS[form]
    is_whole = form == "fp8_blocks_tiled"
    outputs, columns = outputs or (256 if is_whole else 40), columns or (256 if is_whole else 192)
    size = (experts, outputs, columns * BITS[PLAIN.get(form, form)] // 8)
    codes = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
    if form == "int8":
        codes = codes.view(torch.int8)
    if form.startswith("fp8"):  # no NaN
        codes = torch.where(codes % 128 == 127, 1, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    blocks = (experts, -(-outputs // rows), -(-columns // width))
    scales = torch.rand(blocks, generator=random).mul(0.01).half()
    if form == "mxfp4_tiled":
        scales = torch.randint(118, 124, blocks, generator=random, dtype=torch.uint8)
    least = torch.randint(0, 16, blocks, generator=random, dtype=torch.int8) if zeros else None
    if form in PLAIN:
        codes, scales, stored, block = tile(codes, scales, least, PLAIN[form], (rows, width))
        assert form == stored
        return codes, scales, None, stored, block
    return codes, scales, least, form, (rows, width)


def numbers(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    codes, scales, zeros, form, block = weight
    return dequantise(codes, scales, zeros, None, form, block, dtype)


def check(weight: Any, rows: int, dtype: torch.dtype, tile: ProductTile, has_bias: bool = False) -> None:
    """The kernel gives the product with the dequantised weight."""
    codes, scales, zeros, form, block = weight
    size = (rows, num_columns(codes, form, block))
    x = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(codes.shape[1]).to(dtype) if has_bias else None
    out = multiply(x, codes, scales, zeros, bias, None, form, block, tile)
    wanted = torch.nn.functional.linear(x.float(), numbers(weight, torch.float32)[0])
    wanted = wanted if bias is None else wanted + bias.float()

    assert out.dtype is dtype
    assert_close(out.float(), wanted, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=ATOL[dtype])


PRODUCTS = one_of_each([(form, dtype) for form in BLOCKS for dtype in ATOL], lambda case: case[0])
WRITTEN = one_of_each(
    [(form, dtype) for form in BLOCKS for dtype in (torch.float16, torch.bfloat16)], lambda case: case[0]
)
ZEROS = ("int4", "int8", "int4_tiled", "fp8_tiled")
TARGETS = one_of_each([(form, arch) for form in BLOCKS for arch in (80, 90)], lambda case: case[0])


@pytest.mark.parametrize(("form", "dtype"), PRODUCTS, ids=str)
def test_a_product_of_a_few_rows(form: str, dtype: torch.dtype) -> None:
    """Outputs and rows need not fill tiles."""
    check(make_weight(form), 3, dtype, SMALL)


WARPS = [
    ("int4_tiled", torch.bfloat16, 2), ("int4_tiled", torch.float16, 4), ("mxfp4_tiled", torch.bfloat16, 8),
    ("fp8_tiled", torch.bfloat16, 4), ("fp8_blocks_tiled", torch.float32, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "dtype", "depth"),
    some_of(WARPS, WARPS[1:]),
    ids=str,
)
def test_warps_have_blocks_of_inputs_of_their_own(form: str, dtype: torch.dtype, depth: int) -> None:
    """Also where there are fewer blocks."""
    check(make_weight(form), 3, dtype, ProductTile(8, 64, 1, 2 * depth, 2, depth), has_bias=True)


@pytest.mark.parametrize("form", some_of(ZEROS, ZEROS[:3]))
def test_zeros_splits_and_bias(form: str) -> None:
    """Splits of the inputs are added up, the bias once."""
    check(make_weight(form, zeros="int" in form), 18, torch.bfloat16, ProductTile(16, 32, 2), has_bias=True)


@pytest.mark.parametrize("form", ["int8", "fp8_tiled"])
def test_tiles_of_rows_are_programs_of_their_own(form: str) -> None:
    """The last one is not full."""
    check(make_weight(form), 40, torch.bfloat16, SMALL)


def test_many_rows_are_rounded_to_fp8_where_the_library_multiplies_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs and codes are in one order; the library is a plain product here."""
    codes, scales, zeros, form, block = weight = make_weight("fp8_blocks_tiled", columns=512)
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(2)).bfloat16()

    def scaled(a: Any, b: Any, a_scales: Any, b_scales: Any, out_dtype: torch.dtype) -> torch.Tensor:
        assert ((72, 512), (1, 72)) == (a.shape, a_scales.stride())
        a = a.float() * a_scales.repeat_interleave(128, 1)
        wide = b_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        product: torch.Tensor = a @ (b.float() * wide)
        return product.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(packed_triton, "multiplies_blocks", lambda device, dtype: True)
    with compiling_for(90):  # others have no such conversion
        out = multiply(x, codes, scales, zeros, None, None, form, block)
    wanted = x.float() @ numbers(weight, torch.float32)[0].t()

    assert 0.001 < float((out - wanted).abs().max() / wanted.abs().max()) < 0.05


EXPERTS = [
    ("mxfp4_tiled", SMALL), ("mxfp4_tiled", ProductTile(16, 16, 2)), ("int4", SMALL),
    ("mxfp4_tiled", ProductTile(8, 32, 1, 2, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "tile"),
    some_of(EXPERTS, EXPERTS[1:]),
)
def test_experts_read_their_own_rows(form: str, tile: ProductTile) -> None:
    """Some have none, one has more than a tile."""
    codes, scales, zeros, _, block = weight = make_weight(form, experts=4)
    offsets = torch.tensor([2, 2, 21, 23], dtype=torch.int32)
    x = torch.randn(23, 192).bfloat16()
    out = multiply(x, codes, scales, zeros, None, offsets, form, block, tile)
    spread = torch.repeat_interleave(numbers(weight, torch.float32), torch.tensor([2, 0, 19, 2]), 0)

    assert_close(out.float(), torch.einsum("mk,mnk->mn", x.float(), spread), rtol=1e-2, atol=0.15)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_part_has_some_experts(first: int) -> None:
    """Its rows are those of the whole product."""
    codes, scales, zeros, form, block = make_weight("mxfp4_tiled", experts=4)
    offsets, x = torch.tensor([2, 2, 21, 23], dtype=torch.int32), torch.randn(23, 192).bfloat16()
    own = slice(first, first + 2)
    out = packed_part(x, codes[own], scales[own], zeros, offsets, first, 0.5, form, block)
    whole = packed_grouped(x, codes, scales, zeros, offsets, form, block)
    begin = 0 if first == 0 else int(offsets[first - 1])
    rows = slice(begin, int(offsets[first + 1]))

    assert_close(out[rows], whole[rows], rtol=1e-2, atol=0.05)


def test_experts_with_many_rows_are_written_out() -> None:
    codes, scales, zeros, form, block = weight = make_weight("mxfp4_tiled", experts=2)
    offsets, x = torch.tensor([100, 300], dtype=torch.int32), torch.randn(300, 192).bfloat16()
    with unittest.mock.patch.object(tiled_product, "run", side_effect=AssertionError):
        out = multiply(x, codes, scales, zeros, None, offsets, form, block)
    first, second = numbers(weight, torch.float32)

    assert_close(out[:100].float(), x[:100].float() @ first.t(), rtol=1e-2, atol=0.15)
    assert_close(out[100:].float(), x[100:].float() @ second.t(), rtol=1e-2, atol=0.15)


@pytest.mark.parametrize(("form", "dtype"), WRITTEN, ids=str)
def test_a_weight_written_out_has_the_bits_of_the_cpu(form: str, dtype: torch.dtype) -> None:
    """For products of many rows."""
    codes, scales, zeros, _, block = weight = make_weight(form, zeros=form.startswith("int4"))

    assert torch.equal(numbers(weight, dtype), unpack(codes, scales, zeros, form, block, dtype))


@pytest.mark.parametrize(("width", "columns"), [(128, 384), (256, 320), (96, 96)])
def test_tiles_have_the_numbers_of_integers(width: int, columns: int) -> None:
    """Groups of whole tiles, also the last; one group."""
    codes = torch.randint(0, 256, (2, 40, columns // 2), dtype=torch.uint8)
    scales = torch.rand(2, 40, -(-columns // width)).bfloat16()
    for zeros in (torch.randint(0, 16, scales.shape, dtype=torch.int8), None):
        wanted = dequantise(codes, scales, zeros, None, "int4", (1, width), torch.float32)
        words, info, form, block = tile(codes, scales, zeros, "int4", (1, width))

        assert can_tile(codes, scales, "int4", (1, width))
        assert torch.equal(wanted, dequantise(words, info, None, None, form, block, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_have_the_numbers_of_small_floats(dtype: torch.dtype) -> None:
    """The last tile is not full."""
    codes, scales = (torch.randint(0, 128, size, dtype=torch.uint8) for size in ((2, 40, 160), (2, 40, 10)))
    wanted = E2M1[unpack_nibbles(codes + codes % 2 * 128).int()].unflatten(-1, (-1, 32))
    wanted = (wanted * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
    words, info, form, block = tile(codes + codes % 2 * 128, scales, None, "mxfp4", (1, 32))

    assert torch.equal(wanted.to(dtype), dequantise(words, info, None, None, form, block, dtype))


def test_short_groups_and_wide_scales_are_not_tiled() -> None:
    codes, scales = torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 4)

    assert not can_tile(codes, scales.half(), "int4", (1, 64))
    assert not can_tile(codes, scales[:, :2], "int4", (1, 128))
    assert can_tile(codes, scales[:, :2].half(), "int4", (1, 128))


@pytest.mark.parametrize(
    ("rows", "experts", "wanted"),
    [(8, 1, (16, 8, 4)), (64, 1, (64, 2, 4)), (200, 1, (64, 1, 8)), (32, 32, (16, 1, 4)),
     (8192, 32, (64, 1, 4))],
)  # fmt: skip
def test_a_division_follows_from_shapes(rows: int, experts: int, wanted: tuple[int, int, int]) -> None:
    """Few outputs are split along the inputs; experts are programs enough."""
    tile = tile_for(rows, experts, 4096, 128, 2048, tiled=rows == 200)

    assert wanted == (tile.rows, tile.splits, tile.warps)


@pytest.mark.parametrize(
    ("experts", "outputs", "wanted"),
    [(1, 28672, (64, 2, 4)), (1, 6144, (32, 4, 4)), (1, 1024, (32, 8, 8)), (32, 2880, (64, 2, 4))],
)
def test_few_rows_are_never_split(experts: int, outputs: int, wanted: tuple[int, int, int]) -> None:
    """Fewer outputs have more warps each."""
    tile = tile_for(8, experts, outputs, 32, 2048, tiled=True)

    assert (8, 1, *wanted) == (tile.rows, tile.splits, tile.columns, tile.depth, tile.warps)


# What kernels touch ----------------------------------------------------------------------------------------

READ = {"x", "codes", "scales", "zeros", "offsets"}
ACCESSES = {
    "packed_product": (READ, {"parts"}),
    "packed_join": ({"parts"}, {"out"}),
    "packed_unpack": ({"codes", "scales", "zeros"}, {"out"}),
    "tiled_product": (READ, {"parts"}),
    "tiled_unpack": ({"codes", "scales"}, {"out"}),
}


@pytest.mark.parametrize(("form", "arch"), TARGETS)
def test_every_access_is_proved(arch: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read, what is written, nothing unknown; also where launches overlap."""
    codes, scales, zeros, _, block = make_weight(form, 4, 128, 384, zeros=form.startswith("int"))
    x, offsets = torch.zeros(16, 384).bfloat16(), torch.tensor([2, 4, 8, 16], dtype=torch.int32)
    monkeypatch.setattr(packed_triton, "overlaps", lambda device: arch == 90)
    with compiled_for(arch) as kernels:
        multiply(x, codes, scales, zeros, None, offsets, form, block, ProductTile(16, 64, 2))
        if form in PLAIN:
            multiply(x, codes, scales, zeros, None, offsets, form, block, ProductTile(8, 64, 1, 4, 3, 2))
        unpack(codes, scales, zeros, form, block, torch.bfloat16)
    kind = "tiled" if form in PLAIN else "packed"
    assert {f"{kind}_product", "packed_join", f"{kind}_unpack"} == {kernel.name for kernel in kernels}
    absent = set() if zeros is not None else {"zeros"}
    for kernel in kernels:
        (report,) = analyze(kernel.asm["ptx"])
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        touched = [(names[a.param], a.read, a.write) for a in report.accesses]
        reads, writes = ACCESSES[report.name]
        writes = {"out"} if "parts" not in names else writes

        assert (True, ()) == (report.movable, report.why)
        assert (reads - absent, writes) == (
            {name for name, read, _ in touched if read},
            {name for name, _, write in touched if write},
        )
        assert not any(a.atomic for a in report.accesses)


@pytest.mark.parametrize(
    ("form", "dtype", "arch"),
    [
        ("mxfp4_tiled", torch.float16, 90),
        ("int4_tiled", torch.float32, 80),
        ("fp8_tiled", torch.bfloat16, 80),
    ],
    ids=str,
)
def test_tiles_fit_into_the_shared_memory_of_small_cards(form: str, dtype: torch.dtype, arch: int) -> None:
    """An L40S has 99 KB for a program."""
    codes, scales, zeros, _, block = make_weight(form, 1, 1024, 1024)
    with compiled_for(arch) as kernels:
        multiply(torch.zeros(8, 1024, dtype=dtype), codes, scales, zeros, None, None, form, block)

    assert max(kernel.metadata.shared for kernel in kernels) <= 99 << 10


def test_weights_that_are_fetched_early_are_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the wait for the kernel before."""
    codes, scales, zeros, form, block = make_weight("int4_tiled", outputs=128, columns=1024)
    monkeypatch.setattr(packed_triton, "overlaps", lambda device: True)
    with compiled_for(90) as kernels:
        multiply(torch.zeros(8, 1024).bfloat16(), codes, scales, zeros, None, None, form, block)
    (kernel,) = kernels
    ptx = kernel.asm["ptx"]
    (report,) = analyze(ptx)

    assert 0 < ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait")
    assert (True, ()) == (report.movable, report.why)
