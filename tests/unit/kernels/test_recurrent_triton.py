"""Kernels of recurrent layers without a GPU: run in the PTX interpreter, proved by the analyzer."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from recurrent_factory import MIXED, NUM_ROWS, ONE_EACH, OPERATORS, ROWS, make_call, state_of
from tessera import flow  # hands the interpreter to capture
from tessera.kernels import recurrent_triton
from tessera_ptx import analyze
from triton_ptx import compiled_for, launches_anywhere

assert flow


@pytest.fixture(autouse=True, scope="module")
def anywhere() -> Iterator[None]:
    with launches_anywhere():
        yield


@pytest.mark.parametrize("counts", [ONE_EACH, MIXED], ids=["answers", "mixed"])
@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_are_the_reference(name: str, counts: tuple[int, ...]) -> None:
    """Results and states; zeros for padding, and rows of others keep their bits."""
    call, same = make_call(name, counts, torch.float32), make_call(name, counts, torch.float32)
    before = state_of(name, call).clone()
    out = getattr(recurrent_triton, name)(*call)
    wanted = getattr(torch.ops.tessera, name)(*same)
    used = {r if r >= 0 else -1 - r for r, count in zip(ROWS[counts], counts, strict=True) if count}
    others = [row for row in range(NUM_ROWS) if row not in used]

    assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    assert_close(state_of(name, call), state_of(name, same), rtol=1e-4, atol=1e-4)
    assert not out[sum(counts) :].any()
    assert torch.equal(before[others], state_of(name, call)[others])


@pytest.mark.parametrize("name", ["causal_conv", "ssd_scan", "delta_scan"])
def test_16_bit_inputs_are_summed_in_float32(name: str) -> None:
    """Up to the rounding of what is multiplied."""
    call, same = (make_call(name, MIXED, torch.bfloat16) for _ in range(2))
    out, wanted = getattr(recurrent_triton, name)(*call), getattr(torch.ops.tessera, name)(*same)

    assert_close(out, wanted, rtol=0.05, atol=0.05)
    assert_close(state_of(name, call), state_of(name, same), rtol=0.05, atol=0.05)


WANTED = {
    "conv_update": {"state", "out"},
    "conv_tokens": {"out"},
    "conv_keep": {"state"},
    "ssd_update": {"state", "out"},
    "ssd_chunks": {"state", "out"},
    "selective_tokens": {"state", "out"},
    "delta_tokens": {"state", "out"},
    "delta_chunks": {"state", "out"},
}


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_access_is_proved(arch: int) -> None:
    """Every input is read, states and results are written, nothing is unknown."""
    with compiled_for(arch) as kernels:
        for name in OPERATORS:
            for counts in (ONE_EACH, MIXED):
                getattr(recurrent_triton, name)(*make_call(name, counts, torch.bfloat16, wide=True))
    assert WANTED.keys() == {kernel.src.name for kernel in kernels}
    for kernel in kernels:
        (report,) = analyze(kernel.asm["ptx"])
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        written = {names[a.param] for a in report.accesses if a.write}
        read = {names[a.param] for a in report.accesses if a.read}
        pointers = {n for n, kind in kernel.src.signature.items() if str(kind).startswith("*")}

        assert (True, ()) == (report.movable, report.why)
        assert WANTED[report.name] == written
        assert pointers - {"out"} == read
