"""Mamba-2 of Hugging Face, as steps whose state is the convolution's window and the scan's matrix a layer.

Rows of a prefill may be shorter than the batch is wide. A recurrence has no positions to mask afterwards, so
rows are aligned at the end: `mask` is 0 before a row's first token and 1 from there on, and every row's
newest token is the last column. A prefill starts from nothing and overwrites the state; a decode updates it
in place, each row on its own.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tessera.capture.models.causal import choose
from tessera.capture.workload import Tensors, Workload
from tessera.ir import Step


class RowState:
    """The state of one call, with the methods that Hugging Face's mixer calls on a cache."""

    def __init__(self, state: Tensors, is_prefill: bool) -> None:
        self._state, self._is_prefill = state, is_prefill

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What a decode goes on from."""
        return None if self._is_prefill else self._state[f"conv.{layer_idx}"]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What a decode goes on from."""
        return None if self._is_prefill else self._state[f"scan.{layer_idx}"]

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is rolled back here."""
        return False

    def has_previous_state(self, layer_idx: int = 0) -> bool:
        """Asked by transformers below 5.20, which then reads `layers`."""
        return not self._is_prefill

    @property
    def layers(self) -> list[SimpleNamespace]:
        """The same state as transformers below 5.20 looks for it."""
        count = sum(name.startswith("conv.") for name in self._state)
        return [
            SimpleNamespace(
                conv_states=[self._state[f"conv.{i}"]],
                recurrent_states=[self._state[f"scan.{i}"]],
                record_past=False,
            )
            for i in range(count)
        ]

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """Keeps the last columns of a prefill; short prompts count as preceded by zeros."""
        held = self._state[f"conv.{layer_idx}"]
        missing = held.shape[-1] - conv_states.shape[-1]
        kept = torch.nn.functional.pad(conv_states, (missing, 0)) if missing > 0 else conv_states
        held.copy_(kept[..., -held.shape[-1] :])
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Keeps what a prefill's scan ended with."""
        return self._state[f"scan.{layer_idx}"].copy_(recurrent_states)


def mamba_workload(model: Any, step: Step) -> Workload:
    """A step of a Mamba-2 language model."""
    return Workload(
        step,
        model,
        _caller(model),
        lambda seed: _inputs(step, model.config.vocab_size, model.dtype, seed),
        lambda seed: row_state(step, model.config, model.dtype, seed),
        lambda first, run, last: {"tokens": last["next_tokens"][:, None].clone()},
    )


def _caller(model: Any) -> Callable[[Tensors, Tensors], dict[str, torch.Tensor]]:
    backbone, head = model.backbone, model.get_output_embeddings()

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        # Not through backbone's own forward: it looks at the mask's values on the host.
        mask = inputs.get("mask")
        held = RowState(state, mask is not None)
        hidden = backbone.embeddings(inputs["tokens"])
        for block in backbone.layers:
            hidden = block(hidden, cache_params=held, attention_mask=mask)
        hidden = backbone.norm_f(hidden)[:, -1]
        return choose(head(hidden.to(head.weight.dtype)))

    return call


def _inputs(step: Step, vocab_size: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, aligned at the end."""
    random = torch.Generator().manual_seed(seed)
    width = step.context if step.kind == "prefill" else 1
    tokens = torch.randint(0, vocab_size, (step.batch, width), generator=random)
    if step.kind == "decode":
        return {"tokens": tokens}
    lengths = torch.randint((width + 1) // 2, width + 1, (step.batch, 1), generator=random)
    return {"tokens": tokens, "mask": (torch.arange(width) >= width - lengths).to(dtype)}


def row_state(step: Step, config: Any, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Zeros for a prefill, which overwrites them; for a decode on its own, state that looks used."""
    random = torch.Generator().manual_seed(seed)
    channels = int(config.expand * config.hidden_size) + 2 * config.n_groups * config.state_size
    scan = (step.batch, config.num_heads, config.head_dim, config.state_size)
    sizes = {"conv": (step.batch, channels, config.conv_kernel), "scan": scan}
    # The scan sums over the whole past, so it is kept in single precision.
    dtypes = {"conv": dtype, "scan": torch.float32}
    return {
        f"{part}.{layer}": (
            torch.randn(size, generator=random) if step.kind == "decode" else torch.zeros(size)
        ).to(dtypes[part])
        for layer in range(config.num_hidden_layers)
        for part, size in sizes.items()
    }
