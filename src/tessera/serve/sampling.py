"""Choosing the next tokens: greedy, or drawn; with biases, penalties, limits and logprobs if asked.

    choose(logits, greedy, rows, picks) -> one token a pick

In this order, which is vLLM's: biases, tokens that must not be chosen (by the least number of tokens, or by a
grammar), penalties, temperature, min-p, top-k, top-p. Rows are computed together; each draws from a generator
of its own, once a token, so an answer with a seed depends on its own logits and on nothing else in the batch.
A draw is the inverse of the cumulative distribution over the vocabulary. The tokens in question are a set:
those not below the k-th largest logit, and of these not below the last one that top-p needs, so equal logits
stay or go together. Logprobs are those of the model's own distribution, before all of this.

Where the logits live, there the rows are computed; what comes back is numbers.
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

# Bits of a draw: fewer than a double has, so that a draw times a sum is always below the sum.
DRAW_BITS = 48
# Largest logits that top-p looks at before it sorts a whole vocabulary.
TOP_P_GLANCE = 512


class TokenCounts:
    """The different tokens of a request, and how often each is in its answer."""

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
    """How one request's next token is chosen; it is told of those that were."""

    sampling: Sampling
    generator: random.Random
    # Tokens that must not be chosen before the answer has so many.
    ends: tuple[int, ...] = ()
    min_tokens: int = 0
    # For penalties; None: there are none.
    counts: TokenCounts | None = None
    # Says which tokens may come; None: all.
    guide: Guide | None = None
    num_out: int = 0

    @classmethod
    def of(cls, ask: Ask, end: Sequence[int]) -> "Pick":
        """Of a request that begins; `end` are the model's own ends."""
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
        """Tokens that must not be chosen now."""
        return self.ends if self.num_out < self.min_tokens else ()

    @property
    def is_plain(self) -> bool:
        """True if the model's own greedy choice is the answer."""
        x = self.sampling
        if x.temperature or x.logprobs is not None or x.logit_bias or self.counts is not None:
            return False
        return self.guide is None and not self.banned

    @property
    def is_over(self) -> bool:
        """True if no token may come any more: the answer has the form that was asked for."""
        return self.guide is not None and self.guide.is_over

    @property
    def failure(self) -> str:
        """Why no token can be chosen any more; empty: one can."""
        return "" if self.guide is None else self.guide.failure

    def prepare(self) -> None:
        """Works out what it can before the next logits are there."""
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
    """A token for each pick, from the row beside it; None where a row's logits are no numbers.

    `greedy` is the model's own choice a row; `logits` are only looked at where that is not enough.
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
    # Of a row with a NaN this is NaN; of one that may choose nothing, minus infinity.
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
    # Each row's settings, once for every token it has; then the tokens.
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
    """The same memory; the array cannot grow while the tensor is there."""
    return torch.frombuffer(numbers, dtype=torch.int64)


def _draw(below: torch.Tensor, picks: Sequence[Pick]) -> list[int]:
    """One token a row, each by its own generator; `below` is how far each logit is below the largest.

    So the largest is 0, and a small temperature makes no infinity of it.
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
    # A row that holds no numbers is reported by the caller; its index only has to be one.
    return [min(index, below.shape[-1] - 1) for (index,) in found]


def _keep_min_p(scaled: torch.Tensor, shares: Sequence[float]) -> None:
    """Takes out what is less likely than a share of the likeliest."""
    rows = [row for row, share in enumerate(shares) if share > 0.0]
    if rows:
        least = torch.tensor([math.log(shares[row]) for row in rows], device=scaled.device)
        _keep_from(scaled, rows, least[:, None])


def _keep_top_k(scaled: torch.Tensor, counts: Sequence[int]) -> None:
    """Takes out what is below each row's k-th largest."""
    rows = [row for row, k in enumerate(counts) if 0 < k < scaled.shape[-1]]
    if not rows:
        return
    largest = scaled[rows].topk(max(counts[row] for row in rows), -1).values
    index = torch.tensor([counts[row] - 1 for row in rows], device=scaled.device)
    _keep_from(scaled, rows, largest.gather(-1, index[:, None]))


def _keep_top_p(scaled: torch.Tensor, shares: Sequence[float]) -> None:
    """Takes out what the most probable tokens up to a share do without."""
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
    """Each row's last logit before the wanted sum is reached; False if some row does not reach it."""
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
    """Tokens with their logarithms of probability, one a row, and so many of the likeliest ones."""
    own = logs.gather(-1, _on(logs, numbers)[:, None])[:, 0].tolist()
    values, tokens = logs.topk(min(max(counts), logs.shape[-1]), -1)
    rows = zip(numbers, own, tokens.tolist(), values.tolist(), counts, strict=True)
    return [
        Token(number, logprob, tuple(zip(top[:count], logprobs[:count], strict=True)))
        for number, logprob, top, logprobs, count in rows
    ]
