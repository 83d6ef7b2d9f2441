"""Qwen2.5-VL of Hugging Face in three steps: encode an image, prefill with it, decode.

encode reads the patches of one image a row and returns `context` embeddings a row. prefill reads `context`
tokens a row, of which the first half stand for the image: the embeddings are an input, put in the places of
the placeholder tokens. decode reads one token a row. Positions are those of multimodal rotary embedding
(time, height, width). Prefill and decode return where a row goes on, so that each run follows from the last.

Where windows of the image begin and end is fixed by its size, so it is given as plain numbers: the vision
tower would otherwise read it from the device.
"""

from collections.abc import Callable
from typing import Any

import torch

from tessera.capture.models.generic import check_length, choose, newest
from tessera.capture.reads import traced
from tessera.capture.workload import Tensors, Workload
from tessera.errors import MismatchError
from tessera.ir import Step

# A picture in a prompt of a service is resized to a grid of 8 x 8 tokens: every one has the same shape.
PICTURE_TOKENS = 64
# Text before the image: the marks that begin the conversation and the image.
NUM_LEADING = 1


def vision_workload(model: Any, step: Step) -> Workload:
    """A step of the vision-language model."""
    return _encode(model, step) if step.kind == "encode" else _language(model, step)


def grid_of(num_tokens: int) -> tuple[int, int]:
    """Height and width in merged patches of an image that makes so many tokens, as square as they allow."""
    height = next(n for n in range(int(num_tokens**0.5), 0, -1) if num_tokens % n == 0)
    return height, num_tokens // height


class _Boundaries(list[int]):
    """Where pieces of a sequence begin, with the two things the tower does to them: subtract and list."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Boundaries(found) if isinstance(key, slice) else found

    def __sub__(self, other: list[int]) -> "_Boundaries":
        return _Boundaries(a - b for a, b in zip(self, other, strict=True))

    def tolist(self) -> list[int]:
        """The numbers."""
        return list(self)


def _encode(model: Any, step: Step) -> Workload:
    tower = model.model.visual
    config = tower.config
    merge, height, width = config.spatial_merge_size, *grid_of(step.context)
    num_patches = step.context * merge * merge
    order, windows = _windows(height, width, config.window_size // config.patch_size // merge, step.batch)
    images = _Boundaries(i * num_patches for i in range(step.batch + 1))
    pieces = _Boundaries(w * merge * merge for w in windows)
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    places = _patch_places(height, width, merge).repeat(step.batch, 1)
    index = torch.tensor(order)

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        made = tower(
            inputs["patches"],
            grid_thw=None,
            position_ids=inputs["places"],
            cu_seqlens=images,
            window_index=inputs["window_index"],
            cu_window_seqlens=pieces,
        )
        return {"image": made.pooler_output.view(step.batch, step.context, -1)}

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        patches = torch.randn((step.batch * num_patches, patch), generator=random).to(model.dtype)
        return {"patches": patches, "places": places.clone(), "window_index": index.clone()}

    return Workload(step, model, call, make_inputs, lambda seed: {}, lambda first, run, last: dict(first))


def _patch_places(height: int, width: int, merge: int) -> torch.Tensor:
    """Row and column of every patch, patches of one merged token together."""
    row, column = (
        axis.reshape(height, merge, width, merge).transpose(1, 2).flatten()
        for axis in torch.meshgrid(torch.arange(height * merge), torch.arange(width * merge), indexing="ij")
    )
    return torch.stack([row, column], -1)


def _windows(height: int, width: int, side: int, batch: int) -> tuple[list[int], list[int]]:
    """Merged tokens ordered window by window, and where each window begins in that order."""
    order: list[int] = []
    begins = [0]
    for image in range(batch):
        for top in range(0, height, side):
            for left in range(0, width, side):
                rows = range(top, min(top + side, height))
                columns = range(left, min(left + side, width))
                order += [(image * height + r) * width + c for r in rows for c in columns]
                begins.append(len(order))
    return order, begins


def _language(model: Any, step: Step) -> Workload:
    capacity = check_length(model.config.text_config, step)
    return Workload(
        step,
        model,
        _caller(model, capacity),
        lambda seed: _inputs(step, model, seed),
        lambda seed: _state(model, step, capacity, seed),
        lambda first, run, last: _follow(step, model, last),
    )


def _state(model: Any, step: Step, capacity: int, seed: int) -> dict[str, torch.Tensor]:
    """An empty cache for a prefill; for a decode on its own, a cache that looks used."""
    from tessera.capture.models.rows import RowCache

    random, config = torch.Generator().manual_seed(seed), model.config.text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made = {}
    for number, layer in enumerate(RowCache(config, capacity).layers):
        size = (step.batch, config.num_key_value_heads, layer.slots, width)
        for part in ("keys", "values"):
            used = step.kind == "decode"
            tensor = torch.randn(size, generator=random) if used else torch.zeros(size)
            made[f"{part}.{number}"] = tensor.to(model.dtype)
    return made


def _caller(model: Any, capacity: int) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    from tessera.capture.models.rows import RowCache, row_masks

    language, head = model.model.language_model, model.get_output_embeddings()

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        positions, last = inputs["positions"], inputs.get("last")
        hidden = language.embed_tokens(inputs["tokens"])
        if "image" in inputs:
            rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None]
            hidden[rows, inputs["image_places"]] = inputs["image"]
        cache = RowCache(model.config.text_config, capacity)
        for number, layer in enumerate(cache.layers):
            layer.hold(state[f"keys.{number}"], state[f"values.{number}"])
        cache.begin(positions, last)
        with traced(), row_masks():
            hidden = language(
                inputs_embeds=hidden, position_ids=inputs["rotary"], past_key_values=cache, use_cache=True
            ).last_hidden_state
        made = choose(head(newest(hidden, last)))
        now = positions[:, -1] if last is None else last
        made["next_positions"] = now[:, None] + 1
        made["next_rotary"] = newest(inputs["rotary"].transpose(0, 1).transpose(1, 2), last) + 1
        return made

    return call


def _inputs(step: Step, model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths; in a prefill the image's places come right after the leading text."""
    config = model.config.text_config
    random = torch.Generator().manual_seed(seed)
    width = step.context if step.kind == "prefill" else 1
    tokens = torch.randint(0, config.vocab_size, (step.batch, width), generator=random)
    least = min(step.context, NUM_LEADING + num_image_tokens(step) + 1)
    lengths = torch.randint(least, step.context + 1, (step.batch,), generator=random)
    if step.kind == "decode":
        positions = (lengths - 1)[:, None].clone()
        return {"tokens": tokens, "positions": positions, "rotary": positions.repeat(3, 1, 1)}
    num = num_image_tokens(step)
    image = torch.randn((step.batch, num, config.hidden_size), generator=random).to(model.dtype)
    return {
        "tokens": tokens,
        "positions": torch.arange(width).repeat(step.batch, 1),
        "rotary": rotary_positions(width, num)[:, None].repeat(1, step.batch, 1),
        "last": lengths - 1,
        "image": image,
        "image_places": (NUM_LEADING + torch.arange(num)).repeat(step.batch, 1),
    }


def num_image_tokens(step: Step) -> int:
    """How many of a prefill's tokens stand for the image: what an encode of that context returns."""
    return step.context // 2 if step.kind == "prefill" else 0


def rotary_positions(width: int, num_image: int) -> torch.Tensor:
    """Time, height and width of every token: text counts on in all three, the image spans its grid."""
    text = torch.arange(width)
    positions = torch.stack([text, text, text])
    if num_image:
        rows, columns = grid_of(num_image)
        start, stop = NUM_LEADING, NUM_LEADING + num_image
        positions[0, start:stop] = start
        positions[1, start:stop] = start + torch.arange(rows).repeat_interleave(columns)
        positions[2, start:stop] = start + torch.arange(columns).repeat(rows)
        positions[:, stop:] = start + max(rows, columns) + torch.arange(width - stop)
    return positions


def _follow(step: Step, model: Any, last: Tensors) -> dict[str, torch.Tensor]:
    """A prefill takes the image that an encode returned; a decode goes on where its row stands."""
    if step.kind == "decode":
        return {
            "tokens": last["next_tokens"][:, None].clone(),
            "positions": last["next_positions"].clone(),
            "rotary": last["next_rotary"].t()[:, :, None].contiguous(),
        }
    inputs = _inputs(step, model, 0)
    if inputs["image"].shape != last["image"].shape:
        found, wanted = last["image"].shape[1], inputs["image"].shape[1]
        raise MismatchError(
            f"the encode returns {found} tokens a row, the prefill takes {wanted}",
            "Capture the encode with half the prefill's context, and both with the same batch.",
        )
    return {**inputs, "image": last["image"].clone()}
