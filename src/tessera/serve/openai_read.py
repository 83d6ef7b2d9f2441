"""From a body to a draft: the bodies of OpenAI's routes, checked strictly and put into tokens.

    read_chat, read_completion, read_embedding, read_image    (raw body, card) -> a draft
    tokenize, detokenize                                      (raw body, card) -> the answer itself

These run beside the event loop, in a thread or in a process of their own (`reading`); `asking` makes asks of
a draft. Types are strict: "5" is no number. A field that is not declared here is ignored, as vLLM does,
unless ignoring it would change the answer: those are named in `REFUSED`, with the values that ask for
nothing. What is wrong is told with the field's name. Prompts and choices multiply: two prompts with n = 3 are
six asks, in OpenAI's order.

A message's parts are joined as they come; a mark stands for a picture until the prompt is in tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tessera.serve.limits import check_parts
from tessera.serve.openai_errors import ApiError
from tessera.serve.records import Sampling
from tessera.serve.text import Text
from tessera.serve.tools import MAX_CALLS, answer_form, calls_form

# Of OpenAI: choices of one request, and alternatives of a token.
MAX_CHOICES = 128
MAX_PICTURES = 16
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
# Of OpenAI: tools of one request, and texts to embed.
MAX_TOOLS = 128
MAX_INPUTS = 2048
# Of one picture that is made.
MAX_PIXELS = 2**22
UNKNOWN = "\ufffd"

# Field -> values that ask for nothing. Any other value is answered with 400.
REFUSED: dict[str, tuple[Any, ...]] = {
    name: (None, *harmless)
    for names, harmless in (
        ("allowed_token_ids audio chat_template guided_choice guided_grammar guided_json guided_regex", ()),
        ("prompt_embeds reasoning_effort structured_outputs truncate_prompt_tokens", ()),
        ("verbosity web_search_options", ()),
        ("bad_words documents functions logits_processors", ([],)),
        ("chat_template_kwargs", ({},)),
        ("continue_final_message include_stop_str_in_output use_beam_search", (False,)),
        ("add_generation_prompt skip_special_tokens", (True,)),
        ("length_penalty", (1,)),
        ("function_call", ("none", "auto")),
        ("modalities", ([], ["text"])),
        ("suffix", ("",)),
    )
    for name in names.split()
}
# Of a union pydantic tells what the first kind lacks, which is not what the client meant.
UNIONS = {
    **dict.fromkeys(
        ("prompt", "input"),
        "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
    ),
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
    "stop": f"a text, or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters",
}
# Fields of a request that are those of `Sampling`; where nobody says, its own.
SAMPLED = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Of a tool without parameters.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
)
# JSON knows texts as keys only.
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Body(_Part):
    model: str | None = Field(None, description="The served model's name; may be left out.")


class MessagePart(_Part):
    """A piece of a message: text, or a picture where the model sees."""

    type: str
    text: str | None = None


class CalledFunction(_Part):
    """A function with the arguments of one call, in JSON."""

    name: ToolName
    arguments: str


class ToolCall(_Part):
    """A call of a tool that an assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Part):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> "Message":
        if self.role not in ROLES or (self.model_extra or {}).get("function_call"):
            raise PydanticCustomError("unsupported_value", "functions are not supported; use tools")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("invalid_value", "only an assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "content is missing")
        return self


class Function(_Part):
    """What a tool does, and the schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    """A function by its name."""

    name: str


class NamedTool(_Part):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Part):
    """A schema that the answer follows."""

    name: str | None = None
    document: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Part):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None: any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.document

    @model_validator(mode="after")
    def _is_whole(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("missing", "json_schema belongs to its type, and only to that")
        return self


class StreamOptions(_Part):
    """What else a stream tells."""

    include_usage: bool | None = None


class _GenerationRequest(_Body):
    """What both endpoints take. None is the same as not given."""

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
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Of vLLM.")
    user: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> "_GenerationRequest":
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise _unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "only of use with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise _invalid("prompt_logprobs", "are told with a whole answer only, without stream")
        return self


class ChatRequest(_GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "only of use with logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > len(set(names)):
            raise _invalid("tools", "two of them have one name")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise _invalid("tool_choice", f"'{choice.function.name[:64]}' is none of the tools")
        if choice == "required" and not names:
            raise _invalid("tool_choice", "there are no tools")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the answer may call."""
        if self.tool_choice == "none":
            return []
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return [tool for tool in self.tools or () if name in (None, tool.function.name)]

    @property
    def is_forced(self) -> bool:
        """True if the answer is calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class CompletionRequest(_GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of")
        if self.echo and self.logprobs is not None and self.stream:
            raise _invalid("echo", "with logprobs only of a whole answer, without stream")
        if self.max_tokens == 0 and not self.echo:
            raise _invalid("max_tokens", "0 asks for no answer; use 1 or more, or echo")
        return self


def _apart(given: Prompts) -> list[str | list[int]]:
    """Prompts apart: a list of numbers is one prompt, a list of anything else several."""
    if isinstance(given, str):
        return [given]
    numbers = [x for x in given if isinstance(x, int)]
    return [numbers] if numbers else [x for x in given if not isinstance(x, int)]


class TokenizeRequest(_Body):
    """The body of /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096, fail_fast=True)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_special_tokens: bool | None = Field(None, description="Of a prompt: what stands before every prompt.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise _invalid("prompt", "send a prompt or messages, one of them")
        if (self.model_extra or {}).get("add_generation_prompt") is False:
            raise _unsupported("add_generation_prompt")
        return self


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    tokens: list[TokenId] = Field(fail_fast=True)


class EmbeddingRequest(_Body):
    """The body of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    user: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> "EmbeddingRequest":
        if (self.model_extra or {}).get("truncate_prompt_tokens") is not None:
            raise _unsupported("truncate_prompt_tokens")
        return self


class ImageRequest(_Body):
    """The body of /v1/images/generations."""

    prompt: str = Field(min_length=1, max_length=32_000)
    n: int | None = Field(None, ge=1, le=10)
    size: str | None = Field(None, pattern=r"^(auto|[1-9][0-9]{1,3}x[1-9][0-9]{1,3})$")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    negative_prompt: str | None = Field(None, max_length=32_000, description="Of diffusers, as those below.")
    num_inference_steps: int | None = Field(None, ge=1, le=200)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, le=2**62)
    user: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> "ImageRequest":
        if self.response_format == "url":
            raise _invalid("response_format", "pictures come as b64_json: nothing is kept to link to")
        if (self.model_extra or {}).get("stream"):
            raise _unsupported("stream")
        return self


Body = TypeVar("Body", bound=_Body)


@dataclass(frozen=True, slots=True)
class Card:
    """What reading has to know of the model behind the address."""

    model: str
    text: Text
    # Tokens of a prompt and its answer together, at most; tokens have numbers below this.
    capacity: int
    vocab_size: int
    # Stands for a picture in a conversation; empty: the model reads text only.
    mark: str = ""
    # Of an encoder: stands before every text, and the lengths that a vector may be cut to (0: any).
    prefix: str = ""
    vector_sizes: tuple[int, ...] = ()


class Draft(msgspec.Struct, frozen=True, tag=True):
    """One request in tokens. Of a prompt that is far too long only the beginning is there."""

    prompts: tuple[tuple[int, ...], ...]
    # Answers a prompt.
    n: int
    # None: nobody said.
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignores_end: bool
    min_tokens: int
    is_chat: bool
    is_stream: bool
    includes_usage: bool
    # Of each ask: the prompt's text to give back before the answer; empty without `echo`.
    echoes: tuple[str, ...] = ()
    # Alternatives to report for each token of the prompt after its first; None: nothing.
    prompt_logprobs: int | None = None
    # Addresses of the pictures that marks stand for.
    urls: tuple[str, ...] = ()
    # The form of the answer, as a grammar, and the field that asked for it; empty: any form.
    grammar: str = ""
    place: str = ""
    # Tools that the answer may call, and whether it must.
    tools: tuple[str, ...] = ()
    is_forced: bool = False

    @property
    def echoes_logprobs(self) -> bool:
        """True if the prompt is given back with those of its tokens."""
        return bool(self.echoes) and self.sampling.logprobs is not None


class EmbeddingDraft(msgspec.Struct, frozen=True, tag=True):
    """A request for embeddings, in tokens."""

    inputs: tuple[tuple[int, ...], ...]
    is_base64: bool
    # Numbers of a vector; None: all.
    size: int | None


class ImageDraft(msgspec.Struct, frozen=True, tag=True):
    """A request for pictures."""

    prompt: str
    n: int
    seed: int | None
    # png, jpeg or webp.
    form: str
    # What else a pipeline is told, by its own names; None: nothing.
    options: dict[str, int | float | str | None]


def parse(kind: type[Body], raw: bytes, card: Card) -> Body:
    """A body for this model, or the first thing that is wrong with it."""
    check_parts(raw)
    try:
        request = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field, *rest = (str(x) for x in first["loc"] or ("",))
        is_union = field in UNIONS and bool(rest)
        place, text = (field, UNIONS[field]) if is_union else (".".join([field, *rest]), first["msg"])
        raise ApiError(400, f"{place}: {text}" if field else text, field or None, first["type"]) from None
    if request.model not in (None, card.model):
        raise no_such_model(str(request.model), card.model)
    return request


def no_such_model(name: str, served: str) -> ApiError:
    """Another model is asked for."""
    message = f"The model '{name}' is not served here; this is '{served}'."
    return ApiError(404, message, "model", "model_not_found")


def read_chat(raw: bytes, card: Card) -> Draft:
    """The body of /v1/chat/completions."""
    request = parse(ChatRequest, raw, card)
    turns, urls = _turns(request.messages, card.mark)
    tools = request.callable_tools
    shown = [_shown_tool(tool) for tool in (request.tools or () if tools else ())]
    prompt = tuple(card.text.chat(turns, shown, card.capacity))
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    most = request.max_completion_tokens or request.max_tokens
    grammar, place = _form(request, tools)
    names = tuple(tool.function.name for tool in tools)
    return _draft(
        request,
        (prompt,),
        most,
        logprobs,
        urls=tuple(urls),
        grammar=grammar,
        place=place,
        tools=names,
        is_forced=request.is_forced,
    )


def read_completion(raw: bytes, card: Card) -> Draft:
    """The body of /v1/completions."""
    request = parse(CompletionRequest, raw, card)
    n, apart = request.n or 1, _apart(request.prompt)
    if (num := len(apart) * n) > MAX_ASKS:
        raise _invalid("n", f"{num} answers in one request; the most are {MAX_ASKS}")
    prompts, echoes = [], []
    for given in apart:
        tokens = _tokens(given, card, "prompt")
        prompts.append(tokens)
        if request.echo and len(tokens) <= card.capacity:
            echoes += [given if isinstance(given, str) else card.text.decode(tokens)] * n
    grammar, place = _form(request, ())
    return _draft(
        request,
        tuple(prompts),
        request.max_tokens,
        request.logprobs,
        echoes=tuple(echoes),
        grammar=grammar,
        place=place,
    )


def _tokens(given: str | list[int], card: Card, field: str) -> tuple[int, ...]:
    """A prompt in tokens; of one that is far too long, some more than there is room for."""
    if isinstance(given, str):
        found = tuple(card.text.encode(given, card.capacity))
        if not found:
            raise _invalid(field, "a prompt without a token")
        return found
    if (wrong := max(given)) >= card.vocab_size:
        raise _invalid(field, f"token {wrong} is none of the model's {card.vocab_size}")
    return tuple(given[: card.capacity + 1])


def read_embedding(raw: bytes, card: Card) -> EmbeddingDraft:
    """The body of /v1/embeddings."""
    request = parse(EmbeddingRequest, raw, card)
    given, size = _apart(request.input), request.dimensions
    if len(given) > MAX_INPUTS:
        raise _invalid("input", f"{len(given)} inputs in one request; the most are {MAX_INPUTS}")
    if size is not None and size not in card.vector_sizes and 0 not in card.vector_sizes:
        known = f"use {', '.join(map(str, card.vector_sizes))}" if card.vector_sizes else "leave it out"
        raise _invalid("dimensions", f"this model's vectors are not made to be cut to {size}; {known}")
    inputs = []
    for one in given:
        if one == "":
            raise _invalid("input", "an empty text")
        inputs.append(_tokens(card.prefix + one if isinstance(one, str) else one, card, "input"))
    longest = max(map(len, inputs))
    if longest > card.capacity:
        message = f"This model's maximum context length is {card.capacity} tokens. An input has more."
        raise ApiError(400, message, "input", "context_length_exceeded")
    return EmbeddingDraft(tuple(inputs), request.encoding_format == "base64", size)


def read_image(raw: bytes, card: Card) -> ImageDraft:
    """The body of /v1/images/generations."""
    request = parse(ImageRequest, raw, card)
    width = height = None
    if request.size not in (None, "auto"):
        width, height = map(int, str(request.size).split("x"))
        if width * height > MAX_PIXELS:
            raise _invalid("size", f"more than {MAX_PIXELS:,} pixels")
    options = {
        "width": width,
        "height": height,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
    }
    return ImageDraft(request.prompt, request.n or 1, request.seed, request.output_format or "png", options)


def tokenize(raw: bytes, card: Card) -> bytes:
    """The answer of /tokenize to its body."""
    request = parse(TokenizeRequest, raw, card)
    if request.messages is not None:
        turns, _ = _turns(request.messages, card.mark)
        tokens = card.text.chat(turns, [_shown_tool(tool) for tool in request.tools or ()])
    else:
        tokens = card.text.encode(request.prompt or "", adds=request.add_special_tokens is not False)
    strings = None
    if request.return_token_strs:
        strings = [card.text.token_bytes(token).decode(errors="replace") for token in tokens]
    found = {"count": len(tokens), "max_model_len": card.capacity, "tokens": tokens, "token_strs": strings}
    return json.dumps(found, separators=(",", ":")).encode()


def detokenize(raw: bytes, card: Card) -> bytes:
    """The answer of /detokenize to its body."""
    request = parse(DetokenizeRequest, raw, card)
    if request.tokens and (wrong := max(request.tokens)) >= card.vocab_size:
        raise _invalid("tokens", f"token {wrong} is none of the model's {card.vocab_size}")
    return json.dumps({"prompt": card.text.decode(request.tokens)}).encode()


def _form(request: ChatRequest | CompletionRequest, tools: Sequence[Tool]) -> tuple[str, str]:
    """The grammar of the answer and the field that asked for it; nothing if any text will do."""
    form = request.response_format
    schema = None if form is None else form.schema_of_answer
    answer = "" if schema is None else answer_form(schema)
    if not isinstance(request, ChatRequest) or not (request.is_forced or (tools and answer)):
        return (f"start: {answer}", "response_format") if answer else ("", "")
    is_single = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
    schemas = {x.function.name: x.function.parameters or NO_PARAMETERS for x in tools}
    calls = calls_form(schemas, 1 if is_single else MAX_CALLS)
    if request.is_forced:
        return f"start: calls\n{calls}", "tools"
    return f"start: answer | calls\nanswer: {answer}\n{calls}", "response_format"


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates know it."""
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or NO_PARAMETERS
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _turns(messages: Sequence[Message], mark: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as templates know it, with a mark for each picture, and their addresses."""
    turns: list[dict[str, Any]] = []
    urls: list[str] = []
    for number, message in enumerate(messages):
        content = message.content or ""
        parts = [MessagePart(type="text", text=content)] if isinstance(content, str) else content
        turn: dict[str, Any] = {"role": ROLES[message.role]}
        turn["content"] = "".join(_part(part, mark, urls, number) for part in parts)
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, number) for call in message.tool_calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                turn[name] = value
        turns.append(turn)
    return turns, urls


def _wrong(number: int, what: str, code: str = "unsupported_value") -> ApiError:
    """Of a message."""
    return ApiError(400, f"messages.{number}: {what}", "messages", code)


def _call(call: ToolCall, number: int) -> dict[str, Any]:
    """A call as templates know it: with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(number, "the arguments of a call are no JSON object", "invalid_value")
    known = {} if call.id is None else {"id": call.id}
    return {**known, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _part(part: MessagePart, mark: str, urls: list[str], number: int) -> str:
    """Text, in which nobody else has written the mark; or the mark of a picture, which `urls` gets."""
    if part.type == "text" and part.text is not None:
        return part.text.replace(mark, UNKNOWN) if mark else part.text
    if part.type != "image_url" or not mark:
        reads = "text and image_url" if mark else "text"
        raise _wrong(number, f"a part of type '{part.type[:40]}' is not supported; this model reads {reads}")
    found = (part.model_extra or {}).get("image_url")
    url = found.get("url") if isinstance(found, dict) else found
    if not isinstance(url, str):
        raise _wrong(number, 'image_url is {"url": "data:image/png;base64,..."}', "invalid_value")
    if len(urls) == MAX_PICTURES:
        raise _wrong(number, f"a request shows {MAX_PICTURES} pictures at most")
    urls.append(url)
    return mark


def _draft(
    request: ChatRequest | CompletionRequest,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int | None,
    logprobs: int | None,
    **more: Any,
) -> Draft:
    options = request.stream_options
    return Draft(
        prompts,
        request.n or 1,
        max_tokens,
        _sampling(request, logprobs),
        (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        tuple(request.stop_token_ids or ()),
        bool(request.ignore_eos),
        request.min_tokens or 0,
        isinstance(request, ChatRequest),
        bool(request.stream),
        bool(options and options.include_usage),
        prompt_logprobs=request.prompt_logprobs,
        **more,
    )


def _sampling(request: ChatRequest | CompletionRequest, logprobs: int | None) -> Sampling:
    given = {name: value for name in SAMPLED if (value := getattr(request, name)) is not None}
    bias = tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items())
    return Sampling(top_k=max(0, request.top_k or 0), logprobs=logprobs, logit_bias=bias, **given)


def _invalid(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name}: {what}", name, "invalid_value")


def _unsupported(name: str) -> ApiError:
    what = f"{name}: this value is not supported here; leave the field out"
    return ApiError(400, what, name, "unsupported_value")
