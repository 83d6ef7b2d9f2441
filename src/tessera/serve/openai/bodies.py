"""Request bodies of OpenAI's routes, decoded strictly by msgspec: an error names the field.

Unknown fields of a body are refused, because ignoring one could change the answer; those of `FIELDS` are
accepted with values without effect. Unknown fields inside messages and tools are ignored, as clients send
back answers of other servers. null is a missing field.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from tessera.ir.files import packaged
from tessera.serve.openai.errors import ApiError

# OpenAI's limits.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
# OpenAI allows four stop strings; each is searched for after every token.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
# Tokens with a bias; stop tokens.
MAX_MARKED = 1024
MAX_MESSAGES = 4096
MAX_INT = 2**63 - 1
# Above any model's positions.
MAX_TOKENS = 2**31 - 1
# Decoding takes well under 100 ms.
MAX_PARTS, MAX_VALUES = 2**14, 2**19

# Further fields -> values without effect; null: all of them.
FIELDS = packaged("serve.openai", "fields.json", dict[str, list[Any] | None])
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
PROMPTS = "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty"
PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(.*?)`$")
MISSING = re.compile(r"missing required field `(\w+)`")

StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
# Ids in a prompt are compared with the vocabulary, where a refusal can name them.
AnyId = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
# Texts, token ids, or lists of token ids: `apart` refuses a mixture.
Prompts = str | list[str | AnyId | list[AnyId]]
# JSON has texts as keys only.
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,18}$")]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
FIELDS_DECODER = msgspec.json.Decoder(dict[str, Raw])


class ImageUrl(Struct):
    url: str


class MessagePart(Struct):
    """Text, or a picture for vision models."""

    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None


class CalledFunction(Struct):
    name: ToolName
    # JSON.
    arguments: str


class ToolCall(Struct):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Not supported; use tools.
    function_call: None = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")


class ToolFunction(Struct):
    name: ToolName
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None


class Tool(Struct):
    type: Literal["function"]
    function: ToolFunction


class JsonSchema(Struct):
    document: dict[str, Any] = msgspec.field(name="schema")
    name: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with "type": "json_schema", and only with that')

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.document


class StreamOptions(Struct):
    include_usage: bool | None = None


Conversation = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class _Body(Struct, kw_only=True):
    model: str | None = None
    user: str | None = None


class SampledFields(_Body, kw_only=True):
    """Fields that a folder's generation_config.json gives too."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    # -1 and 0: all tokens.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None


class FolderFields(SampledFields, kw_only=True):
    # Never chosen.
    suppress_tokens: list[TokenId] | None = None


NO_DEFAULTS = FolderFields()


class _GenerationRequest(SampledFields, kw_only=True):
    """Fields of both endpoints; names that OpenAI does not have are vLLM's."""

    n: Choices | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=MAX_MARKED)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_MARKED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: NumTokens | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: NumTop | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only of use with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "only without stream")


class ChatRequest(_GenerationRequest, kw_only=True):
    messages: Conversation
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_tokens: SomeTokens | None = None
    max_completion_tokens: SomeTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "only of use with logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > len(set(names)):
            raise invalid("tools", "two tools have the same name")
        choice = self.tool_choice
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise invalid("tool_choice", f"there is no tool '{choice.function.name[:64]}'")
        if choice == "required" and not names:
            raise invalid("tool_choice", "there are no tools")

    @property
    def callable_tools(self) -> list[Tool]:
        choice = self.tool_choice
        if choice == "none":
            return []
        name = choice.function.name if isinstance(choice, Tool) else None
        return [tool for tool in self.tools or () if name in (None, tool.function.name)]

    @property
    def is_forced(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)


class CompletionRequest(_GenerationRequest, kw_only=True):
    prompt: Prompts
    max_tokens: NumTokens | None = None
    logprobs: NumTop | None = None
    echo: bool | None = None
    best_of: Choices | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of")
        if self.echo and self.logprobs is not None and self.stream:
            raise invalid("echo", "with logprobs only without stream")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "0 asks for no answer; use 1 or more, or echo")


class TokenizeRequest(_Body, kw_only=True):
    prompt: str | None = None
    messages: Conversation | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "send either a prompt or messages")


class DetokenizeRequest(_Body, kw_only=True):
    tokens: list[TokenId]


class EmbeddingRequest(_Body, kw_only=True):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: SomeTokens | None = None


class ImageRequest(_Body, kw_only=True):
    """The fields after output_format are diffusers'."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: Annotated[str, Meta(pattern="^(auto|[1-9][0-9]{1,3}x[1-9][0-9]{1,3})$")] | None = None
    # "url" is refused: pictures are not kept.
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    negative_prompt: Annotated[str, Meta(max_length=32_000)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=200)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**62)] | None = None


Body = TypeVar("Body", bound=_Body)
# Made at import, before the first thread: msgspec inspects a type at its first use, and crashes the process
# if a second thread uses the type meanwhile.
DECODERS: dict[type[_Body], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        *(ChatRequest, CompletionRequest, EmbeddingRequest, ImageRequest),
        *(TokenizeRequest, DetokenizeRequest),
    )
}


def parse(kind: type[Body], raw: bytes, served: Sequence[str]) -> Body:
    check_parts(raw)
    try:
        if raw.lstrip()[:1] == b"{":
            _check_names(FIELDS_DECODER.decode(raw), kind.__struct_fields__)
        request: Body = DECODERS[kind].decode(raw)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if request.model is not None and request.model not in served:
        raise no_such_model(str(request.model), served[0])
    return request


def template_variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    variables |= request.chat_template_kwargs or {}
    continues, generates = request.continue_final_message, request.add_generation_prompt
    if continues and generates:
        raise invalid("continue_final_message", "only of use with add_generation_prompt: false")
    if continues or generates is not None:
        variables |= {"add_generation_prompt": bool(generates), "continue_final_message": bool(continues)}
    return variables


def _check_names(fields: dict[str, Raw], names: tuple[str, ...]) -> None:
    for name in fields.keys() - set(names):
        if name not in FIELDS:
            message = f"{name[:64]}: there is no such field; leave it out"
            raise ApiError(400, message, name[:64], "unknown_parameter")
        harmless = FIELDS[name]
        if harmless is not None and msgspec.json.decode(fields[name]) not in harmless:
            raise unsupported(name)


def _explained(message: str) -> ApiError:
    place = match.group(1) if (match := PLACE.search(message)) else ""
    text, missing = PLACE.sub("", message), MISSING.search(message)
    param = re.split(r"[.\[]", place)[0] or (missing.group(1) if missing else None)
    code = (
        "missing_required_parameter" if missing else "invalid_type" if ", got " in text else "invalid_value"
    )
    if param in ("prompt", "input") and place:
        text, place = PROMPTS, param
    return ApiError(400, f"{place}: {text}" if place else text, param, code)


def check_parts(body: bytes) -> None:
    """Refuse JSON with too many parts before it is decoded."""
    if sum(map(body.count, (b'"', b"[", b"{"))) <= MAX_PARTS and body.count(b",") <= MAX_VALUES:
        return
    texts = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * MAX_PARTS)
    outside = b"".join(texts[::2])
    num_parts = len(texts) // 2 + outside.count(b"[") + outside.count(b"{")
    if num_parts >= MAX_PARTS or outside.count(b",") > MAX_VALUES:
        message = f"a body of {MAX_PARTS:,} or more lists, objects and texts, or of {MAX_VALUES:,} values"
        raise ApiError(400, message, code="request_too_large")


def no_such_model(name: str, served: str) -> ApiError:
    message = f"The model '{name[:200]}' is not served here; this is '{served}'."
    return ApiError(404, message, "model", "model_not_found")


def apart(prompts: Prompts, name: str) -> list[str] | list[list[int]]:
    """A list of numbers is one prompt, any other list several."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if len(kinds) != 1 or not all(prompts if kinds == {list} else [prompts]):
        raise invalid(name, PROMPTS)
    return [prompts] if kinds == {int} else prompts  # type: ignore[return-value]


def invalid(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name}: {problem}", name, "invalid_value")


def unsupported(name: str) -> ApiError:
    return ApiError(
        400, f"{name}: this value is not supported here; leave the field out", name, "unsupported_value"
    )
