"""Launches of the CUDA kernels about bits, control flow, formats and newer instructions."""

import math

import numpy as np

from launches import Launch, launch, pick, shape_1d, singles
from tessera_ptx.interp import ByPointer, tensor_map


@launch("cuda", "or_and_index", "or_and_index")
def _(rng):
    x = singles(rng, 128 * int(rng.integers(1, 4)))
    i = np.arange(x.size)
    return Launch(x.size // 128, 128, [np.zeros_like(x), x], {0: x[i ^ 1] + x[i & ~3]})


@launch("cuda", "or_and_index", "swizzle")
def _(rng):
    x = singles(rng, int(rng.integers(1, 4)), 64)
    row, col = np.arange(64) >> 3, np.arange(64) & 7
    want = np.zeros_like(x)
    want[:, row << 3 | (col ^ row)] = x
    return Launch(len(x), 64, [np.zeros_like(x), x], {0: want})


@launch("cuda", "or_and_index", "bit_reverse")
def _(rng):
    x = singles(rng, 32)
    order = [int(f"{i:05b}"[::-1], 2) for i in range(32)]
    return Launch(1, 32, [np.zeros_like(x), x, 5], {0: x[order]})


@launch("cuda", "or_and_index", "modulo_index")
def _(rng):
    grid, block, n = shape_1d(rng)
    m = int(rng.integers(1, 40))
    x = singles(rng, m)
    return Launch(grid, block, [np.zeros(n, np.float32), x, n, m], {0: x[np.arange(n) % m]})


@launch("cuda", "or_and_index", "divide_index")
def _(rng):
    c, h, w = (int(v) for v in rng.integers(1, 6, 3))
    x = singles(rng, c, w, h)
    want = x.transpose(0, 2, 1).ravel()
    return Launch(math.ceil(x.size / 32), 32, [np.zeros(x.size, np.float32), x, x.size, h, w], {0: want})


@launch("cuda", "or_and_index", "bit_tricks")
def _(rng):
    x = rng.integers(0, 2**32, 8, dtype=np.uint32)
    want = np.zeros((8, 8), np.uint32)
    for i, v in enumerate(int(v) for v in x):
        both = v | ((~v & 0xFFFFFFFF) << 32)
        want[i, 0] = sum((both >> 8 * byte & 0xFF) << 8 * k for k, byte in enumerate((5, 1, 7, 3)))
        want[i, 1] = ((((v + 1) & 0xFFFFFFFF) << 32 | v) << 7) >> 32 & 0xFFFFFFFF
        want[i, 2] = (((v * 3) & 0xFFFFFFFF) << 32 | v) >> min(i, 32) & 0xFFFFFFFF
        leading = 32 - v.bit_length()
        first = (v & -v).bit_length()
        want[i, 3] = leading + 64 * first + 4096 * bin(v).count("1")
        signed = np.array([v], np.uint32).view(np.int8).astype(int)
        dot = int(signed @ [4, 3, 2, 1]) + 5
        want[i, 4] = (v * 0x9E3779B9 >> 32) ^ (dot & 0xFFFFFFFF)
        moved = np.array([v << 3 & 0xFFFFFFFF], np.uint32).view(np.int32)[0] >> 24
        want[i, 5] = (v >> 5 & 0x7F) | ((int(moved) & 0xFFFFFFFF) << 8) & 0xFFFFFFFF
        want[i, 6] = (v & 0xFF00FF) ^ ((i | 0x10) & ~v & 0xFFFFFFFF)
        bytes_ = [abs((v >> 8 * k & 255) - (0x01020304 >> 8 * k & 255)) << 8 * k for k in range(4)]
        want[i, 7] = (abs(v - 77) + i + sum(bytes_)) & 0xFFFFFFFF
    return Launch(1, 32, [np.zeros((8, 8), np.uint32), x, 8], {0: want}, 0)


@launch("cuda", "control_flow", "switch_dense")
def _(rng):
    grid, block, n = shape_1d(rng)
    op, out = rng.integers(-1, 10, n).astype(np.int32), rng.integers(0, 9, n).astype(np.int32)
    x, y = (rng.integers(0, 99, n).astype(np.int32) for _ in range(2))
    results = [x + y, x - 3 * y, x * y + 1, x & y, (x | y) + out, x ^ y, x << (y & 7), x >> (y & 7)]
    want = np.select([op == k for k in range(8)], results, -1)
    return Launch(grid, block, [out, op, x, y, n], {0: want}, 0)


@launch("cuda", "control_flow", "collatz")
def _(rng):
    x = rng.integers(1, 40, 40).astype(np.int32)
    want = []
    for start in x:
        v, count = int(start), 0
        while v > 1:
            v, count = (3 * v + 1 if v & 1 else v // 2), count + 1
        want.append(count)
    return Launch(2, 32, [np.zeros(40, np.int32), x, 40], {0: want}, 0)


@launch("cuda", "control_flow", "early_exit_search")
def _(rng):
    table = np.unique(rng.integers(0, 50, 30)).astype(np.int32)
    keys = rng.integers(0, 50, 40).astype(np.int32)
    where = np.searchsorted(table, keys)
    found = (where < table.size) & (table[np.minimum(where, table.size - 1)] == keys)
    args = [np.zeros(40, np.int32), keys, table, 40, table.size]
    return Launch(2, 32, args, {0: np.where(found, where, -1)}, 0)


@launch("cuda", "control_flow", "nested_break")
def _(rng):
    w = int(rng.integers(1, 12))
    grid = rng.integers(0, 64, (w, w)).astype(np.int32)
    want = []
    for t in range(32):
        hits = 0
        for y in range(w):
            for x in range(w):
                if grid[y, x] == t:
                    break
                if (x ^ y) != t:
                    hits += x
            if hits > 100 + t:
                break
        want.append(hits)
    return Launch(1, 32, [np.zeros(32, np.int32), grid, w], {0: want}, 0)


@launch("cuda", "control_flow", "local_array")
def _(rng):
    n, idx = int(rng.integers(0, 30)), rng.integers(0, 99, 30).astype(np.int32)
    want = []
    for t in range(32):
        bucket = [k * t for k in range(16)]
        for k in range(n):
            bucket[idx[k] & 15] += k
        total = 0
        for v in bucket:
            total = (total * 3 + v) & 0xFFFFFFFF
        want.append(total)
    return Launch(1, 32, [np.zeros(32, np.uint32), idx, n], {0: want}, 0)


@launch("cuda", "control_flow", "write_on_one_side")
def _(rng):
    flag = pick(rng, 0, 9)
    return Launch(
        1, 32, [np.zeros(32, np.int32), np.zeros(32, np.int32), flag], {0: np.full(32, int(flag > 3))}, 0
    )


@launch("cuda", "control_flow", "dynamic_shared")
def _(rng):
    x = singles(rng, int(rng.integers(1, 100)))
    return Launch(1, 32, [np.zeros_like(x), x, x.size], {0: x[::-1]}, shared_bytes=4 * x.size)


@launch("cuda", "control_flow", "dropout_philox")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = singles(rng, n)
    a, b, k = np.arange(n, dtype=np.uint64), np.uint64(77), 0x9E3779B9
    for _ in range(7):
        wide = a * np.uint64(0xD2511F53)
        a, b = (wide >> np.uint64(32)) ^ b ^ np.uint64(k), wide & np.uint64(0xFFFFFFFF)
        k = (k + 0xBB67AE85) & 0xFFFFFFFF
    u = (a >> np.uint64(8)).astype(np.float32) * np.float32(5.9604645e-8)
    want = np.where(u < np.float32(0.3), 0, x / np.float32(0.7))
    return Launch(grid, block, [np.zeros(n, np.float32), x, 77, 0.3, n], {0: want}, 1e-5)


@launch("cuda", "control_flow", "math_functions")
def _(rng):
    x = rng.uniform(0.1, 6.0, 32).astype(np.float32)
    d = x.astype(np.float64)
    want = np.stack(
        [
            np.sqrt(d) + 1 / np.sqrt(d),
            np.exp(d) + np.exp2(d),
            np.log(d) - np.log2(d),
            np.sin(d) * np.cos(d),
            np.floor(d) + np.ceil(d * 1.5) + np.trunc(d * 2.5) + np.rint(x * np.float32(3.5)),
            d / 3 + 1 / d + d,
            np.copysign(np.abs(d - 2), d - 1) + d * d - d,
            np.trunc(x * np.float32(1000)) + np.floor(d * 7.7) + d**1.5,
        ],
        1,
    )
    return Launch(1, 32, [np.zeros((32, 8), np.float32), x, 32], {0: want}, 1e-4)


@launch("cuda", "control_flow", "volatile_and_cache_hints")
def _(rng):
    b = singles(rng, 96)
    v = b[:32] + b[32:64] + b[64:]
    return Launch(1, 32, [np.zeros(32, np.float32), b, np.zeros(64, np.float32)], {0: v, 2: np.tile(v, 2)})


@launch("cuda", "debug_info", "debug_info")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = singles(rng, n)
    return Launch(grid, block, [np.zeros_like(x), x, n], {0: 2 * x})


@launch("cuda", "fp8", "quantize_fp8")
def _(rng):
    x = np.array([[0.0, 1.0], [448.0, 500.0], [-2.0, 0.4375], [1.0625, 1.1875]], np.float32)
    want = np.array([[0x00, 0x38], [0x7E, 0x7E], [0xC0, 0x2E], [0x38, 0x3A]], np.uint8)
    return Launch(1, 32, [np.zeros((4, 2), np.uint8), x, 1.0, 4], {0: want}, 0)


@launch("cuda", "fp8", "dequantize_fp8")
def _(rng):
    code = np.array([[0x00, 0x3C], [0x7B, 0xBC], [0x01, 0x40]], np.uint8)
    want = np.array([[0, 1], [57344, -1], [2.0**-16, 2]], np.float32)
    return Launch(1, 32, [np.zeros((3, 2), np.float32), code, 3], {0: want}, 0)


@launch("cuda", "tma", "bulk_copy")
def _(rng):
    x = singles(rng, int(rng.integers(1, 4)), 256)
    return Launch(len(x), 32, [np.zeros_like(x), x, 0], {0: x})


@launch("cuda", "tma", "bulk_reduce")
def _(rng):
    x = rng.integers(-9, 9, (int(rng.integers(1, 4)), 64)).astype(np.int32)
    return Launch(len(x), 64, [np.ones(64, np.int32), x], {0: 1 + x.sum(0)}, 0)


def tiles(rng):
    """A tensor of 16 x 16 tiles, with a ragged edge."""
    rows, cols = int(rng.integers(1, 40)), 4 * int(rng.integers(1, 10))
    return singles(rng, rows, cols), (math.ceil(cols / 16), math.ceil(rows / 16))


@launch("cuda", "tma", "tma_copy")
def _(rng):
    x, grid = tiles(rng)
    args = [tensor_map(x, (16, 16)), tensor_map(np.zeros_like(x), (16, 16))]
    return Launch(grid, 32, args, {"1+0": x})


@launch("cuda", "tma", "tma_read_only")
def _(rng):
    x, grid = tiles(rng)
    padded = np.zeros((16, 16 * grid[0]), np.float32)
    part = x[:16]
    padded[: len(part), : x.shape[1]] = part
    want = padded.reshape(16, grid[0], 16).transpose(1, 0, 2)
    args = [tensor_map(x, (16, 16)), np.zeros((grid[0], 256), np.float32)]
    return Launch(grid[0], 256, args, {1: want.reshape(grid[0], 256)})


@launch("cuda", "tma", "tma_map_by_pointer")
def _(rng):
    x = singles(rng, 16, 16)
    args = [ByPointer(tensor_map(x, (16, 16))), np.zeros((16, 16), np.float32)]
    return Launch(1, 256, args, {1: x})


@launch("cuda", "tma", "tma_reduce_add")
def _(rng):
    acc, x = singles(rng, 12, 16), singles(rng, 16, 16)
    return Launch(1, 256, [tensor_map(acc, (16, 16)), x], {"0+0": acc + x[:12]})


@launch("cuda", "tma", "tma_prefetch_only")
def _(rng):
    args = [tensor_map(singles(rng, 16, 16), (16, 16)), np.zeros(32, np.float32)]
    return Launch(1, 32, args, {1: np.ones(32)})


@launch("cuda", "hopper", "cluster_exchange")
def _(rng):
    x = singles(rng, 2 * int(rng.integers(1, 3)), 64)
    want = x.reshape(-1, 2, 64)[:, ::-1].reshape(x.shape)
    return Launch(len(x), 64, [np.zeros_like(x), x], {0: want}, cluster=2)


@launch("cuda", "hopper", "programmatic_launch")
def _(rng):
    x = singles(rng, 32)
    return Launch(1, 32, [np.zeros_like(x), x], {0: x})


@launch("cuda", "hopper", "stmatrix_store")
def _(rng):
    x = rng.integers(0, 2**32, 32, dtype=np.uint32)
    return Launch(1, 32, [np.zeros(64, np.uint16), x], {0: x.view(np.uint16)}, 0)
