"""Recurrent layers over tokens of several sequences: convolutions and scans that keep a state per sequence.

    tessera::causal_conv      depthwise causal convolution, with SiLU
    tessera::ssd_scan         Mamba 2: one decay per head
    tessera::selective_scan   Mamba 1: a decay per channel and state
    tessera::delta_scan       gated delta rule

Common arguments, beside inputs of T tokens, sequence after sequence:

    state   [R, ...]   a row per sequence, updated in place
    starts  [S + 1]    tokens of sequence s: starts[s] : starts[s + 1]; none: unused
    rows    [S]        state row of each sequence, r; -1 - r: the sequence begins, and its row counts as zeros

Results of padding tokens, those after starts[S], are zeros. As many tokens as sequences mean at most one
each. States and sums are float32, a convolution's state has the type of its inputs.

The torch code here, for CPUs, is the reference. It computes sequences of equal length together.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Alike:
    tokens: torch.Tensor
    rows: torch.Tensor
    begins: torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.tokens].float()

    def read(self, state: torch.Tensor) -> torch.Tensor:
        held = state[self.rows].float()
        return held.masked_fill_(self.begins.view(-1, *[1] * (state.dim() - 1)), 0)


def _alike(starts: torch.Tensor, rows: torch.Tensor) -> Iterator[_Alike]:
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    firsts = starts.tolist()
    for first, after, row in zip(firsts[:-1], firsts[1:], rows.tolist(), strict=True):
        groups[after - first].append((first, row))
    groups.pop(0, None)
    for count, group in groups.items():
        first, row = torch.tensor(group).t()
        yield _Alike(first[:, None] + torch.arange(count), torch.where(row < 0, -1 - row, row), row < 0)


def _conv_on_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    has_silu: bool,
) -> torch.Tensor:
    """x [T, C], weight [C, K], state [R, K - 1, C]: the last inputs."""
    out = x.new_zeros(x.shape)
    for part in _alike(starts, rows):
        count = part.tokens.shape[1]
        seen = torch.cat([part.read(state), part.of(x)], 1)
        total = sum(seen[:, k : k + count] * w for k, w in enumerate(weight.float().unbind(1)))
        assert isinstance(total, torch.Tensor)
        total = total if bias is None else total + bias.float()
        out[part.tokens] = (silu(total) if has_silu else total).to(x.dtype)
        state[part.rows] = seen[:, count:].to(state.dtype)
    return out


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, has_softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.float()
    return softplus(dt) if has_softplus else dt


def _ssd_on_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    has_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """x [T, H, P], dt [T, H], a, d, dt_bias [H], b and c [T, G, N], state [R, H, P, N].

    A head's state decays by exp(dt * a) and gains dt * x * b; the result is state * c + d * x. Tokens of a
    chunk see one another by a product, earlier ones by the state.
    """
    out, group = x.new_zeros(x.shape), x.shape[1] // b.shape[1]
    for part in _alike(starts, rows):
        held = part.read(state)
        for tokens in part.tokens.split(CHUNK, 1):
            values = x[tokens].float()
            step = _time_steps(dt[tokens].float(), dt_bias, has_softplus).clamp(dt_min, dt_max)
            keys, queries = (t[tokens].float().repeat_interleave(group, 2) for t in (b, c))
            total = (step * a.float()).cumsum(1)
            weights = torch.einsum("nihs,njhs->nijh", queries, keys) * _fades(total) * step[:, None]
            made = torch.einsum("nijh,njhp->nihp", weights, values)
            made += torch.einsum("nihs,nhps->nihp", queries, held) * total.exp()[..., None]
            if d is not None:
                made += values * d.float()[:, None]
            out[tokens] = made.to(x.dtype)
            left = (total[:, -1:] - total).exp() * step
            gain = torch.einsum("nihp,nihs->nhps", values * left[..., None], keys)
            held = held * total[:, -1].exp()[..., None, None] + gain
        state[part.rows] = held.to(state.dtype)
    return out


def _fades(total: torch.Tensor) -> torch.Tensor:
    """exp of decays from token j to token i, [n, i, j, heads]; 0 for later tokens."""
    later = torch.ones(2 * total.shape[1:2], dtype=torch.bool).triu(1)
    between = total[:, :, None] - total[:, None]
    return between.masked_fill_(later[..., None], -torch.inf).exp_()


def _selective_on_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    has_softplus: bool,
) -> torch.Tensor:
    """x, dt and z [T, C], a [C, N], b and c [T, N], d and dt_bias [C], state [R, C, N]; `z` gates by SiLU."""
    out = x.new_zeros(x.shape)
    for part in _alike(starts, rows):
        held = part.read(state)
        for tokens in part.tokens.unbind(1):
            value, key, query = (t[tokens].float() for t in (x, b, c))
            step = _time_steps(dt[tokens].float(), dt_bias, has_softplus)
            held = held * (step[..., None] * a.float()).exp() + (step * value)[..., None] * key[:, None]
            made = (held * query[:, None]).sum(-1)
            made = made if d is None else made + value * d.float()
            out[tokens] = (made if z is None else made * silu(z[tokens].float())).to(x.dtype)
        state[part.rows] = held.to(state.dtype)
    return out


def _delta_on_cpu(
    value: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    is_normed: bool,
) -> torch.Tensor:
    """value [T, H, V], query and key [T, H, K], g [T, H, 1 or K], beta [T, H], state [R, H, K, V].

    A head's state decays by exp(g), then gains key * beta * (value - key @ state); the result is query @
    state / sqrt(K). `is_normed`: queries and keys are normed first.
    """
    out = value.new_zeros(value.shape)
    for part in _alike(starts, rows):
        held = part.read(state)
        for tokens in part.tokens.unbind(1):
            q, k, v, decay, rate = (t[tokens].float() for t in (query, key, value, g, beta))
            if is_normed:
                q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for t in (q, k))
            held = held * decay.exp()[..., None]
            delta = (v - torch.einsum("nhk,nhkv->nhv", k, held)) * rate[..., None]
            held = held + k[..., None] * delta[..., None, :]
            made = torch.einsum("nhk,nhkv->nhv", q, held) * query.shape[-1] ** -0.5
            out[tokens] = made.to(value.dtype)
        state[part.rows] = held.to(state.dtype)
    return out


for _name, _on_cpu in (
    ("causal_conv", _conv_on_cpu),
    ("ssd_scan", _ssd_on_cpu),
    ("selective_scan", _selective_on_cpu),
    ("delta_scan", _delta_on_cpu),
):
    register(_name, SCHEMAS[_name], alike, _on_cpu, "tessera.kernels.recurrent_triton")
