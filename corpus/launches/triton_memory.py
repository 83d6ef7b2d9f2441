"""Launches of the Triton kernels about memory, pointers and tensor descriptors."""

import math

import numpy as np

from launches import MAKERS, Launch, launch, pick, singles
from launches.triton import product, sixteens
from tessera_ptx.interp import ByPointer, Packed, tensor_map


@launch("triton", "memory", "histogram")
def _(rng):
    n = sixteens(rng, 600)
    idx = rng.integers(0, 10, n).astype(np.int32)
    return Launch(
        math.ceil(n / 256), 128, [idx, np.zeros(10, np.int32), n], {1: np.bincount(idx, minlength=10)}, 0
    )


@launch("triton", "memory", "scatter_add")
def _(rng):
    n = sixteens(rng, 150)
    values, idx = singles(rng, n, 16), rng.integers(0, 7, n).astype(np.int32)
    want = np.zeros((7, 16), np.float32)
    np.add.at(want, idx, values)
    return Launch(math.ceil(n / 64), 128, [values, idx, np.zeros_like(want), n], {2: want}, 1e-4)


@launch("triton", "memory", "tickets")
def _(rng):
    n = sixteens(rng, 300)
    x = rng.integers(0, 5, n).astype(np.int64)
    args = [x, np.zeros(5, np.int32), np.zeros(n, np.int32), n]
    return Launch(math.ceil(n / 128), 32, args, {1: np.bincount(x, minlength=5)}, 0)


@launch("triton", "memory", "scatter_product")
def _(rng):
    k, stride = 16 * int(rng.integers(1, 4)), 32 + 16 * int(rng.integers(0, 3))
    a, b = rng.integers(-4, 5, (32, k)).astype(np.float16), rng.integers(-4, 5, (k, 32)).astype(np.float16)
    rows, want = rng.integers(0, 6, 32).astype(np.int64), np.zeros((6, stride), np.float32)
    np.add.at(want[:, :32], rows, a.astype(np.float32) @ b.astype(np.float32))
    return Launch(1, 32, [a, b, rows, np.zeros_like(want), k, np.int64(stride)], {3: want}, 0)


@launch("triton", "memory", "atomic_kinds")
def _(rng):
    n = sixteens(rng, 300)
    x, grid = rng.integers(1, 999, n).astype(np.int32), math.ceil(n / 128)
    lanes = [x[k::4] for k in range(4)]
    want = {
        1: [v.max() for v in lanes], 2: [min(v.min(), 500) for v in lanes],
        3: [np.bitwise_or.reduce(v) for v in lanes], 4: [7] * grid,
    }  # fmt: skip
    args = [
        x,
        np.zeros(4, np.int32),
        np.full(4, 500, np.int32),
        np.zeros(4, np.int32),
        np.zeros(grid, np.int32),
        n,
    ]
    return Launch(grid, 128, args, want, 0)


@launch("triton", "memory", "compare_and_swap")
def _(rng):
    return Launch(3, 128, [np.zeros(1, np.int32), np.full(3, -1, np.int32)], {0: [1], 1: [0, 1, 1]}, 0)


@launch("triton", "memory", "select_ptr")
def _(rng):
    n, flag = sixteens(rng, 600), pick(rng, -16, 16)
    a, b = singles(rng, n), singles(rng, n)
    return Launch(math.ceil(n / 256), 128, [a, b, np.zeros_like(a), flag, n], {2: a if flag > 0 else b})


@launch("triton", "memory", "select_store")
def _(rng):
    n, flag = sixteens(rng, 600), pick(rng, -16, 16)
    x = singles(rng, n)
    want = {0: x, 1: 0 * x} if flag > 3 else {0: 0 * x, 1: 2 * x}
    return Launch(math.ceil(n / 256), 128, [np.zeros_like(x), np.zeros_like(x), x, flag, n], want)


@launch("triton", "memory", "ptr_table")
def _(rng):
    n = sixteens(rng, 128)
    tables = [singles(rng, n).astype(np.float16) for _ in range(3)]
    table = ByPointer(Packed({8 * k: t for k, t in enumerate(tables)}, 24))
    return Launch(3, 128, [table, np.zeros((3, n), np.float16), n], {1: np.stack(tables)}, 0)


@launch("triton", "memory", "paged_gather")
def _(rng):
    dim, tokens = int(rng.integers(1, 129)), int(rng.integers(1, 40))
    pages, table = singles(rng, 6, 16, dim).astype(np.float16), rng.integers(0, 6, 3).astype(np.int32)
    t = np.arange(tokens)
    args = [pages, table, np.zeros((tokens, dim), np.float16), dim]
    return Launch(tokens, 128, args, {2: pages[table[t // 16], t % 16]}, 0)


@launch("triton", "memory", "gather_i64")
def _(rng):
    n, x = sixteens(rng, 300), singles(rng, 50)
    idx = rng.integers(0, 50, n).astype(np.int64)
    return Launch(math.ceil(n / 128), 128, [x, idx, np.zeros(n, np.float32), n], {2: x[idx]})


@launch("triton", "memory", "swap_buffers")
def _(rng):
    a, b, steps = singles(rng, 128), singles(rng, 128), 16 * int(rng.integers(0, 2))
    x, y = a.copy(), b.copy()
    for _ in range(steps):
        y = np.float32(0.5) * x
        x, y = y, x
    return Launch(1, 128, [a, b, steps], {0: x, 1: y})


@launch("triton", "tma", "tma_device_desc")
def _(rng):
    m, n = sixteens(rng, 70), sixteens(rng, 70)
    x = singles(rng, m, n)
    return Launch((math.ceil(m / 32), math.ceil(n / 32)), 128, [x, np.zeros_like(x), m, n], {1: 2 * x})


@launch("triton", "tma", "tma_device_matmul")
def _(rng):
    a, b, (m, n, k), grid, want = product(rng, 100, 64, "f16")
    return Launch(grid, 128, [a, b, np.zeros((m, n), np.float16), m, n, k], {2: want}, 4e-2)


@launch("triton", "tma", "tma_host_desc")
def _(rng):
    """Before sm_90 a descriptor is a pointer, shapes, strides, two flags, and shapes and strides again."""
    a, b, (m, n, k), grid, want = product(rng, 100, 64, "f16")
    c = np.zeros((m, n), np.float16)
    args = []
    for array in (a, b, c):
        rows, cols = array.shape
        args += [array, rows, cols, cols, 1, 0, 0, rows, cols, cols, 1]
    return Launch(grid, 128, [*args, k], {22: want}, 4e-2)


@launch("triton", "tma", "tma_host_desc@sm_90")
def _(rng):
    """From sm_90 on it is a tensor map, shapes and strides; the swizzle is as wide as a row of the box."""
    a, b, (m, n, k), grid, want = product(rng, 100, 64, "f16")
    c = np.zeros((m, n), np.float16)
    args = []
    for array, box, swizzle in ((a, (64, 32), 2), (b, (32, 64), 3), (c, (64, 64), 3)):
        rows, cols = array.shape
        args += [tensor_map(array, box, swizzle), rows, cols, cols, 1]
    return Launch(grid, 128, [*args, k], {"10+0": want}, 4e-2)


def device_scratch(made):
    """The same launch with room for the tensor maps that each block writes."""
    blocks = int(np.prod(made.grid))
    scratch = np.zeros(512 * blocks, np.uint8)
    return Launch(made.grid, made.block, [*made.args, scratch], made.expect, made.tolerance)


@launch("triton", "tma", "tma_device_desc@sm_90")
def _(rng):
    return device_scratch(MAKERS["triton", "tma", "tma_device_desc"](rng))


@launch("triton", "tma", "tma_device_matmul@sm_90")
def _(rng):
    return device_scratch(MAKERS["triton", "tma", "tma_device_matmul"](rng))
