"""tessera::choose on a CPU: what plain PyTorch chooses, row by row."""

import pytest
import torch

from choose_factory import KINDS, Given, make_rows
from tessera.kernels.choice import Number, Setting
from tessera.kernels.choose import _exponential


def chosen(given: Given, row: int) -> int:
    """The order of vLLM: biases, bans, masks, penalties, temperature, min-p, top-k, top-p; then a race."""
    logits, last, settings, numbers, edits, masks = given
    scores, setting, number = logits[row].float().clone(), settings[row], numbers[row]
    counts = torch.full_like(scores, -1)
    for token, count, bits in edits[number[Number.EDITS_BEGIN] : number[Number.EDITS_END]]:
        scores[token] += bits.view(torch.float32)
        counts[token] = count
    if number[Number.COUNTS_LAST]:
        counts[last[row]] = counts[last[row]].clamp_min(0) + 1
    if number[Number.MASK]:
        bits = masks[number[Number.MASK] - 1].repeat_interleave(32) >> torch.arange(32).repeat(masks.shape[1])
        scores[(bits & 1)[: len(scores)] == 0] = -torch.inf
    repeated = torch.where(
        scores > 0, scores / setting[Setting.REPETITION], scores * setting[Setting.REPETITION]
    )
    repeated -= setting[Setting.FREQUENCY] * counts + setting[Setting.PRESENCE] * (counts > 0)
    scores = torch.where(counts >= 0, repeated, scores)
    if not setting[Setting.SHARPNESS]:
        return int(scores.argmax())
    scaled = (scores - scores.max()) * setting[Setting.SHARPNESS]
    scaled[scaled.exp() < setting[Setting.MIN_P]] = -torch.inf
    if number[Number.TOP_K]:
        scaled[scaled < scaled.topk(int(number[Number.TOP_K])).values[-1]] = -torch.inf
    likely, order = scaled.double().softmax(-1).sort(descending=True)
    scaled[order[likely.cumsum(-1) - likely >= setting[Setting.TOP_P].item()]] = -torch.inf
    draws = (number[which].expand(len(scaled)) for which in (Number.SEED, Number.POSITION))
    return int((scaled - _exponential(torch.arange(len(scaled)), *draws).log()).argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_chooses_what_plain_pytorch_chooses(dtype: torch.dtype) -> None:
    """Every kind of row, forty times."""
    given = make_rows(40 * len(KINDS), 300, dtype=dtype)
    tokens, *_ = torch.ops.tessera.choose(*given)

    assert [chosen(given, row) for row in range(len(tokens))] == tokens.tolist()
