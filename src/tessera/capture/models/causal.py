"""Causal language models of Hugging Face, as steps with a static cache whose rows stand at different places.

prefill reads `context` tokens a row (rows may be shorter: `last` is the index of each row's last token) and
leaves room for `context + reserve` positions behind; decode reads one token a row at the row's own position.
Both return the logits of each row's newest token and the greedy choice among them.
"""

from collections.abc import Callable
from typing import Any

import torch

from tessera.capture.models.cache import SLIDING, CacheShape, RowCache, cache_shape, make_state, masks
from tessera.capture.workload import Tensors, Workload
from tessera.ir import Step


def causal_workload(model: Any, step: Step) -> Workload:
    """A step of a causal language model."""
    shape = cache_shape(model.config, step)
    return Workload(
        step,
        model,
        _caller(model, shape),
        lambda seed: _inputs(step, model.config.vocab_size, seed),
        lambda seed: make_state(shape, step, model.dtype, seed),
        _follow,
    )


def _caller(model: Any, shape: CacheShape) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    decoder, head, dtype = model.get_decoder(), model.get_output_embeddings(), model.dtype

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        positions, last = inputs["positions"], inputs.get("last")
        made = masks(shape, positions, last is not None, dtype)
        hidden = decoder(
            input_ids=inputs["tokens"],
            attention_mask=by_kind(model.config, shape, made),
            position_ids=positions,
            past_key_values=RowCache(shape, state, positions, last),
            use_cache=True,
        ).last_hidden_state
        return choose(head(newest(hidden, last)))

    return call


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


def _inputs(step: Step, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths: full ones for the first row, shorter ones below."""
    random = torch.Generator().manual_seed(seed)
    width = step.context if step.kind == "prefill" else 1
    tokens = torch.randint(0, vocab_size, (step.batch, width), generator=random)
    lengths = torch.randint((step.context + 1) // 2, step.context + 1, (step.batch,), generator=random)
    if step.kind == "prefill":
        positions = torch.arange(width).repeat(step.batch, 1)
        return {"tokens": tokens, "positions": positions, "last": lengths - 1}
    return {"tokens": tokens, "positions": (lengths - 1)[:, None].clone()}


def _follow(first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
    """Each row reads the token it chose, one place further on."""
    start = first["last"] + 1 if "last" in first else first["positions"][:, 0]
    return {
        "tokens": last["next_tokens"][:, None].clone(),
        "positions": (start + run)[:, None].clone(),
    }
