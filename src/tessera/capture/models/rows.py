"""Transformers caches with a fixed capacity and a position per row.

Full attention keeps every position, a window of w the last w in a ring (position p in slot p % w). A prefill
attends to its own keys and leaves each row's last w in the ring. Masks apply the model's rule to row
positions (`row_mask`). Latent attention (MLA) decodes over latents (`row_latents`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import StaticCache, cache_utils, masking_utils, modeling_utils

# Mask widths are multiples of this: no kernel pads them.
MASK_ALIGNMENT = 8


class RowLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    is_compileable = True
    is_sliding = False

    def __init__(self, slots: int, is_ring: bool) -> None:
        super().__init__()
        self.slots, self.is_sliding = slots, is_ring
        self.rows: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def begin(
        self, rows: torch.Tensor | None, positions: torch.Tensor | None, last: torch.Tensor | None
    ) -> None:
        """`last` is each row's last token in a prefill."""
        self.rows, self.positions, self.last = rows, positions, last

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            new.new_zeros((*new.shape[:2], self.slots, new.shape[3])) for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots = self.rows, self.positions
        assert rows is not None
        assert slots is not None
        if self.is_sliding and self.last is not None:
            ring = torch.arange(self.slots, device=slots.device)
            # Newest position up to `last` in each slot; others keep any.
            kept = (self.last[:, None] - (self.last[:, None] - ring) % self.slots).clamp_min(0)
            for held, new in ((self.keys, key_states), (self.values, value_states)):
                held.copy_(new[rows, :, kept].transpose(1, 2))
            return key_states, value_states
        if self.is_sliding:
            slots = slots % self.slots
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.is_sliding and self.last is not None else self.slots), 0

    def get_seq_length(self) -> Any:
        if self.last is not None or self.positions is None:
            return 0
        return self.positions[0, 0]

    def get_max_length(self) -> int:
        return self.slots


@cache
def recurrent(kind: Any) -> Any:
    class Recurrent(cache_utils.LinearAttentionLayer, kind):  # type: ignore[misc]
        def __init__(self, *args: Any, number_of_states: int) -> None:
            kind.__init__(self, *args)
            cache_utils.LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            whose = kind if args else cache_utils.LinearAttentionLayer
            whose.lazy_initialization(self, *args, **kwargs)

        def reset(self) -> None:
            cache_utils.LinearAttentionLayer.reset(self)
            kind.reset(self)

    return Recurrent


def in_place_of(layer: Any, kind: Any, *args: Any) -> Any:
    if type(layer) in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        return kind(*args)
    is_recurrent = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
    if is_recurrent and isinstance(layer, cache_utils.StaticLayer):
        return recurrent(kind)(*args, number_of_states=layer.number_of_states)
    return layer


def is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


class RowCache(StaticCache):  # type: ignore[misc]
    layers: list[Any]

    def __init__(self, config: Any, capacity: int) -> None:
        super().__init__(config=config, max_cache_len=capacity)
        self.layers = [
            in_place_of(layer, RowLayer, getattr(layer, "max_cache_len", 0), is_sliding(layer))
            for layer in self.layers
        ]

    @property
    def has_rows(self) -> bool:
        return all(type(layer) is RowLayer for layer in self.layers)

    @property
    def has_positions(self) -> bool:
        return any(isinstance(layer, RowLayer) for layer in self.layers)

    def begin(self, positions: torch.Tensor | None, last: torch.Tensor | None) -> None:
        if not self.has_positions:
            return
        rows = positions if positions is None else torch.arange(len(positions), device=positions.device)
        for layer in self.layers:
            if isinstance(layer, RowLayer):
                layer.begin(rows if rows is None else rows[:, None], positions, last)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        layers = [layer for layer in self.layers if isinstance(layer, RowLayer)]
        if not layers or layers[0].positions is None:
            return super().get_query_offset(layer_idx)
        return layers[0].positions[:, 0]


class CrossLayer(RowLayer):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.slots = key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.copy_(key_states)
        self.values.copy_(value_states)
        return key_states, value_states


class RowPairCache(cache_utils.EncoderDecoderCache):  # type: ignore[misc]
    def __init__(self, config: Any, capacity: int) -> None:
        decoder = RowCache(config, capacity)
        encoder = cache_utils.Cache(layers=[CrossLayer(0, False) for _ in decoder.layers])
        super().__init__(decoder, encoder)

    def begin(self, positions: torch.Tensor | None, last: torch.Tensor | None) -> None:
        self.self_attention_cache.begin(positions, last)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.self_attention_cache.get_query_offset(layer_idx)


def row_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., torch.Tensor] = masking_utils.causal_mask_function,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    **_: Any,
) -> torch.Tensor:
    """`attention_mask` is not applied: rows have no padding that later tokens could see."""
    now = q_offset[:, None, None, None]
    if q_length > 1:
        now = now + torch.arange(q_length, device=device)[:, None]
    key_positions = torch.arange(kv_length, device=device)
    is_ring = local_size is not None and q_length == 1
    if is_ring:  # newest position in each slot
        key_positions = now - (now - key_positions) % kv_length
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    seen = mask_function(rows, torch.zeros_like(rows[:1]), now, key_positions)
    if is_ring:
        seen = seen & (key_positions >= 0)
    return additive(~seen.expand(batch_size, 1, q_length, kv_length), dtype)


def additive(barred: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    width = barred.shape[-1]
    aligned = width + -width % MASK_ALIGNMENT
    mask = torch.zeros((*barred.shape[:-1], aligned), dtype=dtype, device=barred.device)[..., :width]
    return mask.masked_fill_(barred, float("-inf"))


def row_masks() -> AbstractContextManager[Any]:
    mapping = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def choose(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(**options: Any) -> Any:
            offset = options.get("q_offset")
            is_by_row = isinstance(offset, torch.Tensor) and offset.dim() == 1
            return row_mask(**options) if is_by_row else plain(**options)

        return make

    return patch.dict(mapping._local_mapping, {name: choose(mapping[name]) for name in mapping})


def latent_modules(model: torch.nn.Module) -> list[Any]:
    """Attention that caches latents and expands them by a plain product."""
    expanding: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    return [module for module in expanding if _is_plain(module.kv_b_proj)]


def _is_plain(product: Any) -> bool:
    """Without a bias, an adapter or a packed weight."""
    has_more = getattr(product, "bias", None) is not None or hasattr(product.weight, "__tensor_flatten__")
    return type(product) is torch.nn.Linear and not has_more


@contextmanager
def attention_of(plain: Callable[..., Any], mix: Callable[..., Any], latent: Sequence[Any]) -> Iterator[None]:
    """Attention by `plain`, but by `mix` in `latent` modules (MLA).

    Their keys and values are products of latents. The product of a head's keys moves into its queries, that
    of its values into the result. `mix`: queries of latents and of rotated keys, latents, rotated keys and
    mask -> mixed latents, positions first.
    """

    def attend(
        module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if not any(module is one for one in latent):
            return plain(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
        heads, size = query.shape[1], module.qk_nope_head_dim
        up = module.kv_b_proj.weight.view(heads, -1, module.kv_lora_rank)
        content, tail = query.split([size, query.shape[3] - size], -1)
        out = mix(torch.matmul(content, up[:, :size]), tail, key, value, mask, **options)
        return torch.matmul(out.transpose(1, 2), up[:, size:].transpose(1, 2)).transpose(1, 2), None

    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS
    with ExitStack() as stack:
        stack.enter_context(patch.dict(functions._local_mapping, dict.fromkeys(functions, attend)))
        for module in latent:
            stack.enter_context(patch.object(module, "expand_kv", lambda *latents: latents))
        yield


def row_latents(model: Any) -> AbstractContextManager[None]:
    functions, name = modeling_utils.ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation
    latent = latent_modules(model) if name in functions else []

    def mix(
        latents: torch.Tensor, tail: torch.Tensor, key: Any, value: Any, mask: Any, **options: Any
    ) -> torch.Tensor:
        pairs = ((latents[:, :, 0], key[:, 0]), (tail[:, :, 0], value[:, 0]))
        first, second = (torch.matmul(q, held.transpose(1, 2)) for q, held in pairs)
        weights = torch.softmax(((first + second) * options["scaling"] + mask[:, 0]).float(), -1)
        return torch.matmul(weights.to(key.dtype), key[:, 0])[:, None]

    return attention_of(functions[name], mix, latent) if latent else nullcontext()
