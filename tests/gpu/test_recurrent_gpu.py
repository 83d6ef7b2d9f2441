"""Recurrent layers on a GPU: near the CPU's, the same bits every time."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from recurrent_factory import LONG, MIXED, ONE_EACH, OPERATORS, make_call, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(call: list[Any]) -> list[Any]:
    return [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [ONE_EACH, MIXED, LONG], ids=["answers", "mixed", "long"])
@pytest.mark.parametrize("name", OPERATORS)
def test_results_and_states_are_the_references(
    name: str, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """At the sizes of a 7B model's heads."""
    call, again, same = (make_call(name, counts, dtype, wide=True) for _ in range(3))
    call, again = on_gpu(call), on_gpu(again)
    operator = getattr(torch.ops.tessera, name)
    out, wanted = operator(*call), operator(*same)
    error = 1e-3 if dtype is torch.float32 else 0.03

    assert_close(out.cpu(), wanted, rtol=error, atol=error * float(wanted.abs().max()))
    held = state_of(name, same)
    assert_close(state_of(name, call).cpu(), held, rtol=error, atol=error * float(held.abs().max()))
    assert torch.equal(out, operator(*again))
    assert torch.equal(state_of(name, call), state_of(name, again))
