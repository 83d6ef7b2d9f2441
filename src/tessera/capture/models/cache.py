"""The key/value cache as named state: fixed size, each row of the batch at its own positions.

A layer with full attention keeps every position. A layer with a sliding window of w keeps the last w in a
ring: position p lies in slot p % w. A prefill starts at position 0, attends to its own keys in such a layer
and leaves in the ring what each row's last w tokens put there; a decode writes its slot and reads the ring.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tessera.capture.workload import Tensors
from tessera.errors import CaptureError
from tessera.ir import Step


def newest(hidden: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Each row's newest token."""
    if last is None:
        return hidden[:, -1]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def choose(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of every language model here."""
    return {"logits": logits, "next_tokens": logits.argmax(-1)}


FULL, SLIDING = "full_attention", "sliding_attention"
# Masks are made this much wider than needed, to a multiple, so that no kernel has to pad them.
MASK_ALIGNMENT = 8
# What a configuration must say; older families (gpt2, opt, bloom) do not, and keep caches of their own.
NEEDED = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
)


@dataclass(frozen=True)
class CacheShape:
    """What a model's configuration says about its cache."""

    kinds: tuple[str, ...]  # one per layer
    heads: int
    head_dim: int
    capacity: int
    # Slots of a sliding layer; the capacity if that is less than the window.
    ring: int

    def slots(self, layer: int) -> int:
        """Positions that one layer keeps."""
        return self.ring if self.kinds[layer] == SLIDING else self.capacity


def cache_shape(config: Any, step: Step) -> CacheShape:
    """The cache of a step, refused where the configuration asks for a kind of cache that is unknown here."""
    absent = [name for name in NEEDED if getattr(config, name, None) is None]
    if absent:
        raise CaptureError(
            f"a {config.model_type} is not known here: its configuration has no {', '.join(absent)}",
            "Use a model made like Llama, or write a module:callable that returns a Workload.",
        )
    capacity = step.context + step.reserve
    most = config.max_position_embeddings
    if capacity > most:
        raise CaptureError(
            f"context {capacity} is beyond the {most} positions of {step.model}", f"Use at most {most}."
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kinds = tuple(kinds or [SLIDING if window else FULL] * config.num_hidden_layers)
    strange = sorted(set(kinds) - {FULL, SLIDING})
    if strange:
        raise CaptureError(
            f"{step.model} has layers of kind {', '.join(strange)}",
            "Write a module:callable that returns a Workload with that state.",
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ring = min(window or capacity, capacity)
    return CacheShape(kinds, config.num_key_value_heads, head_dim, capacity, ring)


class PositionedCache:
    """The state of one call. Has the two methods that Hugging Face attention calls on a cache."""

    def __init__(
        self, shape: CacheShape, state: Tensors, positions: torch.Tensor, last: torch.Tensor | None
    ) -> None:
        """`last` is the index of each row's last token in a prefill, None in a decode."""
        self._shape, self._state, self._positions = shape, state, positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self._slots, self._kept = positions, positions
        if SLIDING in shape.kinds:
            ring = torch.arange(shape.ring, device=positions.device)
            if last is None:
                self._slots = positions % shape.ring
            else:
                # The newest position at or before `last` that lies in each slot; unused slots keep any.
                self._kept = (last[:, None] - (last[:, None] - ring) % shape.ring).clamp_min(0)
        self._is_prefill = last is not None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values; returns what the layer attends to."""
        keys, values = self._state[f"keys.{layer_idx}"], self._state[f"values.{layer_idx}"]
        slides = self._shape.kinds[layer_idx] == SLIDING
        if slides and self._is_prefill:
            for held, new in ((keys, key), (values, value)):
                held.copy_(new[self._rows, :, self._kept].transpose(1, 2))
            return key, value
        slots = self._slots if slides else self._positions
        keys[self._rows, :, slots] = key.transpose(1, 2)
        values[self._rows, :, slots] = value.transpose(1, 2)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions the cache can hold; positions are always given, so nothing depends on it."""
        return self._shape.slots(layer_idx)


def masks(
    shape: CacheShape, positions: torch.Tensor, is_prefill: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """For each kind of layer the model has: 0 where a token may look, minus infinity where not."""
    now = positions[:, None, :, None]
    found = {}
    if FULL in shape.kinds:
        places = torch.arange(shape.capacity, device=positions.device)
        found[FULL] = additive(places > now, dtype)
    if SLIDING in shape.kinds:
        if is_prefill:
            ago = now - positions[:, None, None, :]
            found[SLIDING] = additive((ago < 0) | (ago >= shape.ring), dtype)
        else:
            ring = torch.arange(shape.ring, device=positions.device)
            found[SLIDING] = additive(now - (now - ring) % shape.ring < 0, dtype)
    return found


def additive(barred: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to be added to scores: minus infinity where barred."""
    width = barred.shape[-1]
    aligned = width + -width % MASK_ALIGNMENT
    mask = torch.zeros((*barred.shape[:-1], aligned), dtype=dtype, device=barred.device)[..., :width]
    return mask.masked_fill_(barred, float("-inf"))


def make_state(shape: CacheShape, step: Step, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """An empty cache for a prefill; for a decode on its own, a cache that looks used."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(len(shape.kinds)):
        size = (step.batch, shape.heads, shape.slots(layer), shape.head_dim)
        for part in ("keys", "values"):
            used = step.kind == "decode"
            tensor = torch.randn(size, generator=random) if used else torch.zeros(size)
            made[f"{part}.{layer}"] = tensor.to(dtype)
    return made
