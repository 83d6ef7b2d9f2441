"""The CUDA implementations of `recurrent`.

  causal_conv      `conv_tokens` computes tiles of tokens and channels, then `conv_keep` replaces each state
                   by its sequence's last inputs. One token per sequence: `conv_update` does both.
  ssd_scan         `ssd_update` for sequences with one token, `ssd_chunks` for others, with the state in
                   registers.
  selective_scan   `selective_tokens`: states within a chunk are a prefix scan.
  delta_scan       `delta_tokens`: token by token. With one decay per head, sequences of several tokens are
                   read by chunk (`delta_chunks`): changes of the state solve a triangular
                   system, whose inverse is a product of a few powers.

Sums are float32, without TF32. All programs share the zeros of padding tokens. Starts and rows are read on
the GPU, for CUDA graphs.
"""

import torch
import triton
import triton.language as tl

from tessera.kernels import NORM_EPSILON

_EPSILON = tl.constexpr(NORM_EPSILON)
_CONV_TOKENS, _CONV_CHANNELS = 16, 128
_STATE_ELEMENTS = 4096
_CHUNK_TOKENS, _CHUNK_ROWS, _CHUNK_WARPS = 32, 64, 4

_SELECTIVE_TOKENS = 16
_DELTA_TOKENS, _DELTA_VALUES = 16, 32


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _strides(**tensors: torch.Tensor | None):
    return {
        f"{name}_{place}": 0 if t is None else t.stride(k)
        for name, t in tensors.items()
        for k, place in enumerate(("ROW", "ITEM"))
    }


def causal_conv(x, weight, bias, state, starts, rows, has_silu):
    (tokens, channels), width = x.shape, weight.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    blocks, sequences = triton.cdiv(channels, _CONV_CHANNELS), rows.shape[0]
    sizes = {"C": channels, "WIDTH": width, "X_ROW": x.stride(0), "CHANNELS": _CONV_CHANNELS}
    given = (x, weight.contiguous(), bias, state, starts, rows)
    if tokens == sequences:
        conv_update[blocks, sequences](*given, out, tokens, HAS_SILU=has_silu, **sizes)
        return out
    conv_tokens[blocks, triton.cdiv(tokens, _CONV_TOKENS)](
        *given, out, tokens, sequences, HAS_SILU=has_silu, TOKENS=_CONV_TOKENS,
        SEQUENCES_PAD=_power(sequences), **sizes,
    )  # fmt: skip
    conv_keep[blocks, sequences](x, state, starts, rows, **sizes)
    return out


def ssd_scan(x, dt, a, b, c, d, dt_bias, state, starts, rows, has_softplus, dt_min, dt_max):
    (tokens, heads, size), (_, groups, width) = x.shape, b.shape
    out = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    x, b, c = (t if t.stride(2) == 1 else t.contiguous() for t in (x, b, c))
    sequences, width_pad = rows.shape[0], _power(width)
    given = (x, dt, a, b, c, d, dt_bias, state, starts, rows, out, dt_min, dt_max)
    sizes = {
        "H": heads, "GROUP": heads // groups, "P": size, "N": width, "N_PAD": width_pad,
        "HAS_SOFTPLUS": has_softplus, **_strides(X=x, DT=dt, B=b, C=c),
    }  # fmt: skip
    block = min(_power(size), max(1, _STATE_ELEMENTS // width_pad))
    ssd_update[heads * triton.cdiv(size, block), sequences](*given, tokens, ROWS=block, **sizes, num_warps=4)
    if tokens > sequences:
        block = max(16, min(_power(size), _CHUNK_ROWS))
        chunk = _CHUNK_TOKENS if x.dtype.itemsize < 4 and width_pad <= 128 else 16
        ssd_chunks[heads * triton.cdiv(size, block), sequences](
            *given, ROWS=block, TOKENS=chunk, **sizes | {"N_PAD": max(16, width_pad)},
            num_warps=_CHUNK_WARPS, num_stages=1,
        )  # fmt: skip
    return out


def selective_scan(x, dt, a, b, c, d, dt_bias, z, state, starts, rows, has_softplus):
    (tokens, channels), width = x.shape, a.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    width_pad = _power(width)
    chunk = 1 if tokens == rows.shape[0] else _SELECTIVE_TOKENS
    elements = _STATE_ELEMENTS if chunk > 1 else _STATE_ELEMENTS // 2
    block = min(_power(channels), max(1, elements // width_pad // chunk))
    selective_tokens[triton.cdiv(channels, block), rows.shape[0]](
        x, dt, a.contiguous(), b, c, d, dt_bias, z, state, starts, rows, out, tokens, D=channels, N=width,
        N_PAD=width_pad, CHANNELS=block, TOKENS=chunk, HAS_SOFTPLUS=has_softplus,
        **_strides(X=x, DT=dt, B=b, C=c, Z=z), num_warps=4,
    )  # fmt: skip
    return out


def delta_scan(value, query, key, g, beta, state, starts, rows, is_normed):
    (tokens, heads, values), width = value.shape, key.shape[2]
    out = torch.empty((tokens, heads, values), dtype=value.dtype, device=value.device)
    value, query, key = (t if t.stride(2) == 1 else t.contiguous() for t in (value, query, key))
    width_pad = _power(width)
    block = min(_power(values), max(1, _STATE_ELEMENTS // width_pad))
    is_chunked = tokens > rows.shape[0] and g.shape[2] == 1
    given = (value, query, key, g, beta, state, starts, rows, out)
    sizes = {"H": heads, "V": values, "K": width, "IS_NORMED": is_normed}
    sizes |= _strides(V=value, Q=query, K=key, G=g, BETA=beta)
    delta_tokens[heads * triton.cdiv(values, block), rows.shape[0]](
        *given, tokens, width**-0.5, K_PAD=width_pad, VALUES=block, IS_ONE_EACH=is_chunked,
        G_KEY=g.stride(2) if g.shape[2] > 1 else 0, **sizes, num_warps=4,
    )  # fmt: skip
    if is_chunked:
        block = max(16, min(_power(values), _DELTA_VALUES))
        delta_chunks[heads * triton.cdiv(values, block), rows.shape[0]](
            *given, width**-0.5, K_PAD=max(16, width_pad), VALUES=block, TOKENS=_DELTA_TOKENS, **sizes,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _sequence(starts, rows, sequence):
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    row = tl.load(rows + sequence)
    return first, count, tl.where(row < 0, -1 - row, row).to(tl.int64), row >= 0


@triton.jit
def _clear_padding(place, inside, starts, tokens, ROW: tl.constexpr, SIZE: tl.constexpr):
    step = tl.num_programs(1)
    for padding in range(tl.load(starts + step) + tl.program_id(1), tokens, step):
        zeros = tl.zeros([SIZE], place.dtype.element_ty)
        tl.store(place + tl.cast(padding, tl.int64) * ROW, zeros, mask=inside)


@triton.jit
def _activated(total, HAS_SILU: tl.constexpr):
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit(do_not_specialize=["tokens"])
def conv_update(
    x, weight, bias, state, starts, rows, out, tokens, C: tl.constexpr, WIDTH: tl.constexpr,
    X_ROW: tl.constexpr, CHANNELS: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    _clear_padding(out + c, inside, starts, tokens, C, CHANNELS)
    first, count, row, goes_on = _sequence(starts, rows, sequence)
    if count == 0:
        return
    held = state + row * (WIDTH - 1) * C + c
    new = tl.load(x + first.to(tl.int64) * X_ROW + c, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(
        tl.float32
    )
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(WIDTH - 1):
        old = tl.load(held + k * C, mask=inside & goes_on, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + c * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(held + (k - 1) * C, old, mask=inside)
    if WIDTH > 1:
        tl.store(held + (WIDTH - 2) * C, new.to(state.dtype.element_ty), mask=inside)
    total = _activated(total, HAS_SILU)
    tl.store(out + first.to(tl.int64) * C + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def conv_tokens(
    x, weight, bias, state, starts, rows, out, tokens, sequences, C: tl.constexpr, WIDTH: tl.constexpr,
    X_ROW: tl.constexpr, CHANNELS: tl.constexpr, HAS_SILU: tl.constexpr, TOKENS: tl.constexpr,
    SEQUENCES_PAD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    # The number of sequences that end at or before a token is its sequence's.
    number = tl.arange(0, SEQUENCES_PAD)
    ends = tl.load(starts + 1 + number, mask=number < sequences, other=tokens)
    ended = (number < sequences)[None, :] & (ends[None, :] <= t[:, None])
    sequence = tl.sum(ended.to(tl.int32), 1)
    is_used = sequence < sequences
    first = tl.load(starts + sequence, mask=is_used, other=0)
    row = tl.load(rows + sequence, mask=is_used, other=-1)
    goes_on = is_used & (row >= 0)
    held = tl.where(row < 0, 0, row).to(tl.int64) * ((WIDTH - 1) * C)
    is_channel = (c < C)[None, :]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        place = t - (WIDTH - 1) + k
        is_new = is_used & (place >= first)
        seen = tl.load(
            x + place.to(tl.int64)[:, None] * X_ROW + c[None, :], mask=is_new[:, None] & is_channel, other=0.0
        ).to(tl.float32)
        if k < WIDTH - 1:
            kept = held + (place - first + WIDTH - 1) * C
            is_old = goes_on & (place < first)
            seen += tl.load(
                state + kept[:, None] + c[None, :], mask=is_old[:, None] & is_channel, other=0.0
            ).to(tl.float32)
        total += seen * tl.load(weight + c * WIDTH + k, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total = tl.where(is_used[:, None], _activated(total, HAS_SILU), 0.0)
    place = t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & is_channel)


@triton.jit
def conv_keep(
    x, state, starts, rows, C: tl.constexpr, WIDTH: tl.constexpr, X_ROW: tl.constexpr, CHANNELS: tl.constexpr
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first, count, row, goes_on = _sequence(starts, rows, tl.program_id(1))
    if count == 0:
        return
    held = state + row * (WIDTH - 1) * C + c
    for k in tl.static_range(WIDTH - 1):  # in order: an input that stays moves down
        place = count - (WIDTH - 1) + k
        is_new = (c < C) & (place >= 0)
        new = tl.load(x + (first + place).to(tl.int64) * X_ROW + c, mask=is_new, other=0.0)
        is_old = (c < C) & (place < 0) & goes_on
        old = tl.load(held + (place + WIDTH - 1) * C, mask=is_old, other=0.0)
        tl.store(held + k * C, new.to(state.dtype.element_ty) + old, mask=c < C)


@triton.jit
def _time_step(dt, dt_bias, at, head, is_used, dt_min, dt_max, HAS_SOFTPLUS: tl.constexpr):
    step = tl.load(dt + at, mask=is_used, other=0.0).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias + head).to(tl.float32)
    if HAS_SOFTPLUS:
        step = _softplus(step)
    return tl.minimum(tl.maximum(step, dt_min), dt_max)


@triton.jit(do_not_specialize=["tokens", "dt_min", "dt_max"])
def ssd_update(
    x, dt, a, b, c, d, dt_bias, state, starts, rows, out, dt_min, dt_max, tokens, H: tl.constexpr,
    GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, X_ROW: tl.constexpr,
    X_ITEM: tl.constexpr, DT_ROW: tl.constexpr, DT_ITEM: tl.constexpr, B_ROW: tl.constexpr,
    B_ITEM: tl.constexpr, C_ROW: tl.constexpr, C_ITEM: tl.constexpr, HAS_SOFTPLUS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (P + ROWS - 1) // ROWS
    head, sequence = tl.program_id(0) // BLOCKS, tl.program_id(1)
    p, n = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS), tl.arange(0, N_PAD)
    is_row, is_state = p < P, n < N
    _clear_padding(out + head * P + p, is_row, starts, tokens, H * P, ROWS)
    first, count, row, goes_on = _sequence(starts, rows, sequence)
    if count != 1:
        return
    token = first.to(tl.int64)
    held = state + ((row * H + head) * P + p)[:, None] * N + n[None, :]
    inside = is_row[:, None] & is_state[None, :]
    old = tl.load(held, mask=inside & goes_on, other=0.0).to(tl.float32)
    step = _time_step(dt, dt_bias, token * DT_ROW + head * DT_ITEM, head, True, dt_min, dt_max, HAS_SOFTPLUS)
    value = tl.load(x + token * X_ROW + head * X_ITEM + p, mask=is_row, other=0.0).to(tl.float32)
    group = head // GROUP
    key = tl.load(b + token * B_ROW + group * B_ITEM + n, mask=is_state, other=0.0).to(tl.float32)
    query = tl.load(c + token * C_ROW + group * C_ITEM + n, mask=is_state, other=0.0).to(tl.float32)
    new = old * tl.exp(step * tl.load(a + head).to(tl.float32)) + (step * value)[:, None] * key[None, :]
    tl.store(held, new.to(state.dtype.element_ty), mask=inside)
    total = tl.sum(new * query[None, :], 1)
    if d is not None:
        total += value * tl.load(d + head).to(tl.float32)
    tl.store(out + (token * H + head) * P + p, total.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["dt_min", "dt_max"])
def ssd_chunks(
    x, dt, a, b, c, d, dt_bias, state, starts, rows, out, dt_min, dt_max, H: tl.constexpr,
    GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, X_ROW: tl.constexpr,
    X_ITEM: tl.constexpr, DT_ROW: tl.constexpr, DT_ITEM: tl.constexpr, B_ROW: tl.constexpr,
    B_ITEM: tl.constexpr, C_ROW: tl.constexpr, C_ITEM: tl.constexpr, HAS_SOFTPLUS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (P + ROWS - 1) // ROWS
    head = tl.program_id(0) // BLOCKS
    first, count, row, goes_on = _sequence(starts, rows, tl.program_id(1))
    if count <= 1:
        return
    p, n, t = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS), tl.arange(0, N_PAD), tl.arange(0, TOKENS)
    is_row, is_state, group = p < P, n < N, head // GROUP
    place = state + ((row * H + head) * P + p)[None, :] * N + n[:, None]
    inside = is_state[:, None] & is_row[None, :]
    held = tl.load(place, mask=inside & goes_on, other=0.0).to(tl.float32)  # [N, P]
    decay = tl.load(a + head).to(tl.float32)
    for start in range(0, count, TOKENS):
        is_used = start + t < count
        token = (first + start + t).to(tl.int64)
        step = _time_step(
            dt, dt_bias, token * DT_ROW + head * DT_ITEM, head, is_used, dt_min, dt_max, HAS_SOFTPLUS
        )
        step = tl.where(is_used, step, 0.0)
        total = tl.cumsum(step * decay, 0)
        last = tl.sum(step * decay, 0)
        value = tl.load(
            x + token[:, None] * X_ROW + head * X_ITEM + p[None, :],
            mask=is_used[:, None] & is_row[None, :], other=0.0,
        )  # fmt: skip
        key = tl.load(
            b + token[None, :] * B_ROW + group * B_ITEM + n[:, None],
            mask=is_used[None, :] & is_state[:, None], other=0.0,
        )  # fmt: skip
        query = tl.load(
            c + token[:, None] * C_ROW + group * C_ITEM + n[None, :],
            mask=is_used[:, None] & is_state[None, :], other=0.0,
        )  # fmt: skip
        weights = tl.dot(query, key, input_precision="ieee")
        between = tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf"))
        weights = weights * tl.exp(between) * step[None, :]
        made = tl.dot(query, held.to(query.dtype), input_precision="ieee") * tl.exp(total)[:, None]
        made = tl.dot(weights.to(value.dtype), value, made, input_precision="ieee")
        if d is not None:
            made += value.to(tl.float32) * tl.load(d + head).to(tl.float32)
        at = out + (token[:, None] * H + head) * P + p[None, :]
        tl.store(at, made.to(out.dtype.element_ty), mask=is_used[:, None] & is_row[None, :])
        left = tl.exp(last - total) * step
        faded = (value.to(tl.float32) * left[:, None]).to(value.dtype)
        held = tl.dot(key, faded, held * tl.exp(last), input_precision="ieee")
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _after(decay, added, next_decay, next_added):
    return decay * next_decay, added * next_decay + next_added


@triton.jit(do_not_specialize=["tokens"])
def selective_tokens(
    x, dt, a, b, c, d, dt_bias, z, state, starts, rows, out, tokens, D: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTPLUS: tl.constexpr,
    X_ROW: tl.constexpr, X_ITEM: tl.constexpr, DT_ROW: tl.constexpr, DT_ITEM: tl.constexpr,
    B_ROW: tl.constexpr, B_ITEM: tl.constexpr, C_ROW: tl.constexpr, C_ITEM: tl.constexpr,
    Z_ROW: tl.constexpr, Z_ITEM: tl.constexpr,
):  # fmt: skip
    sequence, t = tl.program_id(1), tl.arange(0, TOKENS)
    k, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, N_PAD)
    is_channel, is_state = k < D, n < N
    _clear_padding(out + k, is_channel, starts, tokens, D, CHANNELS)
    first, count, row, goes_on = _sequence(starts, rows, sequence)
    if count == 0:
        return
    inside = is_channel[:, None] & is_state[None, :]
    place = state + (row * D + k)[:, None] * N + n[None, :]
    held = tl.load(place, mask=inside & goes_on, other=0.0).to(tl.float32)
    rate = tl.load(a + k[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    for start in range(0, count, TOKENS):
        used = (start + t < count)[:, None]
        token = (first + start + t).to(tl.int64)[:, None]
        item, is_item, is_kept = k[None, :], used & is_channel[None, :], used & is_state[None, :]
        value = tl.load(x + token * X_ROW + item * X_ITEM, mask=is_item, other=0.0).to(tl.float32)
        step = tl.load(dt + token * DT_ROW + item * DT_ITEM, mask=is_item, other=0.0).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + k, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTPLUS:
            step = _softplus(step)
        step = tl.where(used, step, 0.0)  # unused tokens change no state
        key = tl.load(b + token * B_ROW + n[None, :] * B_ITEM, mask=is_kept, other=0.0).to(tl.float32)
        query = tl.load(c + token * C_ROW + n[None, :] * C_ITEM, mask=is_kept, other=0.0).to(tl.float32)
        decay = tl.exp(step[:, :, None] * rate[None, :, :])
        added = (step * value)[:, :, None] * key[:, None, :]
        if TOKENS > 1:
            decay, added = tl.associative_scan((decay, added), 0, _after)
        states = held[None, :, :] * decay + added
        held = tl.sum(tl.where((t == TOKENS - 1)[:, None, None], states, 0.0), 0)
        total = tl.sum(states * query[:, None, :], 2)
        if d is not None:
            total += value * tl.load(d + k, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if z is not None:
            gate = tl.load(z + token * Z_ROW + item * Z_ITEM, mask=is_item, other=0.0).to(tl.float32)
            total *= _activated(gate, True)
        tl.store(out + token * D + item, total.to(out.dtype.element_ty), mask=is_item)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def delta_tokens(
    value, query, key, g, beta, state, starts, rows, out, tokens, scale, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, VALUES: tl.constexpr, IS_NORMED: tl.constexpr,
    V_ROW: tl.constexpr, V_ITEM: tl.constexpr, Q_ROW: tl.constexpr, Q_ITEM: tl.constexpr,
    K_ROW: tl.constexpr, K_ITEM: tl.constexpr, G_ROW: tl.constexpr, G_ITEM: tl.constexpr,
    G_KEY: tl.constexpr, BETA_ROW: tl.constexpr, BETA_ITEM: tl.constexpr, IS_ONE_EACH: tl.constexpr,
):  # fmt: skip
    """`IS_ONE_EACH`: sequences of several tokens are left to `delta_chunks`."""
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    head, sequence = tl.program_id(0) // BLOCKS, tl.program_id(1)
    v, k = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES), tl.arange(0, K_PAD)
    is_value, is_key = v < V, k < K
    _clear_padding(out + head * V + v, is_value, starts, tokens, H * V, VALUES)
    first, count, row, goes_on = _sequence(starts, rows, sequence)
    if count == 0 or (IS_ONE_EACH and count > 1):
        return
    inside = is_key[:, None] & is_value[None, :]
    place = state + ((row * H + head) * K + k)[:, None] * V + v[None, :]
    held = tl.load(place, mask=inside & goes_on, other=0.0).to(tl.float32)
    for number in range(count):
        token = (first + number).to(tl.int64)
        new = tl.load(value + token * V_ROW + head * V_ITEM + v, mask=is_value, other=0.0).to(tl.float32)
        asked = tl.load(query + token * Q_ROW + head * Q_ITEM + k, mask=is_key, other=0.0).to(tl.float32)
        named = tl.load(key + token * K_ROW + head * K_ITEM + k, mask=is_key, other=0.0).to(tl.float32)
        decay = tl.load(g + token * G_ROW + head * G_ITEM + k * G_KEY, mask=is_key, other=0.0).to(tl.float32)
        rate = tl.load(beta + token * BETA_ROW + head * BETA_ITEM).to(tl.float32)
        if IS_NORMED:
            asked *= tl.rsqrt(tl.sum(asked * asked, 0) + _EPSILON)
            named *= tl.rsqrt(tl.sum(named * named, 0) + _EPSILON)
        held = held * tl.exp(decay)[:, None]
        delta = (new - tl.sum(held * named[:, None], 0)) * rate
        held += named[:, None] * delta[None, :]
        total = tl.sum(held * asked[:, None], 0) * scale
        tl.store(out + (token * H + head) * V + v, total.to(out.dtype.element_ty), mask=is_value)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@triton.jit
def delta_chunks(
    value, query, key, g, beta, state, starts, rows, out, scale, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, VALUES: tl.constexpr, TOKENS: tl.constexpr,
    IS_NORMED: tl.constexpr, V_ROW: tl.constexpr, V_ITEM: tl.constexpr, Q_ROW: tl.constexpr,
    Q_ITEM: tl.constexpr, K_ROW: tl.constexpr, K_ITEM: tl.constexpr, G_ROW: tl.constexpr,
    G_ITEM: tl.constexpr, BETA_ROW: tl.constexpr, BETA_ITEM: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    head = tl.program_id(0) // BLOCKS
    first, count, row, goes_on = _sequence(starts, rows, tl.program_id(1))
    if count <= 1:
        return
    v, k = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES), tl.arange(0, K_PAD)
    t, is_value, is_key = tl.arange(0, TOKENS), (v < V)[None, :], (k < K)[None, :]
    place = state + ((row * H + head) * K + k)[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & is_value
    held = tl.load(place, mask=inside & goes_on, other=0.0).to(tl.float32)
    for start in range(0, count, TOKENS):
        is_used = start + t < count
        token = (first + start + t).to(tl.int64)
        at, used = token[:, None], is_used[:, None]
        new = tl.load(value + at * V_ROW + head * V_ITEM + v[None, :], mask=used & is_value, other=0.0)
        asked = tl.load(query + at * Q_ROW + head * Q_ITEM + k[None, :], mask=used & is_key, other=0.0)
        named = tl.load(key + at * K_ROW + head * K_ITEM + k[None, :], mask=used & is_key, other=0.0)
        decay = tl.load(g + token * G_ROW + head * G_ITEM, mask=is_used, other=0.0).to(tl.float32)
        rate = tl.load(beta + token * BETA_ROW + head * BETA_ITEM, mask=is_used, other=0.0).to(tl.float32)
        norm, factor = _inverse_norm(named, IS_NORMED), _inverse_norm(asked, IS_NORMED) * scale
        total, last, turned = tl.cumsum(decay, 0), tl.sum(decay, 0), tl.trans(named)
        between = tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf"))
        faded = tl.exp(between) * norm[None, :]
        alike = tl.dot(named, turned, input_precision="ieee") * faded * (norm * rate)[:, None]
        power = tl.where(t[:, None] > t[None, :], alike, 0.0)
        inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0) - power
        for _ in tl.static_range(3):  # (1 - L)(1 + L^2)(1 + L^4)(1 + L^8): L^16 is zero
            power = tl.dot(power, power, input_precision="ieee")
            inverse = tl.dot(inverse, power, inverse, input_precision="ieee")
        small = held.to(named.dtype)
        known = tl.dot(named, small, input_precision="ieee") * (norm * tl.exp(total))[:, None]
        delta = tl.dot(inverse, (new.to(tl.float32) - known) * rate[:, None], input_precision="ieee")
        made = tl.dot(asked, small, input_precision="ieee") * tl.exp(total)[:, None]
        weights = tl.dot(asked, turned, input_precision="ieee") * faded
        made = tl.dot(weights, delta, made, input_precision="ieee") * factor[:, None]
        to = out + (at * H + head) * V + v[None, :]
        tl.store(to, made.to(out.dtype.element_ty), mask=used & is_value)
        kept = (delta * (norm * tl.exp(last - total))[:, None]).to(named.dtype)
        held = tl.dot(turned, kept, held * tl.exp(last), input_precision="ieee")
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_norm(x, IS_NORMED: tl.constexpr):
    x = x.to(tl.float32)
    total = tl.sum(x * x, 1)
    return tl.rsqrt(total + _EPSILON) if IS_NORMED else tl.full(total.shape, 1.0, tl.float32)
