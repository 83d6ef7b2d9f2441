"""The steps of a served model: prompts in chunks into a spare row, and the spare row into a batch.

    chunk   reads `context` tokens a row at given positions; what earlier chunks left behind is attended to
    insert  copies the spare row's state, one buffer at a time, over one row of a batch
    decode  is the decode of the model's family, one token a row

A spare row's state has the names of the batch's with "row." before them, so the three steps are joined by
state: chunk and insert by the spare row, insert and decode by the batch. An insert is two launches a buffer,
one that reads the spare row and one that writes the batch: so the two may live on different devices, and
what moves between them is one row.

Tokens and positions of a chunk after `last` are not looked at: the last token stands in for them, at its own
place. So a chunk that is not full writes nothing but its own tokens, in a ring too. The positions of a chunk
follow one another, and come after those of the chunk before.

A recurrent model has no chunk here: its prompts are read by decodes, and an insert of the spare row, which
nothing writes, clears a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tessera.capture.models.cache import FULL, SLIDING, CacheShape, additive, cache_shape, make_state
from tessera.capture.models.causal import by_kind, choose, newest
from tessera.capture.models.generic import CachedSteps
from tessera.capture.workload import Tensors, Workload
from tessera.ir import Step

SPARE = "row."
# (step, seed) -> the state of a step of the family.
MakeState = Callable[[Step, int], Mapping[str, torch.Tensor]]


class ChunkCache:
    """The state of one chunk. Has the two methods that Hugging Face attention calls on a cache."""

    def __init__(
        self, shape: CacheShape, state: Tensors, positions: torch.Tensor, last: torch.Tensor
    ) -> None:
        """`positions` are those of the tokens in use: after `last`, its own again."""
        self._shape, self._state, self._positions = shape, state, positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        if SLIDING in shape.kinds:
            ring = torch.arange(shape.ring, device=positions.device)
            newest_position = positions.gather(1, last[:, None])
            # Of each slot: which token of the chunk is the newest there; before the chunk's first: none.
            index = newest_position - (newest_position - ring) % shape.ring - positions[:, :1]
            self._from = index.clamp_min(0)[:, None, :, None]
            self._is_new = (index >= 0)[:, None, :, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values; returns what the layer attends to."""
        keys, values = self._state[f"keys.{layer_idx}"], self._state[f"values.{layer_idx}"]
        if self._shape.kinds[layer_idx] == SLIDING:
            return self._slide(keys, key), self._slide(values, value)
        keys[self._rows, :, self._positions] = key.transpose(1, 2)
        values[self._rows, :, self._positions] = value.transpose(1, 2)
        return keys, values

    def _slide(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The ring as it was, and the chunk behind it; then the ring takes its newest tokens in."""
        seen = torch.cat([held, new], 2)
        index = self._from.expand(-1, new.shape[1], -1, new.shape[3])
        held.copy_(torch.where(self._is_new, new.gather(2, index), held))
        return seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions the cache can hold; positions are always given, so nothing depends on it."""
        return self._shape.slots(layer_idx)


def chunk_masks(
    shape: CacheShape, positions: torch.Tensor, last: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """For each kind of layer: 0 where a token of a chunk may look, minus infinity where not."""
    now = positions[:, None, :, None]
    found = {}
    if FULL in shape.kinds:
        found[FULL] = additive(torch.arange(shape.capacity, device=positions.device) > now, dtype)
    if SLIDING in shape.kinds:
        before = positions[:, None, None, :1] - 1
        slots = torch.arange(shape.ring, device=positions.device)
        old = before - (before - slots) % shape.ring  # the position that each slot of the ring holds
        is_no_old = (old < 0) | (now - old >= shape.ring)
        places = torch.arange(positions.shape[1], device=positions.device)
        ago = now - positions[:, None, None, :]
        is_no_new = (ago < 0) | (ago >= shape.ring) | (places > last[:, None, None, None])
        found[SLIDING] = additive(torch.cat([is_no_old, is_no_new], -1), dtype)
    return found


def chunk_workload(model: Any, step: Step) -> Workload:
    """A chunk of a causal language model; `context` tokens of `context + reserve` positions."""
    shape = cache_shape(model.config, step)
    return Workload(
        step,
        model,
        _chunk_caller(model, shape),
        lambda seed: _chunk_inputs(step, model.config.vocab_size, seed),
        lambda seed: spare(make_state(shape, step, model.dtype, seed)),
        _next_chunk,
    )


def _chunk_caller(model: Any, shape: CacheShape) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    decoder, head, dtype = model.get_decoder(), model.get_output_embeddings(), model.dtype

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        last = inputs["last"]
        count = torch.arange(inputs["tokens"].shape[1], device=last.device)
        used = torch.minimum(count, last[:, None])
        tokens, positions = inputs["tokens"].gather(1, used), inputs["positions"].gather(1, used)
        own = {name.removeprefix(SPARE): tensor for name, tensor in state.items()}
        hidden = decoder(
            input_ids=tokens,
            attention_mask=by_kind(model.config, shape, chunk_masks(shape, positions, last, dtype)),
            position_ids=positions,
            past_key_values=ChunkCache(shape, own, positions, last),
            use_cache=True,
        ).last_hidden_state
        return choose(head(newest(hidden, last)))

    return call


def _chunk_inputs(step: Step, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """A first chunk that is at least half full."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (step.batch, step.context), generator=random)
    last = torch.randint((step.context - 1) // 2, step.context, (step.batch,), generator=random)
    return {"tokens": tokens, "positions": torch.arange(step.context).repeat(step.batch, 1), "last": last}


def _next_chunk(first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
    """The same tokens again, behind those of the runs before."""
    length = int(first["last"].max()) + 1
    return {**first, "positions": first["positions"] + run * length}


def causal_insert(model: Any, step: Step) -> Workload:
    """The insert of a causal language model."""
    shape = cache_shape(model.config, step)
    return insert_workload(model, step, lambda of, seed: make_state(shape, of, model.dtype, seed))


def mamba_insert(model: Any, step: Step) -> Workload:
    """The insert of a Mamba-2 language model."""
    return insert_workload(model, step, lambda of, seed: CachedSteps(model, of).state(seed))


def insert_workload(model: Any, step: Step, state_of: MakeState) -> Workload:
    """The spare row over one row of a batch of `batch` rows."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        batch = dict(state_of(replace(step, kind="decode"), seed))
        return {**spare(state_of(replace(step, kind="decode", batch=1), seed + 1)), **batch}

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        for name in [name for name in state if not name.startswith(SPARE)]:
            state[name].index_copy_(0, inputs["row"], state[SPARE + name].clone())
        return {}

    def row(number: int) -> dict[str, torch.Tensor]:
        return {"row": torch.tensor([number % step.batch])}

    return Workload(step, model, call, row, make, lambda first, run, last: row(run))


def spare(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row's state under the names of the spare row."""
    return {SPARE + name: tensor for name, tensor in state.items()}
