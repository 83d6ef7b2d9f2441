"""What clients send: the bodies of /v1/chat/completions and /v1/completions.

Types are strict: "5" is no number. A field that is not declared here is ignored, as vLLM does, unless
ignoring it would change the answer: those are named in `REFUSED`, with the values that ask for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Of OpenAI: choices of one request, and alternatives of a token.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
# More stop strings than OpenAI's four; every one is looked for after every token.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_INT = 2**63 - 1
# A limit that no model's positions reach; longer answers are refused by the engine with its own limit.
MAX_TOKENS = 2**31 - 1

# Field -> values that ask for nothing. Any other value is answered with 400.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "min_p": (None, 0),
    "modalities": (None, [], ["text"]),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Part(BaseModel):
    """A piece of a message; only text is read."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class StreamOptions(BaseModel):
    """What else a stream tells."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class _Generation(BaseModel):
    """What both endpoints take. None is the same as not given."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The served model's name; may be left out.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="Of vLLM; -1 and 0: all tokens.")
    seed: int | None = Field(None, ge=-MAX_INT - 1, le=MAX_INT)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="Of vLLM: go on past the model's own end.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Of vLLM.")
    user: str | None = None


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class CompletionRequest(_Generation):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)


class ErrorBody(BaseModel):
    """What is wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """Every answer that is not a 200."""

    error: ErrorBody
