"""Recurrent layers of transformers models over packed tokens, by the operators of `kernels.recurrent`.

Models call convolutions and scans as functions of their module, by a few names (`FUNCTIONS`), which a call
exchanges. Models always take their path for several tokens: the cache reports no earlier state.

A recurrence of another name, or a model that changes its state itself, raises ValueError.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import tessera.kernels.recurrent  # noqa: F401 - registers the operators
from tessera.capture.models.pages import PagedCache, PageTables


class PackedCache(PagedCache):
    def begin(self, tables: Sequence[PageTables]) -> None:
        super().begin(tables)
        self.starts: Any = None
        self.rows: Any = None
        self._layer: Any = None
        self._number, self._is_unread = 0, False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.check()
        self._layer, self._number = self.layers[layer_idx], state_idx

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.get_conv_state(layer_idx, state_idx)
        self._is_unread = True
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """The new state must be the one that was updated in place."""
        held: torch.Tensor | None = self.layers[layer_idx].recurrent_states[state_idx]
        if held is None or recurrent_states is not held:
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


def _conv(cache: PackedCache, call: Any) -> torch.Tensor:
    if call.activation not in ("silu", "swish", None):
        raise ValueError(f"its convolution ends in {call.activation}")
    x = call.hidden_states[0].t()
    state = cache.conv_state(x, call.weight.shape[1])
    has_silu = call.activation is not None
    tables = state, cache.starts, cache.rows
    out: torch.Tensor = torch.ops.tessera.causal_conv(x, call.weight, call.bias, *tables, has_silu)
    return out.t()[None]


def _ssd(cache: PackedCache, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if call.z is not None or call.A.dim() != 1:
        raise ValueError("its scan has a gate, or several decays per head")
    x, dt, keys, queries = (t[0] for t in (call.hidden_states, call.dt, call.B, call.C))
    state = cache.recurrent_state((*x.shape[1:], keys.shape[2]), x)
    low, high = call.dt_limit or (0.0, float("inf"))
    tables = state, cache.starts, cache.rows
    options = bool(call.dt_softplus), float(low), float(high)
    out = torch.ops.tessera.ssd_scan(x, dt, call.A, keys, queries, call.D, call.dt_bias, *tables, *options)
    return out[None], state


def _selective(cache: PackedCache, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    state = cache.recurrent_state(tuple(call.A.shape), call.hidden_states)
    x, step, key, query = (t[0].t() for t in (call.hidden_states, call.dt, call.B, call.C))
    gate = None if call.z is None else call.z[0].t()
    tables = state, cache.starts, cache.rows
    weights = call.D, call.delta_bias, gate
    has_softplus = bool(call.delta_softplus)
    out = torch.ops.tessera.selective_scan(x, step, call.A, key, query, *weights, *tables, has_softplus)
    return out.t()[None], state


def _delta(cache: PackedCache, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    state = cache.recurrent_state((call.value.shape[2], call.key.shape[3], call.value.shape[3]), call.value)
    decay = call.g if call.g.dim() == 4 else call.g[..., None]
    operands = (t[0] for t in (call.value, call.query, call.key, decay, call.beta))
    tables = state, cache.starts, cache.rows
    out = torch.ops.tessera.delta_scan(*operands, *tables, bool(call.use_qk_l2norm_in_kernel))
    return out[None], state


_DELTA = _delta, "query key value g beta use_qk_l2norm_in_kernel"
# By name: the operator's caller, and the parameters, which are None if a model leaves them out.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_fn": (_conv, "hidden_states weight bias activation"),
    "mamba2_chunk_scan": (_ssd, "hidden_states dt A B C chunk_size D z dt_bias dt_softplus dt_limit"),
    "mamba_selective_scan": (_selective, "hidden_states dt A B C D z delta_bias delta_softplus"),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
}


def _in_place_of(name: str, cache: PackedCache) -> Callable[..., Any]:
    function, parameters = FUNCTIONS[name]
    names = parameters.split()

    def run(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        return function(cache, SimpleNamespace(**dict.fromkeys(names) | given | options))

    return run


@contextmanager
def exchanged_recurrence(
    model: torch.nn.Module, cache: PackedCache, starts: torch.Tensor, rows: torch.Tensor
) -> Iterator[None]:
    """`starts` and `rows`: see `kernels.recurrent`."""
    cache.starts, cache.rows = starts, rows
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as stack:
        for module in modules:
            for name in FUNCTIONS.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, _in_place_of(name, cache)))
        yield
    cache.check()
