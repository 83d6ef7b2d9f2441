"""The bodies of OpenAI's routes, checked strictly: what is wrong is told with the field's name.

Types are strict: "5" is no number. A field that is not declared here is ignored, as vLLM does, unless
ignoring it would change the answer: those are named in `REFUSED`, with the values that ask for nothing.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tessera.serve.openai.errors import ApiError

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
# Of OpenAI: tools of one request.
MAX_TOOLS = 128

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
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}

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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def extra(self, name: str) -> Any:
        """A field that is not declared; None: it is not there."""
        return (self.model_extra or {}).get(name)


class _Checked(_Strict):
    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_together()
        return self

    def check_together(self) -> None:
        """Raises for fields that are right one by one and wrong together."""


class _Body(_Checked):
    model: str | None = Field(None, description="The served model's name; may be left out.")


class MessagePart(_Strict):
    """A piece of a message: text, or a picture where the model sees."""

    type: str
    text: str | None = None


class CalledFunction(_Strict):
    """A function with the arguments of one call, in JSON."""

    name: ToolName
    arguments: str


class ToolCall(_Strict):
    """A call of a tool that an assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Checked):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    def check_together(self) -> None:
        if self.role not in ROLES or self.extra("function_call"):
            raise PydanticCustomError("unsupported_value", "functions are not supported; use tools")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("invalid_value", "only an assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "content is missing")


class ToolFunction(_Strict):
    """What a tool does, and the schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class JsonSchema(_Strict):
    """A schema that the answer follows."""

    name: str | None = None
    document: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Checked):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None: any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.document

    def check_together(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("missing", "json_schema belongs to its type, and only to that")


class StreamOptions(_Strict):
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

    def check_together(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only of use with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "are told with a whole answer only, without stream")


class ChatRequest(_GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "only of use with logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > len(set(names)):
            raise invalid("tools", "two of them have one name")
        choice = self.tool_choice
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise invalid("tool_choice", f"'{choice.function.name[:64]}' is none of the tools")
        if choice == "required" and not names:
            raise invalid("tool_choice", "there are no tools")

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the answer may call."""
        if self.tool_choice == "none":
            return []
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, Tool) else None
        return [tool for tool in self.tools or () if name in (None, tool.function.name)]

    @property
    def is_forced(self) -> bool:
        """True if the answer is calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)


class CompletionRequest(_GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    def check_together(self) -> None:
        super().check_together()
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of")
        if self.echo and self.logprobs is not None and self.stream:
            raise invalid("echo", "with logprobs only of a whole answer, without stream")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "0 asks for no answer; use 1 or more, or echo")


class TokenizeRequest(_Body):
    """The body of /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096, fail_fast=True)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_special_tokens: bool | None = Field(None, description="Of a prompt: what stands before every prompt.")
    return_token_strs: bool | None = None

    def check_together(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "send a prompt or messages, one of them")
        if self.extra("add_generation_prompt") is False:
            raise unsupported("add_generation_prompt")


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    tokens: list[TokenId] = Field(fail_fast=True)


class EmbeddingRequest(_Body):
    """The body of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    user: str | None = None

    def check_together(self) -> None:
        if self.extra("truncate_prompt_tokens") is not None:
            raise unsupported("truncate_prompt_tokens")


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

    def check_together(self) -> None:
        if self.response_format == "url":
            raise invalid("response_format", "pictures come as b64_json: nothing is kept to link to")
        if self.extra("stream"):
            raise unsupported("stream")


Body = TypeVar("Body", bound=_Body)
# Lists, objects and texts of one body; values of any kind. They are counted before they are made.
MAX_PARTS, MAX_VALUES = 2**14, 2**20


def parse(kind: type[Body], raw: bytes, served: str) -> Body:
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
    if request.model not in (None, served):
        raise no_such_model(str(request.model), served)
    return request


def check_parts(body: bytes) -> None:
    """Refuses JSON of more parts than any request has."""
    if sum(map(body.count, (b'"', b"[", b"{"))) <= MAX_PARTS and body.count(b",") <= MAX_VALUES:
        return  # nearly every body
    texts = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * MAX_PARTS)
    outside = b"".join(texts[::2])
    num_parts = len(texts) // 2 + outside.count(b"[") + outside.count(b"{")
    if num_parts >= MAX_PARTS or outside.count(b",") > MAX_VALUES:
        message = f"a body of {MAX_PARTS:,} or more lists, objects and texts, or of {MAX_VALUES:,} values"
        raise ApiError(400, message, code="request_too_large")


def no_such_model(name: str, served: str) -> ApiError:
    """Another model is asked for."""
    message = f"The model '{name}' is not served here; this is '{served}'."
    return ApiError(404, message, "model", "model_not_found")


def apart(given: Prompts) -> list[str | list[int]]:
    """Prompts apart: a list of numbers is one prompt, a list of anything else several."""
    if isinstance(given, str):
        return [given]
    numbers = [x for x in given if isinstance(x, int)]
    return [numbers] if numbers else [x for x in given if not isinstance(x, int)]


def invalid(name: str, what: str) -> ApiError:
    """A field that holds what it may not."""
    return ApiError(400, f"{name}: {what}", name, "invalid_value")


def unsupported(name: str) -> ApiError:
    """A field whose value would change the answer, and is not known here."""
    what = f"{name}: this value is not supported here; leave the field out"
    return ApiError(400, what, name, "unsupported_value")
