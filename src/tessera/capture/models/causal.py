"""What the steps of language models share: each row's newest token, and the choice."""

import torch


def newest(hidden: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Each row's newest token."""
    if last is None:
        return hidden[:, -1]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def choose(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of every language model here."""
    return {"logits": logits, "next_tokens": logits.argmax(-1)}
