"""Launches of the plain CUDA kernels: elementwise, reductions, products, attention, control flow."""

import math

import numpy as np

from launches import Launch, from_bf16, launch, pick, shape_1d, singles, softmax, to_bf16


@launch("cuda", "basics", "axpy")
def _(rng):
    grid, block, n = shape_1d(rng)
    y, x, a = singles(rng, grid * block), singles(rng, n), np.float32(rng.standard_normal())
    out = y.copy()
    out[:n] += a * x
    return Launch(grid, block, [y, x, a, n], {0: out})


@launch("cuda", "basics", "copy_vec4")
def _(rng):
    grid, block, n = shape_1d(rng)
    src, dst = singles(rng, n, 4), singles(rng, grid * block, 4)
    out = dst.copy()
    out[:n] = src
    return Launch(grid, block, [dst, src, n], {0: out})


@launch("cuda", "basics", "fill")
def _(rng):
    grid, block, _ = shape_1d(rng)
    n = int(rng.integers(1, 700))
    out = np.zeros(n + 9, np.int32)
    want = out.copy()
    want[:n] = -7
    return Launch(grid, block, [out, -7, n], {0: want})


@launch("cuda", "basics", "scale_grid_stride")
def _(rng):
    grid, block, _ = shape_1d(rng)
    n = int(rng.integers(1, 900))
    x = singles(rng, n)
    return Launch(grid, block, [np.zeros_like(x), x, 3.0, n], {0: 3 * x})


@launch("cuda", "basics", "silu_mul")
def _(rng):
    grid, block, n = shape_1d(rng)
    g, u = singles(rng, n), singles(rng, n)
    return Launch(grid, block, [np.zeros(n, np.float32), g, u, n], {0: g / (1 + np.exp(-g)) * u})


@launch("cuda", "basics", "gelu_tanh")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = 3 * singles(rng, n)
    return Launch(
        grid,
        block,
        [np.zeros_like(x), x, n],
        {0: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))},
    )


@launch("cuda", "basics", "half_fma")
def _(rng):
    grid, block, n = shape_1d(rng)
    a, b, out = (singles(rng, n, 2).astype(np.float16) for _ in range(3))
    return Launch(grid, block, [out, a, b, n], {0: a.astype(np.float32) * b + out}, 4e-3)


@launch("cuda", "basics", "bf16_to_float")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = to_bf16(singles(rng, n))
    return Launch(grid, block, [np.zeros(n, np.float32), x, n], {0: from_bf16(x)}, 0)


@launch("cuda", "basics", "float_to_bf16")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = singles(rng, n)
    return Launch(grid, block, [np.zeros(n, np.uint16), x, n], {0: to_bf16(x)}, 0)


@launch("cuda", "basics", "bf16_fma")
def _(rng):
    grid, block, n = shape_1d(rng)
    a, b = to_bf16(singles(rng, n, 2)), to_bf16(singles(rng, n, 2))
    want = to_bf16(from_bf16(a) * from_bf16(b) + from_bf16(a))
    return Launch(grid, block, [np.zeros((n, 2), np.uint16), a, b, n], {0: want}, 1)


@launch("cuda", "basics", "quantize_int8")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = 60 * singles(rng, n)
    return Launch(
        grid,
        block,
        [np.zeros(n, np.int8), x, 1.5, n],
        {0: np.clip(np.rint(x * np.float32(1.5)), -127, 127)},
        0,
    )


@launch("cuda", "basics", "dequant_int4")
def _(rng):
    grid, block, n = shape_1d(rng)
    packed, scales = rng.integers(0, 256, -(-n // 2), dtype=np.uint8), singles(rng, -(-n // 32))
    i = np.arange(n)
    nibble = (packed[i // 2].astype(int) >> (4 * (i % 2))) & 15
    return Launch(
        grid, block, [np.zeros(n, np.float32), packed, scales, n], {0: (nibble - 8) * scales[i // 32]}
    )


@launch("cuda", "basics", "rope_interleaved")
def _(rng):
    tokens, heads, dim = int(rng.integers(1, 5)), int(rng.integers(1, 4)), pick(rng, 16, 32, 80)
    qk, c, s = (
        singles(rng, tokens, heads, dim),
        singles(rng, tokens, dim // 2),
        singles(rng, tokens, dim // 2),
    )
    a, b, cc, ss = qk[..., ::2], qk[..., 1::2], c[:, None], s[:, None]
    want = np.stack([a * cc - b * ss, a * ss + b * cc], -1).reshape(qk.shape)
    return Launch((tokens, heads), 32, [qk, c, s, heads, dim], {0: want})


@launch("cuda", "basics", "transpose_tiled")
def _(rng):
    rows, cols = (int(v) for v in rng.integers(1, 40, 2))
    x = singles(rng, rows, cols)
    grid = math.ceil(cols / 16), math.ceil(rows / 16)
    return Launch(grid, (16, 16), [np.zeros((cols, rows), np.float32), x, rows, cols], {0: x.T})


@launch("cuda", "basics", "stencil_2d")
def _(rng):
    width, height = (int(v) for v in rng.integers(3, 40, 2))
    x = singles(rng, height, width)
    want = np.zeros_like(x)
    want[1:-1, 1:-1] = 0.2 * (x[1:-1, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] + x[:-2, 1:-1] + x[2:, 1:-1])
    grid = math.ceil(width / 16), math.ceil(height / 8)
    return Launch(grid, (16, 8), [np.zeros_like(x), x, width, height], {0: want})


@launch("cuda", "basics", "strided_copy")
def _(rng):
    rows, cols = (int(v) for v in rng.integers(1, 60, 2))
    a, b = cols + int(rng.integers(0, 9)), cols + int(rng.integers(0, 9))
    src, dst = singles(rng, rows, b), singles(rng, rows, a)
    want = dst.copy()
    want[:, :cols] = src[:, :cols]
    return Launch((math.ceil(cols / 32), rows), 32, [dst, src, a, b, cols, rows], {0: want})


@launch("cuda", "basics", "unused_pointer")
def _(rng):
    grid, block, n = shape_1d(rng)
    return Launch(grid, block, [np.zeros(n, np.float32), singles(rng, 4), n], {0: np.ones(n)})


@launch("cuda", "basics", "adam_step")
def _(rng):
    grid, block, n = shape_1d(rng)
    p, m, g = (singles(rng, n) for _ in range(3))
    v = np.abs(singles(rng, n))
    m2, v2 = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    want = {0: p - 0.1 * m2 / (np.sqrt(v2) + 1e-6), 1: m2, 2: v2}
    return Launch(grid, block, [p, m, v, g, 0.1, 0.9, 0.99, 1e-6, n], want, 1e-4)


def rows_of(rng, top=300):
    """A small matrix and a block of one to four warps."""
    return singles(rng, int(rng.integers(1, 5)), int(rng.integers(1, top))), pick(rng, 32, 64, 128)


@launch("cuda", "reduce", "row_sum")
def _(rng):
    x, block = rows_of(rng)
    return Launch(len(x), block, [np.zeros(len(x), np.float32), x, x.shape[1]], {0: x.sum(1)}, 1e-4)


@launch("cuda", "reduce", "rmsnorm")
def _(rng):
    x, block = rows_of(rng)
    w = singles(rng, x.shape[1])
    want = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * w
    return Launch(len(x), block, [x, w, 1e-6, x.shape[1]], {0: want}, 1e-4)


@launch("cuda", "reduce", "layernorm")
def _(rng):
    x, block = rows_of(rng)
    w, b = singles(rng, x.shape[1]), singles(rng, x.shape[1])
    want = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * w + b
    return Launch(len(x), block, [np.zeros_like(x), x, w, b, x.shape[1]], {0: want}, 1e-3)


@launch("cuda", "reduce", "softmax_warp")
def _(rng):
    x, block = rows_of(rng, 128)
    return Launch(math.ceil(len(x) / (block // 32)), block, [np.zeros_like(x), x, *x.shape], {0: softmax(x)})


@launch("cuda", "reduce", "argmax_rows")
def _(rng):
    x, _ = rows_of(rng)
    return Launch(len(x), 32, [np.zeros(len(x), np.int32), x, x.shape[1]], {0: x.argmax(1)}, 0)


@launch("cuda", "reduce", "scan_block")
def _(rng):
    grid = int(rng.integers(1, 4))
    n = int(rng.integers(1, 256 * grid + 1))
    x = rng.integers(-50, 50, n).astype(np.int32)
    want = np.concatenate([np.cumsum(x[k : k + 256]) for k in range(0, n, 256)])
    return Launch(grid, 256, [np.zeros(n, np.int32), x, n], {0: want}, 0)


@launch("cuda", "reduce", "count_positive")
def _(rng):
    grid, block = int(rng.integers(1, 4)), pick(rng, 32, 64)
    n = int(rng.integers(1, grid * block + 1))
    x = singles(rng, n)
    padded = np.zeros(grid * block)
    padded[:n] = x
    want = (padded > 0).reshape(-1, 32).sum(1)
    return Launch(grid, block, [np.zeros(grid * block // 32, np.uint32), x, n], {0: want}, 0)


@launch("cuda", "reduce", "redux_max")
def _(rng):
    x = rng.integers(0, 2**32, (int(rng.integers(1, 5)), 32), dtype=np.uint32)
    return Launch(len(x), 32, [np.zeros(len(x), np.uint32), x], {0: x.max(1)}, 0)


@launch("cuda", "reduce", "match_groups")
def _(rng):
    grid, block, n = shape_1d(rng)
    keys = rng.integers(0, 4, n).astype(np.int32)
    want = np.zeros(n, np.uint32)
    for i in range(n):
        t = i % block
        first = i - t % 32
        last = min(first + 32, n, i - t + block)
        want[i] = sum(1 << (j - first) for j in range(first, last) if keys[j] == keys[i])
    return Launch(grid, block, [np.zeros(n, np.uint32), keys, n], {0: want}, 0)


@launch("cuda", "reduce", "bitonic_sort_block")
def _(rng):
    x = rng.integers(-999, 999, (int(rng.integers(1, 4)), 128)).astype(np.int32)
    return Launch(len(x), 128, [x], {0: np.sort(x, 1)}, 0)


@launch("cuda", "reduce", "dot_double")
def _(rng):
    a, b = rng.standard_normal((2, int(rng.integers(1, 200))))
    return Launch(1, 32, [np.zeros(1), a.copy(), b.copy(), len(a)], {0: [a @ b]}, 1e-12)


@launch("cuda", "reduce", "vote_any_all")
def _(rng):
    block = pick(rng, 32, 64, 128)
    x = rng.integers(0, 9, block).astype(np.int32)
    warps = (x > 3).reshape(-1, 32)
    warp = np.repeat(warps.any(1) * 2 + warps.all(1), 32)
    return Launch(
        1, block, [np.zeros(block, np.int32), x], {0: warp + 4 * (x > 3).sum() + 1000 * (x == 7).any()}, 0
    )


def product(rng, top=40):
    """Two matrices that fit together."""
    m, n, k = (int(v) for v in rng.integers(1, top, 3))
    return singles(rng, m, k), singles(rng, k, n), (m, n, k)


@launch("cuda", "matmul", "matmul_naive")
def _(rng):
    a, b, (m, n, k) = product(rng)
    grid = math.ceil(n / 16), math.ceil(m / 4)
    return Launch(grid, (16, 4), [np.zeros((m, n), np.float32), a, b, m, n, k], {0: a @ b}, 1e-4)


@launch("cuda", "matmul", "matmul_tiled")
def _(rng):
    a, b, (m, n, k) = product(rng)
    grid = math.ceil(n / 16), math.ceil(m / 16)
    return Launch(grid, (16, 16), [np.zeros((m, n), np.float32), a, b, m, n, k], {0: a @ b}, 1e-4)


@launch("cuda", "matmul", "mma_f16")
def _(rng):
    a, b = singles(rng, 16, 16).astype(np.float16), singles(rng, 16, 8).astype(np.float16)
    return Launch(1, 32, [np.zeros((16, 8), np.float32), a, b], {0: a.astype(np.float64) @ b}, 1e-5)


@launch("cuda", "matmul", "mma_tf32")
def _(rng):
    a, b = singles(rng, 16, 8), singles(rng, 8, 8)
    return Launch(1, 32, [np.zeros((16, 8), np.float32), a, b], {0: a @ b}, 2e-2)


@launch("cuda", "matmul", "matmul_wmma")
def _(rng):
    rows, cols, k = (16 * int(v) for v in rng.integers(1, 4, 3))
    a, b = singles(rng, rows, k).astype(np.float16), singles(rng, cols, k).astype(np.float16)
    want = a.astype(np.float64) @ b.T
    return Launch(
        (cols // 16, rows // 16), 32, [np.zeros((rows, cols), np.float32), a, b, cols, k], {0: want}, 1e-4
    )


@launch("cuda", "matmul", "gemv_int8")
def _(rng):
    rows, k4 = (int(v) for v in rng.integers(1, 40, 2))
    a, x = (
        rng.integers(-128, 128, (rows, 4 * k4), dtype=np.int8),
        rng.integers(-128, 128, 4 * k4, dtype=np.int8),
    )
    return Launch(2, 32, [np.zeros(rows, np.int32), a, x, rows, k4], {0: a.astype(int) @ x.astype(int)}, 0)


@launch("cuda", "matmul", "bmm_strided")
def _(rng):
    z, m, n, k = (int(v) for v in rng.integers(1, 12, 4))
    a, b, c = singles(rng, z, m * k + 3), singles(rng, z, k * n + 32), singles(rng, z, m * n + 5)
    want = c.copy()
    for i in range(z):
        got = a[i, : m * k].reshape(m, k) @ b[i, : k * n].reshape(k, n)
        want[i, : m * n] = got.ravel()
    return Launch((m, 1, z), 32, [c, a, b, n, k, a.shape[1], b.shape[1], c.shape[1]], {0: want}, 1e-4)


@launch("cuda", "attention", "paged_attention")
def _(rng):
    seqs, heads, page, pages = int(rng.integers(1, 3)), int(rng.integers(1, 3)), pick(rng, 4, 8), 6
    lengths = rng.integers(1, page * pages, seqs).astype(np.int32)
    total = pages * seqs
    table = rng.permutation(total).reshape(seqs, pages).astype(np.int32)
    q, k, v = (
        singles(rng, seqs, heads, 32),
        singles(rng, total, page, heads, 32),
        singles(rng, total, page, heads, 32),
    )
    want = np.zeros_like(q)
    for s in range(seqs):
        keys, values = (c[table[s]].reshape(-1, heads, 32)[: lengths[s]] for c in (k, v))
        p = softmax(np.einsum("hd,lhd->hl", q[s], keys) * 0.3)
        want[s] = np.einsum("hl,lhd->hd", p, values)
    args = [np.zeros_like(q), q, k, v, table, lengths, 0.3, heads, pages, page]
    return Launch((heads, seqs), 64, args, {0: want}, 1e-4)


@launch("cuda", "attention", "selective_scan")
def _(rng):
    steps, channels = (int(v) for v in rng.integers(1, 20, 2))
    x, decay = singles(rng, steps, channels), np.abs(singles(rng, channels))
    b, c, state = singles(rng, steps), singles(rng, steps), singles(rng, channels)
    h, y = state.copy(), np.zeros_like(x)
    for t in range(steps):
        h = h * np.exp(-decay) + b[t] * x[t]
        y[t] = c[t] * h
    args = [np.zeros_like(x), state, x, decay, b, c, steps, channels]
    return Launch(1, 32, args, {0: y, 1: h}, 1e-4)


@launch("cuda", "attention", "causal_conv1d")
def _(rng):
    length, channels = (int(v) for v in rng.integers(1, 50, 2))
    x, w, bias = singles(rng, length, channels), singles(rng, channels, 4), singles(rng, channels)
    want = np.tile(bias, (length, 1))
    for k in range(min(4, length)):
        want[k:] += x[: length - k] * w[:, k]
    grid = math.ceil(length / 32), channels
    return Launch(grid, 32, [np.zeros_like(x), x, w, bias, length, channels], {0: want}, 1e-4)


@launch("cuda", "attention", "cross_entropy")
def _(rng):
    x, _ = rows_of(rng)
    label = rng.integers(0, x.shape[1], len(x)).astype(np.int32)
    want = -np.log(softmax(x)[np.arange(len(x)), label])
    return Launch(len(x), 32, [np.zeros(len(x), np.float32), x, label, x.shape[1]], {0: want}, 1e-4)


@launch("cuda", "attention", "combine_splits")
def _(rng):
    rows, splits = (int(v) for v in rng.integers(1, 6, 2))
    part, lse = singles(rng, rows, splits, 32), singles(rng, rows, splits)
    want = np.einsum("rs,rsd->rd", softmax(lse), part)
    return Launch(rows, 32, [np.zeros((rows, 32), np.float32), part, lse, splits, 32], {0: want}, 1e-4)
