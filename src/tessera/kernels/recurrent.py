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
from collections.abc import Callable

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


# Tokens [sequences, some] and states before them -> results, and states after them.
Advance = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _scan(
    x: torch.Tensor,
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    advance: Advance,
    chunk: int | None = None,
) -> torch.Tensor:
    """`chunk`: tokens of a sequence that are computed at once; None: all."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    firsts = starts.tolist()
    for first, after, row in zip(firsts[:-1], firsts[1:], rows.tolist(), strict=True):
        groups[after - first].append((first, row))
    groups.pop(0, None)
    out = x.new_zeros(x.shape)
    for count, group in groups.items():
        first, row = torch.tensor(group).t()
        begins, places = row < 0, torch.where(row < 0, -1 - row, row)
        held = state[places].float().masked_fill_(begins.view(-1, *[1] * (state.dim() - 1)), 0)
        for tokens in (first[:, None] + torch.arange(count)).split(chunk or count, 1):
            results, held = advance(tokens, held)
            out[tokens] = results.to(x.dtype)
        state[places] = held.to(state.dtype)
    return out


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

    def advance(tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = tokens.shape[1]
        seen = torch.cat([held, x[tokens].float()], 1)
        total = sum(seen[:, k : k + count] * w for k, w in enumerate(weight.float().unbind(1)))
        assert isinstance(total, torch.Tensor)
        total = total if bias is None else total + bias.float()
        return silu(total) if has_silu else total, seen[:, count:]

    return _scan(x, state, starts, rows, advance)


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

    def advance(tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, group = x[tokens].float(), x.shape[1] // b.shape[1]
        step = _time_steps(dt[tokens].float(), dt_bias, has_softplus).clamp(dt_min, dt_max)
        keys, queries = (t[tokens].float().repeat_interleave(group, 2) for t in (b, c))
        total = (step * a.float()).cumsum(1)
        weights = torch.einsum("nihs,njhs->nijh", queries, keys) * _fades(total) * step[:, None]
        out = torch.einsum("nijh,njhp->nihp", weights, values)
        out += torch.einsum("nihs,nhps->nihp", queries, held) * total.exp()[..., None]
        if d is not None:
            out += values * d.float()[:, None]
        left = (total[:, -1:] - total).exp() * step
        gain = torch.einsum("nihp,nihs->nhps", values * left[..., None], keys)
        return out, held * total[:, -1].exp()[..., None, None] + gain

    return _scan(x, state, starts, rows, advance, CHUNK)


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

    def advance(tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = tokens[:, 0]
        value, key, query = (t[now].float() for t in (x, b, c))
        step = _time_steps(dt[now].float(), dt_bias, has_softplus)
        held = held * (step[..., None] * a.float()).exp() + (step * value)[..., None] * key[:, None]
        out = (held * query[:, None]).sum(-1)
        out = out if d is None else out + value * d.float()
        return (out if z is None else out * silu(z[now].float()))[:, None], held

    return _scan(x, state, starts, rows, advance, 1)


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

    def advance(tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, rate = (t[tokens[:, 0]].float() for t in (query, key, value, g, beta))
        if is_normed:
            q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for t in (q, k))
        held = held * decay.exp()[..., None]
        delta = (v - torch.einsum("nhk,nhkv->nhv", k, held)) * rate[..., None]
        held = held + k[..., None] * delta[..., None, :]
        out = torch.einsum("nhk,nhkv->nhv", q, held) * query.shape[-1] ** -0.5
        return out[:, None], held

    return _scan(value, state, starts, rows, advance, 1)


for _name, _on_cpu in (
    ("causal_conv", _conv_on_cpu),
    ("ssd_scan", _ssd_on_cpu),
    ("selective_scan", _selective_on_cpu),
    ("delta_scan", _delta_on_cpu),
):
    register(_name, SCHEMAS[_name], alike, _on_cpu, "tessera.kernels.recurrent_triton")
