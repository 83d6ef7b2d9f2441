"""Recurrent layers over tokens of several sequences: convolutions and scans with a state per sequence.

    tessera::causal_conv      depthwise causal convolution, with SiLU
    tessera::ssd_scan         Mamba 2: one decay per head
    tessera::selective_scan   Mamba 1: a decay per channel and state
    tessera::delta_scan       gated delta rule

Common arguments, beside inputs of T tokens, sequence after sequence:

    state   [R, ...]   a row per sequence, updated in place
    starts  [S + 1]    tokens of sequence s: starts[s] : starts[s + 1]; none: unused
    rows    [S]        state row of each sequence, r; -1 - r: the sequence begins, with zeros for its row

Results of padding tokens, those after starts[S], are zeros. As many tokens as sequences mean at most one
each. States and sums are float32, a convolution's state has its inputs' type.

The code here, for CPUs, is the reference. Sequences of equal length are computed together.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from tessera.kernels import NORM_EPSILON
from tessera.kernels.register import alike, register

CHUNK = 64

_TABLES = "Tensor(a!) state, Tensor starts, Tensor rows"
SCHEMAS = {
    "causal_conv": f"(Tensor x, Tensor weight, Tensor? bias, {_TABLES}, bool has_silu) -> Tensor",
    "ssd_scan": "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
    f"{_TABLES}, bool has_softplus, float dt_min, float dt_max) -> Tensor",
    "selective_scan": "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
    f"Tensor? z, {_TABLES}, bool has_softplus) -> Tensor",
    "delta_scan": f"(Tensor value, Tensor query, Tensor key, Tensor g, Tensor beta, {_TABLES}, "
    "bool is_normed) -> Tensor",
}


# Arguments of a call, tokens [sequences, some] and states before them -> results, and states after them.
Advance = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _scan(first: str, advance: Advance, chunk: int | None, call: Any) -> torch.Tensor:
    """`first`: the argument of the results' shape; `chunk`: tokens of a sequence that are computed at once;
    None: all.
    """
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    x, state, firsts = getattr(call, first), call.state, call.starts.tolist()
    for begin, after, row in zip(firsts[:-1], firsts[1:], call.rows.tolist(), strict=True):
        groups[after - begin].append((begin, row))
    groups.pop(0, None)
    out: torch.Tensor = x.new_zeros(x.shape)
    for count, group in groups.items():
        begin, row = torch.tensor(group).t()
        is_new, places = row < 0, torch.where(row < 0, -1 - row, row)
        held = state[places].float().masked_fill_(is_new.view(-1, *[1] * (state.dim() - 1)), 0)
        for tokens in (begin[:, None] + torch.arange(count)).split(chunk or count, 1):
            results, held = advance(call, tokens, held)
            out[tokens] = results.to(x.dtype)
        state[places] = held.to(state.dtype)
    return out


def _conv(call: Any, tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, C], weight [C, K], state [R, K - 1, C]: the last inputs."""
    count = tokens.shape[1]
    seen = torch.cat([held, call.x[tokens].float()], 1)
    total: Any = sum(seen[:, k : k + count] * w for k, w in enumerate(call.weight.float().unbind(1)))
    total = total if call.bias is None else total + call.bias.float()
    return silu(total) if call.has_silu else total, seen[:, count:]


def _time_steps(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    dt: torch.Tensor = call.dt[tokens].float()
    dt = dt if call.dt_bias is None else dt + call.dt_bias.float()
    return softplus(dt) if call.has_softplus else dt


def _ssd(call: Any, tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H, P], dt [T, H], a, d, dt_bias [H], b and c [T, G, N], state [R, H, P, N].

    A head's state decays by exp(dt * a) and gains dt * x * b; the result is state * c + d * x. Tokens of a
    chunk see one another by a product, earlier ones by the state.
    """
    values, group = call.x[tokens].float(), call.x.shape[1] // call.b.shape[1]
    step = _time_steps(call, tokens).clamp(call.dt_min, call.dt_max)
    keys, queries = (t[tokens].float().repeat_interleave(group, 2) for t in (call.b, call.c))
    total = (step * call.a.float()).cumsum(1)
    weights = torch.einsum("nihs,njhs->nijh", queries, keys) * _fades(total) * step[:, None]
    out = torch.einsum("nijh,njhp->nihp", weights, values)
    out += torch.einsum("nihs,nhps->nihp", queries, held) * total.exp()[..., None]
    if call.d is not None:
        out += values * call.d.float()[:, None]
    left = (total[:, -1:] - total).exp() * step
    gain = torch.einsum("nihp,nihs->nhps", values * left[..., None], keys)
    return out, held * total[:, -1].exp()[..., None, None] + gain


def _fades(total: torch.Tensor) -> torch.Tensor:
    """exp of decays from token j to token i, [n, i, j, heads]; 0 for later tokens."""
    later = torch.ones(2 * total.shape[1:2], dtype=torch.bool).triu(1)
    between = total[:, :, None] - total[:, None]
    return between.masked_fill_(later[..., None], -torch.inf).exp_()


def _selective(call: Any, tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x, dt and z [T, C], a [C, N], b and c [T, N], d and dt_bias [C], state [R, C, N]; `z` gates by SiLU."""
    now = tokens[:, 0]
    value, key, query = (t[now].float() for t in (call.x, call.b, call.c))
    step = _time_steps(call, now)
    held = held * (step[..., None] * call.a.float()).exp() + (step * value)[..., None] * key[:, None]
    out = (held * query[:, None]).sum(-1)
    out = out if call.d is None else out + value * call.d.float()
    return (out if call.z is None else out * silu(call.z[now].float()))[:, None], held


def _delta(call: Any, tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value [T, H, V], query and key [T, H, K], g [T, H, 1 or K], beta [T, H], state [R, H, K, V].

    A head's state decays by exp(g), then gains key * beta * (value - key @ state); the result is query @
    state / sqrt(K). `is_normed`: queries and keys are normed first.
    """
    operands = (call.query, call.key, call.value, call.g, call.beta)
    q, k, v, decay, rate = (t[tokens[:, 0]].float() for t in operands)
    if call.is_normed:
        q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for t in (q, k))
    held = held * decay.exp()[..., None]
    delta = (v - torch.einsum("nhk,nhkv->nhv", k, held)) * rate[..., None]
    held = held + k[..., None] * delta[..., None, :]
    out = torch.einsum("nhk,nhkv->nhv", q, held) * q.shape[-1] ** -0.5
    return out[:, None], held


for _name, _first, _advance, _chunk in (
    ("causal_conv", "x", _conv, None),
    ("ssd_scan", "x", _ssd, CHUNK),
    ("selective_scan", "x", _selective, 1),
    ("delta_scan", "value", _delta, 1),
):
    _on_cpu = partial(_scan, _first, _advance, _chunk)
    register(_name, SCHEMAS[_name], alike, _on_cpu, "tessera.kernels.recurrent_triton")
