"""Causal language models of Hugging Face, as steps with a static cache whose rows stand at different places.

prefill reads `context` tokens a row (rows may be shorter: `last` is the index of each row's last token) and
leaves `context + reserve` rows of cache behind; decode reads one token a row at the row's own position.
Both return the logits of each row's newest token and the greedy choice among them.
"""

from collections.abc import Callable
from typing import Any

import torch

from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError, MissingExtra
from tessera.ir import Step


class RowCache:
    """A key/value cache of fixed size; each row of the batch writes at its own positions.

    Has the two methods that Hugging Face attention calls on a cache.
    """

    def __init__(self, state: Tensors, positions: torch.Tensor) -> None:
        self._state, self._positions = state, positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)[:, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values; returns the whole cache, old rows and unused ones included."""
        keys, values = self._state[f"keys.{layer_idx}"], self._state[f"values.{layer_idx}"]
        keys[self._rows, :, self._positions] = key.transpose(1, 2)
        values[self._rows, :, self._positions] = value.transpose(1, 2)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows the cache can hold; positions are always given, so nothing depends on it."""
        return self._state[f"keys.{layer_idx}"].shape[2]


def causal_workload(family: str, sizes: dict[str, int], step: Step) -> Workload:
    """A step of a causal language model built from a configuration."""
    model = _build_model(family, sizes, step.seed)
    capacity = step.context + step.reserve
    if capacity > model.config.max_position_embeddings:
        most = model.config.max_position_embeddings
        raise CaptureError(
            f"context {capacity} is beyond the {most} positions of {step.model}", f"Use at most {most}."
        )
    return Workload(
        step,
        model,
        _caller(model, capacity),
        lambda seed: _inputs(step, model.config.vocab_size, seed),
        lambda seed: _state(step, model.config, capacity, seed),
        _follow,
    )


def _build_model(family: str, sizes: dict[str, int], seed: int) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra("transformers", "hf") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **sizes)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def _caller(model: Any, capacity: int) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    decoder, head = model.get_decoder(), model.get_output_embeddings()

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        positions = inputs["positions"]
        places = torch.arange(capacity, device=positions.device)
        mask = places <= positions[:, None, :, None]
        hidden = decoder(
            input_ids=inputs["tokens"],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=RowCache(state, positions),
            use_cache=True,
        ).last_hidden_state
        if "last" in inputs:
            rows = torch.arange(hidden.shape[0], device=hidden.device)
            hidden = hidden[rows, inputs["last"]]
        else:
            hidden = hidden[:, -1]
        logits = head(hidden)
        return {"logits": logits, "next_tokens": logits.argmax(-1)}

    return call


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


def _state(step: Step, config: Any, capacity: int, seed: int) -> dict[str, torch.Tensor]:
    """An empty cache for a prefill; for a decode on its own, a cache that looks used."""
    heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (step.batch, heads, capacity, head_dim)
    random = torch.Generator().manual_seed(seed)
    used = step.kind == "decode"
    return {
        f"{part}.{layer}": torch.randn(shape, generator=random) if used else torch.zeros(shape)
        for layer in range(config.num_hidden_layers)
        for part in ("keys", "values")
    }
