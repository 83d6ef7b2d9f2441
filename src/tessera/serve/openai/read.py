"""From a body to a draft in tokens, and from a draft to asks.

Two prompts with n = 3 are six asks, in OpenAI's order.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tessera.errors import ArtifactError, MissingExtra
from tessera.ir import ServicePlan
from tessera.serve.answer import AnswerService
from tessera.serve.grammar import Grammar, GrammarCompiler
from tessera.serve.openai import bodies
from tessera.serve.openai.errors import ApiError
from tessera.serve.openai.tools import MAX_CALLS, answer_form, calls_form
from tessera.serve.records import Ask, ImageDraft, PromptPicture, Sampling
from tessera.serve.text import MARK, Text

if TYPE_CHECKING:
    from tessera.serve.pictures import PictureReader

MAX_PICTURES, MAX_ASKS, MAX_INPUTS = 16, 128, 2048
MAX_PIXELS = 2**22
# OpenAI's default; a chat's answer may fill the context.
COMPLETION_TOKENS = 16
MAX_NOTED = 2**19
UNKNOWN = "\ufffd"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("seed", "presence_penalty", "frequency_penalty"),
)
# Fields of generation_config.json that change what `generate` gives, and values without effect.
UNUSED = (
    *("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("guidance_scale", "min_new_tokens", "no_repeat_ngram_size", "num_beams", "penalty_alpha"),
    *("sequence_bias", "typical_p"),
)
NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {})


@dataclass(frozen=True, slots=True)
class ModelCard:
    model: str
    text: Text
    capacity: int
    vocab_size: int
    # For a picture; empty: text only.
    mark: str = ""
    # For an encoder; a length of 0 means any.
    prefix: str = ""
    vector_sizes: tuple[int, ...] = ()
    # text, vectors or pictures.
    makes: str = "text"
    adapters: tuple[str, ...] = ()
    # For what requests leave out.
    defaults: bodies.FolderFields = bodies.NO_DEFAULTS

    @property
    def names(self) -> tuple[str, ...]:
        """The base model, then its adapters."""
        return (self.model, *self.adapters)


@dataclass(frozen=True)
class Endpoint:
    card: ModelCard
    service: AnswerService
    created: int
    plans: Callable[[], Sequence[ServicePlan]] = tuple
    picture_reader: "PictureReader | None" = None
    grammars: GrammarCompiler | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """One request with its prompts in tokens."""

    request: bodies.ChatRequest | bodies.CompletionRequest
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    # Form of the answer, with the field that requested it; empty: any text.
    grammar: str
    place: str
    # By ask; empty without `echo`.
    echoes: tuple[str, ...] = ()
    # Data URLs, in the order of their marks.
    urls: tuple[str, ...] = ()
    # Tools that the answer may call.
    tools: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Answers per prompt."""
        return self.request.n or 1

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, bodies.ChatRequest)

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echoes) and self.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class EmbeddingDraft:
    inputs: tuple[tuple[int, ...], ...]
    is_base64: bool
    size: int | None


def read_chat(raw: bytes, card: ModelCard) -> Draft:
    request = bodies.parse(bodies.ChatRequest, raw, card.names)
    turns, urls = _turns(request.messages, card.mark)
    tools = request.callable_tools
    shown = [_shown_tool(tool) for tool in (request.tools or () if tools else ())]
    prompt = tuple(card.text.chat(turns, shown, card.capacity, bodies.template_variables(request)))
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    names = tuple(tool.function.name for tool in tools)
    sampling, form = _sampling(request, card, logprobs), _form(request, tools)
    return Draft(request, (prompt,), sampling, *form, urls=tuple(urls), tools=names)


def read_completion(raw: bytes, card: ModelCard) -> Draft:
    request = bodies.parse(bodies.CompletionRequest, raw, card.names)
    n, inputs = request.n or 1, bodies.apart(request.prompt, "prompt")
    if (num := len(inputs) * n) > MAX_ASKS:
        raise bodies.invalid("n", f"at most {MAX_ASKS} answers per request, got {num}")
    prompts, echoes = [], []
    for prompt in inputs:
        tokens = _tokens(prompt, card, "prompt")
        prompts.append(tokens)
        if request.echo and len(tokens) <= card.capacity:
            echoes += [prompt if isinstance(prompt, str) else card.text.decode(tokens)] * n
    sampling = _sampling(request, card, request.logprobs)
    return Draft(request, tuple(prompts), sampling, *_form(request, ()), tuple(echoes))


def _tokens(prompt: str | list[int], card: ModelCard, field: str) -> tuple[int, ...]:
    """A prompt far too long is cut above the capacity."""
    if isinstance(prompt, str):
        tokens = tuple(card.text.encode(prompt, card.capacity))
        if not tokens:
            raise bodies.invalid(field, "the prompt has no token")
        return tokens
    _check_ids(prompt, card, field)
    return tuple(prompt[: card.capacity + 1])


def _check_ids(tokens: Sequence[int], card: ModelCard, field: str) -> None:
    if (wrong := min(tokens, default=0)) < 0:
        raise bodies.invalid(field, f"token {wrong} is negative; token ids begin at 0")
    if (wrong := max(tokens, default=0)) >= card.vocab_size:
        raise bodies.invalid(field, f"token {wrong} is not below the vocabulary size {card.vocab_size}")


def read_embedding(raw: bytes, card: ModelCard) -> EmbeddingDraft:
    request = bodies.parse(bodies.EmbeddingRequest, raw, card.names)
    inputs, size = bodies.apart(request.input, "input"), request.dimensions
    if len(inputs) > MAX_INPUTS:
        raise bodies.invalid("input", f"at most {MAX_INPUTS} inputs per request, got {len(inputs)}")
    if size is not None and size not in card.vector_sizes and 0 not in card.vector_sizes:
        remedy = f"use {', '.join(map(str, card.vector_sizes))}" if card.vector_sizes else "leave it out"
        raise bodies.invalid("dimensions", f"this model's vectors cannot be cut to {size}; {remedy}")
    tokens = []
    for prompt in inputs:
        if prompt == "":
            raise bodies.invalid("input", "a text is empty")
        tokens.append(_tokens(card.prefix + prompt if isinstance(prompt, str) else prompt, card, "input"))
    longest = max(map(len, tokens))
    if longest > card.capacity:
        message = f"This model's maximum context length is {card.capacity} tokens. An input has more."
        raise ApiError(400, message, "input", "context_length_exceeded")
    return EmbeddingDraft(tuple(tokens), request.encoding_format == "base64", size)


def read_image(raw: bytes, card: ModelCard) -> ImageDraft:
    request = bodies.parse(bodies.ImageRequest, raw, card.names)
    width = height = None
    if request.size not in (None, "auto"):
        width, height = map(int, str(request.size).split("x"))
        if width * height > MAX_PIXELS:
            raise bodies.invalid("size", f"more than {MAX_PIXELS:,} pixels")
    options = {
        "width": width,
        "height": height,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
    }
    return ImageDraft(request.prompt, request.n or 1, request.seed, request.output_format or "png", options)


def tokenize(raw: bytes, card: ModelCard) -> bytes:
    request = bodies.parse(bodies.TokenizeRequest, raw, card.names)
    if request.messages is not None:
        turns, _ = _turns(request.messages, card.mark)
        shown = [_shown_tool(tool) for tool in request.tools or ()]
        tokens = card.text.chat(turns, shown, bodies.MAX_VALUES, bodies.template_variables(request))
    else:
        adds = request.add_special_tokens is not False
        tokens = card.text.encode(request.prompt or "", bodies.MAX_VALUES, adds)
    if len(tokens) > bodies.MAX_VALUES:
        raise bodies.invalid("prompt", f"it has more than {bodies.MAX_VALUES:,} tokens")
    strings = None
    if request.return_token_strs:
        strings = [card.text.token_bytes(token).decode(errors="replace") for token in tokens]
    answer = {"count": len(tokens), "max_model_len": card.capacity, "tokens": tokens, "token_strs": strings}
    return msgspec.json.encode(answer)


def detokenize(raw: bytes, card: ModelCard) -> bytes:
    request = bodies.parse(bodies.DetokenizeRequest, raw, card.names)
    _check_ids(request.tokens, card, "tokens")
    return msgspec.json.encode({"prompt": card.text.decode(request.tokens)})


def _form(
    request: bodies.ChatRequest | bodies.CompletionRequest, tools: Sequence[bodies.Tool]
) -> tuple[str, str]:
    form = request.response_format
    schema = None if form is None else form.schema_of_answer
    answer = "" if schema is None else answer_form(schema)
    if not isinstance(request, bodies.ChatRequest) or not (request.is_forced or (tools and answer)):
        return (f"start: {answer}", "response_format") if answer else ("", "")
    is_single = request.parallel_tool_calls is False or isinstance(request.tool_choice, bodies.Tool)
    schemas = {x.function.name: x.function.parameters or NO_PARAMETERS for x in tools}
    calls = calls_form(schemas, 1 if is_single else MAX_CALLS)
    if request.is_forced:
        return f"start: calls\n{calls}", "tools"
    return f"start: answer | calls\nanswer: {answer}\n{calls}", "response_format"


def _shown_tool(tool: bodies.Tool) -> dict[str, Any]:
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or NO_PARAMETERS
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _turns(messages: Sequence[bodies.Message], mark: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Turns with a mark per picture, and the pictures' URLs."""
    turns: list[dict[str, Any]] = []
    urls: list[str] = []
    for number, message in enumerate(messages):
        content = message.content or ""
        parts = [bodies.MessagePart(type="text", text=content)] if isinstance(content, str) else content
        turn: dict[str, Any] = {"role": bodies.ROLES[message.role]}
        turn["content"] = "".join(_part(part, mark, urls, number) for part in parts)
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, number) for call in message.tool_calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                turn[name] = value
        turns.append(turn)
    return turns, urls


def _wrong(number: int, what: str, code: str = "unsupported_value") -> ApiError:
    return ApiError(400, f"messages.{number}: {what}", "messages", code)


def _call(call: bodies.ToolCall, number: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(number, "the arguments of a call must be a JSON object", "invalid_value")
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _part(part: bodies.MessagePart, mark: str, urls: list[str], number: int) -> str:
    """Text without marks that the client wrote; or the mark of a picture, whose URL goes to `urls`."""
    if part.type == "text" and part.text is not None:
        return part.text.replace(MARK, UNKNOWN)
    if part.type != "image_url" or not mark:
        reads = "text and image_url" if mark else "text"
        raise _wrong(number, f"a part of type '{part.type[:40]}' is not supported; this model reads {reads}")
    image = part.image_url
    url = image.url if isinstance(image, bodies.ImageUrl) else image
    if url is None:
        raise _wrong(number, "image_url is missing", "missing_required_parameter")
    if len(urls) == MAX_PICTURES:
        raise _wrong(number, f"at most {MAX_PICTURES} pictures per request")
    urls.append(url)
    return mark


def _sampling(
    request: bodies.ChatRequest | bodies.CompletionRequest, card: ModelCard, logprobs: int | None
) -> Sampling:
    named = ((name, getattr(body, name, None)) for body in (card.defaults, request) for name in SAMPLED)
    options: dict[str, Any] = {name: value for name, value in named if value is not None}
    bias = {int(token): bias for token, bias in (request.logit_bias or {}).items()}
    bias |= {x: -math.inf for x in card.defaults.suppress_tokens or () if x < card.vocab_size}
    top_k = max(0, int(options.pop("top_k", 0)))
    return Sampling(top_k=top_k, logprobs=logprobs, logit_bias=tuple(bias.items()), **options)


def folder_defaults(folder: str, are_read: bool = True) -> bodies.FolderFields:
    """Sampling by generation_config.json."""
    from tessera.capture.models.checkpoint import read_json

    path = Path(folder) / "generation_config.json"
    document = read_json(path) if are_read and path.is_file() else {}
    if unused := [name for name in UNUSED if document.get(name) not in NEUTRAL]:
        print(f"warning: {path}: without effect here: {', '.join(unused)}", file=sys.stderr)
    try:
        return msgspec.convert(document, bodies.FolderFields)
    except msgspec.ValidationError as error:
        remedy = "Correct it, or start with --generation-config none."
        raise ArtifactError(str(error), remedy, str(path)) from None


async def make_asks(draft: Draft, endpoint: Endpoint, client: str) -> tuple[Ask, ...]:
    prompts, pictures = draft.prompts, tuple[PromptPicture, ...]()
    if draft.urls:
        prompt, pictures = await _with_pictures(draft, endpoint)
        prompts = (prompt,)
    most = _max_tokens(draft, endpoint, prompts)
    grammar = await _grammar(draft, endpoint) if draft.grammar else None
    # Choices differ, and each is reproducible.
    seed = draft.sampling.seed
    seeds = [None if seed is None else (seed + choice) & bodies.MAX_INT for choice in range(draft.n)]
    samplings = [replace(draft.sampling, seed=number) for number in seeds]
    notes = _prompt_logprobs(draft, prompts)
    request, stop = draft.request, draft.request.stop or ()
    continues = not isinstance(request, bodies.ChatRequest) or bool(request.continue_final_message)
    return tuple(
        Ask(
            prompt,
            most if notes is None else max(1, most),
            sampling,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_tokens=tuple(request.stop_token_ids or ()),
            ignores_end=bool(request.ignore_eos),
            min_tokens=request.min_tokens or 0,
            client=client,
            pictures=pictures,
            grammar=grammar,
            prompt_logprobs=None if choice else notes,
            adapter=endpoint.card.names.index(request.model) if request.model else 0,
            continues=continues,
        )
        for prompt in prompts
        for choice, sampling in enumerate(samplings)
    )


async def _with_pictures(
    draft: Draft, endpoint: Endpoint
) -> tuple[tuple[int, ...], tuple[PromptPicture, ...]]:
    reader = endpoint.picture_reader
    assert reader is not None, "other models are sent no pictures"
    pixels = [await asyncio.to_thread(reader.pixels_of, url) for url in draft.urls]
    prompt, pictures = reader.placed(draft.prompts[0], pixels)
    return tuple(prompt), pictures


async def _grammar(draft: Draft, endpoint: Endpoint) -> Grammar:
    if endpoint.grammars is None:
        missing = MissingExtra("llguidance", "grammar")
        raise ApiError(400, f"{draft.place}: {missing}", draft.place, "missing_extra")
    return await endpoint.grammars.compiled(draft.grammar, draft.place)


def _prompt_logprobs(draft: Draft, prompts: Sequence[Sequence[int]]) -> int | None:
    """For the first answer only."""
    numbers = [draft.request.prompt_logprobs, draft.sampling.logprobs if draft.echoes_logprobs else None]
    listed = [number for number in numbers if number is not None]
    if not listed:
        return None
    num = sum(map(len, prompts)) * (1 + max(listed))
    if num > MAX_NOTED:
        field = "logprobs" if draft.request.prompt_logprobs is None else "prompt_logprobs"
        raise bodies.invalid(field, f"at most {MAX_NOTED:,} prompt logprobs per request, got {num:,}")
    return max(listed)


def _max_tokens(draft: Draft, endpoint: Endpoint, prompts: Sequence[Sequence[int]]) -> int:
    longest = max(map(len, prompts))
    most = draft.request.max_tokens
    if most is None:
        room = max(1, endpoint.card.capacity - longest)  # 0 left: the prompt is refused below
        most = room if draft.is_chat else min(COMPLETION_TOKENS, room)
    if (least := draft.request.min_tokens or 0) > most:
        raise bodies.invalid("min_tokens", f"must be at most max_tokens ({most}), got {least}")
    if longest + most <= endpoint.card.capacity:
        return most
    has = f"more than {endpoint.card.capacity}" if longest > endpoint.card.capacity else str(longest)
    message = (
        f"This model's maximum context length is {endpoint.card.capacity} tokens. The prompt has {has} "
        f"and {most} are asked for. Shorten the prompt or ask for fewer."
    )
    field = "max_tokens" if longest < endpoint.card.capacity else None
    raise ApiError(400, message, field, "context_length_exceeded")
