"""tessera::choose on a GPU: what the reference chooses."""

import pytest
import torch

from choose_factory import make_rows
from tessera.kernels import choose

assert choose
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(16, 1000), (64, 128_256), (32, 151_936)])
def test_a_gpu_chooses_what_a_cpu_chooses(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """The same logits, seeds and positions give the same tokens on both."""
    given = make_rows(rows, vocab, dtype=dtype)
    expected = torch.ops.tessera.choose(*given)
    tokens, logprobs, top = torch.ops.tessera.choose(*(t.cuda() for t in given))

    assert torch.equal(expected[0], tokens.cpu())
    torch.testing.assert_close(logprobs.cpu(), expected[1], rtol=2e-5, atol=2e-5)
    assert torch.equal(expected[2], top.cpu())
