"""Products with packed weights on a GPU: near the CPU's, the same bits every time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from packed_factory import answer, serving, words, write_folder, write_words
from tessera.kernels import lora  # registers the operators
from tessera.kernels.packing import BITS, PLAIN, dequantise, tile

assert lora
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS = {
    "int4": (1, 64), "int8": (1, 4096), "fp8": (128, 64), "int4_tiled": (1, 128), "fp8_tiled": (1, 128),
    "fp8_blocks_tiled": (128, 128), "mxfp4_tiled": (1, 32),
}  # fmt: skip


def make_weight(form: str, experts: int, outputs: int, columns: int) -> tuple[Any, ...]:
    """Codes, scales and zeros on the GPU."""
    rows, width = BLOCKS[form]
    width = min(width, columns)
    codes = torch.randint(
        0, 256, (experts, outputs, columns * BITS[PLAIN.get(form, form)] // 8), dtype=torch.uint8
    )
    codes = codes.cuda()
    if form == "int8":
        codes = codes.view(torch.int8)
    if form.startswith("fp8"):
        codes = torch.where(codes % 128 == 127, 1, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    blocks = (experts, -(-outputs // rows), columns // width)
    scales = torch.rand(blocks).mul(0.01).bfloat16().cuda()
    if form == "mxfp4_tiled":
        scales = torch.randint(115, 121, blocks, dtype=torch.uint8).cuda()
    zeros = torch.randint(0, 16, blocks, dtype=torch.int8).cuda() if form.startswith("int4") else None
    if form in PLAIN:
        codes, scales, stored, block = tile(codes, scales, zeros, PLAIN[form], (rows, width))
        assert form == stored
        return codes, scales, None, block
    return codes, scales, zeros, (rows, width)


@pytest.mark.parametrize("rows", [1, 8, 17, 64, 300, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", BLOCKS)
def test_a_product(form: str, dtype: torch.dtype, rows: int) -> None:
    """Few rows by the kernel, many by the library, of blocks of FP8 with inputs in FP8."""
    size = 1024 if form == "fp8_blocks_tiled" else 1000
    codes, scales, zeros, block = make_weight(form, 1, size, 4096)
    first = None if zeros is None else zeros[0]
    x, bias = torch.randn(rows, 4096, device="cuda").to(dtype), torch.randn(size, device="cuda").to(dtype)
    given = codes[0], scales[0], first, None
    out = torch.ops.tessera.packed_linear(x, *given, bias, form, block)
    wanted = x.double() @ dequantise(*given, form, block, torch.float64).t() + bias.double()

    is_rounded = size == 1024 and dtype is torch.bfloat16
    assert_close(
        out.double(), wanted, rtol=0, atol=(0.05 if is_rounded else 0.02) * float(wanted.abs().max())
    )
    assert torch.equal(out, torch.ops.tessera.packed_linear(x, *given, bias, form, block))


@pytest.mark.parametrize("rows", [4, 64, 2000])
@pytest.mark.parametrize("form", ["mxfp4_tiled", "fp8", "fp8_tiled", "fp8_blocks_tiled"])
def test_experts(form: str, rows: int) -> None:
    """Rows of 8 experts, one of which has none."""
    codes, scales, zeros, block = make_weight(form, 8, 640, 512)
    shares = torch.tensor([0.1, 0.1, 0.3, 0.3, 0.5, 0.8, 0.9, 1.0])
    offsets = (shares * rows).int().cuda()
    x = torch.randn(rows, 512, device="cuda").bfloat16()
    out = torch.ops.tessera.packed_grouped(x, codes, scales, zeros, offsets, form, block)
    wanted = torch.ops.tessera.packed_grouped(
        x.cpu().float(), codes.cpu(), scales.cpu(), None, offsets.cpu(), form, block
    )

    assert_close(out.cpu().float(), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


def test_adapters() -> None:
    """Rows with different adapters and without."""
    sizes = [(9, 512), (9, 256), (2, 16, 256), (2, 512, 16)]
    y, x, down, up = (torch.randn(size).mul(0.3).bfloat16() for size in sizes)
    adapters = torch.arange(9) % 3
    wanted = torch.ops.tessera.lora(y, x, down, up, adapters)
    out = torch.ops.tessera.lora(y.cuda(), x.cuda(), down.cuda(), up.cuda(), adapters.cuda())

    assert_close(out.cpu(), wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(("method", "family"), [("mxfp4", "gpt_oss"), ("awq", "llama")])
def test_served_tokens(method: str, family: str, tmp_path: Path) -> None:
    """Greedy tokens of the dequantised model, which differs in its sums."""
    reference = write_folder(tmp_path, method, family)
    write_words(tmp_path)
    prompt = [5, 17, 200, 31, 8, 90, 44]
    with serving(tmp_path, devices="cuda:0") as url:
        found = answer(url, tmp_path.name, prompt)

    assert words(reference, prompt)[:8] == found[:8]
