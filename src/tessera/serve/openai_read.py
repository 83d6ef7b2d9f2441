"""From a body to asks: parsed strictly, checked against the model's limits, put into tokens.

What would change the answer and is not supported is refused with the field's name (`schemas.REFUSED`); what
would not is ignored. Prompts and choices multiply: two prompts with n = 3 are six asks, in OpenAI's order.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tessera.serve.openai_errors import ApiError
from tessera.serve.openai_ports import Endpoint
from tessera.serve.openai_shown import Shown
from tessera.serve.records import Ask, Sampling
from tessera.serve.schemas import (
    MAX_INT,
    MAX_STOP_CHARS,
    MAX_STOPS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Message,
)

Body = TypeVar("Body", bound=BaseModel)

# Answers of one request: each takes a place in the queue.
MAX_ASKS = 128
# OpenAI's default for /v1/completions; a chat's answer may be as long as the model allows.
COMPLETION_TOKENS = 16
# Longer texts are tokenized beside the event loop, which others wait for.
LONG_CHARS = 4096
# Fields that may be of several kinds.
KINDS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
    "stop": f"a text, or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters",
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request: its asks, `n` a prompt, and how the answers are to be told."""

    asks: tuple[Ask, ...]
    n: int
    is_stream: bool
    includes_usage: bool
    # Of each ask: the prompt's text to give back before the answer; empty without `echo`.
    echoes: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each once."""
        return sum(len(ask.prompt) for ask in self.asks[:: self.n])


def parse(kind: type[Body], raw: bytes) -> Body:
    """A body, or the first thing that is wrong with it."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = first["loc"]
        field = str(place[0]) if place else None
        # Of a union pydantic tells what the first kind lacks, which is not what the client meant.
        text = KINDS.get(field or "", first["msg"]) if len(place) > 1 or not field else first["msg"]
        where = field if field in KINDS else ".".join(str(x) for x in place)
        raise ApiError(400, f"{where}: {text}" if field else text, field, first["type"]) from None


def check(request: ChatRequest | CompletionRequest, endpoint: Endpoint) -> None:
    """Refuses another model and what would change the answer."""
    if request.model is not None and request.model != endpoint.model:
        message = f"The model '{request.model}' is not served here; this is '{endpoint.model}'."
        raise ApiError(404, message, "model", "model_not_found")
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name]:
            raise _unsupported(name)
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "only of use with stream: true")


async def chat_wanted(request: ChatRequest, endpoint: Endpoint, client: str) -> Wanted:
    """The asks of a chat."""
    check(request, endpoint)
    if request.top_logprobs is not None and not request.logprobs:
        raise _invalid("top_logprobs", "only of use with logprobs: true")
    shown = Shown(endpoint.eyes)
    turns = [{"role": _role(m, i), "content": shown.content(m, i)} for i, m in enumerate(request.messages)]
    length = sum(len(turn["content"]) for turn in turns)
    prompt = await _beside(length, partial(endpoint.words.chat, turns))
    most = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prompt, picture = await shown.placed(prompt)
    asks = _asks(request, endpoint, [tuple(prompt)], most or _room(endpoint, prompt), logprobs, client)
    if picture is not None:
        asks = tuple(replace(ask, picture=picture) for ask in asks)
    return Wanted(asks, request.n or 1, *_telling(request))


async def completion_wanted(request: CompletionRequest, endpoint: Endpoint, client: str) -> Wanted:
    """The asks of a completion, which may have several prompts."""
    check(request, endpoint)
    n = request.n or 1
    if request.best_of not in (None, n):
        raise _unsupported("best_of")
    if request.echo and request.logprobs is not None:
        raise _invalid("echo", "with logprobs is not supported: the prompt's own are not kept")
    if request.max_tokens == 0 and not request.echo:
        raise _invalid("max_tokens", "0 asks for no answer; use 1 or more, or echo")
    texts, prompts = await _prompts(request, endpoint)
    most = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None:
        most = min([most, *(_room(endpoint, p) for p in prompts)])
    asks = _asks(request, endpoint, prompts, most, request.logprobs, client)
    echoes = tuple(text for text in texts for _ in range(n)) if request.echo else ()
    return Wanted(asks, n, *_telling(request), echoes)


async def _beside(num_chars: int, encode: Callable[[], Sequence[int]]) -> Sequence[int]:
    return encode() if num_chars < LONG_CHARS else await asyncio.to_thread(encode)


def _telling(request: ChatRequest | CompletionRequest) -> tuple[bool, bool]:
    options = request.stream_options
    return bool(request.stream), bool(options and options.include_usage)


async def _prompts(request: CompletionRequest, endpoint: Endpoint) -> tuple[list[str], list[tuple[int, ...]]]:
    """All prompts as text (only where it is given back) and as tokens."""
    parts = _parts(request)
    _check_number(len(parts) * (request.n or 1))
    texts, prompts = [], []
    for part in parts:
        if isinstance(part, str):
            tokens = tuple(await _beside(len(part), partial(endpoint.words.encode, part)))
            if not tokens:
                raise _invalid("prompt", "a prompt without a token")
        else:
            tokens = tuple(part)
            if (wrong := max(tokens)) >= endpoint.vocab_size:
                raise _invalid("prompt", f"token {wrong} is none of the model's {endpoint.vocab_size}")
        if request.echo:
            texts.append(part if isinstance(part, str) else _text(endpoint, tokens))
        prompts.append(tokens)
    return texts, prompts


def _text(endpoint: Endpoint, tokens: Sequence[int]) -> str:
    reader = endpoint.words.reader()
    return "".join([*(reader.feed(token) for token in tokens), reader.flush()])


def _parts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts apart: a list of numbers is one prompt, a list of anything else several."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    numbers = [x for x in given if isinstance(x, int)]
    return [numbers] if numbers else [x for x in given if not isinstance(x, int)]


def _asks(
    request: ChatRequest | CompletionRequest,
    endpoint: Endpoint,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    logprobs: int | None,
    client: str,
) -> tuple[Ask, ...]:
    _check_number(len(prompts) * (request.n or 1))
    least = request.min_tokens or 0
    if least > max_tokens:
        raise _invalid("min_tokens", f"{least} are more than the {max_tokens} allowed")
    for prompt in prompts:
        _check_room(endpoint, prompt, max_tokens)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return tuple(
        Ask(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=_sampling(request, logprobs, choice),
            stop=stop,
            ignores_end=bool(request.ignore_eos),
            min_tokens=least,
            client=client,
        )
        for prompt in prompts
        for choice in range(request.n or 1)
    )


def _sampling(request: ChatRequest | CompletionRequest, logprobs: int | None, choice: int) -> Sampling:
    """Choices of one seed differ from one another, and each is the same every time."""
    seed = None if request.seed is None else (request.seed + choice) & MAX_INT
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=seed,
        logprobs=logprobs,
    )


def _room(endpoint: Endpoint, prompt: Sequence[int]) -> int:
    """Tokens that an answer may have after a prompt; at least one, which is then refused by name."""
    return max(1, endpoint.capacity - len(prompt))


def _check_room(endpoint: Endpoint, prompt: Sequence[int], max_tokens: int) -> None:
    if len(prompt) + max_tokens > endpoint.capacity:
        message = (
            f"This model's maximum context length is {endpoint.capacity} tokens. The prompt has "
            f"{len(prompt)} and {max_tokens} are asked for. Shorten the prompt or ask for fewer."
        )
        raise ApiError(
            400, message, "max_tokens" if len(prompt) < endpoint.capacity else None, "context_length_exceeded"
        )


def _check_number(num: int) -> None:
    if num > MAX_ASKS:
        raise _invalid("n", f"{num} answers in one request; the most are {MAX_ASKS}")


def _role(message: Message, number: int) -> str:
    extra = message.model_extra or {}
    if message.role not in ROLES or extra.get("tool_calls") or extra.get("function_call"):
        raise ApiError(400, f"messages.{number}: tools are not supported", "messages", "unsupported_value")
    return ROLES[message.role]


def _invalid(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name}: {what}", name, "invalid_value")


def _unsupported(name: str) -> ApiError:
    return ApiError(
        400, f"{name}: this value is not supported here; leave the field out", name, "unsupported_value"
    )
