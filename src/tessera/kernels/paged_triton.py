"""The CUDA implementation of `tessera::paged_attention`.

  one new token      `paged_decode`: one program per (key head, sequence, split of its keys); the query heads
                     of the key head are the rows of its products. Also writes the zeros of padding tokens.
  several new ones   `paged_prefill`: one program per (key head, tile of one sequence's tokens). A tile's
                     sequence is looked up in `query_starts`, so the grid is a bound.

Lengths and page tables are read on the GPU alone, for CUDA graphs. Grids, blocks and splits depend on shapes
and types (`tiles_for`), the pipeline's depth, which changes no bit, on the card.

Softmax is online, in powers of two. Sums are float32, without TF32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tessera.kernels import PAGE
from tessera.kernels.launch import overlaps
from tessera.kernels.overlap_triton import overlap, wait_previous

_PAGE = tl.constexpr(PAGE)
_LOG2E = tl.constexpr(1.4426950408889634)
# Stands for minus infinity, without its NaNs.
_NEVER = tl.constexpr(-1.0e30)

# Programs that keep a large card's memory busy; below half, keys are split, among so many programs and into
# parts of at least so many; of wide heads.
_BUSY = 512
_SPLIT, _SPLIT_WIDE = (1024, 64), (512, 256)
_FEW = 256
_MAX_SPLITS = 64
# A block's shared memory since Ampere; bytes for sums and page numbers.
_SHARED_BYTES, _OTHER_BYTES = 99 << 10, 2 << 10


@dataclass(frozen=True, slots=True)
class Tile:
    # Query heads, or tokens times query heads.
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Tiles:
    decode: Tile
    prefill: Tile
    splits: int


def tiles_for(
    tokens: int,
    sequences: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    item_bytes: int,
    table: int,
    shared_bytes: int = _SHARED_BYTES,
) -> Tiles:
    """`heads`: query heads and key heads; `sizes`: head sizes of keys and values; `table`: length of the page
    list. Only the pipelines' depth depends on `shared_bytes`.
    """
    group = heads[0] // heads[1]
    width = triton.next_power_of_2(max(sizes))
    is_wide, is_double = width > 128, item_bytes > 2
    is_latent = width > 256  # sums of many rows would not fit the registers
    rows = max(16, triton.next_power_of_2(group))
    keys = 64 >> (is_wide + is_double)
    is_long = tokens * group >= 4096 and not is_wide
    long_rows = 32 if is_double or is_latent else 128 if is_long else 64
    splits = _splits(sequences * heads[1], table, *(_SPLIT_WIDE if is_wide else _SPLIT))
    # Few programs leave memory idle unless each prefetches far; several parts fit beside one another.
    stages = 5 if sequences * heads[1] <= _FEW else 3
    decode = Tile(rows, keys, 4, 2 if splits > 1 and not is_wide else stages)
    warps = (8, 3, 128) if long_rows == 128 else (8 if is_latent else 4, 3)
    prefill = Tile(max(long_rows, rows), keys, *warps)
    decode, prefill = (_fitting(tile, width * item_bytes, shared_bytes) for tile in (decode, prefill))
    return Tiles(decode, prefill, splits)


def _splits(programs: int, table: int, most: int, keys: int) -> int:
    if 2 * programs >= _BUSY:
        return 1
    wanted, worthwhile = -(-most // programs), max(table * PAGE // keys, 1)
    return min(1 << (wanted - 1).bit_length(), 1 << (worthwhile.bit_length() - 1), _MAX_SPLITS)


def _fitting(tile: Tile, row_bytes: int, shared_bytes: int) -> Tile:
    room = (shared_bytes - tile.rows * row_bytes - _OTHER_BYTES) // (2 * tile.keys * row_bytes)
    if room < 2:
        return replace(tile, stages=1)
    return tile if room >= tile.stages else replace(tile, stages=min(tile.stages, 3))


def _tiles_of(query: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor) -> Tiles:
    (tokens, query_heads, size), (_, _, heads, value_size) = query.shape, values.shape
    shared = _SHARED_BYTES
    if query.is_cuda:
        card = torch.cuda.get_device_properties(query.device)
        shared = getattr(card, "shared_memory_per_block_optin", _SHARED_BYTES)
    counts = (query_heads, heads), (size, value_size)
    return tiles_for(tokens, lengths.numel(), *counts, query.element_size(), pages.numel(), shared)


def _strides(name: str, tensor: torch.Tensor | None, dims: tuple[str, ...]) -> dict[str, int]:
    strides = [0] * len(dims) if tensor is None else tensor.stride()
    return {f"{name}_{dim}": stride for dim, stride in zip(dims, strides, strict=False)}


def _meta(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_tail: torch.Tensor | None,
    key_tail: torch.Tensor | None,
) -> dict[str, Any]:
    tail = 0 if query_tail is None else query_tail.shape[2]
    size, value_size = query.shape[2], values.shape[3]
    return {
        **_strides("QUERY", query, ("ROW", "HEAD")),
        **_strides("KEY", keys, ("PAGE", "ROW", "HEAD")),
        **_strides("VALUE", values, ("PAGE", "ROW", "HEAD")),
        **_strides("QUERY_TAIL", query_tail, ("ROW", "HEAD")),
        **_strides("KEY_TAIL", key_tail, ("PAGE", "ROW")),
        **{"SIZE": size, "SIZE_PAD": max(16, triton.next_power_of_2(size))},
        **{"VALUE_SIZE": value_size, "VALUE_PAD": max(16, triton.next_power_of_2(value_size))},
        **{"TAIL": tail, "TAIL_PAD": max(16, triton.next_power_of_2(tail))},
    }


def paged_attention(*given: Any) -> torch.Tensor:
    scale, window, soft_cap, sinks, _expected_length, one_each, *tails = given[7:]
    both = (tails[0], tails[1]) if tails and tails[0] is not None else None
    return attend(given[:7], scale, window, soft_cap, sinks, one_each, tails=both)


def attend(
    step: tuple[torch.Tensor, ...],
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    one_each: bool,
    tiles: Tiles | None = None,
    tails: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    query, keys, values, pages, page_starts, lengths, query_starts = step
    tiles = tiles or _tiles_of(query, values, pages, lengths)
    is_shared = keys.data_ptr() == values.data_ptr() and keys.shape == values.shape
    query_tail, key_tail = tails or (None, None)
    query, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values))
    query_tail = None if query_tail is None else query_tail.contiguous()
    (tokens, query_heads, _), (_, _, heads, value_size) = query.shape, values.shape
    sequences, group = lengths.numel(), query_heads // heads
    out = query.new_empty(tokens, query_heads, value_size)
    if not out.numel() or not sequences:
        return out.zero_()
    tables = (pages, page_starts, lengths, query_starts, sinks, query_tail, key_tail)
    numbers = (float(scale), float(soft_cap))
    meta = _meta(query, keys, values, query_tail, key_tail)
    overlapping = {"OVERLAPS": overlaps(query.device), "launch_pdl": overlaps(query.device)}
    meta |= {"IS_SHARED": is_shared, "GROUP": group, "WINDOW": int(window), "CAPPED": soft_cap != 0}
    tile, splits = tiles.decode, tiles.splits
    parts = tops = None
    if splits > 1:
        parts = query.new_empty(sequences, query_heads, splits, value_size, dtype=torch.float32)
        tops = query.new_empty(sequences, query_heads, splits, dtype=torch.float32)
    paged_decode[heads, sequences, splits](
        query, keys, values, *tables, out, parts, tops, *numbers, tokens, **meta,
        ROWS=tile.rows, BLOCK=tile.keys, SPLITS=splits, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, **overlapping,
    )  # fmt: skip
    if splits > 1:
        paged_join[query_heads, sequences](
            parts, tops, query_starts, out, VALUE_SIZE=value_size, VALUE_PAD=meta["VALUE_PAD"], SPLITS=splits,
            num_warps=4, **overlapping,
        )  # fmt: skip
    if not one_each:
        tile = tiles.prefill
        bound = tokens // (tile.rows // group) + sequences
        paged_prefill[heads, bound](
            query, keys, values, *tables, out, *numbers, sequences, **meta,
            SEQUENCES_PAD=max(128, triton.next_power_of_2(sequences)), ROWS=tile.rows, BLOCK=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **overlapping,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def paged_decode(
    query, keys, values, pages, page_starts, lengths, query_starts, sinks, query_tail, key_tail, out, parts,
    tops, scale, cap, tokens, QUERY_ROW: tl.constexpr, QUERY_HEAD: tl.constexpr, KEY_PAGE: tl.constexpr,
    KEY_ROW: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_PAGE: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_HEAD: tl.constexpr, QUERY_TAIL_ROW: tl.constexpr, QUERY_TAIL_HEAD: tl.constexpr,
    KEY_TAIL_PAGE: tl.constexpr, KEY_TAIL_ROW: tl.constexpr, TAIL: tl.constexpr, TAIL_PAD: tl.constexpr,
    IS_SHARED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAPS)
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_heads = tl.num_programs(0) * GROUP
    member, d, dv = tl.arange(0, ROWS), tl.arange(0, SIZE_PAD), tl.arange(0, VALUE_PAD)
    heads = head * GROUP + member
    inside = (member < GROUP)[:, None] & (dv < VALUE_SIZE)[None, :]
    if split == 0:
        used = tl.load(query_starts + tl.num_programs(1))
        for padding in range(used + sequence, tokens, tl.num_programs(1)):
            zeros = tl.zeros([ROWS, VALUE_PAD], out.dtype.element_ty)
            tl.store(
                out + (padding * query_heads + heads)[:, None] * VALUE_SIZE + dv[None, :], zeros, mask=inside
            )
    token = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) != token + 1:
        return
    length = tl.load(lengths + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, BLOCK), SPLITS) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    table = pages + tl.load(page_starts + sequence)
    keys += head * KEY_HEAD
    values += head * VALUE_HEAD
    q = _load_rows(query, token.to(tl.int64) * QUERY_ROW + heads * QUERY_HEAD, member < GROUP, d, SIZE)
    tail, q_tail = tl.arange(0, TAIL_PAD), q
    if TAIL > 0:
        rows = token.to(tl.int64) * QUERY_TAIL_ROW + heads * QUERY_TAIL_HEAD
        q_tail = _load_rows(query_tail, rows, member < GROUP, tail, TAIL)
    seen, top, total = _nothing_seen(sinks, heads, (member < GROUP) & (split == 0), ROWS, VALUE_PAD)
    newest = tl.full([ROWS], 0, tl.int32) + (end - 1)
    for start in range(begin, end, BLOCK):
        seen, top, total = _see(
            seen, top, total, q, q_tail, (keys, values, key_tail, table), start, end, newest, scale, cap, d,
            dv, tail, (KEY_PAGE, KEY_ROW, VALUE_PAGE, VALUE_ROW, KEY_TAIL_PAGE, KEY_TAIL_ROW), TAIL,
            IS_SHARED, SIZE, VALUE_SIZE, 0, CAPPED, BLOCK, True,
        )  # fmt: skip
    result = seen / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        at = (token * query_heads + heads)[:, None] * VALUE_SIZE + dv[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = (sequence * query_heads + heads) * SPLITS + split
        tl.store(parts + part[:, None] * VALUE_SIZE + dv[None, :], result, mask=inside)
        weight = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), _NEVER)
        tl.store(tops + part, weight, mask=member < GROUP)


@triton.jit
def paged_join(
    parts, tops, query_starts, out, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap(OVERLAPS)
    head, sequence = tl.program_id(0), tl.program_id(1)
    query_heads = tl.num_programs(0)
    token = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) != token + 1:
        return
    dv = tl.arange(0, VALUE_PAD)
    part = (sequence * query_heads + head) * SPLITS + tl.arange(0, SPLITS)
    weight = tl.load(tops + part)
    weight = tl.exp2(weight - tl.max(weight, 0))
    inside = dv < VALUE_SIZE
    seen = tl.load(parts + part[:, None] * VALUE_SIZE + dv[None, :], mask=inside[None, :], other=0.0)
    result = tl.sum(seen * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(
        out + (token * query_heads + head) * VALUE_SIZE + dv, result.to(out.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["sequences"])
def paged_prefill(
    query, keys, values, pages, page_starts, lengths, query_starts, sinks, query_tail, key_tail, out,
    scale, cap, sequences, QUERY_ROW: tl.constexpr, QUERY_HEAD: tl.constexpr, KEY_PAGE: tl.constexpr,
    KEY_ROW: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_PAGE: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_HEAD: tl.constexpr, QUERY_TAIL_ROW: tl.constexpr, QUERY_TAIL_HEAD: tl.constexpr,
    KEY_TAIL_PAGE: tl.constexpr, KEY_TAIL_ROW: tl.constexpr, TAIL: tl.constexpr, TAIL_PAD: tl.constexpr,
    IS_SHARED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SEQUENCES_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAPS)
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # later tokens see more: start them first
    # Tiles of sequence s start at query_starts[s] // TOKENS + s.
    number = tl.arange(0, SEQUENCES_PAD)
    starts = tl.load(query_starts + number, mask=number < sequences, other=0)
    begun = (number < sequences) & (starts // TOKENS + number <= tile)
    sequence = tl.sum(begun.to(tl.int32), 0) - 1
    token = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - token
    local = (tile - token // TOKENS - sequence) * TOKENS
    if (count <= 1) | (local >= count):
        return

    row, d, dv = tl.arange(0, ROWS), tl.arange(0, SIZE_PAD), tl.arange(0, VALUE_PAD)
    new = local + row // GROUP
    heads = head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (new < count)
    # Every row sees keys up to `oldest`, window aside; none sees keys from `end` on.
    past = tl.load(lengths + sequence) - count
    oldest, end = past + local, past + tl.minimum(local + TOKENS, count)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0)
    split = begin + (oldest + 1 - begin) // BLOCK * BLOCK
    table = pages + tl.load(page_starts + sequence)
    keys += head * KEY_HEAD
    values += head * VALUE_HEAD
    q = _load_rows(query, (token + new).to(tl.int64) * QUERY_ROW + heads * QUERY_HEAD, is_row, d, SIZE)
    tail, q_tail = tl.arange(0, TAIL_PAD), q
    if TAIL > 0:
        rows = (token + new).to(tl.int64) * QUERY_TAIL_ROW + heads * QUERY_TAIL_HEAD
        q_tail = _load_rows(query_tail, rows, is_row, tail, TAIL)
    seen, top, total = _nothing_seen(sinks, heads, is_row, ROWS, VALUE_PAD)
    cache = (keys, values, key_tail, table)
    bounds = (begin, split, end)
    for part in tl.static_range(2):  # some keys of the second part are hidden from some rows
        for start in range(bounds[part], bounds[part + 1], BLOCK):
            seen, top, total = _see(
                seen, top, total, q, q_tail, cache, start, end, past + new, scale, cap, d, dv, tail,
                (KEY_PAGE, KEY_ROW, VALUE_PAGE, VALUE_ROW, KEY_TAIL_PAGE, KEY_TAIL_ROW), TAIL, IS_SHARED,
                SIZE, VALUE_SIZE, WINDOW, CAPPED, BLOCK, part == 1,
            )  # fmt: skip
    result = seen / tl.where(total > 0, total, 1.0)[:, None]
    at = ((token + new) * (tl.num_programs(0) * GROUP) + heads)[:, None] * VALUE_SIZE + dv[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < VALUE_SIZE)[None, :])


@triton.jit
def _load_rows(given, rows, is_row, d, SIZE: tl.constexpr):
    return tl.load(
        given + rows[:, None] + d[None, :], mask=is_row[:, None] & (d < SIZE)[None, :], other=0.0
    )  # fmt: skip


@triton.jit
def _nothing_seen(sinks, heads, has_sink, ROWS: tl.constexpr, VALUE_PAD: tl.constexpr):
    """Weighted values, highest logit, sum of weights."""
    top, total = tl.full([ROWS], _NEVER, tl.float32), tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=has_sink, other=0.0).to(tl.float32)
        top, total = tl.where(has_sink, sink * _LOG2E, top), tl.where(has_sink, 1.0, total)
    return tl.zeros([ROWS, VALUE_PAD], tl.float32), top, total


@triton.jit
def _see(
    seen, top, total, q, q_tail, cache, start, end, position, scale, cap, d, dv, tail, strides,
    TAIL: tl.constexpr, IS_SHARED: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """`BOUNDED`: some keys are hidden from some rows."""
    keys, values, key_tail, table = cache
    KEY_PAGE, KEY_ROW, VALUE_PAGE, VALUE_ROW, KEY_TAIL_PAGE, KEY_TAIL_ROW = strides
    place = start + tl.arange(0, BLOCK)
    is_key = place < end if BOUNDED else tl.full([BLOCK], True, tl.int1)
    page = tl.load(table + place // _PAGE, mask=is_key, other=0).to(tl.int64)
    k = tl.load(
        keys + (page * KEY_PAGE + place % _PAGE * KEY_ROW)[None, :] + d[:, None],
        mask=is_key[None, :] & (d < SIZE)[:, None],
        other=0.0,
    )
    if IS_SHARED:
        v = tl.trans(k)
    else:
        v = tl.load(
            values + (page * VALUE_PAGE + place % _PAGE * VALUE_ROW)[:, None] + dv[None, :],
            mask=is_key[:, None] & (dv < VALUE_SIZE)[None, :],
            other=0.0,
        )
    logits = tl.dot(q, k, input_precision="ieee")
    if TAIL > 0:
        k_tail = tl.load(
            key_tail + (page * KEY_TAIL_PAGE + place % _PAGE * KEY_TAIL_ROW)[None, :] + tail[:, None],
            mask=is_key[None, :] & (tail < TAIL)[:, None],
            other=0.0,
        )
        logits = tl.dot(q_tail, k_tail, logits, input_precision="ieee")
    if CAPPED:  # cap * tanh(x / cap)
        logits = cap - 2.0 * cap / (tl.exp2(logits * (scale / cap * 2.0 * _LOG2E)) + 1.0)
        unit = _LOG2E
    else:
        unit = scale * _LOG2E
    if BOUNDED:
        logits = tl.where(place[None, :] <= position[:, None], logits, _NEVER)
    if WINDOW > 0:
        logits = tl.where(place[None, :] > position[:, None] - WINDOW, logits, _NEVER)
    highest = tl.maximum(top, tl.max(logits, 1) * unit)
    weights = tl.exp2(logits * unit - highest[:, None])
    faded = tl.exp2(top - highest)
    seen = tl.dot(weights.to(v.dtype), v, seen * faded[:, None], input_precision="ieee")
    return seen, highest, total * faded + tl.sum(weights, 1)
