"""What the steps of language models share: masks by kind of layer, each row's newest token, the choice."""

from typing import Any

import torch

from tessera.capture.models.cache import SLIDING, CacheShape


def by_kind(config: Any, shape: CacheShape, made: dict[str, torch.Tensor]) -> Any:
    """Masks as the decoder takes them: one for each kind of layer where it knows kinds, else one for all."""
    knows_kinds = getattr(config, "layer_types", None) is not None and SLIDING in shape.kinds
    return made if knows_kinds else next(iter(made.values()))


def newest(hidden: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Each row's newest token."""
    if last is None:
        return hidden[:, -1]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def choose(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of every language model here."""
    return {"logits": logits, "next_tokens": logits.argmax(-1)}
