"""Ask, Piece, Finish: what a client wants and what comes back; Snapshot: what the service is doing; Endpoint:
what HTTP needs of the rest, handed in so that it can be tested without a model.

An ask is in tokens already; text is made of tokens by `text`, HTTP of both by `app`. An ask is answered by
pieces and then one finish, always: also when it is cancelled or a device is lost.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tessera.ir import Decision, Plan
from tessera.serve.text import Text

if TYPE_CHECKING:
    import torch

    from tessera.serve.embedding import EmbeddingService
    from tessera.serve.grammar import Grammar, GrammarCompiler
    from tessera.serve.pictures import Eyes

Reason = Literal["stop", "length", "cancelled", "error"]
StepKind = Literal["encode", "chunk", "insert", "decode"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one served model."""

    # Microbatches.
    slots: int
    # Rows of a microbatch, and positions of a row.
    rows: int
    capacity: int
    # Tokens of a chunk; 0: the model has no such step.
    chunk: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all tokens.
    top_k: int = 0
    # None: another one for every request.
    seed: int | None = None
    # Alternatives to report for each token; 0: the chosen token's own; None: nothing.
    logprobs: int | None = None
    # Tokens less likely than this share of the likeliest are not drawn.
    min_p: float = 0.0
    # Taken off the logit of a token that the answer has: once, and for every time that it has it.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides the logits (of negative ones: multiplies) of tokens that the prompt or the answer has.
    repetition_penalty: float = 1.0
    # (token, what is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptPicture:
    """A picture in a prompt: where its tokens begin, and its patches as the model reads them."""

    start: int
    patches: "torch.Tensor"


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation. Verified by the engine: `prompt` is not empty, and fits with `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    # Text that ends the answer and is not part of it.
    stop: tuple[str, ...] = ()
    # Tokens that end the answer besides the model's own end; their text is not part of it.
    stop_tokens: tuple[int, ...] = ()
    # True to go on past the model's own end.
    ignores_end: bool = False
    # Neither an end nor a stop string ends the answer before it has so many tokens.
    min_tokens: int = 0
    # Whose it is: asks of different clients take turns in the queue.
    client: str = ""
    # For a model that sees.
    picture: PromptPicture | None = None
    # The form that the answer has; None: any.
    grammar: "Grammar | None" = None


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer; logprobs only where they were asked for."""

    number: int
    logprob: float | None = None
    # (token, logprob), the likeliest first.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text that can no longer change, and the tokens it came from; the text may be empty."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer."""

    reason: Reason
    prompt_tokens: int
    output_tokens: int
    # Of an error: one line, with the remedy.
    message: str = ""


Event = AnswerPiece | Finish
Events = AsyncGenerator[Event, None]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as the page and the metrics show it."""

    name: str
    # Share of the last seconds in which it ran a launch.
    utilisation: float
    memory_bytes: int
    is_lost: bool = False
    # Of its worker: its process (None: none of its own, or not known), "starting", "ready" or "lost", how
    # often it was started again, and how often it was lost.
    pid: int | None = None
    state: str = "ready"
    restarts: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What the service is doing now. Counters count from the start."""

    model: str
    policy: str
    policies: tuple[str, ...]
    devices: tuple[DeviceView, ...]
    # (source, destination, share of the last seconds, bytes so far)
    links: tuple[tuple[str, str, float, int], ...]
    running: int
    waiting: int
    # Rows with a request, of all rows: how much of the key/value budget is in use.
    rows_used: int
    rows: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0
    # Finished requests by reason.
    finished: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    # How often other plans were taken up.
    plan_changes: int = 0
    # The newest ones, and how many of each kind there were.
    decisions: tuple[Decision, ...] = ()
    decided: dict[str, int] = field(default_factory=dict)


class AnswerService(Protocol):
    """Answers asks; from any thread or event loop."""

    def answer(self, ask: Ask) -> Events:
        """Pieces, then one finish; closing it cancels. A refusal is raised here or with the first event."""

    def snapshot(self) -> Snapshot:
        """What the service is doing now."""

    @property
    def failure(self) -> str:
        """Why nothing can be served any more; empty: it can."""


@dataclass(frozen=True)
class Endpoint:
    """One model behind one address."""

    # What clients call it.
    model: str
    service: AnswerService
    text: Text
    # Tokens of a prompt and its answer together, at most.
    capacity: int
    # Tokens have numbers below this.
    vocab_size: int
    # Whole seconds since 1970.
    created: int
    # The plans that the policies follow now: a lost device may have changed them. None if undivided.
    plans: Callable[[], Sequence[Plan]] = tuple
    # Of a model that sees; None: it reads text only.
    eyes: "Eyes | None" = None
    # For answers of a form; None: the extra 'grammar' is not installed.
    grammars: "GrammarCompiler | None" = None
    # Of an encoder, which is the service then; None: the model generates.
    embeddings: "EmbeddingService | None" = None
