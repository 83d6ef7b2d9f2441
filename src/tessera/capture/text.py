"""A byte-level tokenizer: token n below 256 is byte n. For models that have no vocabulary."""

from collections.abc import Sequence

import torch

BEGIN, END = 256, 257


def encode(text: str) -> list[int]:
    """Tokens of a text, behind the begin mark."""
    return [BEGIN, *text.encode()]


def decode(tokens: Sequence[int]) -> str:
    """The text of some tokens, with a dot for every byte that is no printable character."""
    return "".join(chr(t) if 32 <= t < 127 else "\N{MIDDLE DOT}" for t in tokens if t < 256)


def prompt_inputs(prompts: Sequence[str], width: int) -> dict[str, torch.Tensor]:
    """Prefill inputs of one batch: prompts cut to `width` tokens and filled up with end marks."""
    rows = [encode(prompt)[:width] for prompt in prompts]
    tokens = torch.tensor([row + [END] * (width - len(row)) for row in rows])
    positions = torch.arange(width).repeat(len(rows), 1)
    return {"tokens": tokens, "positions": positions, "last": torch.tensor([len(r) - 1 for r in rows])}
