"""Launches of the CUDA kernels whose pointers are hard to follow."""

import math

import numpy as np

from launches import Launch, launch, pick, shape_1d, singles
from tessera_ptx.interp import ByPointer, Offset, Packed


@launch("cuda", "swap_in_loop", "swap_in_loop")
def _(rng):
    n, steps = int(rng.integers(1, 65)), int(rng.integers(0, 5))
    a, b = singles(rng, n), singles(rng, n)
    x, y = a.copy(), b.copy()
    for _ in range(steps):
        x, y = np.float32(0.5) * x[::-1], x
    want = {0: x, 1: y} if steps % 2 == 0 else {0: y, 1: x}
    return Launch(1, 64, [a, b, steps, n], want)


@launch("cuda", "swap_in_loop", "rotate_three")
def _(rng):
    buffers, steps = [singles(rng, 32) for _ in range(3)], int(rng.integers(0, 7))
    want = sum((buffers[s % 3] for s in range(steps)), np.zeros(32, np.float32))
    return Launch(1, 32, [*buffers, np.zeros(32, np.float32), steps], {3: want})


@launch("cuda", "swap_in_loop", "pointer_walk")
def _(rng):
    rows, pitch = int(rng.integers(1, 6)), int(rng.integers(32, 50))
    x = singles(rng, rows, pitch)
    want = np.zeros_like(x)
    want[:, :32] = x[:, :32] + 1
    return Launch(1, 32, [np.zeros_like(x), x, rows, pitch], {0: want})


@launch("cuda", "swap_in_loop", "pointer_after_loop")
def _(rng):
    stop = rng.integers(-9, 2, 8).astype(np.int32)
    a, b = np.zeros(1, np.float32), np.zeros(8, np.float32)
    hits = np.flatnonzero(stop > 0)
    wa, wb = a.copy(), b.copy()
    (wb if hits.size else wa)[hits[-1] if hits.size else 0] = 1
    return Launch(1, 1, [a, b, stop], {0: wa, 1: wb})


@launch("cuda", "generic_select", "generic_select")
def _(rng):
    use, n = pick(rng, 0, 1), int(rng.integers(1, 129))
    x = rng.integers(0, 99, 128).astype(np.int32)
    t = np.arange(128)
    want = {0: np.where(t < n, 2 * (t + 5) if use else t + x + 5, 0), 1: x if use else x + 5}
    return Launch(1, 128, [np.zeros(128, np.int32), x, use, n], want, 0)


@launch("cuda", "generic_select", "generic_atomic")
def _(rng):
    take, n, grid = pick(rng, 0, 1), int(rng.integers(1, 65)), int(rng.integers(1, 4))
    want = {0: [2 * n * grid if take else 0], 1: [0 if take else 2 * n] * grid}
    return Launch(grid, 64, [np.zeros(1, np.int32), np.zeros(grid, np.int32), take, n], want, 0)


@launch("cuda", "generic_select", "half_atomic")
def _(rng):
    n = int(rng.integers(1, 33))
    x = rng.integers(-4, 5, n).astype(np.float16)
    want = np.array([x[k::4].sum() for k in range(4)], np.float32)
    return Launch(1, 32, [np.zeros(4, np.float16), x, n], {0: want}, 0)


@launch("cuda", "generic_select", "is_shared_test")
def _(rng):
    return Launch(1, 32, [np.zeros(32, np.int32), np.zeros(32, np.int32)], {0: [2, 1] * 16}, 0)


@launch("cuda", "generic_select", "select_of_two")
def _(rng):
    grid, block, n = shape_1d(rng)
    a, b, flags = singles(rng, n), singles(rng, n), rng.integers(0, 2, n).astype(np.int32)
    return Launch(grid, block, [np.zeros(n, np.float32), a, b, flags, n], {0: np.where(flags, a, b)})


@launch("cuda", "cp_async_copy", "cp_async_copy")
def _(rng):
    grid = int(rng.integers(1, 4))
    n = int(rng.integers(1, 128 * grid + 1))
    x = singles(rng, n, 4)
    return Launch(grid, 128, [np.zeros_like(x), x, n], {0: x})


@launch("cuda", "cp_async_copy", "cp_async_zfill")
def _(rng):
    grid = int(rng.integers(1, 4))
    n = int(rng.integers(1, 128 * grid + 1))
    x, want = singles(rng, n), np.zeros(128 * grid)
    want[:n] = x
    return Launch(grid, 128, [np.ones(128 * grid, np.float32), x, n], {0: want})


@launch("cuda", "cp_async_copy", "cp_async_pipeline")
def _(rng):
    x = singles(rng, int(rng.integers(1, 6)), 64)
    return Launch(1, 64, [np.zeros(64, np.float32), x, len(x)], {0: x.sum(0)[::-1]})


@launch("cuda", "pointer_in_shared", "pointer_in_shared")
def _(rng):
    n, idx = int(rng.integers(1, 65)), rng.permutation(64).astype(np.int32)
    a, b = np.full(64, -1.0, np.float32), np.full(64, -1.0, np.float32)
    wa, wb = a.copy(), b.copy()
    for t in range(n):
        (wa if (63 - t) & 1 else wb)[idx[63 - t]] = t
    return Launch(1, 64, [a, b, idx, n], {0: wa, 1: wb})


@launch("cuda", "pointer_in_shared", "base_in_shared")
def _(rng):
    x = singles(rng, int(rng.integers(1, 5)), 32)
    return Launch(len(x), 32, [x, np.zeros_like(x)], {1: 2 * x})


@launch("cuda", "struct_by_value", "struct_by_value")
def _(rng):
    grid, block, n = shape_1d(rng)
    out, a, b = np.zeros(n, np.float32), singles(rng, n), singles(rng, n)
    args = [Packed({0: out, 8: a, 16: b, 24: np.int32(n)}, 32), 2.0]
    return Launch(grid, block, args, {"0+0": 2 * (a + b)})


@launch("cuda", "struct_by_value", "struct_param_index")
def _(rng):
    which, stride = int(rng.integers(0, 4)), int(rng.integers(1, 4))
    table = [singles(rng, 32 * stride) for _ in range(4)]
    packed = Packed({**{8 * k: t for k, t in enumerate(table)}, 32: np.int32(stride)}, 40)
    return Launch(1, 32, [packed, which, np.zeros(32, np.float32)], {2: table[which][::stride]})


@launch("cuda", "struct_by_value", "struct_local_index")
def _(rng):
    which, other = (int(v) for v in rng.integers(0, 4, 2))
    table, spare = [np.zeros(32, np.float32) for _ in range(4)], np.zeros(32, np.float32)
    packed = Packed({**{8 * k: t for k, t in enumerate(table)}, 32: np.int32(7)}, 40)
    hit = "3" if which == other else f"0+{8 * which}"
    return Launch(1, 32, [packed, which, other, spare], {hit: np.full(32, 7.0)})


@launch("cuda", "struct_by_value", "struct_block_index")
def _(rng):
    grid, n = int(rng.integers(1, 5)), int(rng.integers(1, 33))
    table = [np.zeros(32, np.float32) for _ in range(4)]
    packed = Packed({**{8 * k: t for k, t in enumerate(table)}, 32: np.int32(0)}, 40)
    want = (np.arange(32) < n).astype(np.float32)
    return Launch(grid, 32, [packed, n], {f"0+{8 * k}": want if k < grid else 0 * want for k in range(4)})


@launch("cuda", "struct_by_value", "nested_struct")
def _(rng):
    n, kind, stride = int(rng.integers(1, 33)), pick(rng, 0, 1), int(rng.integers(1, 4))
    out, a, b, last = np.zeros(32, np.float32), singles(rng, 32), singles(rng, 32), np.zeros(32 * stride)
    fields = {0: np.int32(kind), 8: out, 16: a, 24: b, 32: np.int32(n), 40: np.int64(stride), 48: last}
    want = np.where(np.arange(32) < n, a if kind else b, 0)
    return Launch(1, 32, [Packed(fields, 56)], {"0+8": want})


@launch("cuda", "struct_by_value", "tensor_iterator_add")
def _(rng):
    grid, block, n = shape_1d(rng)
    sa, sb = (int(v) for v in rng.integers(0, 3, 2))
    a, b, out = singles(rng, n * max(sa, 1)), singles(rng, n * max(sb, 1)), np.zeros(n, np.float32)
    fields = {0: out, 8: a, 16: b, 24: np.int32(4), 28: np.int32(4 * sa), 32: np.int32(4 * sb)}
    i = np.arange(n)
    return Launch(grid, block, [n, Packed(fields, 40)], {"1+0": a[i * sa] + b[i * sb]})


@launch("cuda", "ptr_difference", "ptr_difference")
def _(rng):
    k, x = int(rng.integers(0, 9)), np.zeros(9, np.uint8)
    want = np.zeros(48, np.uint8)
    want[k : k + 32] = 7
    return Launch(1, 32, [x, Offset(x, k), np.zeros(48, np.uint8)], {2: want}, 0)


@launch("cuda", "ptr_difference", "end_pointer")
def _(rng):
    n, x = int(rng.integers(1, 80)), np.zeros(80, np.float32)
    want = np.where(np.arange(80) < n, 3, 0)
    return Launch(1, 32, [x, Offset(x, 4 * n)], {0: want})


@launch("cuda", "ptr_difference", "address_of")
def _(rng):
    return Launch(1, 32, [np.zeros(32, np.uint64), singles(rng, 32)], {})


@launch("cuda", "ptr_difference", "wide_scalars")
def _(rng):
    grid, block, n = shape_1d(rng)
    stride = int(rng.integers(1, 4))
    x = singles(rng, n * stride)
    return Launch(grid, block, [np.zeros(n, np.float32), x, n, stride], {0: x[::stride]})


@launch("cuda", "ptr_difference", "rebase")
def _(rng):
    n, x = int(rng.integers(1, 33)), singles(rng, 32)
    return Launch(1, 32, [x, np.zeros(32, np.float32), n], {1: np.where(np.arange(32) < n, x, 0)})


@launch("cuda", "index_from_memory", "index_from_memory")
def _(rng):
    grid, block, n = shape_1d(rng)
    idx, x = rng.permutation(n).astype(np.int64), singles(rng, n)
    want = np.zeros(n, np.float32)
    want[idx] = x
    return Launch(grid, block, [np.zeros(n, np.float32), idx, x, n], {0: want})


@launch("cuda", "index_from_memory", "byte_offset_from_memory")
def _(rng):
    n, offset = 40, rng.integers(0, 99, 40).astype(np.int64)
    want = np.zeros(99, np.uint8)
    want[offset] = 1
    return Launch(2, 32, [np.zeros(99, np.uint8), offset, n], {0: want}, 0)


@launch("cuda", "index_from_memory", "embedding")
def _(rng):
    table, ids = singles(rng, 9, int(rng.integers(1, 70))), rng.integers(0, 9, 5).astype(np.int32)
    args = [np.zeros((5, table.shape[1]), np.float32), ids, table, table.shape[1]]
    return Launch(5, 32, args, {0: table[ids]})


@launch("cuda", "index_from_memory", "spmv_csr")
def _(rng):
    rows, cols = (int(v) for v in rng.integers(1, 40, 2))
    dense = singles(rng, rows, cols) * (rng.random((rows, cols)) < 0.3)
    start = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).astype(np.int32)
    col = np.append(np.nonzero(dense)[1], 0).astype(np.int32)
    val, x = np.append(dense[dense != 0], 0).astype(np.float32), singles(rng, cols)
    args = [np.zeros(rows, np.float32), start, col, val, x, rows]
    return Launch(math.ceil(rows / 32), 32, args, {0: dense @ x}, 1e-4)


@launch("cuda", "index_from_memory", "paged_gather")
def _(rng):
    page, dim, tokens = pick(rng, 2, 4), int(rng.integers(1, 50)), int(rng.integers(1, 9))
    pages, table = singles(rng, 8, page, dim), rng.integers(0, 8, tokens).astype(np.int32)
    t = np.arange(tokens)
    args = [np.zeros((tokens, dim), np.float32), pages, table, page, dim]
    return Launch(tokens, 32, args, {0: pages[table[t // page], t % page]})


@launch("cuda", "index_from_memory", "kv_append")
def _(rng):
    dim, slot = int(rng.integers(1, 50)), np.array([3, -1, 0], np.int32)
    cache, fresh = singles(rng, 5, dim), singles(rng, 3, dim)
    want = cache.copy()
    want[3], want[0] = fresh[0], fresh[2]
    return Launch(3, 32, [cache, fresh, slot, dim], {0: want})


@launch("cuda", "index_from_memory", "moe_gather")
def _(rng):
    dim, tokens = int(rng.integers(1, 50)), singles(rng, 6, int(rng.integers(1, 50)))
    dim = tokens.shape[1]
    expert, order = rng.integers(0, 2, 6).astype(np.int32), rng.permutation(6).astype(np.int32)
    want = np.where((expert[order] == 1)[:, None], tokens[order], 0)
    return Launch(6, 32, [np.zeros((6, dim), np.float32), tokens, expert, order, dim, 1], {0: want})


@launch("cuda", "pointer_table", "pointer_table")
def _(rng):
    n, tables = int(rng.integers(1, 33)), [singles(rng, 32) for _ in range(3)]
    table = ByPointer(Packed({8 * k: t for k, t in enumerate(tables)}, 24))
    return Launch(3, 32, [table, np.zeros((3, n), np.float32), n], {1: np.stack(tables)[:, :n]})


@launch("cuda", "pointer_table", "scatter_to_table")
def _(rng):
    n, x = int(rng.integers(1, 33)), singles(rng, 32)
    table = ByPointer(Packed({8 * k: np.zeros(32, np.float32) for k in range(3)}, 24))
    want = np.where(np.arange(32) < n, x, 0)
    return Launch(3, 32, [table, x, n], {f"0->{8 * k}": want for k in range(3)})


@launch("cuda", "pointer_table", "args_by_pointer")
def _(rng):
    n, x = int(rng.integers(1, 33)), singles(rng, 32)
    args = ByPointer(Packed({0: np.zeros(32, np.float32), 8: x, 16: np.int32(n)}, 24))
    return Launch(1, 32, [args], {"0->0": np.where(np.arange(32) < n, x, 0)})


@launch("cuda", "pointer_table", "list_walk")
def _(rng):
    node, total = None, 0
    for value in rng.integers(1, 99, int(rng.integers(1, 5))):
        total += int(value)
        node = ByPointer(Packed({0: np.uint64(0) if node is None else node, 8: np.int32(value)}, 16))
    return Launch(1, 32, [node, np.zeros(32, np.int32)], {1: np.full(32, total)}, 0)
