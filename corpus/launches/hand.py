"""Launches of the hand-written PTX."""

import numpy as np

from launches import Launch, launch, pick, shape_1d, singles


@launch("hand", "lexical", "scoped_registers")
def _(rng):
    grid, block, n = shape_1d(rng)
    x = singles(rng, n)
    return Launch(grid, block, [np.zeros_like(x), x, n], {0: x})


@launch("hand", "lexical", "no_percent")
def _(rng):
    t = np.arange(64)
    return Launch(1, 64, [np.zeros(64, np.int32), 0], {0: np.where(t < 32, t, 1)}, 0)


@launch("hand", "lexical", "vector_register")
def _(rng):
    x = singles(rng, 2)
    return Launch(1, 1, [x, np.zeros(1, np.float32)], {1: [x.sum()]})


@launch("hand", "lexical", "number_forms")
def _(rng):
    want = np.zeros(10, np.uint32)
    want[:4] = [16, 8, 5, 2**32 - 7]
    want[4:7] = np.array([1.0, 2.5, 3.0], np.float32).view(np.uint32)
    want[8:] = np.array([1.5]).view(np.uint32)
    return Launch(1, 1, [np.zeros(10, np.uint32)], {0: want}, 0)


@launch("hand", "control", "branch_table")
def _(rng):
    which = rng.integers(0, 4, 32).astype(np.int32)
    args = [np.zeros(32, np.int32), np.zeros(32, np.int32), which]
    return Launch(1, 32, args, {1: np.where(which == 1, 1, 0)}, 0)


@launch("hand", "control", "irreducible")
def _(rng):
    steps, a = int(rng.integers(1, 4)), singles(rng, 32)
    return Launch(1, 32, [a, np.zeros(32, np.float32), steps, pick(rng, 0, 1)], {})


@launch("hand", "control", "use_before_definition")
def _(rng):
    x = rng.integers(0, 99, 32).astype(np.int32)
    return Launch(1, 32, [x, np.zeros(32, np.int32)], {1: x}, 0)


@launch("hand", "calls", "listed_targets")
def _(rng):
    which = pick(rng, 0, 1)
    return Launch(1, 1, [np.zeros(1, np.int32), which], {0: [5 * which]}, 0)


@launch("hand", "calls", "register_arguments")
def _(rng):
    x = rng.integers(0, 99, 32).astype(np.int32)
    return Launch(1, 32, [x, np.zeros(32, np.int32)], {1: x}, 0)


@launch("hand", "memory_forms", "cache_control")
def _(rng):
    x = singles(rng, 32)
    return Launch(1, 1, [x, np.zeros(1, np.float32), np.ones(64, np.float32)], {1: x[:1]})


@launch("hand", "memory_forms", "scoped_accesses")
def _(rng):
    x = np.array([1, 2, 4], np.int32)
    return Launch(1, 1, [x, np.zeros(2, np.int32), np.zeros(3, np.int32)], {1: [7, 2], 2: [7, 7, 9]}, 0)


@launch("hand", "memory_forms", "vector_reduction")
def _(rng):
    x = singles(rng, 4)
    return Launch(1, 1, [np.ones(4, np.float32), x], {0: 1 + x})


@launch("hand", "memory_forms", "param_address_select")
def _(rng):
    flag, a, b = pick(rng, 0, 1), singles(rng, 1), singles(rng, 1)
    return Launch(1, 1, [a, b, np.zeros(1, np.float32), flag], {2: a if flag else b})


@launch("hand", "memory_forms", "pointer_in_pieces")
def _(rng):
    x = singles(rng, 2)
    return Launch(1, 1, [x, np.zeros(1, np.float32)], {1: x[:1]})


@launch("hand", "memory_forms", "packed_halves")
def _(rng):
    x = singles(rng, 2)
    return Launch(1, 1, [x, np.zeros(1, np.float32)], {1: x[1:]})


@launch("hand", "immovable", "sets_module_pointer")
def _(rng):
    return Launch(1, 1, [np.zeros(1, np.uint64)], {})
