"""The CUDA implementation of `tessera::choose`.

  largest    program (row, segment of the vocabulary): edited logits, in scratch memory, and the largest
  narrow     (row, segment), several times: weights above some pivots between two bounds of the threshold of
             top-k or top-p; the next call goes on between two neighbouring pivots
  limit      (row): the threshold, by bisection if the last bounds have different logits between them
  race       (row, segment): the highest score
  token      (row): the winner and logprobs

Greedy rows run only the first and the last. Nothing is read on the host, for CUDA graphs. Sums of weights are
float32, in an order that depends on the vocabulary's size.
"""

import torch
import triton
import triton.language as tl

from tessera.kernels.choice import MAX_TOP, OUT_OF_REACH, SMALL_DRAW, Number, Setting
from tessera.kernels.choose import results
from tessera.kernels.launch import overlaps
from tessera.kernels.overlap_triton import overlap

_MAX_BLOCK, _MAX_WARPS = 4096, 16
# Programs that keep a large card busy.
_BUSY = 264
# Calls of `choose_narrow`, and pivots of each.
_ROUNDS, _SLOTS = 5, tl.constexpr(8)
# Pivots, the upper bound, and the wanted weight.
_BOUNDS = tl.constexpr(_SLOTS.value + 2)
_LEAST = tl.constexpr(-3.4e38)
_BANNED = tl.constexpr(float("-inf"))
_ABOVE_ALL = tl.constexpr(0.01)
_OUT_OF_REACH = tl.constexpr(OUT_OF_REACH)
_SMALL_DRAW = tl.constexpr(SMALL_DRAW)
_EDITS = tl.constexpr(256)
_NUM_SETTINGS, _NUM_NUMBERS = tl.constexpr(len(Setting)), tl.constexpr(len(Number))
_SHARPNESS, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = (tl.constexpr(int(s)) for s in Setting)
_SEED, _POSITION, _TOP_K, _BEGIN, _END, _MASK, _COUNTS_LAST, _FORCED, _NUM_TOP = (
    tl.constexpr(int(n)) for n in Number
)
_MAX_TOP, _TOP_PAD = tl.constexpr(MAX_TOP), tl.constexpr(32)


def choose(
    logits: torch.Tensor,
    last: torch.Tensor,
    settings: torch.Tensor,
    numbers: torch.Tensor,
    edits: torch.Tensor,
    masks: torch.Tensor,
    block: int = _MAX_BLOCK,
    programs: int = _BUSY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, logprobs, top = results(logits)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    if not rows:
        return tokens, logprobs, top
    block = min(block, max(256, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block)
    span = triton.cdiv(blocks, min(blocks, max(1, programs // rows)))
    segments = triton.cdiv(blocks, span)
    scratch = logits.new_empty((rows, vocab), dtype=torch.float32)
    bests, lows, highs, scores = logits.new_empty((4, rows, segments), dtype=torch.float32)
    places, winners = logits.new_empty((2, rows, segments), dtype=torch.int32)
    sums = logits.new_empty((_ROUNDS, rows, segments, _SLOTS.value), dtype=torch.float32)
    bounds = logits.new_empty((_ROUNDS, rows, _BOUNDS.value), dtype=torch.float32)
    limits = logits.new_empty(rows, dtype=torch.float32)
    sizes = {"VOCAB": vocab, "LOGITS_ROW": logits.stride(0), "BLOCK": block, "SPAN": span}
    sizes["SEGMENTS"] = segments
    sizes["SEGMENTS_PAD"] = triton.next_power_of_2(segments)
    does_overlap = overlaps(logits.device)
    sizes |= {"OVERLAPS": does_overlap, "launch_pdl": does_overlap}
    warps = {"num_warps": min(_MAX_WARPS, max(4, block // 256))}
    choose_largest[rows, segments](
        logits, last, settings, numbers, edits, masks, scratch, bests, places, WORDS=masks.shape[1], **sizes,
        **warps,
    )  # fmt: skip
    given = (logits, settings, numbers, scratch, bests)
    for number in range(_ROUNDS):
        before = max(0, number - 1)
        choose_narrow[rows, segments](
            *given, sums[before], bounds[before], sums[number], bounds[number], lows, highs,
            ROUND=min(number, 2), **sizes, **warps,
        )  # fmt: skip
    choose_limit[rows,](*given, sums[0], bounds[-1], lows, highs, limits, **sizes, **warps)
    choose_race[rows, segments](*given, limits, scores, winners, **sizes, **warps)
    choose_token[rows,](*given, places, scores, winners, tokens, logprobs, top, **sizes, **warps)
    return tokens, logprobs, top


@triton.jit
def choose_largest(
    logits, last, settings, numbers, edits, masks, scratch, bests, places,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr, WORDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap(OVERLAPS)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * LOGITS_ROW
    scratch += row * VOCAB
    settings += row * _NUM_SETTINGS
    numbers += row * _NUM_NUMBERS
    first = segment * (SPAN * BLOCK)
    is_edited = _is_edited(numbers)
    if is_edited:
        begin, end, mask = tl.load(numbers + _BEGIN), tl.load(numbers + _END), tl.load(numbers + _MASK)
        counts_last = tl.load(numbers + _COUNTS_LAST) != 0
        _edit(
            logits, scratch, settings, edits, masks + (mask - 1) * WORDS, begin, end, mask != 0,
            tl.load(last + row), counts_last, first, VOCAB, BLOCK, SPAN,
        )  # fmt: skip
    best, place = tl.full([BLOCK], _BANNED, tl.float32), tl.full([BLOCK], VOCAB, tl.int32)
    for number in range(SPAN):
        token = first + number * BLOCK + tl.arange(0, BLOCK)
        value = _load(logits, scratch, is_edited, token, VOCAB)
        value = tl.where(value == value, value, float("inf"))  # noqa: PLR0124 - a NaN differs from itself
        is_new = value > best
        best, place = tl.where(is_new, value, best), tl.where(is_new, token, place)
    most = tl.max(best, 0)
    tl.store(bests + row * SEGMENTS + segment, most)
    tl.store(places + row * SEGMENTS + segment, tl.min(tl.where(best == most, place, VOCAB), 0))


@triton.jit
def _is_edited(numbers):
    has_edits = tl.load(numbers + _END) > tl.load(numbers + _BEGIN)
    return has_edits | (tl.load(numbers + _MASK) != 0) | (tl.load(numbers + _COUNTS_LAST) != 0)


@triton.jit
def _most(bests, SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr):
    segment = tl.arange(0, SEGMENTS_PAD)
    return tl.max(tl.load(bests + segment, mask=segment < SEGMENTS, other=_BANNED), 0)


@triton.jit
def _is_finite(most):
    return (most < float("inf")) & (most > _BANNED)


@triton.jit
def _edit(
    logits, scratch, settings, edits, words, begin, end, has_mask, newest, counts_last, first,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    for block in range(SPAN):
        token = first + block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < VOCAB).to(tl.float32)
        word = tl.load(words + (token >> 5), mask=has_mask & (token < VOCAB), other=-1)
        value = tl.where(((word >> (token & 31)) & 1) != 0, value, _BANNED)
        tl.store(scratch + token, value, mask=token < VOCAB)
    tl.debug_barrier()
    after = tl.minimum(first + SPAN * BLOCK, VOCAB)
    presence, frequency = tl.load(settings + _PRESENCE), tl.load(settings + _FREQUENCY)
    repetition = tl.load(settings + _REPETITION)
    hits = tl.zeros([_EDITS], tl.int32)
    for start in range(begin, end, _EDITS):
        entry = start + tl.arange(0, _EDITS)
        inside = entry < end
        number = tl.load(edits + 3 * entry, mask=inside, other=-1)
        inside = inside & (number >= first) & (number < after)
        count = tl.load(edits + 3 * entry + 1, mask=inside, other=0)
        bias = tl.load(edits + 3 * entry + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        is_last = inside & counts_last & (number == newest)
        hits += is_last.to(tl.int32)
        count = tl.where(is_last, tl.maximum(count, 0) + 1, count)
        biased = tl.load(scratch + number, mask=inside, other=0.0) + bias
        edited = _penalised(biased, count, presence, frequency, repetition)
        tl.store(scratch + number, edited, mask=inside)
    if counts_last & (tl.sum(hits, 0) == 0) & (newest >= first) & (newest < after):
        lone = _penalised(tl.load(scratch + newest), 1, presence, frequency, repetition)
        tl.store(scratch + newest, lone)
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
def _scaled(row, token, VOCAB: tl.constexpr):
    logits, scratch, is_edited, most, sharpness = row
    return (_load(logits, scratch, is_edited, token, VOCAB) - most) * sharpness


@triton.jit
def _base(settings):
    min_p = tl.load(settings + _MIN_P)
    return tl.maximum(tl.where(min_p > 0, tl.log(min_p), _OUT_OF_REACH), _OUT_OF_REACH)


@triton.jit
def choose_narrow(
    logits, settings, numbers, scratch, bests, sums_before, bounds_before, sums, bounds, lows, highs,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr, ROUND: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap(OVERLAPS)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    settings += row * _NUM_SETTINGS
    numbers += row * _NUM_NUMBERS
    sharpness, top_p = tl.load(settings + _SHARPNESS), tl.load(settings + _TOP_P)
    top_k = _top_k(numbers, VOCAB)
    most = _most(bests + row * SEGMENTS, SEGMENTS, SEGMENTS_PAD)
    if (sharpness > 0) & ((top_k > 0) | (top_p < 1)) & _is_finite(most):
        low, high, wanted = _base(settings), _ABOVE_ALL + most * 0.0, top_k.to(tl.float32)
        if ROUND > 0:
            bounds_before += row * _BOUNDS
            totals = _totals(sums_before + row * SEGMENTS * _SLOTS, SEGMENTS, SEGMENTS_PAD)
            slot = tl.arange(0, _SLOTS)
            wanted = tl.load(bounds_before + _SLOTS + 1)
            if (ROUND == 1) & (top_k == 0):
                wanted = top_p * tl.sum(tl.where(slot == 0, totals, 0.0), 0)
            is_enough = (slot > 0) & (totals >= wanted)
            place = tl.sum(is_enough.to(tl.int32), 0)
            low, high = tl.load(bounds_before + place), tl.load(bounds_before + place + 1)
        slots = tl.arange(0, _SLOTS)
        pivots = low + (high - low) * (slots / _SLOTS)
        bounds += row * _BOUNDS
        if segment == 0:
            tl.store(bounds + slots, pivots)
            tl.store(bounds + _SLOTS, high)
            tl.store(bounds + _SLOTS + 1, wanted)
        least, lower = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], _LEAST, tl.float32)
        totals_here = (tl.zeros([BLOCK], tl.float32),) * _SLOTS
        edited = (logits + row * LOGITS_ROW, scratch + row * VOCAB, _is_edited(numbers), most, sharpness)
        for number in range(SPAN):
            scaled = _scaled(edited, (segment * SPAN + number) * BLOCK + tl.arange(0, BLOCK), VOCAB)
            weight = tl.where(top_k > 0, 1.0, tl.exp(scaled))
            totals_here = _added(totals_here, scaled, weight, pivots)
            least = tl.minimum(least, tl.where(scaled >= low, scaled, 0.0))
            lower = tl.maximum(lower, tl.where((scaled < high) & (scaled >= low), scaled, _LEAST))
        sums += (row * SEGMENTS + segment) * _SLOTS
        for number in tl.static_range(_SLOTS):
            tl.store(sums + number, tl.sum(totals_here[number], 0))
        tl.store(lows + row * SEGMENTS + segment, tl.min(least, 0))
        tl.store(highs + row * SEGMENTS + segment, tl.max(lower, 0))


@triton.jit
def _added(totals, scaled, weight, pivots):
    added = ()
    for place in tl.static_range(_SLOTS):
        added = added + (totals[place] + tl.where(scaled >= _item(pivots, place), weight, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit
def _item(pivots, place: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _SLOTS) == place, pivots, 0.0), 0)


@triton.jit
def _top_k(numbers, VOCAB: tl.constexpr):
    top_k = tl.load(numbers + _TOP_K)
    return tl.where(top_k < VOCAB, top_k, 0)


@triton.jit
def _totals(sums, SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr):
    segment, slot = tl.arange(0, SEGMENTS_PAD)[:, None], tl.arange(0, _SLOTS)[None, :]
    return tl.sum(tl.load(sums + segment * _SLOTS + slot, mask=segment < SEGMENTS, other=0.0), 0)


@triton.jit
def choose_limit(
    logits, settings, numbers, scratch, bests, sums, bounds, lows, highs, limits,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`sums` are the first, `bounds` the last."""
    overlap(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    settings += row * _NUM_SETTINGS
    numbers += row * _NUM_NUMBERS
    logits += row * LOGITS_ROW
    scratch += row * VOCAB
    sharpness, top_p = tl.load(settings + _SHARPNESS), tl.load(settings + _TOP_P)
    top_k = _top_k(numbers, VOCAB)
    most = _most(bests + row * SEGMENTS, SEGMENTS, SEGMENTS_PAD)
    limit = _base(settings)
    if (sharpness > 0) & ((top_k > 0) | (top_p < 1)) & _is_finite(most):
        edited = (logits, scratch, _is_edited(numbers), most, sharpness)
        totals = _totals(sums + row * SEGMENTS * _SLOTS, SEGMENTS, SEGMENTS_PAD)
        total = tl.sum(tl.where(tl.arange(0, _SLOTS) == 0, totals, 0.0), 0)
        if (top_k == 0) | (total > top_k):
            segment = tl.arange(0, SEGMENTS_PAD)
            is_segment = segment < SEGMENTS
            low = tl.min(tl.load(lows + row * SEGMENTS + segment, mask=is_segment, other=0.0), 0)
            high = tl.max(tl.load(highs + row * SEGMENTS + segment, mask=is_segment, other=_LEAST), 0)
            wanted = tl.load(bounds + row * _BOUNDS + _SLOTS + 1)
            limit = _bisect(edited, low, high, wanted, top_k > 0, VOCAB, BLOCK)
        if (top_k > 0) & (top_p < 1):
            kept, least, _ = _above(edited, limit, limit, False, VOCAB, BLOCK)
            limit = _bisect(edited, least, least * 0.0, top_p * kept, False, VOCAB, BLOCK)
    tl.store(limits + row, limit)


@triton.jit
def _bisect(row, low, high, wanted, is_count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest scaled logit from which on tokens have the wanted weight."""
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        kept, least, next_lower = _above(row, middle, low, is_count, VOCAB, BLOCK)
        is_enough = kept >= wanted
        low = tl.where(is_enough, least, low)
        high = tl.where(is_enough, high, next_lower)
    return low


@triton.jit
def _above(row, limit, low, is_count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Weight of the tokens from `limit` on, the least of them, and the largest from `low` to it."""
    total, least = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    lower = tl.full([BLOCK], _LEAST, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        scaled = _scaled(row, start + tl.arange(0, BLOCK), VOCAB)
        is_kept = scaled >= limit
        total += tl.where(is_kept, tl.where(is_count, 1.0, tl.exp(scaled)), 0.0)
        least = tl.minimum(least, tl.where(is_kept, scaled, 0.0))
        lower = tl.maximum(lower, tl.where((scaled < limit) & (scaled >= low), scaled, _LEAST))
    return tl.sum(total, 0), tl.min(least, 0), tl.max(lower, 0)


@triton.jit
def choose_race(
    logits, settings, numbers, scratch, bests, limits, scores, winners,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap(OVERLAPS)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    settings += row * _NUM_SETTINGS
    numbers += row * _NUM_NUMBERS
    sharpness, limit = tl.load(settings + _SHARPNESS), tl.load(limits + row)
    if sharpness > 0:
        most = _most(bests + row * SEGMENTS, SEGMENTS, SEGMENTS_PAD)
        QUARTER: tl.constexpr = BLOCK // 4
        best, place = tl.full([QUARTER], _LEAST, tl.float32), tl.full([QUARTER], VOCAB, tl.int32)
        if (tl.load(bests + row * SEGMENTS + segment) - most) * sharpness >= limit:
            edited = (logits + row * LOGITS_ROW, scratch + row * VOCAB, _is_edited(numbers), most, sharpness)
            seed, position = tl.load(numbers + _SEED), tl.load(numbers + _POSITION).to(tl.int32)
            for number in range(SPAN):
                quad = (segment * SPAN + number) * QUARTER + tl.arange(0, QUARTER)
                words = tl.philox(seed, quad, quad * 0 + position, quad * 0, quad * 0)
                for lane in tl.static_range(4):
                    token = 4 * quad + lane
                    scaled = _scaled(edited, token, VOCAB)
                    score = scaled - tl.log(_exponential(words[lane]))
                    is_new = (scaled >= limit) & ((score > best) | ((score == best) & (token < place)))
                    best, place = tl.where(is_new, score, best), tl.where(is_new, token, place)
        highest = tl.max(best, 0)
        tl.store(scores + row * SEGMENTS + segment, highest)
        tl.store(winners + row * SEGMENTS + segment, tl.min(tl.where(best == highest, place, VOCAB), 0))


@triton.jit
def choose_token(
    logits, settings, numbers, scratch, bests, places, scores, winners, tokens, logprobs, top,
    VOCAB: tl.constexpr, LOGITS_ROW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENTS_PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    logits += row * LOGITS_ROW
    numbers += row * _NUM_NUMBERS
    segment = row * SEGMENTS + tl.arange(0, SEGMENTS_PAD)
    is_segment = tl.arange(0, SEGMENTS_PAD) < SEGMENTS
    best = tl.load(bests + segment, mask=is_segment, other=_BANNED)
    place = tl.load(places + segment, mask=is_segment, other=VOCAB)
    is_good = _is_finite(tl.max(best, 0))
    if tl.load(settings + row * _NUM_SETTINGS + _SHARPNESS) > 0:
        best = tl.load(scores + segment, mask=is_segment, other=_LEAST)
        place = tl.load(winners + segment, mask=is_segment, other=VOCAB)
    chosen = tl.min(tl.where(best == tl.max(best, 0), place, VOCAB), 0)
    token = tl.where(is_good, chosen.to(tl.int64), -1)
    forced = tl.load(numbers + _FORCED)
    token = tl.where(forced > 0, forced - 1, token)
    tl.store(tokens + row, token)
    column = tl.arange(0, _TOP_PAD)
    values, indices = tl.zeros([_TOP_PAD], tl.float32), tl.zeros([_TOP_PAD], tl.int64)
    num_top = tl.load(numbers + _NUM_TOP)
    if (num_top > 0) & (token >= 0):
        value, index = _next_largest(logits, float("inf"), -1, VOCAB, BLOCK)
        total = value + tl.log(_sum(logits, value, VOCAB, BLOCK))
        values = tl.where(column == 0, tl.load(logits + token).to(tl.float32) - total, values)
        for number in range(1, tl.minimum(num_top, VOCAB + 1)):
            values = tl.where(column == number, value - total, values)
            indices = tl.where(column == number - 1, index.to(tl.int64), indices)
            value, index = _next_largest(logits, value, index, VOCAB, BLOCK)
    tl.store(logprobs + row * (1 + _MAX_TOP) + column, values, mask=column < 1 + _MAX_TOP)
    tl.store(top + row * _MAX_TOP + column, indices, mask=column < _MAX_TOP)


@triton.jit
def _next_largest(logits, below, after, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit behind (`below`, `after`) in descending order."""
    best, place = tl.full([BLOCK], _BANNED, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < VOCAB, other=_BANNED).to(tl.float32)
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
def _exponential(word):
    draw = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    small = draw * (1.0 / 6.0) + 1.0 / 5.0
    for term in tl.static_range(4):
        small = draw * small + 1.0 / (4 - term)
    return tl.where(draw < _SMALL_DRAW, draw * small, -tl.log(1.0 - draw))
