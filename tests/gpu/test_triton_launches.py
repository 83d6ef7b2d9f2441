"""Triton kernels that a program launches itself are seen with PTX, grid and arguments."""

from typing import Any

import pytest
import torch

from tessera.analyze.accesses import triton_accesses
from tessera.capture.inductor import Ledger, TritonLaunch, note, triton_launches
from tessera.execute.ptx_module import PtxKernel

triton = pytest.importorskip("triton", reason="needs triton")
tl: Any = pytest.importorskip("triton.language", reason="needs triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """y = factor * x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=inside) * factor, mask=inside)


def seen() -> tuple[list[TritonLaunch], torch.Tensor, torch.Tensor]:
    """One launch over 1000 elements."""
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    launches: list[TritonLaunch] = []
    with triton_launches(launches.append):
        scale[(triton.cdiv(1000, 256),)](x, y, 1000, 2.5, BLOCK=256)
    return launches, x, y


def test_a_launch_is_seen_with_its_code_and_numbers() -> None:
    """Name, PTX, grid and what was compiled in."""
    launches, _, _ = seen()

    assert ["scale"] == [x.kernel.name for x in launches]
    assert (4, 1, 1) == launches[0].grid
    assert ".entry" in launches[0].kernel.ptx
    assert 256 == dict(launches[0].kernel.constants)["BLOCK"]


def test_its_accesses_are_proved() -> None:
    """x is read and y is written, 4000 bytes each."""
    launches, _, _ = seen()
    ledger = Ledger()
    note(ledger, launches[0], triton_accesses)
    found = [(a.region.num_bytes, a.read, a.write) for a in ledger.launches[0].accesses]

    assert [(4000, True, False), (4000, False, True)] == found


def test_it_can_be_launched_again() -> None:
    """The compiled object and the PTX text both compute the same bits."""
    launches, x, y = seen()
    results = []
    for run in (launches[0].relaunch, PtxKernel(launches[0].kernel, launches[0].block)):
        again = torch.zeros_like(y)
        run(launches[0].grid, [x, again, *launches[0].args[2:]])
        results.append(torch.equal(again, y))

    assert [True, True] == results
