"""The served steps of a vision-language model: prompts in chunks that may see a picture.

    encode  is that of `vision`: one picture in, `PICTURE_TOKENS` embeddings out
    chunk   reads `context` tokens at given positions into a spare row; `seen` says for each token which of
            the picture's embeddings stands in its place, -1 for a token of text
    insert  copies the spare row over one row of a batch
    decode  is that of `vision`

So a prompt may hold its picture anywhere, across chunks too, or have none. Everything else is as in
`serving`: tokens of a chunk after `last` are not looked at. Sliding windows are not handled; the family has
none.
"""

from collections.abc import Callable
from typing import Any

import torch

from tessera.capture.models.cache import CacheShape, cache_shape, make_state
from tessera.capture.models.causal import by_kind, choose, newest
from tessera.capture.models.serving import SPARE, ChunkCache, chunk_masks, insert_workload, spare
from tessera.capture.workload import Tensors, Workload
from tessera.ir import Step

# A picture is resized to a grid of 8 x 8 tokens: every request has the same shapes.
PICTURE_TOKENS = 64


def seeing_chunk(model: Any, step: Step) -> Workload:
    """A chunk of a vision-language model; `context` tokens of `context + reserve` positions."""
    shape = cache_shape(model.config.text_config, step)
    return Workload(
        step,
        model,
        _caller(model, shape),
        lambda seed: _inputs(step, model, seed),
        lambda seed: spare(make_state(shape, step, model.dtype, seed)),
        _follow,
    )


def seeing_insert(model: Any, step: Step) -> Workload:
    """The insert of a vision-language model."""
    shape = cache_shape(model.config.text_config, step)
    return insert_workload(model, step, lambda of, seed: make_state(shape, of, model.dtype, seed))


def _caller(model: Any, shape: CacheShape) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    language, head, dtype = model.model.language_model, model.get_output_embeddings(), model.dtype
    config = model.config.text_config

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        last, image = inputs["last"], inputs["image"]
        count = torch.arange(inputs["tokens"].shape[1], device=last.device)
        used = torch.minimum(count, last[:, None])
        tokens, positions = inputs["tokens"].gather(1, used), inputs["positions"].gather(1, used)
        seen = inputs["seen"].gather(1, used)[..., None]
        there = image.gather(1, seen.clamp_min(0).expand(-1, -1, image.shape[-1]))
        own = {name.removeprefix(SPARE): tensor for name, tensor in state.items()}
        hidden = language(
            inputs_embeds=torch.where(seen >= 0, there, language.embed_tokens(tokens)),
            attention_mask=by_kind(config, shape, chunk_masks(shape, positions, last, dtype)),
            position_ids=inputs["rotary"].gather(2, used.expand(3, -1, -1)),
            past_key_values=ChunkCache(shape, own, positions, last),
            use_cache=True,
        ).last_hidden_state
        return choose(head(newest(hidden, last)))

    return call


def _inputs(step: Step, model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A first chunk that is at least half full, with as much of a picture as there is room for."""
    config = model.config.text_config
    random = torch.Generator().manual_seed(seed)
    size = (step.batch, step.context)
    seen = torch.arange(step.context) - 1
    seen[min(step.context, PICTURE_TOKENS + 1) :] = -1
    positions = torch.arange(step.context).repeat(step.batch, 1)
    image = torch.randn((step.batch, PICTURE_TOKENS, config.hidden_size), generator=random)
    return {
        "tokens": torch.randint(0, config.vocab_size, size, generator=random),
        "positions": positions,
        "rotary": positions.repeat(3, 1, 1),
        "last": torch.randint((step.context - 1) // 2, step.context, (step.batch,), generator=random),
        "seen": seen.repeat(step.batch, 1),
        "image": image.to(model.dtype),
    }


def _follow(first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
    """The same again, behind the runs before."""
    length = run * (int(first["last"].max()) + 1)
    return {**first, "positions": first["positions"] + length, "rotary": first["rotary"] + length}
