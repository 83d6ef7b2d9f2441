"""Launches of the CUDA kernels with calls, module variables, integers as pointers, and atomics."""

import numpy as np

from launches import Launch, launch, pick, shape_1d, singles
from tessera_ptx.interp import Offset


@launch("cuda", "device_function", "device_function")
def _(rng):
    n, grid = int(rng.integers(1, 70)), int(rng.integers(1, 4))
    a, b = singles(rng, grid, n), singles(rng, grid, n)
    return Launch(grid, 32, [a, b, n], {0: a + b})


@launch("cuda", "device_function", "device_function_twice")
def _(rng):
    n = int(rng.integers(1, 70))
    a, b, c = (singles(rng, n) for _ in range(3))
    return Launch(1, 32, [a, b, c, n], {0: a + b, 1: b + c})


@launch("cuda", "device_function", "returned_pointer")
def _(rng):
    k, a, b = int(rng.integers(0, 9)), singles(rng, 48), singles(rng, 48)
    return Launch(1, 32, [np.zeros(32, np.float32), a, b, k], {0: a[k : k + 32] if k else b[:32]})


@launch("cuda", "device_function", "pure_function")
def _(rng):
    x = singles(rng, 32)
    return Launch(1, 32, [np.zeros(32, np.float32), x], {0: x * x})


@launch("cuda", "device_function", "function_pointer")
def _(rng):
    which, x, y = pick(rng, 0, 1), singles(rng, 32), singles(rng, 1)
    return Launch(1, 32, [x, y, which], {0: x * y if which else x + y})


@launch("cuda", "device_function", "recursion")
def _(rng):
    depth, tree = int(rng.integers(0, 6)), rng.integers(0, 32, 32).astype(np.int32)
    node = np.arange(32)
    for _ in range(depth):
        node = tree[node]
    return Launch(1, 32, [np.zeros(32, np.int32), tree, depth], {0: node + depth}, 0)


@launch("cuda", "device_function", "pointer_to_pointer")
def _(rng):
    k, want = int(rng.integers(0, 9)), np.zeros(48, np.float32)
    want[k : k + 32] = 1
    return Launch(1, 32, [np.zeros(48, np.float32), k], {0: want})


@launch("cuda", "device_function", "struct_to_function")
def _(rng):
    x = singles(rng, 32)
    return Launch(1, 32, [np.zeros(32, np.float32), x], {0: x})


@launch("cuda", "module_variable", "module_write")
def _(rng):
    x = singles(rng, 64)
    want = np.zeros(256, np.float32)
    want[:64] = x
    return Launch(1, 64, [x], {":gbuf": want.view(np.uint8)}, 0)


@launch("cuda", "module_variable", "module_read")
def _(rng):
    return Launch(1, 64, [np.zeros(64, np.float32)], {0: np.ones(64)})


@launch("cuda", "module_variable", "module_counter")
def _(rng):
    return Launch(2, 32, [np.zeros(32, np.int32)], {":counter": np.array([64], np.int32).view(np.uint8)}, 0)


@launch("cuda", "module_variable", "constant_taps")
def _(rng):
    n, x = int(rng.integers(1, 40)), singles(rng, 40)
    padded = np.concatenate([x[:n], np.zeros(48)])
    want = sum(0.1 * (k + 1) * padded[k : k + 32] for k in range(8))
    return Launch(1, 32, [np.zeros(32, np.float32), x, n], {0: want}, 1e-4)


@launch("cuda", "module_variable", "lookup_table")
def _(rng):
    code = rng.integers(0, 256, 32, dtype=np.uint8)
    return Launch(1, 32, [np.zeros(32, np.float32), code], {0: 2.0 ** (code & 3)})


@launch("cuda", "module_variable", "module_or_param")
def _(rng):
    use = pick(rng, 0, 1)
    return Launch(1, 32, [np.zeros(32, np.float32), use], {0: np.full(32, 9.0 * use)})


@launch("cuda", "module_variable", "module_address_out")
def _(rng):
    return Launch(1, 1, [np.zeros(1, np.uint64)], {})


@launch("cuda", "int_as_pointer", "int_as_pointer")
def _(rng):
    return Launch(1, 32, [np.zeros(32, np.int32), 5], {0: np.full(32, 5)}, 0)


@launch("cuda", "int_as_pointer", "aligned_up")
def _(rng):
    x = singles(rng, 32)
    return Launch(1, 32, [x, np.zeros(32, np.float32)], {1: x})


@launch("cuda", "int_as_pointer", "tagged_pointer")
def _(rng):
    tag, a = pick(rng, 0, 1), np.zeros(32, np.float32)
    want = {0: np.full(32, float(tag)), 1: np.full(32, 2.0 * (1 - tag))}
    return Launch(1, 32, [Offset(a, tag), np.zeros(32, np.float32)], want)


@launch("cuda", "int_as_pointer", "reinterpret")
def _(rng):
    n, x = int(rng.integers(1, 33)), singles(rng, 32)
    return Launch(1, 32, [np.zeros(32, np.float32), x, n], {0: np.where(np.arange(32) < n, -x, 0)})


@launch("cuda", "atomics", "histogram")
def _(rng):
    grid, block, n = shape_1d(rng)
    idx = rng.integers(0, 10, n).astype(np.int32)
    return Launch(grid, block, [np.zeros(10, np.int32), idx, n], {0: np.bincount(idx, minlength=10)}, 0)


@launch("cuda", "atomics", "histogram_shared")
def _(rng):
    n, data = 300, rng.integers(0, 256, 300, dtype=np.uint8)
    want = np.bincount(data & 63, minlength=64)
    return Launch(int(rng.integers(1, 4)), 64, [np.zeros(64, np.int32), data, n], {0: want}, 0)


@launch("cuda", "atomics", "take_ticket")
def _(rng):
    return Launch(1, 64, [np.array([5], np.int32), np.zeros(64, np.int32)], {0: [69], 1: np.arange(5, 69)}, 0)


@launch("cuda", "atomics", "atomic_max_float")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = np.abs(singles(rng, n))
    return Launch(grid, block, [np.zeros(1, np.float32), x, n], {0: [x.max()]})


@launch("cuda", "atomics", "atomic_kinds")
def _(rng):
    v = np.zeros(37, np.int32)
    want = v.copy()
    want[0], want[1], want[3] = -5, 31, -1
    want[4] = np.bitwise_xor.reduce(np.arange(32))
    want[5:37] = 3 * np.arange(32)
    args = [v, np.array([0, 9], np.uint32), np.zeros(2, np.uint64)]
    return Launch(1, 32, args, {0: want, 1: [2, 7], 2: [sum(t << 33 for t in range(32)), 31 << 33]}, 0)


@launch("cuda", "atomics", "float_sums")
def _(rng):
    n, x = int(rng.integers(1, 65)), singles(rng, 64)
    total = x[:n].astype(np.float64).sum()
    return Launch(1, 64, [np.zeros(1, np.float32), np.zeros(1), x, n], {0: [total], 1: [total]}, 1e-4)


@launch("cuda", "atomics", "last_block_sum")
def _(rng):
    x = singles(rng, int(rng.integers(1, 5)), 32)
    args = [np.zeros(len(x), np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32), x]
    return Launch(len(x), 32, args, {1: [0], 2: [x.sum()]}, 1e-4)


@launch("cuda", "atomics", "release_acquire")
def _(rng):
    grid = int(rng.integers(1, 4))
    args = [np.zeros(1, np.int32), np.zeros(grid, np.int32), np.zeros(32 * grid, np.int32)]
    return Launch(grid, 32, args, {2: np.full(32 * grid, 42)}, 0)
