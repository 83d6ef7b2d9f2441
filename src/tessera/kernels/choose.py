"""tessera::choose: the next token of each sequence, greedy or drawn.

    logits    [R, V]    one row per sequence
    last      [R]       the token that each row just read
    settings  [R, 6]    float32, see `choice.Setting`; a row of zeros in both tables is greedy
    numbers   [R, 9]    int64, see `choice.Number`
    edits     [E, 3]    int32: token, count, bias as bits of a float32. A count is the token's
                        occurrences in the answer, 0 for a token of the prompt alone, -1 for neither. A row
                        has EDITS_BEGIN : EDITS_END, each token once; a bias of minus infinity bans;
                        tokens beyond the vocabulary are ignored
    masks     [M, W]    int32, one bit per token that may come next, token 0 lowest
    -> tokens [R], logprobs [R, 1 + 20] of the chosen and the likeliest tokens, top [R, 20]

The order is vLLM's: biases, bans, masks, penalties, temperature, min-p, top-k, top-p. A token of -1 means
that no logit is finite. Logprobs are of the unmodified logits, zeros unless NUM_TOP asks for them.

A draw is an exponential race: token i has an exponential variable E and the score z - log(E), z its scaled
logit. E comes from Philox 4x32-10 with the request's seed as key and (token, position) as counter, so a
choice depends on its logits, seed and position alone. Limits are thresholds of z: equal logits stay or go
together. Devices differ by the rounding of exp, log and the sums of top-p.

The code here, for CPUs, is the reference. Rows that are not greedy take dozens of operators on few numbers:
numpy takes a fraction of torch's time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.kernels.choice import INPUTS, MAX_TOP, OUT_OF_REACH, SMALL_DRAW, Number, Setting
from tessera.kernels.register import register

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
PHILOX_ROUNDS = 10
_WORD = 0xFFFFFFFF
SCHEMA = (
    "(Tensor logits, Tensor last, Tensor settings, Tensor numbers, Tensor edits, Tensor masks) "
    "-> (Tensor, Tensor, Tensor)"
)


def results(logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty((rows, 1 + MAX_TOP), dtype=torch.float32),
        logits.new_empty((rows, MAX_TOP), dtype=torch.int64),
    )


@np.errstate(all="ignore")
def _on_cpu(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, settings, numbers = call.logits, call.settings, call.numbers
    tokens, logprobs, top = (t.zero_() for t in results(logits))
    most, at = logits.max(-1)
    tokens.copy_(torch.where(most.isfinite(), at, -1))
    listed = [
        (row, number, setting)
        for row, (number, setting) in enumerate(zip(numbers.tolist(), settings.tolist(), strict=True))
        if setting[Setting.SHARPNESS] or any(number[Number.EDITS_BEGIN :])
    ]
    kept: dict[int, tuple[Ints, Floats]] = {}
    for row, number, setting in listed:
        edited: Floats = logits[row].detach().float().numpy()
        if any(number[Number.EDITS_BEGIN : Number.FORCED]):
            edits, masks = call.edits.numpy(), call.masks.numpy()
            edited = _edited(edited, int(call.last[row]), setting, number, edits, masks)
        likeliest = int(edited.argmax())
        tokens[row] = likeliest if np.isfinite(edited[likeliest]) else -1
        if setting[Setting.SHARPNESS] and tokens[row] >= 0:
            scaled = (edited - edited[likeliest]) * setting[Setting.SHARPNESS]
            able = np.flatnonzero(scaled >= _limit(scaled, setting, number))
            kept[row] = able, scaled[able]
    if kept:
        tokens[list(kept)] = _draw(kept, numbers)
    for row, number, _ in listed:
        if number[Number.FORCED]:
            tokens[row] = number[Number.FORCED] - 1
        if number[Number.NUM_TOP] and tokens[row] >= 0:
            num = min(number[Number.NUM_TOP] - 1, logits.shape[1])
            logs = logits[row].float().log_softmax(-1)
            logprobs[row, 0] = logs[tokens[row]]
            logprobs[row, 1 : 1 + num], top[row, :num] = _likeliest(logs, num)
    return tokens, logprobs, top


def _draw(kept: dict[int, tuple[Ints, Floats]], numbers: torch.Tensor) -> torch.Tensor:
    counts = [len(tokens) for tokens, _ in kept.values()]
    by_token = torch.from_numpy(numbers.numpy()[list(kept)].repeat(counts, 0))
    tokens, scaled = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*kept.values(), strict=True))
    scores = scaled - _exponential(tokens, by_token[:, Number.SEED], by_token[:, Number.POSITION]).log()
    races = zip(kept.values(), scores.split(counts), strict=True)
    return torch.tensor([able[part.argmax()] for (able, _), part in races])


def _likeliest(logs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values and their tokens; equal ones in order of tokens."""
    least = logs.topk(num).values[-1:] if num else logs.new_full((1,), torch.inf)
    tokens = (logs >= least).nonzero()[:, 0]
    values, order = logs[tokens].sort(descending=True, stable=True)
    return values[:num], tokens[order[:num]]


def _edited(
    logits: Floats,
    last: int,
    settings: list[float],
    numbers: list[int],
    edits: npt.NDArray[np.int32],
    masks: npt.NDArray[np.int32],
) -> Floats:
    edited = logits.copy()
    entries = edits[numbers[Number.EDITS_BEGIN] : numbers[Number.EDITS_END]]
    token, count, bits = entries[entries[:, 0] < len(logits)].T
    bias = bits.view(np.float32)
    if numbers[Number.COUNTS_LAST]:
        is_last = token == last
        if is_last.any():
            count = np.where(is_last, np.maximum(count, 0) + 1, count)
        else:
            more = zip((token, count, bias), (last, 1, 0.0), strict=True)
            token, count, bias = (np.append(held, held.dtype.type(new)) for held, new in more)
    edited[token] += bias
    if numbers[Number.MASK]:
        words = masks[numbers[Number.MASK] - 1].view(np.uint8)
        edited[np.unpackbits(words, count=len(edited), bitorder="little") == 0] = -np.inf
    values, times = edited[token], count.astype(np.float32)
    repetition = settings[Setting.REPETITION]
    penalised = np.where(values > 0, values / repetition, values * repetition)
    penalised -= settings[Setting.FREQUENCY] * times + settings[Setting.PRESENCE] * np.minimum(times, 1)
    edited[token] = np.where(times >= 0, penalised, values)
    return edited


def _limit(scaled: Floats, settings: list[float], numbers: list[int]) -> float:
    limit = OUT_OF_REACH
    if settings[Setting.MIN_P] > 0:
        limit = max(limit, float(torch.tensor(settings[Setting.MIN_P]).log()))
    if 0 < numbers[Number.TOP_K] < len(scaled):
        limit = max(limit, float(np.partition(scaled, -numbers[Number.TOP_K])[-numbers[Number.TOP_K]]))
    if settings[Setting.TOP_P] < 1:
        descending = np.sort(scaled[scaled >= limit])[::-1]
        sums = np.exp(descending).cumsum(dtype=np.float64)
        limit = float(descending[np.count_nonzero(sums < settings[Setting.TOP_P] * sums[-1])])
    return limit


def _exponential(tokens: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    lanes = philox(tokens >> 2, positions, seeds)
    lane = lanes[(tokens & 3).numpy(), np.arange(len(tokens))]
    draw = np.minimum(lane.astype(np.float32) * 2.0**-32 + 2.0**-33, np.float32(1.0 - 2.0**-24))
    small = np.full_like(draw, 1.0 / 6.0)
    for term in (5.0, 4.0, 3.0, 2.0, 1.0):
        small = draw * small + 1.0 / term
    is_small, small, large = map(torch.from_numpy, (draw < SMALL_DRAW, draw * small, 1.0 - draw))
    return torch.where(is_small, small, -large.log())


def philox(counter: torch.Tensor, position: torch.Tensor, seed: torch.Tensor) -> npt.NDArray[np.int64]:
    """[4, N] 32-bit words of (counter, position, 0, 0)."""
    key = seed.numpy()
    high, low = (key >> 32) & _WORD, key & _WORD
    a, b = counter.numpy() & _WORD, position.numpy() & _WORD
    c, d = np.zeros_like(a), np.zeros_like(a)
    for turn in range(PHILOX_ROUNDS):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a = ((second >> 32) & _WORD) ^ b ^ ((low + turn * 0x9E3779B9) & _WORD)
        c = ((first >> 32) & _WORD) ^ d ^ ((high + turn * 0xBB67AE85) & _WORD)
        b, d = second & _WORD, first & _WORD
    return np.stack([a, b, c, d])


register("choose", SCHEMA, results, _on_cpu, "tessera.kernels.choose_triton")


def choose(logits: torch.Tensor, last: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, ...]:
    return torch.ops.tessera.choose(logits, last, *(inputs[name] for name in INPUTS))  # type: ignore[no-any-return]
