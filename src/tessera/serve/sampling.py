"""Choosing the next tokens: greedy, or drawn with temperature, top-k and top-p; with logprobs if asked.

    choose(logits, greedy, rows, picks) -> one token a pick

Rows are computed together; each draws from a generator of its own, once a token, so an answer with a seed
depends on its own logits and on nothing else in the batch. A draw is the inverse of the cumulative
distribution over the vocabulary. The tokens in question are a set: those not below the k-th largest logit,
and of these not below the last one that top-p needs, so equal logits stay or go together. Logprobs are those
of the model's own distribution, before temperature, top-k and top-p; only banned tokens are taken out.

Where the logits live, there the rows are computed; what comes back is numbers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tessera.errors import AskError
from tessera.serve.records import Sampling, Token

# Alternatives that may be reported for a token, as OpenAI's.
MAX_LOGPROBS = 20
# Bits of a draw: fewer than a double has, so that a draw times a sum is always below the sum.
DRAW_BITS = 48
# Largest logits that top-p looks at before it sorts a whole vocabulary.
TOP_P_GLANCE = 512


@dataclass(frozen=True, slots=True)
class Pick:
    """How one row's next token is chosen, here and now."""

    sampling: Sampling
    generator: random.Random
    # Tokens that must not be chosen now.
    banned: tuple[int, ...] = ()

    # True if the model's own greedy choice is the answer.
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        is_greedy = not self.sampling.temperature and self.sampling.logprobs is None
        object.__setattr__(self, "is_plain", is_greedy and not self.banned)


def check_sampling(sampling: Sampling) -> None:
    """Refuses numbers that make no distribution."""
    if not 0.0 <= sampling.temperature <= 100.0:
        raise AskError(
            f"a temperature of {sampling.temperature} makes no sense", "Use 0 to 2.", "temperature"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise AskError(f"a share of {sampling.top_p} is none", "Use more than 0 and at most 1.", "top_p")
    if sampling.top_k < 0:
        raise AskError(f"{sampling.top_k} tokens are none", "Use 0 for all.", "top_k")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise AskError(f"{sampling.logprobs} alternatives", f"Use 0 to {MAX_LOGPROBS}.", "logprobs")


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
    for row, pick in enumerate(picks):
        if pick.banned:
            logits[row, list(pick.banned)] = -torch.inf
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
    is_good = most[:, 0].isfinite().tolist()
    wanted = [row for row, pick in enumerate(picks) if pick.sampling.logprobs is not None and is_good[row]]
    notes = dict(zip(wanted, _logprobs(logits, wanted, chosen, picks), strict=True)) if wanted else {}
    return [(notes.get(row) or Token(chosen[row])) if is_good[row] else None for row in range(len(picks))]


def _draw(below: torch.Tensor, picks: Sequence[Pick]) -> list[int]:
    """One token a row, each by its own generator; `below` is how far each logit is below the largest.

    So the largest is 0, and a small temperature makes no infinity of it.
    """
    device = below.device
    temperatures = [p.sampling.temperature for p in picks]
    if any(temperature != 1.0 for temperature in temperatures):
        below /= torch.tensor(temperatures, device=device)[:, None]
    _keep_top_k(below, [p.sampling.top_k for p in picks])
    _keep_top_p(below, [p.sampling.top_p for p in picks])
    sums = below.exp_().cumsum(-1, dtype=torch.float64)
    draws = [[p.generator.getrandbits(DRAW_BITS) * 2.0**-DRAW_BITS] for p in picks]
    targets = torch.tensor(draws, dtype=torch.float64, device=device) * sums[:, -1:]
    found: list[list[int]] = torch.searchsorted(sums, targets, right=True).tolist()
    # A row that holds no numbers is reported by the caller; its index only has to be one.
    return [min(index, below.shape[-1] - 1) for (index,) in found]


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
    index = list(rows)
    scaled[index] = scaled[index].masked_fill(scaled[index] < least, -torch.inf)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[int], chosen: Sequence[int], picks: Sequence[Pick]
) -> list[Token]:
    logs = logits[list(rows)].log_softmax(-1)
    numbers = torch.tensor([chosen[row] for row in rows], device=logits.device)
    own = logs.gather(-1, numbers[:, None])[:, 0].tolist()
    counts = [picks[row].sampling.logprobs or 0 for row in rows]
    values, tokens = logs.topk(min(max(counts), logs.shape[-1]), -1)
    table = list(zip(tokens.tolist(), values.tolist(), strict=True))
    return [
        Token(
            chosen[row], own[i], tuple(zip(table[i][0][: counts[i]], table[i][1][: counts[i]], strict=True))
        )
        for i, row in enumerate(rows)
    ]
