"""Recurrent layers of transformers models over packed tokens, by the operators of `kernels.recurrent`.

Models call their convolutions and scans as functions of their own module, by a few names (`FUNCTIONS`), which
a call exchanges. A model always takes its path for several tokens, because the cache reports no earlier
state.

A model whose recurrence has another name, or that changes its state itself, raises ValueError.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import tessera.kernels.recurrent  # noqa: F401 - registers the operators


class PackedStates:
    def __init__(self, starts: torch.Tensor, rows: torch.Tensor) -> None:
        self.starts, self.rows = starts, rows
        self._layer: Any = None
        self._number = 0
        self._is_unread = False

    def enter(self, layer: Any, number: int) -> None:
        self.check()
        self._layer, self._number = layer, number

    def convolve(self, layer: Any, number: int) -> None:
        self.enter(layer, number)
        self._is_unread = True

    def update(self, layer: Any, state: torch.Tensor, number: int) -> torch.Tensor:
        """The new state must be the one that was updated in place."""
        held: torch.Tensor | None = layer.recurrent_states[number]
        if held is None or state is not held:
            raise ValueError("its recurrence is none of the known functions")
        return held

    def check(self) -> None:
        if self._is_unread:
            raise ValueError("its convolution is none of the known functions")

    def conv_state(self, x: torch.Tensor, width: int) -> torch.Tensor:
        self._is_unread = False
        return self._state(self._layer.conv_states, (width - 1, x.shape[1]), x)

    def recurrent_state(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return self._state(self._layer.recurrent_states, shape, like.float())

    def _state(
        self, held: dict[int, torch.Tensor | None], shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        state = held[self._number]
        if state is None:
            state = held[self._number] = like.new_zeros((len(self.rows), *shape))
        return state


def _conv(
    states: PackedStates,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    if activation not in ("silu", "swish", None):
        raise ValueError(f"its convolution ends in {activation}")
    x = hidden_states[0].t()
    state = states.conv_state(x, weight.shape[1])
    out = torch.ops.tessera.causal_conv(
        x, weight, bias, state, states.starts, states.rows, activation is not None
    )
    return out.t()[None]  # type: ignore[no-any-return]


def _ssd(
    states: PackedStates,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if z is not None or A.dim() != 1:
        raise ValueError("its scan has a gate, or several decays per head")
    state = states.recurrent_state((*hidden_states.shape[2:], B.shape[3]), hidden_states)
    low, high = dt_limit or (0.0, float("inf"))
    out = torch.ops.tessera.ssd_scan(
        hidden_states[0], dt[0], A, B[0], C[0], D, dt_bias, state, states.starts, states.rows, dt_softplus,
        float(low), float(high),
    )  # fmt: skip
    return out[None], state


def _selective(
    states: PackedStates,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = states.recurrent_state(tuple(A.shape), hidden_states)
    x, step, key, query = (t[0].t() for t in (hidden_states, dt, B, C))
    gate = None if z is None else z[0].t()
    out = torch.ops.tessera.selective_scan(
        x, step, A, key, query, D, delta_bias, gate, state, states.starts, states.rows, delta_softplus
    )
    return out.t()[None], state


def _delta(
    states: PackedStates,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = states.recurrent_state((value.shape[2], key.shape[3], value.shape[3]), value)
    decay = g if g.dim() == 4 else g[..., None]
    operands = (t[0] for t in (value, query, key, decay, beta))
    out = torch.ops.tessera.delta_scan(*operands, state, states.starts, states.rows, use_qk_l2norm_in_kernel)
    return out[None], state


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
}


@contextmanager
def exchanged_recurrence(model: torch.nn.Module, states: PackedStates) -> Iterator[None]:
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as stack:
        for module in modules:
            for name in FUNCTIONS.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, partial(FUNCTIONS[name], states)))
        yield
    states.check()
