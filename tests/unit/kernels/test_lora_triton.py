"""Kernels of LoRA adapters without a GPU: run in the PTX interpreter, proved by the analyzer."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from tessera import flow  # hands the interpreter to capture
from tessera.kernels import lora, lora_triton
from tessera_ptx import analyze
from triton_ptx import compiled_for, launches_anywhere

assert flow
assert lora  # registers the operator


@pytest.fixture(autouse=True, scope="module")
def anywhere() -> Iterator[None]:
    with launches_anywhere():
        yield


def make_call(dtype: torch.dtype, rank: int = 6) -> tuple[torch.Tensor, ...]:
    """Product, input, matrices and adapters of five rows; the product is a part of a joined one."""
    random = torch.Generator().manual_seed(0)
    sizes = [(5, 200), (5, 300), (2, rank, 300), (2, 70, rank)]
    wide, x, down, up = (torch.randn(size, generator=random).mul(0.3).to(dtype) for size in sizes)
    return wide[:, 100:170], x, down, up, torch.tensor([0, 2, 1, 1, 0])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_rows_have_their_own_adapters(dtype: torch.dtype, atol: float) -> None:
    """As on a CPU; a row without one has the base's bits."""
    call = make_call(dtype)
    out, wanted = lora_triton.lora(*call), torch.ops.tessera.lora(*call)

    assert_close(out, wanted, rtol=1e-2, atol=atol)
    assert torch.equal(call[0][[0, 4]], out[[0, 4]])


@pytest.mark.parametrize("arch", [80, 90])
def test_every_access_is_proved(arch: int) -> None:
    """What is read, what is written, nothing unknown."""
    with compiled_for(arch) as kernels:
        lora_triton.lora(*make_call(torch.bfloat16, 16))
    wanted = {
        "lora_down": ({"x", "down", "adapters"}, {"low"}),
        "lora_up": ({"y", "low", "up", "adapters"}, {"out"}),
    }
    for kernel in kernels:
        (report,) = analyze(kernel.asm["ptx"])
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        touched = [(names[a.param], a.read, a.write) for a in report.accesses]

        assert (True, ()) == (report.movable, report.why)
        assert wanted.pop(report.name) == (
            {name for name, read, _ in touched if read},
            {name for name, _, write in touched if write},
        )
    assert not wanted
