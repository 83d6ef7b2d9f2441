"""Calls of tessera::choose with every kind of row."""

import torch

from tessera.kernels.choice import MAX_TOP, Number, Setting, max_edits, num_words

Given = tuple[torch.Tensor, ...]
# Tokens that a row edits.
NUM_EDITS = 50
KINDS = ("greedy", "plain", "top-p", "top-k", "min-p", "edits", "all", "mask")


def make_rows(rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Given:
    """Arguments of the operator: row r is of kind r % 8; every third asks for logprobs."""
    chance = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab, generator=chance)).to(dtype)
    last = torch.randint(0, vocab, (rows,), generator=chance)
    settings, numbers = torch.zeros(rows, len(Setting)), torch.zeros(rows, len(Number), dtype=torch.int64)
    edits = torch.zeros(max_edits(rows, vocab), 3, dtype=torch.int32)
    masks = torch.randint(-(2**31), 2**31 - 1, (rows, num_words(vocab)), generator=chance).int()
    numbers[:, Number.SEED] = torch.randint(-(2**62), 2**62, (rows,), generator=chance)
    numbers[:, Number.POSITION] = torch.arange(rows) + 5
    settings[:, Setting.TOP_P] = 1.0
    at = 0
    for row in range(rows):
        kind = KINDS[row % len(KINDS)]
        settings[row, Setting.SHARPNESS] = 0.0 if kind == "greedy" else 1 / 0.8
        settings[row, Setting.TOP_P] = 0.9 if kind in ("top-p", "all") else 1.0
        settings[row, Setting.MIN_P] = 0.05 if kind == "min-p" else 0.0
        numbers[row, Number.TOP_K] = 7 if kind in ("top-k", "all") else 0
        numbers[row, Number.MASK] = row + 1 if kind == "mask" else 0
        numbers[row, Number.NUM_TOP] = 1 + row % (MAX_TOP + 1) if row % 3 == 0 else 0
        if kind in ("edits", "all"):
            num = min(vocab, NUM_EDITS)
            tokens = torch.randperm(vocab, generator=chance)[:num]
            bias = torch.randn(num, generator=chance)
            bias[0] = -torch.inf
            counts = torch.randint(-1, 4, (num,), generator=chance)
            edits[at : at + num] = torch.stack([tokens.int(), counts.int(), bias.view(torch.int32)], 1)
            numbers[row, Number.EDITS_BEGIN], numbers[row, Number.EDITS_END] = at, at + num
            settings[row, Setting.PRESENCE :] = torch.tensor([0.5, 0.3, 1.2])
            numbers[row, Number.COUNTS_LAST] = 1
            if kind == "all":
                last[row] = tokens[3]
            at += num
    return logits, last, settings, numbers, edits, masks
