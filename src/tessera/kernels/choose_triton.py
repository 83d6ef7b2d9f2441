# ruff: noqa: ANN001, ANN201, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The next token of each sequence on a GPU: the CUDA implementation of `tessera::choose`.

One program per row. A greedy row is one pass over its logits. A row with edits or a mask first writes its
edited logits to scratch memory, which later passes read. The threshold of top-k and top-p is found by
bisection between two logits of the row, one pass each, until they are equal; a 16-bit type has few distinct
logits, so that takes about ten. The alternatives of logprobs take a pass each.

Nothing is read on the host, so a step can be part of a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from tessera.kernels.choice import MAX_TOP, OUT_OF_REACH, SMALL_DRAW, WEIGHT_BITS, Number, Setting

_MAX_BLOCK, _MAX_WARPS = 8192, 16
_LEAST = tl.constexpr(-3.4e38)
_BANNED = tl.constexpr(float("-inf"))
_ONE = tl.constexpr(2.0**WEIGHT_BITS)
_OUT_OF_REACH = tl.constexpr(OUT_OF_REACH)
_SMALL_DRAW = tl.constexpr(SMALL_DRAW)
_EDITS = tl.constexpr(256)
_NUM_SETTINGS, _NUM_NUMBERS = tl.constexpr(len(Setting)), tl.constexpr(len(Number))
_SHARPNESS, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = (tl.constexpr(int(s)) for s in Setting)
_SEED, _POSITION, _TOP_K, _BEGIN, _END, _MASK, _COUNTS_LAST, _FORCED, _NUM_TOP = (
    tl.constexpr(int(n)) for n in Number
)
_MAX_TOP, _TOP_PAD = tl.constexpr(MAX_TOP), tl.constexpr(32)


def choose_on_gpu(
    logits: torch.Tensor,
    last: torch.Tensor,
    settings: torch.Tensor,
    numbers: torch.Tensor,
    edits: torch.Tensor,
    masks: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    top: torch.Tensor,
    block: int = _MAX_BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills and returns the last three tensors."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    if rows:
        block = min(block, max(256, triton.next_power_of_2(vocab)))
        scratch = logits.new_empty((rows, vocab), dtype=torch.float32)
        choose_token[rows,](
            logits, last, settings, numbers, edits, masks, scratch, tokens, logprobs, top,
            VOCAB=vocab, LOGITS_ROW=logits.stride(0), WORDS=masks.shape[1], BLOCK=block,
            num_warps=min(_MAX_WARPS, max(4, block // 512)),
        )  # fmt: skip
    return tokens, logprobs, top


@triton.jit
def choose_token(
    logits, last, settings, numbers, edits, masks, scratch, tokens, logprobs, top,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * LOGITS_ROW
    scratch += row * VOCAB
    settings += row * _NUM_SETTINGS
    numbers += row * _NUM_NUMBERS
    begin, end, mask = tl.load(numbers + _BEGIN), tl.load(numbers + _END), tl.load(numbers + _MASK)
    counts_last = tl.load(numbers + _COUNTS_LAST) != 0
    is_edited = (end > begin) | (mask != 0) | counts_last
    if is_edited:
        newest = tl.load(last + row)
        _edit(
            logits, scratch, settings, edits, masks + (mask - 1) * WORDS, begin, end, mask != 0, newest,
            counts_last, VOCAB, BLOCK,
        )  # fmt: skip
    most, chosen = _largest(logits, scratch, is_edited, float("inf"), -1, VOCAB, BLOCK)
    sharpness = tl.load(settings + _SHARPNESS)
    is_good = (most < float("inf")) & (most > _BANNED)
    if (sharpness > 0) & is_good:
        limit = _limit(logits, scratch, is_edited, most, sharpness, settings, numbers, VOCAB, BLOCK)
        chosen = _race(logits, scratch, is_edited, most, sharpness, limit, numbers, VOCAB, BLOCK)
    token = tl.where(is_good, chosen.to(tl.int64), -1)
    forced = tl.load(numbers + _FORCED)
    token = tl.where(forced > 0, forced - 1, token)
    tl.store(tokens + row, token)
    place = tl.arange(0, _TOP_PAD)
    values, indices = tl.zeros([_TOP_PAD], tl.float32), tl.zeros([_TOP_PAD], tl.int64)
    num_top = tl.load(numbers + _NUM_TOP)
    if (num_top > 0) & (token >= 0):
        value, index = _largest(logits, scratch, False, float("inf"), -1, VOCAB, BLOCK)
        total = value + tl.log(_sum(logits, value, VOCAB, BLOCK))
        values = tl.where(place == 0, tl.load(logits + token).to(tl.float32) - total, values)
        for number in range(1, tl.minimum(num_top, VOCAB + 1)):
            values = tl.where(place == number, value - total, values)
            indices = tl.where(place == number - 1, index.to(tl.int64), indices)
            value, index = _largest(logits, scratch, False, value, index, VOCAB, BLOCK)
    tl.store(logprobs + row * (1 + _MAX_TOP) + place, values, mask=place < 1 + _MAX_TOP)
    tl.store(top + row * _MAX_TOP + place, indices, mask=place < _MAX_TOP)


@triton.jit
def _edit(
    logits, scratch, settings, edits, words, begin, end, has_mask, newest, counts_last,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Edited logits of a row in scratch memory."""
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < VOCAB).to(tl.float32)
        word = tl.load(words + (token >> 5), mask=has_mask & (token < VOCAB), other=-1)
        value = tl.where(((word >> (token & 31)) & 1) != 0, value, _BANNED)
        tl.store(scratch + token, value, mask=token < VOCAB)
    tl.debug_barrier()
    presence, frequency = tl.load(settings + _PRESENCE), tl.load(settings + _FREQUENCY)
    repetition = tl.load(settings + _REPETITION)
    hits = tl.zeros([_EDITS], tl.int32)
    for start in range(begin, end, _EDITS):
        entry = start + tl.arange(0, _EDITS)
        inside = entry < end
        token = tl.load(edits + 3 * entry, mask=inside, other=-1)
        inside = inside & (token >= 0) & (token < VOCAB)
        count = tl.load(edits + 3 * entry + 1, mask=inside, other=0)
        bias = tl.load(edits + 3 * entry + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        is_last = inside & counts_last & (token == newest)
        hits += is_last.to(tl.int32)
        count = tl.where(is_last, tl.maximum(count, 0) + 1, count)
        value = tl.load(scratch + token, mask=inside, other=0.0) + bias
        value = _penalised(value, count, presence, frequency, repetition)
        tl.store(scratch + token, value, mask=inside)
    if counts_last & (tl.sum(hits, 0) == 0):
        value = _penalised(tl.load(scratch + newest), 1, presence, frequency, repetition)
        tl.store(scratch + newest, value)
    tl.debug_barrier()


@triton.jit
def _penalised(value, count, presence, frequency, repetition):
    less = tl.where(value > 0, value / repetition, value * repetition)
    less -= frequency * count + tl.where(count > 0, presence, 0.0)
    return tl.where(count >= 0, less, value)


@triton.jit
def _load(logits, scratch, is_edited, token, VOCAB: tl.constexpr):
    inside = token < VOCAB
    plain = tl.load(logits + token, mask=inside & (not is_edited), other=_BANNED).to(tl.float32)
    edited = tl.load(scratch + token, mask=inside & is_edited, other=_BANNED)
    return tl.where(is_edited, edited, plain)


@triton.jit
def _largest(logits, scratch, is_edited, below, after, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit and its first token, behind (`below`, `after`) in descending order; inf for a NaN."""
    best, place = tl.full([BLOCK], _BANNED, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = _load(logits, scratch, is_edited, token, VOCAB)
        value = tl.where(value == value, value, float("inf"))  # noqa: PLR0124 - a NaN differs from itself
        is_new = (value > best) & ((value < below) | ((value == below) & (token > after)))
        best, place = tl.where(is_new, value, best), tl.where(is_new, token, place)
    most = tl.max(best, 0)
    return most, tl.min(tl.where(best == most, place, VOCAB), 0)


@triton.jit
def _sum(logits, most, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(logits + token, mask=token < VOCAB, other=_BANNED).to(tl.float32) - most)
    return tl.sum(total, 0)


@triton.jit
def _limit(
    logits, scratch, is_edited, most, sharpness, settings, numbers, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The least scaled logit that min-p, top-k and top-p keep."""
    limit = _OUT_OF_REACH + most * 0.0
    min_p, top_p, top_k = tl.load(settings + _MIN_P), tl.load(settings + _TOP_P), tl.load(numbers + _TOP_K)
    if min_p > 0:
        limit = tl.maximum(limit, tl.log(min_p))
    if (top_k > 0) & (top_k < VOCAB):
        kept, least, _ = _above(
            logits, scratch, is_edited, most, sharpness, limit, limit, False, VOCAB, BLOCK
        )
        if kept > top_k:
            limit = _bisect(logits, scratch, is_edited, most, sharpness, least, top_k, False, VOCAB, BLOCK)
    if top_p < 1:
        kept, least, _ = _above(logits, scratch, is_edited, most, sharpness, limit, limit, True, VOCAB, BLOCK)
        wanted = tl.maximum((top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64), 1)
        limit = _bisect(logits, scratch, is_edited, most, sharpness, least, wanted, True, VOCAB, BLOCK)
    return limit


@triton.jit
def _bisect(
    logits, scratch, is_edited, most, sharpness, low, wanted, BY_WEIGHT: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest scaled logit such that the tokens from it on have the wanted number or weight."""
    high = low * 0.0
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        kept, least, next_lower = _above(
            logits, scratch, is_edited, most, sharpness, middle, low, BY_WEIGHT, VOCAB, BLOCK
        )
        is_enough = kept >= wanted
        low = tl.where(is_enough, least, low)
        high = tl.where(is_enough, high, next_lower)
    return low


@triton.jit
def _above(
    logits, scratch, is_edited, most, sharpness, limit, low, BY_WEIGHT: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number or weight of the tokens from `limit` on, the least of them, and the largest from `low` to it."""
    total = tl.zeros([BLOCK], tl.int64)
    least, lower = tl.full([BLOCK], 0.0, tl.float32), tl.full([BLOCK], _LEAST, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scaled = (_load(logits, scratch, is_edited, token, VOCAB) - most) * sharpness
        is_kept = scaled >= limit
        if BY_WEIGHT:
            total += tl.where(is_kept, (tl.exp(scaled) * _ONE).to(tl.int64), 0)
        else:
            total += is_kept.to(tl.int64)
        least = tl.minimum(least, tl.where(is_kept, scaled, 0.0))
        lower = tl.maximum(lower, tl.where((scaled < limit) & (scaled >= low), scaled, _LEAST))
    return tl.sum(total, 0), tl.min(least, 0), tl.max(lower, 0)


@triton.jit
def _race(
    logits, scratch, is_edited, most, sharpness, limit, numbers, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The token with the highest score among those from `limit` on."""
    QUARTER: tl.constexpr = BLOCK // 4
    seed, position = tl.load(numbers + _SEED), tl.load(numbers + _POSITION).to(tl.int32)
    best, place = tl.full([QUARTER], _LEAST, tl.float32), tl.full([QUARTER], VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        quad = start // 4 + tl.arange(0, QUARTER)
        nearest = tl.full([QUARTER], _BANNED, tl.float32)
        for lane in tl.static_range(4):
            nearest = tl.maximum(nearest, _load(logits, scratch, is_edited, 4 * quad + lane, VOCAB))
        if (tl.max(nearest, 0) - most) * sharpness >= limit:
            words = tl.philox(seed, quad, quad * 0 + position, quad * 0, quad * 0)
            for lane in tl.static_range(4):
                token = 4 * quad + lane
                scaled = (_load(logits, scratch, is_edited, token, VOCAB) - most) * sharpness
                score = scaled - tl.log(_exponential(words[lane]))
                is_new = (scaled >= limit) & ((score > best) | ((score == best) & (token < place)))
                best, place = tl.where(is_new, score, best), tl.where(is_new, token, place)
    highest = tl.max(best, 0)
    return tl.min(tl.where(best == highest, place, VOCAB), 0)


@triton.jit
def _exponential(word):
    draw = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    small = draw * (1.0 / 6.0) + 1.0 / 5.0
    for term in tl.static_range(4):
        small = draw * small + 1.0 / (4 - term)
    return tl.where(draw < _SMALL_DRAW, draw * small, -tl.log(1.0 - draw))
