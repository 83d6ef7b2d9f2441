"""Launches of the Triton kernels. Sizes that a build takes as divisible by 16 are multiples of 16."""

import math

import numpy as np

from launches import Launch, from_bf16, launch, singles, softmax, to_bf16

erf = np.vectorize(math.erf)


def sixteens(rng, top):
    """A multiple of 16 up to `top`."""
    return 16 * int(rng.integers(1, top // 16 + 1))


@launch("triton", "elementwise", "add")
def _(rng):
    n = sixteens(rng, 3000)
    x, y = singles(rng, n), singles(rng, n)
    return Launch(math.ceil(n / 1024), 128, [x, y, np.zeros_like(x), n], {2: x + y})


@launch("triton", "elementwise", "add_unaligned")
def _(rng):
    n = int(rng.integers(1, 900))
    x, y = (singles(rng, n).astype(np.float16) for _ in range(2))
    return Launch(math.ceil(n / 256), 128, [x, y, np.zeros_like(x), n], {2: x + y}, 1e-3)


@launch("triton", "elementwise", "silu_mul")
def _(rng):
    n = sixteens(rng, 1500)
    g, u = to_bf16(singles(rng, n)), to_bf16(singles(rng, n))
    x, y = from_bf16(g), from_bf16(u)
    want = to_bf16(x / (1 + np.exp(-x)) * y)
    return Launch(math.ceil(n / 512), 128, [g, u, np.zeros(n, np.uint16), n], {2: want}, 1)


@launch("triton", "elementwise", "strided_copy")
def _(rng):
    rows, cols = int(rng.integers(1, 6)), int(rng.integers(1, 129))
    a, b = cols + int(rng.integers(0, 9)), cols + int(rng.integers(0, 9))
    src, dst = singles(rng, rows, a), singles(rng, rows, b)
    want = dst.copy()
    want[:, :cols] = src[:, :cols]
    return Launch(rows, 128, [src, dst, a, b, rows, cols], {1: want})


@launch("triton", "elementwise", "where_mask")
def _(rng):
    n = sixteens(rng, 1500)
    x, mask = singles(rng, n), rng.integers(0, 2, n).astype(np.int8)
    return Launch(math.ceil(n / 512), 128, [x, mask, np.zeros_like(x), n], {2: np.where(mask, x, -1)})


@launch("triton", "elementwise", "dropout")
def _(rng):
    n = sixteens(rng, 600)
    return Launch(math.ceil(n / 256), 128, [singles(rng, n), np.zeros(n, np.float32), 0.5, 16, n], {})


@launch("triton", "elementwise", "transcendental")
def _(rng):
    n = sixteens(rng, 600)
    x = rng.uniform(0.1, 5.0, n).astype(np.float32)
    d = x.astype(np.float64)
    want = np.exp(d) + np.log(d) + np.sqrt(d) + 1 / np.sqrt(d) + np.sin(d) + np.cos(d) + erf(d) + np.floor(d)
    return Launch(math.ceil(n / 256), 128, [x, np.zeros_like(x), n], {1: want}, 1e-3)


def matrix(rng, top):
    """A few rows whose length is a multiple of 16."""
    return singles(rng, int(rng.integers(1, 5)), sixteens(rng, top))


@launch("triton", "rows", "row_sum")
def _(rng):
    x = matrix(rng, 1200)
    return Launch(len(x), 128, [x, np.zeros(len(x), np.float32), x.shape[1]], {1: x.sum(1)}, 1e-3)


@launch("triton", "rows", "softmax")
def _(rng):
    x = matrix(rng, 1024)
    return Launch(len(x), 128, [x, np.zeros_like(x), x.shape[1]], {1: softmax(x)})


@launch("triton", "rows", "softmax_unaligned")
def _(rng):
    x = singles(rng, int(rng.integers(1, 5)), int(rng.integers(1, 257)))
    return Launch(len(x), 128, [x, np.zeros_like(x), x.shape[1]], {1: softmax(x)})


@launch("triton", "rows", "rmsnorm")
def _(rng):
    x, d = matrix(rng, 1024).astype(np.float16), None
    w, d = singles(rng, x.shape[1]).astype(np.float16), x.astype(np.float32)
    want = d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * w
    return Launch(len(x), 128, [x, w, 1e-5, x.shape[1]], {0: want}, 1e-2)


@launch("triton", "rows", "layernorm_residual")
def _(rng):
    x = matrix(rng, 256)
    r, w, b = singles(rng, *x.shape), singles(rng, x.shape[1]), singles(rng, x.shape[1])
    v = x + r
    want = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-5) * w + b
    return Launch(len(x), 128, [x, r, w, b, np.zeros_like(x), x.shape[1], 1e-5], {1: v, 4: want}, 1e-3)


@launch("triton", "rows", "rope")
def _(rng):
    tokens, heads = int(rng.integers(1, 4)), 16
    q, c, s = singles(rng, tokens, heads, 64), singles(rng, tokens, 32), singles(rng, tokens, 32)
    a, b, cc, ss = q[..., :32], q[..., 32:], c[:, None], s[:, None]
    want = np.concatenate([a * cc - b * ss, b * cc + a * ss], -1)
    return Launch((tokens, heads), 32, [q, c, s, heads], {0: want})


@launch("triton", "rows", "argmax")
def _(rng):
    x = matrix(rng, 512)
    return Launch(len(x), 128, [x, np.zeros(len(x), np.int32), x.shape[1]], {1: x.argmax(1)}, 0)


@launch("triton", "rows", "column_sum")
def _(rng):
    x = singles(rng, sixteens(rng, 100), sixteens(rng, 100))
    args = [x, np.zeros(x.shape[1], np.float32), *x.shape]
    return Launch(math.ceil(x.shape[1] / 32), 128, args, {1: x.sum(0)}, 1e-3)


@launch("triton", "rows", "cumsum")
def _(rng):
    x = matrix(rng, 256)
    return Launch(len(x), 128, [x, np.zeros_like(x), x.shape[1]], {1: x.cumsum(1)}, 1e-3)


@launch("triton", "rows", "cross_entropy")
def _(rng):
    x = matrix(rng, 512)
    label = rng.integers(0, x.shape[1], len(x)).astype(np.int32)
    want = -np.log(softmax(x)[np.arange(len(x)), label])
    return Launch(len(x), 128, [x, label, np.zeros(len(x), np.float32), x.shape[1]], {2: want}, 1e-4)


def product(rng, top, tile, bits):
    """Arguments of a matrix product and what it gives."""
    m, n, k = (sixteens(rng, top) for _ in range(3))
    a, b = singles(rng, m, k), singles(rng, k, n)
    if bits == "bf16":
        a, b = to_bf16(a), to_bf16(b)
        want = from_bf16(a) @ from_bf16(b)
    else:
        a, b = (v.astype(np.float16) if bits == "f16" else v for v in (a, b))
        want = a.astype(np.float32) @ b.astype(np.float32)
    grid = math.ceil(m / tile), math.ceil(n / tile)
    return a, b, (m, n, k), grid, want


@launch("triton", "matmul", "matmul_f16")
def _(rng):
    a, b, (m, n, k), grid, want = product(rng, 130, 64, "f16")
    return Launch(grid, 128, [a, b, np.zeros((m, n), np.float16), m, n, k, k, n, n], {2: want}, 4e-2)


@launch("triton", "matmul", "matmul_bf16")
def _(rng):
    a, b, (m, n, k), grid, want = product(rng, 80, 32, "bf16")
    return Launch(grid, 128, [a, b, np.zeros((m, n), np.float32), m, n, k, k, n, n], {2: want}, 1e-3)


@launch("triton", "matmul", "matmul_tf32")
def _(rng):
    a, b, (m, n, k), grid, want = product(rng, 80, 32, "f32")
    return Launch(grid, 128, [a, b, np.zeros((m, n), np.float32), m, n, k, k, n, n], {2: want}, 5e-2)


@launch("triton", "matmul", "matmul_persistent")
def _(rng):
    a, b, (m, n, k), _, want = product(rng, 100, 32, "f16")
    return Launch(4, 128, [a, b, np.zeros((m, n), np.float16), m, n, k], {2: want}, 4e-2)


@launch("triton", "matmul", "matmul_split_k")
def _(rng):
    a, b, (m, n, k), grid, want = product(rng, 80, 32, "bf16")
    return Launch((*grid, 2), 128, [a, b, np.zeros((m, n), np.float32), m, n, k], {2: want}, 1e-3)


@launch("triton", "matmul", "moe_gather_gemm")
def _(rng):
    dim, ffn, experts, tiles = sixteens(rng, 64), sixteens(rng, 64), 3, int(rng.integers(1, 4))
    valid = int(rng.integers(1, 16 * tiles + 1))
    tokens = singles(rng, valid, dim).astype(np.float16)
    weights = singles(rng, experts, dim, ffn).astype(np.float16)
    ids = np.full(16 * tiles, valid, np.int32)
    ids[rng.permutation(16 * tiles)[:valid]] = rng.permutation(valid)
    expert = rng.integers(0, experts, tiles).astype(np.int32)
    want = np.zeros((valid, ffn), np.float32)
    for slot, token in enumerate(ids):
        if token < valid:
            want[token] = tokens[token].astype(np.float32) @ weights[expert[slot // 16]].astype(np.float32)
    args = [tokens, weights, np.zeros((valid, ffn), np.float16), ids, expert, dim, ffn, valid]
    return Launch((tiles, math.ceil(ffn / 32)), 128, args, {2: want}, 4e-2)


@launch("triton", "matmul", "gemv_int8")
def _(rng):
    rows, cols = int(rng.integers(1, 6)), sixteens(rng, 600)
    w, x, scale = rng.integers(-128, 128, (rows, cols), dtype=np.int8), singles(rng, cols), singles(rng, rows)
    want = (w.astype(np.float32) @ x) * scale
    return Launch(rows, 128, [w, x, scale, np.zeros(rows, np.float32), cols], {3: want}, 5e-2)


def attention(q, k, v, scale, causal):
    """Softmax attention and the logarithm of its normaliser."""
    s = np.einsum("hmd,hnd->hmn", q, k) * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    top = s.max(-1)
    lse = top + np.log(np.exp(s - top[..., None]).sum(-1))
    return np.einsum("hmn,hnd->hmd", softmax(s), v), lse


def flash(rng, bits, causal):
    """A launch of flash attention forward."""
    heads, length = int(rng.integers(1, 3)), int(rng.integers(1, 140))
    q, k, v = (singles(rng, heads, length, 32) for _ in range(3))
    if bits == "bf16":
        stored = [to_bf16(t) for t in (q, k, v)]
        q, k, v = (from_bf16(t) for t in stored)
        out = np.zeros(q.shape, np.uint16)
    else:
        stored = [t.astype(np.float16) for t in (q, k, v)]
        q, k, v = (t.astype(np.float32) for t in stored)
        out = np.zeros(q.shape, np.float16)
    want, lse = attention(q, k, v, 0.2, causal)
    args = [*stored, out, np.zeros((heads, length), np.float32), 0.2, length, heads]
    return (math.ceil(length / 64), heads), args, want, lse


@launch("triton", "attention", "flash_forward")
def _(rng):
    grid, args, want, lse = flash(rng, "f16", False)
    return Launch(grid, 128, args, {3: want, 4: lse}, 2e-2)


@launch("triton", "attention", "flash_forward_causal")
def _(rng):
    grid, args, want, lse = flash(rng, "bf16", True)
    return Launch(grid, 128, args, {"bf16:3": want, 4: lse}, 4e-2)


@launch("triton", "attention", "paged_decode")
def _(rng):
    seqs, heads, pages = int(rng.integers(1, 3)), int(rng.integers(1, 3)), 4
    lengths = rng.integers(1, 16 * pages, seqs).astype(np.int32)
    table = rng.permutation(pages * seqs).reshape(seqs, pages).astype(np.int32)
    q = singles(rng, seqs, heads, 32)
    k, v = (singles(rng, pages * seqs, 16, heads, 32) for _ in range(2))
    want = np.zeros_like(q)
    for s in range(seqs):
        keys, values = (c[table[s]].reshape(-1, heads, 32)[: lengths[s]] for c in (k, v))
        want[s] = np.einsum("hl,lhd->hd", softmax(np.einsum("hd,lhd->hl", q[s], keys) * 0.3), values)
    args = [q, k, v, table, lengths, np.zeros_like(q), 0.3, heads, pages]
    return Launch((seqs, heads), 128, args, {5: want}, 1e-4)


@launch("triton", "attention", "ssm_scan")
def _(rng):
    steps, channels, n = int(rng.integers(1, 8)), int(rng.integers(1, 70)), 16
    x, dt = singles(rng, steps, channels), np.abs(singles(rng, steps, channels))
    a, b, c = -np.abs(singles(rng, channels, n)), singles(rng, steps, n), singles(rng, steps, n)
    state = singles(rng, channels, n)
    h, y = state.copy(), np.zeros_like(x)
    for t in range(steps):
        h = h * np.exp(dt[t][:, None] * a) + (dt[t] * x[t])[:, None] * b[t]
        y[t] = h @ c[t]
    args = [x, dt, a, b, c, state, np.zeros_like(x), steps, channels]
    return Launch(math.ceil(channels / 32), 128, args, {5: h, 6: y}, 1e-3)


@launch("triton", "attention", "kv_append")
def _(rng):
    dim, slots = sixteens(rng, 128), np.array([3, -1, 0], np.int32)
    key, cache = singles(rng, 3, dim), singles(rng, 5, dim)
    want = cache.copy()
    want[3], want[0] = key[0], key[2]
    return Launch(3, 128, [key, cache, slots, dim], {1: want})
