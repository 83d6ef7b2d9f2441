"""From a body to asks: the bodies of OpenAI's routes, checked strictly and put into tokens.

Types are strict: "5" is no number. A field that is not declared here is ignored, as vLLM does, unless
ignoring it would change the answer: those are named in `REFUSED`, with the values that ask for nothing. What
is wrong is told with the field's name. Prompts and choices multiply: two prompts with n = 3 are six asks, in
OpenAI's order.

A message's parts are joined as they come; a mark stands for a picture until the prompt is in tokens. A
request shows at most one picture.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tessera.serve.limits import check_parts
from tessera.serve.openai_errors import ApiError
from tessera.serve.records import Ask, Endpoint, Sampling

if TYPE_CHECKING:
    from tessera.serve.pictures import Eyes

# Of OpenAI: choices of one request, and alternatives of a token.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
# More stop strings than OpenAI's four; every one is looked for after every token.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
# Tokens of one request with a bias, or that end its answer, each.
MAX_MARKED = 1024
MAX_INT = 2**63 - 1
# A limit that no model's positions reach; longer answers are refused with the model's own limit.
MAX_TOKENS = 2**31 - 1
# Answers of one request: each takes a place in the queue.
MAX_ASKS = 128
# OpenAI's default for /v1/completions; a chat's answer may be as long as the model allows.
COMPLETION_TOKENS = 16
# Longer texts are tokenized beside the event loop, which others wait for.
LONG_CHARS = 4096
UNKNOWN = "\ufffd"

# Field -> values that ask for nothing. Any other value is answered with 400.
REFUSED: dict[str, tuple[Any, ...]] = {
    name: (None, *harmless)
    for names, harmless in (
        ("allowed_token_ids audio chat_template guided_choice guided_grammar guided_json guided_regex", ()),
        ("prompt_embeds prompt_logprobs reasoning_effort structured_outputs truncate_prompt_tokens", ()),
        ("verbosity web_search_options", ()),
        ("bad_words documents functions logits_processors tools", ([],)),
        ("chat_template_kwargs", ({},)),
        ("continue_final_message include_stop_str_in_output use_beam_search", (False,)),
        ("add_generation_prompt skip_special_tokens", (True,)),
        ("length_penalty", (1,)),
        ("function_call tool_choice", ("none", "auto")),
        ("modalities", ([], ["text"])),
        ("response_format", ({"type": "text"},)),
        ("suffix", ("",)),
    )
    for name in names.split()
}
# Of a union pydantic tells what the first kind lacks, which is not what the client meant.
UNIONS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
    "stop": f"a text, or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters",
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# JSON knows texts as keys only.
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class MessagePart(_Body):
    """A piece of a message: text, or a picture where the model sees."""

    type: str
    text: str | None = None


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_no_tools(self) -> "Message":
        extra = self.model_extra or {}
        if self.role not in ROLES or extra.get("tool_calls") or extra.get("function_call"):
            raise PydanticCustomError("unsupported_value", "tools are not supported")
        if self.content is None:
            raise PydanticCustomError("missing", "content is missing")
        return self


class StreamOptions(_Body):
    """What else a stream tells."""

    include_usage: bool | None = None


class _GenerationRequest(_Body):
    """What both endpoints take. None is the same as not given."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="Of vLLM; -1 and 0: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, description="Of vLLM.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Of vLLM.")
    logit_bias: dict[TokenKey, Bias] | None = Field(None, max_length=MAX_MARKED)
    seed: int | None = Field(None, ge=-MAX_INT - 1, le=MAX_INT)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_MARKED, fail_fast=True, description="Of vLLM."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="Of vLLM: go on past the model's own end.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Of vLLM.")
    user: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> "_GenerationRequest":
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise _unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "only of use with stream: true")
        return self


class ChatRequest(_GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "only of use with logprobs: true")
        return self


class CompletionRequest(_GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of")
        if self.echo and self.logprobs is not None:
            raise _invalid("echo", "with logprobs is not supported: the prompt's own are not kept")
        if self.max_tokens == 0 and not self.echo:
            raise _invalid("max_tokens", "0 asks for no answer; use 1 or more, or echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts apart: a list of numbers is one prompt, a list of anything else several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [x for x in self.prompt if isinstance(x, int)]
        return [numbers] if numbers else [x for x in self.prompt if not isinstance(x, int)]


Body = TypeVar("Body", bound=_GenerationRequest)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AskBatch:
    """One request: its asks, `n` a prompt, and how the answers are to be told."""

    asks: tuple[Ask, ...]
    n: int
    is_chat: bool
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
    check_parts(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field, *rest = (str(x) for x in first["loc"] or ("",))
        is_union = field in UNIONS and bool(rest)
        place, text = (field, UNIONS[field]) if is_union else (".".join([field, *rest]), first["msg"])
        raise ApiError(400, f"{place}: {text}" if field else text, field or None, first["type"]) from None


async def read_asks(request: ChatRequest | CompletionRequest, endpoint: Endpoint, client: str) -> AskBatch:
    """The asks of a request; ApiError or AskError if this model cannot answer them."""
    if request.model is not None and request.model != endpoint.model:
        raise no_such_model(request.model, endpoint)
    if isinstance(request, ChatRequest):
        return await _read_chat(request, endpoint, client)
    return await _read_completion(request, endpoint, client)


def no_such_model(name: str, endpoint: Endpoint) -> ApiError:
    """Another model is asked for."""
    message = f"The model '{name}' is not served here; this is '{endpoint.model}'."
    return ApiError(404, message, "model", "model_not_found")


async def _read_chat(request: ChatRequest, endpoint: Endpoint, client: str) -> AskBatch:
    turns, urls = _turns(request.messages, endpoint.eyes)
    prompt: Sequence[int] = await asyncio.to_thread(endpoint.text.chat, turns)  # a template may take long
    picture = None
    if endpoint.eyes is not None and urls:
        patches = await asyncio.to_thread(endpoint.eyes.look, urls[0])
        prompt, picture = endpoint.eyes.placed(prompt, patches)
    most = request.max_completion_tokens or request.max_tokens or _room(endpoint, prompt)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    make = partial(Ask, max_tokens=most, client=client, picture=picture)
    return _batch(request, endpoint, [tuple(prompt)], make, logprobs)


async def _read_completion(request: CompletionRequest, endpoint: Endpoint, client: str) -> AskBatch:
    n = request.n or 1
    _check_number(len(request.prompts) * n)
    prompts, echoes = [], []
    for given in request.prompts:
        if isinstance(given, str):
            tokens = tuple(await _beside(len(given), partial(endpoint.text.encode, given)))
            if not tokens:
                raise _invalid("prompt", "a prompt without a token")
        elif (wrong := max(given)) >= endpoint.vocab_size:
            raise _invalid("prompt", f"token {wrong} is none of the model's {endpoint.vocab_size}")
        else:
            tokens = tuple(given)
        prompts.append(tokens)
        if request.echo:
            decode = partial(endpoint.text.decode, tokens)
            echoes += [given if isinstance(given, str) else await _beside(len(tokens), decode)] * n
    most = request.max_tokens
    if most is None:
        most = min([COMPLETION_TOKENS, *(_room(endpoint, prompt) for prompt in prompts)])
    make = partial(Ask, max_tokens=most, client=client)
    return _batch(request, endpoint, prompts, make, request.logprobs, tuple(echoes))


def _turns(messages: Sequence[Message], eyes: "Eyes | None") -> tuple[list[dict[str, str]], list[str]]:
    """The conversation in plain turns, with a mark for its picture, and the picture's address."""
    turns: list[dict[str, str]] = []
    urls: list[str] = []
    for number, message in enumerate(messages):
        content = message.content or ""
        parts = [MessagePart(type="text", text=content)] if isinstance(content, str) else content
        try:
            text = "".join(_part(part, eyes, urls) for part in parts)
        except PydanticCustomError as error:
            raise ApiError(400, f"messages.{number}: {error.message()}", "messages", error.type) from None
        turns.append({"role": ROLES[message.role], "content": text})
    return turns, urls


def _part(part: MessagePart, eyes: "Eyes | None", urls: list[str]) -> str:
    """Text, in which nobody else has written the mark; or the mark of a picture, which `urls` gets."""
    if part.type == "text" and part.text is not None:
        return part.text if eyes is None else part.text.replace(eyes.mark, UNKNOWN)
    if part.type != "image_url" or eyes is None:
        reads = "text" if eyes is None else "text and image_url"
        text = f"a part of type '{part.type[:40]}' is not supported; this model reads {reads}"
        raise PydanticCustomError("unsupported_value", "{text}", {"text": text})
    found = (part.model_extra or {}).get("image_url")
    url = found.get("url") if isinstance(found, dict) else found
    if not isinstance(url, str):
        shape = '{"url": "data:image/png;base64,..."}'
        raise PydanticCustomError("invalid_value", "image_url is {shape}", {"shape": shape})
    if urls:
        raise PydanticCustomError("unsupported_value", "a request shows one picture at most")
    urls.append(url)
    return eyes.mark


async def _beside(length: int, convert: Callable[[], Result]) -> Result:
    return convert() if length < LONG_CHARS else await asyncio.to_thread(convert)


def _batch(
    request: ChatRequest | CompletionRequest,
    endpoint: Endpoint,
    prompts: Sequence[tuple[int, ...]],
    make: Callable[..., Ask],
    logprobs: int | None,
    echoes: tuple[str, ...] = (),
) -> AskBatch:
    n, options = request.n or 1, request.stream_options
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    stop_tokens = tuple(request.stop_token_ids or ())
    least, ignores_end = request.min_tokens or 0, bool(request.ignore_eos)
    biases = tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items())

    def sampling(choice: int) -> Sampling:
        """Choices of one seed differ from one another, and each is the same every time."""
        return Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            seed=None if request.seed is None else (request.seed + choice) & MAX_INT,
            logprobs=logprobs,
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=biases,
        )

    samplings = [sampling(choice) for choice in range(n)]
    asks = tuple(
        make(
            prompt=prompt,
            sampling=x,
            stop=stop,
            stop_tokens=stop_tokens,
            ignores_end=ignores_end,
            min_tokens=least,
        )
        for prompt in prompts
        for x in samplings
    )
    most = asks[0].max_tokens
    if least > most:
        raise _invalid("min_tokens", f"{least} are more than the {most} allowed")
    longest = max(len(prompt) for prompt in prompts)
    if longest + most > endpoint.capacity:
        message = (
            f"This model's maximum context length is {endpoint.capacity} tokens. The prompt has {longest} "
            f"and {most} are asked for. Shorten the prompt or ask for fewer."
        )
        field = "max_tokens" if longest < endpoint.capacity else None
        raise ApiError(400, message, field, "context_length_exceeded")
    return AskBatch(
        asks,
        n,
        isinstance(request, ChatRequest),
        bool(request.stream),
        bool(options and options.include_usage),
        echoes,
    )


def _room(endpoint: Endpoint, prompt: Sequence[int]) -> int:
    """Tokens that an answer may have after a prompt; at least one, which is then refused by name."""
    return max(1, endpoint.capacity - len(prompt))


def _check_number(num: int) -> None:
    if num > MAX_ASKS:
        raise _invalid("n", f"{num} answers in one request; the most are {MAX_ASKS}")


def _invalid(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name}: {what}", name, "invalid_value")


def _unsupported(name: str) -> ApiError:
    what = f"{name}: this value is not supported here; leave the field out"
    return ApiError(400, what, name, "unsupported_value")
