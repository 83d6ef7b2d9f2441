"""Launches of the kernels of serving engines."""

import numpy as np

from launches import Launch, launch, pick, singles
from tessera_ptx.interp import ByPointer, Offset, Packed


@launch("cuda", "serving", "cache_by_slot")
def _(rng):
    page, dim, gap, tokens = pick(rng, 1, 2, 3, 8), int(rng.integers(1, 40)), int(rng.integers(0, 5)), 4
    row_stride = dim + gap
    page_stride = page * row_stride + int(rng.integers(0, 9))
    cache, fresh = singles(rng, 6 * page_stride), singles(rng, tokens, dim)
    slots = rng.permutation(6 * page)[:tokens].astype(np.int64)
    slots[rng.integers(0, tokens)] = -1
    want = cache.copy()
    for slot, row in zip(slots, fresh, strict=False):
        if slot >= 0:
            at = slot // page * page_stride + slot % page * row_stride
            want[at : at + dim] = row
    strides = np.int64(page_stride), np.int64(row_stride)
    return Launch(len(slots), 32, [cache, fresh[: len(slots)], slots, *strides, page, dim], {0: want}, 0)


@launch("cuda", "serving", "cache_quantised")
def _(rng):
    page, heads, lanes, tokens = pick(rng, 1, 2, 4), int(rng.integers(1, 4)), pick(rng, 1, 4), 3
    dim, pages = lanes * int(rng.integers(1, 6)), 5
    fresh = rng.integers(0, 100, (tokens, heads, dim)).astype(np.float32)
    slots = rng.permutation(pages * page)[:tokens].astype(np.int64)
    tokens = len(slots)
    want = np.zeros((pages, heads, dim // lanes, page, lanes), np.uint8)
    scales = np.zeros((pages * page, heads), np.float32)
    for slot, row in zip(slots, fresh, strict=False):
        want[slot // page, :, :, slot % page] = row.reshape(heads, dim // lanes, lanes)
        scales[slot] = 0.5
    args = [np.zeros_like(want), np.zeros_like(scales), fresh[:tokens], slots, page, heads, dim, lanes]
    return Launch(tokens, 32, args, {0: want, 1: scales}, 0)


@launch("cuda", "serving", "embedding_part")
def _(rng):
    width, rows, first = int(rng.integers(1, 70)), 7, int(rng.integers(0, 50))
    weight, ids = (
        rng.integers(0, 255, (rows, width)).astype(np.uint8),
        rng.integers(0, 60, 5).astype(np.int64),
    )
    there = (ids >= first) & (ids < first + rows)
    want = np.where(there[:, None], weight[np.where(there, ids - first, 0)], 0)
    numbers = [np.int64(v) for v in (width, first, first + rows)]
    return Launch(5, 32, [np.zeros((5, width), np.uint8), ids, weight, *numbers], {0: want}, 0)


@launch("cuda", "serving", "scale_aligned")
def _(rng):
    dim, skip, rows = int(rng.integers(1, 90)), int(rng.integers(0, 4)), 3
    in_stride, out_stride = dim + int(rng.integers(0, 6)), dim + int(rng.integers(0, 6))
    held = rng.integers(-50, 50, skip + rows * in_stride).astype(np.float32)
    want = np.zeros((rows, out_stride), np.int8)
    want[:, :dim] = 2 * held[skip:].reshape(rows, in_stride)[:, :dim]
    scale, strides = np.array([2], np.float32), (np.int64(in_stride), np.int64(out_stride))
    args = [np.zeros((rows, out_stride), np.int8), Offset(held, 4 * skip), scale, dim, *strides]
    return Launch(rows, 32, args, {0: want}, 0)


@launch("cuda", "serving", "adapter_rows")
def _(rng):
    dim, adapters = int(rng.integers(1, 50)), [singles(rng, 50) for _ in range(3)]
    x, out, which = singles(rng, 4, dim), singles(rng, 4, dim), rng.integers(-1, 3, 4).astype(np.int32)
    chosen = np.stack(adapters)[np.maximum(which, 0), :dim]
    want = np.where((which >= 0)[:, None], out + x * chosen, out)
    table = ByPointer(Packed({8 * k: a for k, a in enumerate(adapters)}, 24))
    return Launch(4, 32, [out, x, table, which, dim], {0: want})


@launch("cuda", "serving", "tables_of_pages")
def _(rng):
    page, dim, tokens = pick(rng, 2, 4), int(rng.integers(1, 50)), int(rng.integers(1, 9))
    cache, pages = singles(rng, 8, page, dim), rng.integers(0, 8, (3, 9)).astype(np.int32)
    t = np.arange(tokens)
    want = np.stack([cache[row[t // page], t % page] for row in pages])
    table = ByPointer(Packed({8 * k: row for k, row in enumerate(pages)}, 24))
    args = [np.zeros((3, tokens, dim), np.float32), cache, table, page, dim]
    return Launch((tokens, 3), 32, args, {0: want}, 0)


@launch("cuda", "serving", "copy_pages")
def _(rng):
    numel, layers = int(rng.integers(1, 50)), [singles(rng, 6, 50) for _ in range(3)]
    caches = [np.ascontiguousarray(layer[:, :numel]) for layer in layers]
    pairs = np.array([[0, 3], [1, 4]], np.int64)
    table = ByPointer(Packed({8 * k: cache for k, cache in enumerate(caches)}, 24))
    wanted = {f"0->{8 * k}": cache[[0, 1, 2, 0, 1, 5]] for k, cache in enumerate(caches)}
    return Launch((3, 2), 32, [table, pairs, numel], wanted, 0)
