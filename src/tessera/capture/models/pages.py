"""A transformers cache with paged keys and values, and attention over it.

A layer's pages hold the positions of its window. Layers with the same window form a group with a page table
of its own (`join_layers`). Layers of different groups share tensors: a page belongs to one group of one
sequence at a time, so pages behind a window are free for any group.

During a call every registered attention function is the paged operator, and a mask is the model's visibility
rule (`PageMask`), which must be a window. For a model with its own attention, each row's keys and values are
gathered, newest last.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import StaticCache, cache_utils, masking_utils

import tessera.kernels.paged  # noqa: F401 - registers the operator
from tessera.capture.models.rows import additive, attention_of, in_place_of, is_sliding, latent_modules
from tessera.kernels import MAX_GROUPS, PAGE

NUM_FIRST_PAGES = 8
# Query heads per program for latents.
MAX_LATENT_GROUP = 16
# Tensor arguments without effect on attention.
HARMLESS = ("position_ids", "cache_position", "s_aux")


@dataclass(frozen=True)
class PageTables:
    positions: torch.Tensor
    # Page and offset of each new key. Two numbers: a write through a flat view would compile into a copy of
    # all pages.
    page: torch.Tensor
    place: torch.Tensor
    pages: torch.Tensor
    page_starts: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
    one_each: bool
    expected_length: int
    # Gathered: positions of each row, negative before its first, and their slots.
    seen: torch.Tensor | None = None
    by_row: torch.Tensor | None = None


class PagedLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of a layer, as [pages, page positions, heads, width]."""

    is_compileable = True
    is_sliding = False

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        # Group of layers, and its widest window; 0: all positions, None: unknown.
        self.group = 0
        self.window: int | None = None
        self.tables: PageTables | None = None
        self.is_unread = False
        self.stored: tuple[torch.Tensor, ...] = ()

    def begin(self, tables: PageTables | None) -> None:
        self.tables, self.is_unread, self.stored = tables, False, ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            new.new_zeros((NUM_FIRST_PAGES, PAGE, new.shape[1], new.shape[3]))
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens (attention stores them), or all dense rows."""
        tables = self.tables
        assert tables is not None
        self.is_unread = True
        if tables.by_row is None:
            return key_states, value_states
        self.store(key_states, value_states)
        slots, heads = tables.by_row[:, None], torch.arange(self.keys.shape[2], device=tables.by_row.device)
        keys, values = (held.flatten(0, 1)[slots, heads[:, None]] for held in (self.keys, self.values))
        return keys, values

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tables = self.tables
        assert tables is not None
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[tables.page, tables.place] = new.transpose(1, 2).flatten(0, 1)
        self.is_unread, self.stored = False, (key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_dense or query_length, 0

    def get_seq_length(self) -> int:
        """Dense rows count as full."""
        return max(0, self._num_dense - 1)

    def get_max_length(self) -> int:
        return -1

    @property
    def _num_dense(self) -> int:
        by_row = None if self.tables is None else self.tables.by_row
        return 0 if by_row is None else by_row.shape[1]


def clear_rows(held: torch.Tensor, fresh: torch.Tensor) -> None:
    if held.shape[:1] != fresh.shape:
        raise ValueError("its cache keeps more than a row for each sequence")
    held.masked_fill_(fresh.view(-1, *[1] * (held.dim() - 1)), 0)


class PagedCache(StaticCache):  # type: ignore[misc]
    layers: list[Any]

    def __init__(self, config: Any) -> None:
        try:
            super().__init__(config=config, max_cache_len=PAGE)
        except KeyError as error:
            raise ValueError(f"its cache has layers of its own kind, {error.args[0]}") from error
        # Keys of an indexer are not kept: it selects all.
        self.layers = [
            PagedLayer(is_sliding=False)
            if hasattr(x, "indexer_keys")
            else in_place_of(x, PagedLayer, is_sliding(x))
            for x in self.layers
        ]
        for x in self.layers:
            if not isinstance(x, PagedLayer | cache_utils.LinearAttentionCacheLayerMixin):
                raise ValueError(f"its cache has layers of its own kind, {type(x).__name__}")
        # Attributes of a model's own class of cache.
        self._adopted: list[str] = []
        # A model that takes no positions adds the number of earlier tokens to those of a call.
        self.counts_tokens = self.is_counted = False

    def adopt(self, cache: Any) -> None:
        """Takes the class of a model's own cache, and what it keeps by row."""
        self._adopted = [name for name in vars(cache) if name not in vars(self)]
        self.__dict__ |= {name: vars(cache)[name] for name in self._adopted}
        self.__class__ = type(type(cache).__name__, (type(self), type(cache)), {})

    @property
    def states(self) -> list[Any]:
        """Kept by row: states of recurrent layers, attributes of a model's own class of cache."""
        recurrent = [x for x in self.layers if isinstance(x, cache_utils.LinearAttentionCacheLayerMixin)]
        by_layer = [(layer.conv_states, layer.recurrent_states) for layer in recurrent]
        return [*by_layer, *(vars(self)[name] for name in self._adopted)]

    @property
    def paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """A layer, or a model that takes no positions, gets the number of tokens before each of its own."""
        if layer_idx is None and self.counts_tokens:
            layer_idx, self.is_counted = self.layers.index(self.paged[0]), True
        tables = None if layer_idx is None else getattr(self.layers[layer_idx], "tables", None)
        if tables is None:
            return super().get_seq_length()
        if tables.by_row is not None:
            raise ValueError("its layers count the tokens before a row")
        return tables.positions - torch.arange(len(tables.positions), device=tables.positions.device)

    def get_query_offset(self, layer_idx: int) -> int:
        return super().get_seq_length(layer_idx)  # type: ignore[no-any-return]

    def begin(self, tables: Sequence[PageTables]) -> None:
        for layer in self.paged:
            layer.begin(tables[layer.group] if tables else None)

    def join_layers(self) -> tuple[int, ...]:
        """Returns the window of each group, full ones first. Pages of different sizes share no tensor."""
        layers = [layer for layer in self.paged if layer.is_initialized]
        by_window: dict[int, list[PagedLayer]] = {}
        for layer in layers:
            by_window.setdefault(layer.window or 0, []).append(layer)
        if len({(x.keys.shape, x.values.shape, x.keys.dtype) for x in layers}) > 1:
            by_window = {0 if 0 in by_window else max(by_window): layers}
        most = max(min(map(len, by_window.values()), default=0), -(-len(layers) // (MAX_GROUPS - 1)))
        windows: list[int] = []
        shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for window, members in sorted(by_window.items()):
            num = -(-len(members) // most)
            for place, layer in enumerate(members):
                layer.group = len(windows) + place % num
                layer.keys, layer.values = shared.setdefault(place // num, (layer.keys, layer.values))
            windows += [window] * num
        return tuple(windows)

    def attended(self, key: torch.Tensor, value: torch.Tensor) -> PagedLayer:
        """Pages hold what attention reads: keys and values by head, or latents (`attention_of`)."""
        for layer in self.paged:
            if layer.is_unread:
                layer.store(key, value)
                return layer
        for layer in self.paged:
            if layer.stored and layer.stored[0] is key and layer.stored[1] is value:
                return layer
        raise ValueError("its attention reads keys that are not in its cache")


class PageMask:
    def __init__(self, **options: Any) -> None:
        self._rule, self._window = options["mask_function"], options.get("local_size") or 0
        self._chunk = chunk_of(options.get("config"))

    @cached_property
    def window(self) -> int:
        """0 for all earlier positions; refuses rules that are no window, by samples where rules differ."""
        window, reach = self._window, self._window or 64
        now = [0, 1, reach - 1, reach, reach + 1, 2 * reach + reach // 2, 7 * reach + 3]
        ago = [-1, 0, 1, reach // 2, reach - 1, reach, reach + 1, 5 * reach]
        pairs = [(q, q - d) for q in now for d in ago if q - d >= 0]
        with _disable_current_modes():
            q, k = torch.tensor(pairs, device="cpu").t()
            zero = torch.zeros((), dtype=torch.long, device="cpu")
            visible = self._rule(zero, zero, q, k).numpy().tolist()  # `selected` exchanges a tensor's
        if window == self._chunk > 0 and visible == [q // window == k // window and k <= q for q, k in pairs]:
            return 0  # a sequence has one chunk at most, see `paged.max_positions`
        if visible != [0 <= q - k and (not window or q - k < window) for q, k in pairs]:
            raise ValueError("its masks hide more than later tokens and those before a window")
        return window

    def __getitem__(self, _: Any) -> "PageMask":
        return self


def attend_pages(
    cache: PagedCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PageMask | torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    query_tail: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """With `query_tail`, keys and values are latents and rotated keys."""
    strange = [n for n, v in others.items() if isinstance(v, torch.Tensor) and n not in HARMLESS]
    if isinstance(attention_mask, torch.Tensor) or strange:
        raise ValueError(f"its attention takes a {strange[0] if strange else 'mask'} of its own")
    layer = cache.attended(key, value)
    tables = layer.tables
    assert tables is not None
    batch, heads, num, width = query.shape
    window = (sliding_window or 0) if attention_mask is None else attention_mask.window
    layer.window = max(window, layer.window or window) if window and layer.window != 0 else 0
    keys, values, tails = layer.keys, layer.values, list[torch.Tensor]()
    if query_tail is not None:
        size = (-1, -1, max(1, heads // MAX_LATENT_GROUP), -1)
        tails = [query_tail.transpose(1, 2).flatten(0, 1), values]
        keys = values = keys.expand(size)
    step = keys, values, tables.pages, tables.page_starts, tables.lengths, tables.query_starts
    options = width**-0.5 if scaling is None else scaling, window, softcap or 0.0, s_aux
    promises = tables.expected_length, tables.one_each
    tokens = query.transpose(1, 2).flatten(0, 1)
    out = torch.ops.tessera.paged_attention(tokens, *step, *options, *promises, *tails)
    return out.view(batch, num, heads, -1), None


@contextmanager
def exchanged_attention(model: torch.nn.Module, cache: PagedCache, is_dense: bool) -> Iterator[None]:
    latent = [] if is_dense else latent_modules(model)
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def plain(module: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return attend_pages(cache, *args, **options)

    def mix(latents: torch.Tensor, tail: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return attend_pages(cache, latents, *args, **{**options, "query_tail": tail})[0]

    def dense_mask(mask_function: Any, dtype: torch.dtype = torch.float32, **_: Any) -> torch.Tensor:
        tables = cache.paged[0].tables
        assert tables is not None
        assert tables.seen is not None
        now, key_positions = tables.positions[:, None, None, None], tables.seen[:, None, None]
        rows = torch.arange(len(now), device=now.device)[:, None, None, None]
        seen = mask_function(rows, torch.zeros_like(rows[:1]), now, key_positions)
        return additive(~(seen & (key_positions >= 0)), dtype)

    make_mask = dense_mask if is_dense else PageMask
    with ExitStack() as stack:
        stack.enter_context(patch.dict(masks._local_mapping, dict.fromkeys(masks, make_mask)))
        if not is_dense:
            stack.enter_context(attention_of(plain, mix, latent))
            for module in filter(is_indexer, model.modules()):
                # It selects all positions, see `paged.max_positions`.
                stack.enter_context(patch.object(module, "forward", lambda *_, **__: True))
        yield


def chunk_of(config: Any) -> int:
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return config.attention_chunk_size if is_chunked else 0


def is_indexer(module: torch.nn.Module) -> bool:
    """An indexer selects the keys of sparse attention."""
    return type(module).__name__.endswith("Indexer") and hasattr(module, "index_topk")
