"""Sampling: how the next token of a request is chosen, as inputs of tessera::choose (`kernels.choose`).

Every step has all of it as inputs, so preemption, moves and lost devices need nothing more, and a seed gives
the same answer wherever and with whatever it runs. Rows that no choice names are greedy.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tessera.kernels.choice import EDIT_FIELDS, INPUTS, Number, Setting, max_edits, num_words
from tessera.serve.grammar import Guide
from tessera.serve.records import Ask, Sampling, Token

# For a temperature close to 0.
MAX_SHARPNESS = 1e30
# For a top-p of 0: the most likely token.
LEAST_TOP_P = 1e-9
NO_TOKEN = (
    "no token may come next: end tokens and stop_token_ids are banned until min_tokens, and no other fits "
    "the form of the answer. Lower min_tokens."
)
_BANNED = int(np.float32(-np.inf).view(np.int32))


class Edits:
    """Tokens whose logits a request changes."""

    __slots__ = ("_banned", "_biases", "_entries", "_num", "_places")

    def __init__(self, biases: Mapping[int, float], prompt: Iterable[int] = ()) -> None:
        self._biases = biases
        self._banned: tuple[int, ...] = ()
        self._num = 0
        self._entries = np.zeros((16, EDIT_FIELDS), dtype=np.int32)
        self._places: dict[int, int] = {}
        for number, bias in biases.items():
            self._entry(number)[2] = np.float32(bias).view(np.int32)
        for number in dict.fromkeys(prompt):
            self._entry(number)[1] = 0

    def _entry(self, number: int) -> npt.NDArray[np.int32]:
        """Number, count or -1, bias. Valid until the next token has an entry."""
        place = self._places.setdefault(number, self._num)
        if place == self._num:
            if self._num == len(self._entries):
                self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])
            self._entries[place] = (number, -1, 0)
            self._num += 1
        entry: npt.NDArray[np.int32] = self._entries[place]
        return entry

    def __len__(self) -> int:
        return self._num

    @property
    def entries(self) -> npt.NDArray[np.int32]:
        return self._entries[: self._num]

    def add(self, number: int) -> None:
        entry = self._entry(number)
        entry[1] = max(0, int(entry[1])) + 1

    def ban(self, numbers: tuple[int, ...]) -> None:
        if numbers == self._banned:
            return
        for number in self._banned:
            self._entry(number)[2] = np.float32(self._biases.get(number, 0.0)).view(np.int32)
        for number in numbers:
            self._entry(number)[2] = _BANNED
        self._banned = numbers


@dataclass(slots=True)
class Pick:
    sampling: Sampling
    settings: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.int64]
    edits: Edits | None = None
    has_penalties: bool = False
    # Banned until the answer has its minimum length.
    ends: tuple[int, ...] = ()
    min_tokens: int = 0
    guide: Guide | None = None
    num_out: int = 0
    # A row of zeros: greedy, and nothing else.
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        is_greedy = not self.sampling.temperature and self.sampling.logprobs is None
        self.is_plain = is_greedy and self.edits is None and self.guide is None

    @classmethod
    def of(cls, ask: Ask, end: Sequence[int]) -> "Pick":
        x = ask.sampling
        has_penalties = bool(x.repetition_penalty != 1.0 or x.presence_penalty or x.frequency_penalty)
        ends = (*(() if ask.ignores_end else end), *ask.stop_tokens) if ask.min_tokens else ()
        edits = None
        if has_penalties or x.logit_bias or ends:
            edits = Edits(dict(x.logit_bias), ask.prompt if x.repetition_penalty != 1.0 else ())
        settings = np.zeros(len(Setting), dtype=np.float32)
        settings[Setting.SHARPNESS] = min(1 / x.temperature, MAX_SHARPNESS) if x.temperature else 0.0
        settings[Setting.TOP_P :] = (
            max(x.top_p, LEAST_TOP_P),
            x.min_p,
            x.presence_penalty,
            x.frequency_penalty,
            x.repetition_penalty,
        )
        numbers = np.zeros(len(Number), dtype=np.int64)
        numbers[Number.SEED] = random.getrandbits(63) if x.seed is None else x.seed
        numbers[Number.TOP_K] = x.top_k
        numbers[Number.NUM_TOP] = 0 if x.logprobs is None else x.logprobs + 1
        guide = None if ask.grammar is None else ask.grammar.start()
        return cls(x, settings, numbers, edits, has_penalties, tuple(ends), ask.min_tokens, guide)

    @property
    def num_edits(self) -> int:
        """Upper bound of entries in the next step."""
        return 0 if self.edits is None else len(self.edits) + len(self.ends)

    @property
    def is_over(self) -> bool:
        return self.guide is not None and self.guide.is_over

    @property
    def failure(self) -> str:
        """Why no token may come next; empty: the request is not the cause."""
        failure = "" if self.guide is None else self.guide.failure
        return failure or (NO_TOKEN if self.ends and self.num_out < self.min_tokens else "")

    def add(self, number: int) -> None:
        self.num_out += 1
        if self.edits is not None and self.has_penalties:
            self.edits.add(number)
        if self.guide is not None:
            self.guide.add(number)


class Choice(NamedTuple):
    """A row that is not plain."""

    row: int
    pick: Pick
    position: int
    # Tokens that running steps will choose: none, or the one that this step reads.
    num_due: int = 0
    # A token of the prompt whose logprob is asked for, and its alternatives.
    forced: tuple[int, int] | None = None


class ChoiceInputs:
    def __init__(self, rows: int, vocab_size: int) -> None:
        self._settings = np.zeros((rows, len(Setting)), dtype=np.float32)
        self._numbers = np.zeros((rows, len(Number)), dtype=np.int64)
        self._edits = np.zeros((max_edits(rows, vocab_size), EDIT_FIELDS), dtype=np.int32)
        self._masks = np.zeros((rows, num_words(vocab_size)), dtype=np.int32)
        self._is_zero = True

    def fill(self, num_rows: int, choices: Sequence[Choice]) -> dict[str, torch.Tensor]:
        settings, numbers = self._settings, self._numbers
        if not self._is_zero:
            settings[:], numbers[:] = 0.0, 0
        self._is_zero = not choices
        num_edits = num_masks = 0
        if drawn := [choice for choice in choices if choice.forced is None]:
            rows = [choice.row for choice in drawn]
            settings[rows] = np.concatenate([x.pick.settings for x in drawn]).reshape(len(rows), -1)
            numbers[rows] = np.concatenate([x.pick.numbers for x in drawn]).reshape(len(rows), -1)
            numbers[rows, Number.POSITION] = [choice.position for choice in drawn]
        for row, pick, _, num_due, forced in choices:
            if forced is not None:
                numbers[row, Number.FORCED], numbers[row, Number.NUM_TOP] = forced[0] + 1, forced[1] + 1
                continue
            if pick.edits is not None:
                pick.edits.ban(pick.ends if pick.num_out + num_due < pick.min_tokens else ())
                entries = pick.edits.entries[: len(self._edits) - num_edits]
                self._edits[num_edits : num_edits + len(entries)] = entries
                numbers[row, Number.EDITS_BEGIN] = num_edits
                num_edits += len(entries)
                numbers[row, Number.EDITS_END] = num_edits
                numbers[row, Number.COUNTS_LAST] = pick.has_penalties and num_due > 0
            if pick.guide is not None:
                num_masks += 1
                numbers[row, Number.MASK] = num_masks
        tables = (settings[:num_rows], numbers[:num_rows], self._edits[:num_edits], self._masks[:0])
        return dict(zip(INPUTS, map(torch.from_numpy, tables), strict=True))

    def masks(self, guides: Sequence[Guide | None]) -> dict[str, torch.Tensor]:
        """In the order of choices with a guide; without a ready mask no token may come."""
        for row, guide in enumerate(guides):
            mask = None if guide is None else guide.mask
            self._masks[row] = 0 if mask is None else mask
        return {INPUTS[-1]: torch.from_numpy(self._masks[: len(guides)])}


def read_tokens(outputs: Mapping[str, Any], rows: Sequence[int], picks: Iterable[Pick]) -> list[Token | None]:
    """None where no logit is finite."""
    chosen: list[int] = outputs["next_tokens"].tolist()
    if "logprobs" not in outputs:
        return [Token(chosen[row]) if chosen[row] >= 0 else None for row in rows]
    logprobs, top = outputs["logprobs"].tolist(), outputs["top_tokens"].tolist()
    return [
        None if chosen[row] < 0 else noted(chosen[row], logprobs[row], top[row], pick.sampling.logprobs)
        for row, pick in zip(rows, picks, strict=True)
    ]


def noted(number: int, logprobs: Sequence[float], top: Sequence[int], num: int | None) -> Token:
    if num is None:
        return Token(number)
    return Token(number, logprobs[0], tuple(zip(top[:num], logprobs[1 : num + 1], strict=True)))
