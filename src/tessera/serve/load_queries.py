"""What a load generator asks, and when: seeded prompts of about so many tokens, and times to send them at.

No tokenizer is at hand, so the server is the ruler: two short questions tell how many tokens its template
adds and how many a word has (`Ruler`). Words have five letters, which makes lengths exact where a token is a
byte and close to it elsewhere; what a prompt really had is what the server reports.

When, as in `vllm bench serve`: all at once (as many as may be in flight), or at a rate with gaps drawn from a
gamma distribution (a burstiness of 1 is a Poisson stream, less is burstier), or as `tessera simulate` reads
arrivals. With verification few prompts are asked many times, so that answers can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.errors import LoadError
from tessera.ir import Arrivals

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD = 5


@dataclass(frozen=True, slots=True)
class Query:
    """One request to send. Queries with the same `prompt_number` ask the same."""

    number: int
    prompt_number: int
    prompt: str
    max_tokens: int
    # When to send it, counted from the start; it is sent later if too many are in flight.
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ruler:
    """Tokens of a prompt = `fixed` + words * `per_word`."""

    fixed: float
    per_word: float

    @classmethod
    def from_two(cls, few: tuple[int, int], many: tuple[int, int]) -> "Ruler":
        """From (words, tokens) of two prompts."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            message = (
                f"{few[0]} words are {few[1]} tokens and {many[0]} words {many[1]}: it does not count them"
            )
            raise LoadError("usage", message, "Leave --prompt-tokens out.")
        return cls(few[1] - few[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        """How many words make at most so many tokens; at least one."""
        return max(1, int((tokens - self.fixed) / self.per_word + 1e-6))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request's prompt and answer."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    # Requests of a recorded log that were longer than allowed, and were cut.
    num_cut: int = 0


def make_prompts(num_words: Sequence[int], seed: int) -> list[str]:
    """Distinct prompts of so many words each."""
    seen: set[str] = set()
    prompts = []
    for number, words in enumerate(num_words):
        random = np.random.default_rng([seed, number])
        while True:
            letters = "".join(LETTERS[i] for i in random.integers(len(LETTERS), size=words * WORD))
            text = " ".join(letters[i : i + WORD] for i in range(0, len(letters), WORD))
            if text not in seen:
                break
        seen.add(text)
        prompts.append(text)
    return prompts


def send_times(num: int, rate_per_s: float | None, burstiness: float, seed: int) -> tuple[float, ...]:
    """Seconds from the start; all zero without a rate."""
    if rate_per_s is None:
        return (0.0,) * num
    if not (rate_per_s > 0 and burstiness > 0):
        raise LoadError("option", "a rate and its burstiness are above zero", place="--rate")
    random = np.random.default_rng([seed, num])
    gaps = random.gamma(burstiness, 1.0 / (rate_per_s * burstiness), num)
    return tuple(np.cumsum(gaps).tolist())


def lengths_of(arrivals: Arrivals, usual: tuple[int, int], most: tuple[int, int]) -> Lengths:
    """(prompt, answer) of every request: a log's own, cut to the most that is allowed, or the usual ones."""
    num = len(arrivals.times_s)
    if not arrivals.prompts:
        return Lengths((usual[0],) * num, (usual[1],) * num)
    prompts = tuple(min(x, most[0]) for x in arrivals.prompts)
    outputs = tuple(min(x, most[1]) for x in arrivals.outputs)
    pairs = zip(arrivals.prompts, prompts, arrivals.outputs, outputs, strict=True)
    return Lengths(prompts, outputs, sum(a != b or c != d for a, b, c, d in pairs))


def make_queries(
    lengths: Lengths, times_s: Sequence[float], ruler: Ruler, seed: int, num_distinct: int | None
) -> list[Query]:
    """The queries in the order of sending; of `num_distinct` prompts, each asked in its turn."""
    num = len(times_s)
    distinct = num if num_distinct is None else min(num, num_distinct)
    prompts = make_prompts([ruler.words(x) for x in lengths.prompts[:distinct]], seed)
    return [
        Query(i, i % distinct, prompts[i % distinct], lengths.outputs[i % distinct], times_s[i])
        for i in range(num)
    ]
