"""Sampling: greedy or random choice of next tokens, with biases, penalties, limits and logprobs.

    choose(logits, greedy, rows, picks) -> one token per pick

The order is vLLM's: biases, banned tokens (by minimum length or grammar), penalties, temperature, min-p,
top-k, top-p. Rows are computed together on the logits' device; each draws from its own generator once per
token, so a seeded answer does not depend on the batch. A draw inverts the cumulative distribution over the
vocabulary. Equal logits at a top-k or top-p limit stay or go together. Logprobs are of the model's unmodified
distribution.
"""

import math
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from tessera.serve.grammar import Guide
from tessera.serve.records import Ask, Sampling, Token

# Bits of a draw: fewer than a double has, so that a draw times a sum is below the sum.
DRAW_BITS = 48
# Largest logits that top-p tries before it sorts the vocabulary.
TOP_P_GLANCE = 512


class TokenCounts:
    __slots__ = ("_places", "numbers", "times")

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self.numbers = array("q", dict.fromkeys(prompt))
        self.times = array("q", bytes(8 * len(self.numbers)))
        self._places = {number: place for place, number in enumerate(self.numbers)}

    def add(self, number: int) -> None:
        place = self._places.setdefault(number, len(self.numbers))
        if place == len(self.numbers):
            self.numbers.append(number)
            self.times.append(0)
        self.times[place] += 1


@dataclass(slots=True)
class Pick:
    """How one request's next token is chosen; it is updated with chosen tokens."""

    sampling: Sampling
    generator: random.Random
    # Tokens banned until the answer has its minimum length.
    ends: tuple[int, ...] = ()
    min_tokens: int = 0
    # For penalties; None: no penalties.
    counts: TokenCounts | None = None
    # Grammar; None: any token.
    guide: Guide | None = None
    num_out: int = 0

    @classmethod
    def of(cls, ask: Ask, end: Sequence[int]) -> "Pick":
        sampling = ask.sampling
        counts = None
        if sampling.repetition_penalty != 1.0:
            counts = TokenCounts(ask.prompt)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            counts = TokenCounts()
        ends = (*(() if ask.ignores_end else end), *ask.stop_tokens)
        guide = None if ask.grammar is None else ask.grammar.start()
        return cls(sampling, random.Random(sampling.seed), ends, ask.min_tokens, counts, guide)

    @property
    def banned(self) -> tuple[int, ...]:
        return self.ends if self.num_out < self.min_tokens else ()

    @property
    def is_plain(self) -> bool:
        x = self.sampling
        if x.temperature or x.logprobs is not None or x.logit_bias or self.counts is not None:
            return False
        return self.guide is None and not self.banned

    @property
    def is_over(self) -> bool:
        """True if the grammar is complete: no token may follow."""
        return self.guide is not None and self.guide.is_over

    @property
    def failure(self) -> str:
        """Why no token can be chosen; empty: one can."""
        return "" if self.guide is None else self.guide.failure

    def prepare(self) -> None:
        if self.guide is not None:
            self.guide.mask()

    def add(self, number: int) -> None:
        self.num_out += 1
        if self.counts is not None:
            self.counts.add(number)
        if self.guide is not None:
            self.guide.add(number)


def choose(
    logits: torch.Tensor | None, greedy: Sequence[int], rows: Sequence[int], picks: Sequence[Pick]
) -> list[Token | None]:
    """One token per pick from its row; None where logits are NaN.

    `greedy` is the model's choice per row; `logits` are only read where that is not enough.
    """
    found: list[Token | None] = [
        Token(greedy[row]) if pick.is_plain else None for row, pick in zip(rows, picks, strict=True)
    ]
    others = [index for index, pick in enumerate(picks) if not pick.is_plain]
    if others:
        assert logits is not None, "the stepper gives logits where they are wanted"
        own = logits[[rows[index] for index in others]].float()
        for index, token in zip(others, _choose_rows(own, [picks[i] for i in others]), strict=True):
            found[index] = token
    return found


def _choose_rows(logits: torch.Tensor, picks: Sequence[Pick]) -> list[Token | None]:
    wanted = [row for row, pick in enumerate(picks) if pick.sampling.logprobs is not None]
    logs = logits[wanted].log_softmax(-1) if wanted else None
    _bias(logits, [pick.sampling.logit_bias for pick in picks])
    for row, pick in enumerate(picks):
        if pick.banned:
            logits[row, list(pick.banned)] = -torch.inf
    _mask(logits, {row: pick.guide.mask() for row, pick in enumerate(picks) if pick.guide is not None})
    _penalise(logits, picks)
    # NaN for a row with a NaN; minus infinity for a row with all tokens banned.
    most = logits.amax(-1, keepdim=True)
    hot = [row for row, pick in enumerate(picks) if pick.sampling.temperature]
    if len(hot) == len(picks):
        chosen = _draw(logits - most, picks)
    else:
        chosen = logits.argmax(-1).tolist()
        drawn = _draw(logits[hot] - most[hot], [picks[row] for row in hot]) if hot else []
        for row, number in zip(hot, drawn, strict=True):
            chosen[row] = number
    tokens = [Token(number) for number in chosen]
    if logs is not None:
        counts = [picks[row].sampling.logprobs or 0 for row in wanted]
        noted = with_logprobs(logs, [chosen[row] for row in wanted], counts)
        for row, token in zip(wanted, noted, strict=True):
            tokens[row] = token
    is_good = most[:, 0].isfinite().tolist()
    return [token if good else None for token, good in zip(tokens, is_good, strict=True)]


def _bias(logits: torch.Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    rows = [row for row, own in enumerate(biases) for _ in own]
    if not rows:
        return
    numbers, values = zip(*chain.from_iterable(biases), strict=True)
    place = (_on(logits, rows), _on(logits, numbers))
    logits[place] += torch.tensor(values, device=logits.device)


def _mask(logits: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    width = logits.shape[-1]
    for row, mask in masks.items():
        barred = np.unpackbits(~np.frombuffer(mask, np.uint8), count=width, bitorder="little")
        logits[row].masked_fill_(torch.from_numpy(barred).bool().to(logits.device), -torch.inf)


def _penalise(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    known = [(row, pick.counts) for row, pick in enumerate(picks) if pick.counts and pick.counts.numbers]
    if not known:
        return
    # Each row's settings, repeated for every token; then the tokens.
    samplings = [picks[row].sampling for row, _ in known]
    settings = [(x.repetition_penalty, x.frequency_penalty, x.presence_penalty) for x in samplings]
    sizes = torch.tensor([len(counts.numbers) for _, counts in known])
    rows = torch.tensor([row for row, _ in known]).repeat_interleave(sizes).to(logits.device)
    repeats, often, once = torch.tensor(settings).repeat_interleave(sizes, 0).to(logits.device).unbind(1)
    numbers = torch.cat([_as_tensor(counts.numbers) for _, counts in known]).to(logits.device)
    times = torch.cat([_as_tensor(counts.times) for _, counts in known]).to(logits.device)
    values = logits[rows, numbers]
    values = torch.where(values > 0, values / repeats, values * repeats)
    logits[rows, numbers] = values - often * times - once * (times > 0)


def _on(logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, device=logits.device)


def _as_tensor(numbers: "array[int]") -> torch.Tensor:
    """Shares memory; the array cannot grow while the tensor exists."""
    return torch.frombuffer(numbers, dtype=torch.int64)


def _draw(below: torch.Tensor, picks: Sequence[Pick]) -> list[int]:
    """One token per row, each by its own generator; `below` is the distance of each logit from the largest.

    The largest is therefore 0, and a small temperature does not overflow.
    """
    device = below.device
    temperatures = [p.sampling.temperature for p in picks]
    if any(temperature != 1.0 for temperature in temperatures):
        below /= torch.tensor(temperatures, device=device)[:, None]
    _keep_min_p(below, [p.sampling.min_p for p in picks])
    _keep_top_k(below, [p.sampling.top_k for p in picks])
    _keep_top_p(below, [p.sampling.top_p for p in picks])
    sums = below.exp_().cumsum(-1, dtype=torch.float64)
    draws = [[p.generator.getrandbits(DRAW_BITS) * 2.0**-DRAW_BITS] for p in picks]
    targets = torch.tensor(draws, dtype=torch.float64, device=device) * sums[:, -1:]
    found: list[list[int]] = torch.searchsorted(sums, targets, right=True).tolist()
    # The caller reports rows without numbers; any valid index will do.
    return [min(index, below.shape[-1] - 1) for (index,) in found]


def _keep_min_p(scaled: torch.Tensor, shares: Sequence[float]) -> None:
    rows = [row for row, share in enumerate(shares) if share > 0.0]
    if rows:
        least = torch.tensor([math.log(shares[row]) for row in rows], device=scaled.device)
        _keep_from(scaled, rows, least[:, None])


def _keep_top_k(scaled: torch.Tensor, counts: Sequence[int]) -> None:
    rows = [row for row, k in enumerate(counts) if 0 < k < scaled.shape[-1]]
    if not rows:
        return
    largest = scaled[rows].topk(max(counts[row] for row in rows), -1).values
    index = torch.tensor([counts[row] - 1 for row in rows], device=scaled.device)
    _keep_from(scaled, rows, largest.gather(-1, index[:, None]))


def _keep_top_p(scaled: torch.Tensor, shares: Sequence[float]) -> None:
    rows = [row for row, share in enumerate(shares) if share < 1.0]
    if not rows:
        return
    own = scaled[rows]
    wanted = torch.tensor([shares[row] for row in rows], dtype=torch.float64, device=scaled.device)[:, None]
    wanted = wanted * own.exp().sum(-1, keepdim=True, dtype=torch.float64)
    width = min(TOP_P_GLANCE, own.shape[-1])
    least, is_enough = _least_needed(own.topk(width, -1).values, wanted)
    if not is_enough and width < own.shape[-1]:
        least, _ = _least_needed(own.sort(-1, descending=True).values, wanted)
    _keep_from(scaled, rows, least)


def _least_needed(descending: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Each row's last logit before the wanted sum; False if some row does not reach it."""
    sums = descending.exp().cumsum(-1, dtype=torch.float64)
    last = (sums < wanted).sum(-1, keepdim=True)
    is_enough = bool((last < descending.shape[-1]).all())
    return descending.gather(-1, last.clamp_max(descending.shape[-1] - 1)), is_enough


def _keep_from(scaled: torch.Tensor, rows: Sequence[int], least: torch.Tensor) -> None:
    if len(rows) == len(scaled):
        scaled.masked_fill_(scaled < least, -torch.inf)
        return
    own = scaled[list(rows)]
    scaled[list(rows)] = own.masked_fill_(own < least, -torch.inf)


def with_logprobs(logs: torch.Tensor, numbers: Sequence[int], counts: Sequence[int]) -> list[Token]:
    own = logs.gather(-1, _on(logs, numbers)[:, None])[:, 0].tolist()
    values, tokens = logs.topk(min(max(counts), logs.shape[-1]), -1)
    rows = zip(numbers, own, tokens.tolist(), values.tolist(), counts, strict=True)
    return [
        Token(number, logprob, tuple(zip(top[:count], logprobs[:count], strict=True)))
        for number, logprob, top, logprobs, count in rows
    ]
