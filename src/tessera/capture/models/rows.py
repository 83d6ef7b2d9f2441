"""Caches of transformers with a fixed capacity and positions per row of the batch.

The cache is the configuration's `StaticCache` with `RowLayer` where layers hold keys and values. A layer
with full attention keeps every position; one with a window of w keeps the last w in a ring (position p in
slot p % w). A prefill attends to its own keys and leaves each row's last w in the ring. Other layers
(convolutions, recurrences) stay. Masks use the model's rule on the rows' positions (`row_mask`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import StaticCache, cache_utils, masking_utils

# Masks are made this much wider than needed, to a multiple, so that no kernel has to pad them.
MASK_ALIGNMENT = 8


class RowLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer."""

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
        """A call with tokens at `positions`; `last` is the index of each row's last token in a prefill."""
        self.rows, self.positions, self.last = rows, positions, last

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Zeros, of the shape that the first keys and values have."""
        self.hold(
            *(new.new_zeros((*new.shape[:2], self.slots, new.shape[3])) for new in (key_states, value_states))
        )

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values lie in these tensors from now on."""
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values; returns what the layer attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots = self.rows, self.positions
        assert rows is not None
        assert slots is not None
        if self.is_sliding and self.last is not None:
            ring = torch.arange(self.slots, device=slots.device)
            # The newest position at or before `last` that lies in each slot; unused slots keep any.
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
        """How many keys there are to look at, and where they begin."""
        return (query_length if self.is_sliding and self.last is not None else self.slots), 0

    def get_seq_length(self) -> Any:
        """Where the first row's tokens begin: a prefill begins at 0."""
        if self.last is not None or self.positions is None:
            return 0
        return self.positions[0, 0]

    def get_max_length(self) -> int:
        return self.slots


@cache
def recurrent(kind: Any) -> Any:
    """The class of layers that are of a kind and hold a recurrent state too."""

    class Recurrent(cache_utils.LinearAttentionLayer, kind):  # type: ignore[misc]
        """A layer that holds keys and values and a recurrent state."""

        def __init__(self, *args: Any, number_of_states: int) -> None:
            kind.__init__(self, *args)
            cache_utils.LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Of keys and values by place, of the recurrent state by name."""
            whose = kind if args else cache_utils.LinearAttentionLayer
            whose.lazy_initialization(self, *args, **kwargs)

        def reset(self) -> None:
            cache_utils.LinearAttentionLayer.reset(self)
            kind.reset(self)

    return Recurrent


def in_place_of(layer: Any, kind: Any, *args: Any) -> Any:
    """A layer of our kind in the place of one of transformers' static ones; others are as they are."""
    if type(layer) in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        return kind(*args)
    is_recurrent = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
    if is_recurrent and isinstance(layer, cache_utils.StaticLayer):
        return recurrent(kind)(*args, number_of_states=layer.number_of_states)
    return layer


def is_sliding(layer: Any) -> bool:
    """True for a layer of transformers that looks back some positions only."""
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
        """True if every layer keeps keys and values by position: rows may be of unequal length."""
        return all(type(layer) is RowLayer for layer in self.layers)

    @property
    def has_positions(self) -> bool:
        """True if some layer does."""
        return any(isinstance(layer, RowLayer) for layer in self.layers)

    def begin(self, positions: torch.Tensor | None, last: torch.Tensor | None) -> None:
        """A call with tokens at `positions`; None when it has ended."""
        if not self.has_positions:
            return
        rows = positions if positions is None else torch.arange(len(positions), device=positions.device)
        for layer in self.layers:
            if isinstance(layer, RowLayer):
                layer.begin(rows if rows is None else rows[:, None], positions, last)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where each row's tokens begin, for `row_mask`."""
        layers = [layer for layer in self.layers if isinstance(layer, RowLayer)]
        if not layers or layers[0].positions is None:
            return super().get_query_offset(layer_idx)
        return layers[0].positions[:, 0]


class CrossLayer(RowLayer):
    """The keys and values of what an encoder returned: written whole by a prefill, then only read."""

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
    """The cache of a decoder that looks at an encoder's results."""

    def __init__(self, config: Any, capacity: int) -> None:
        own = RowCache(config, capacity)
        across = cache_utils.Cache(layers=[CrossLayer(0, False) for _ in own.layers])
        super().__init__(own, across)

    @property
    def has_rows(self) -> bool:
        return bool(self.self_attention_cache.has_rows)

    @property
    def has_positions(self) -> bool:
        return bool(self.self_attention_cache.has_positions)

    def begin(self, positions: torch.Tensor | None, last: torch.Tensor | None) -> None:
        """A call with tokens at `positions`; None when it has ended."""
        self.self_attention_cache.begin(positions, last)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where each row's tokens begin, for `row_mask`."""
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
    """0 where a token may look and minus infinity where not; the rule is the model's `mask_function`.

    Not applied: `attention_mask`. Rows of a RowCache have no padding that later tokens could see.
    """
    now = q_offset[:, None, None, None]
    if q_length > 1:
        now = now + torch.arange(q_length, device=device)[:, None]
    there = torch.arange(kv_length, device=device)
    is_ring = local_size is not None and q_length == 1
    if is_ring:  # the newest position that lies in each slot
        there = now - (now - there) % kv_length
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    seen = mask_function(rows, torch.zeros_like(rows[:1]), now, there)
    if is_ring:
        seen = seen & (there >= 0)
    return additive(~seen.expand(batch_size, 1, q_length, kv_length), dtype)


def additive(barred: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to be added to scores: minus infinity where barred."""
    width = barred.shape[-1]
    aligned = width + -width % MASK_ALIGNMENT
    mask = torch.zeros((*barred.shape[:-1], aligned), dtype=dtype, device=barred.device)[..., :width]
    return mask.masked_fill_(barred, float("-inf"))


@contextmanager
def row_masks() -> Iterator[None]:
    """While entered, masks over the rows of a RowCache are made by `row_mask`, all others as ever."""
    mapping = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def choose(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(**given: Any) -> Any:
            is_by_row = isinstance(given.get("q_offset"), torch.Tensor) and given["q_offset"].dim() == 1
            return row_mask(**given) if is_by_row else plain(**given)

        return make

    with patch.dict(mapping._local_mapping, {name: choose(mapping[name]) for name in mapping}):
        yield
