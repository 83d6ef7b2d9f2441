"""From a draft to asks: what is left to do where the engine is.

Pictures are looked at and grammars compiled in threads, which do not hold the interpreter meanwhile.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.errors import MissingExtra
from tessera.serve.endpoint import Endpoint
from tessera.serve.grammar import Grammar
from tessera.serve.openai.bodies import MAX_INT
from tessera.serve.openai.errors import ApiError
from tessera.serve.openai.read import Draft
from tessera.serve.records import Ask, PromptPicture

# OpenAI's default for /v1/completions; a chat's answer may be as long as the model allows.
COMPLETION_TOKENS = 16
# Logprobs of prompts that one request may ask for.
MAX_NOTED = 2**19


@dataclass(frozen=True, slots=True)
class AskBatch:
    """One request: its asks, `n` a prompt, and what it says of how they are to be told."""

    asks: tuple[Ask, ...]
    draft: Draft

    @property
    def prompts(self) -> tuple[Ask, ...]:
        """The first ask of every prompt."""
        return self.asks[:: self.draft.n]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.prompts)


async def make_asks(draft: Draft, endpoint: Endpoint, client: str) -> AskBatch:
    """The asks of a request; ApiError or AskError if this model cannot answer them."""
    prompts, pictures = draft.prompts, tuple[PromptPicture, ...]()
    if draft.urls:
        prompt, pictures = await _seen(draft, endpoint)
        prompts = (prompt,)
    most = _max_tokens(draft, endpoint, prompts)
    grammar = await _grammar(draft, endpoint) if draft.grammar else None
    # Choices of one seed differ from one another, and each is the same every time.
    seed = draft.sampling.seed
    seeds = [None if seed is None else (seed + choice) & MAX_INT for choice in range(draft.n)]
    samplings = [replace(draft.sampling, seed=own) for own in seeds]
    notes = _prompt_logprobs(draft, prompts)
    most = most if notes is None else max(1, most)
    ends = (draft.stop, draft.stop_tokens, draft.ignores_end, draft.min_tokens)
    asks = [
        Ask(prompt, most, sampling, *ends, client, pictures, grammar, None if choice else notes)
        for prompt in prompts
        for choice, sampling in enumerate(samplings)
    ]
    return AskBatch(tuple(asks), draft)


async def _seen(draft: Draft, endpoint: Endpoint) -> tuple[tuple[int, ...], tuple[PromptPicture, ...]]:
    assert endpoint.eyes is not None, "only a model that sees is sent pictures"
    patches = [await asyncio.to_thread(endpoint.eyes.look, url) for url in draft.urls]
    prompt, pictures = endpoint.eyes.placed(draft.prompts[0], patches)
    return tuple(prompt), pictures


async def _grammar(draft: Draft, endpoint: Endpoint) -> Grammar:
    if endpoint.grammars is None:
        missing = MissingExtra("llguidance", "grammar")
        raise ApiError(400, f"{draft.place}: {missing}", draft.place, "missing_extra")
    return await endpoint.grammars.compiled(draft.grammar, draft.place)


def _prompt_logprobs(draft: Draft, prompts: Sequence[Sequence[int]]) -> int | None:
    """Alternatives that are noted for the tokens of a prompt, once for all its answers; None: none."""
    wanted = [draft.prompt_logprobs, draft.sampling.logprobs if draft.echoes_logprobs else None]
    listed = [number for number in wanted if number is not None]
    if not listed:
        return None
    num = sum(map(len, prompts)) * (1 + max(listed))
    if num > MAX_NOTED:
        field = "logprobs" if draft.prompt_logprobs is None else "prompt_logprobs"
        message = f"{field}: {num:,} logprobs of prompts in one request; the most are {MAX_NOTED:,}"
        raise ApiError(400, message, field, "invalid_value")
    return max(listed)


def _max_tokens(draft: Draft, endpoint: Endpoint, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of an answer, at most; refuses what does not fit."""
    longest = max(map(len, prompts))
    most = draft.max_tokens
    if most is None:
        room = max(1, endpoint.capacity - longest)  # at least one, which is then refused by name
        most = room if draft.is_chat else min(COMPLETION_TOKENS, room)
    if draft.min_tokens > most:
        message = f"min_tokens: {draft.min_tokens} are more than the {most} allowed"
        raise ApiError(400, message, "min_tokens", "invalid_value")
    if longest + most <= endpoint.capacity:
        return most
    has = f"more than {endpoint.capacity}" if longest > endpoint.capacity else str(longest)
    message = (
        f"This model's maximum context length is {endpoint.capacity} tokens. The prompt has {has} "
        f"and {most} are asked for. Shorten the prompt or ask for fewer."
    )
    field = "max_tokens" if longest < endpoint.capacity else None
    raise ApiError(400, message, field, "context_length_exceeded")
