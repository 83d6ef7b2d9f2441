"""Ask, Piece, Finish: what a client wants and what comes back; Snapshot: what the service is doing.

An ask is in tokens already; text is made of tokens by `text`, HTTP of both by `app`. An ask is answered by
pieces and then one finish, always: also when it is cancelled or a device is lost.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from tessera.ir import Cluster, Decision, DeviceKind, Objective, Step
from tessera.kernels import PAGE

if TYPE_CHECKING:
    import torch

    from tessera.serve.grammar import Grammar

# Microbatches, and rows of each, where nobody says otherwise.
MICROBATCHES, ROWS, GPU_ROWS = 2, 8, 64
# What a service is planned for, where nobody says otherwise.
POLICIES = (Objective.THROUGHPUT, Objective.LATENCY)

Reason = Literal["stop", "length", "cancelled", "error"]


def step_name(step: Step) -> str:
    return f"tokens-{step.context}" if step.kind == "tokens" else step.kind


@dataclass(frozen=True, slots=True)
class Shape:
    # Microbatches, and sequences of one of them at most.
    microbatches: int
    rows: int
    # Tokens of a prompt and its answer, at most.
    capacity: int
    # Tokens of the steps, ascending. In one of up to `rows` tokens no sequence has more than one.
    sizes: tuple[int, ...]
    # Positions of a microbatch's pages, those of page 0 included, which nobody gets.
    pool_tokens: int
    vocab_size: int
    # False if state is kept by row: a sequence keeps its row, and reads one token a step, or alone as many
    # as a step of more than `rows` tokens has.
    is_flat: bool = True
    # True if such a step can only be a sequence's first.
    is_first_only: bool = False
    # Positions that a token sees, itself included, where every layer has such a limit; else 0.
    window: int = 0

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Sizes in which a sequence may have more than one token."""
        return tuple(size for size in self.sizes if size > self.rows)

    def num_sequences(self, size: int) -> int:
        return min(size, self.rows) if self.is_flat or size <= self.rows else 1

    @property
    def num_page_entries(self) -> int:
        """Length of the list that holds the page tables of a step: pages may be in several of them."""
        return 2 * self.pool_tokens // PAGE

    @property
    def max_tokens(self) -> int:
        """Tokens of a sequence, at most: those of a prompt and its answer, within the pool."""
        return min(self.capacity, self.pool_tokens - PAGE)


def sizes_for(cluster: Cluster) -> tuple[int, int]:
    """Microbatches, and rows of each, where nobody says: on one GPU there is nothing to overlap."""
    if any(device.kind is not DeviceKind.CUDA for device in cluster.devices):
        return MICROBATCHES, ROWS
    return min(MICROBATCHES, len(cluster.devices)), GPU_ROWS


@dataclass(frozen=True, slots=True)
class Average:
    """An average request, in tokens: what the plans are made for."""

    prompt: int = 128
    output: int = 64


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What a service is planned for; None: a size that suits the model."""

    microbatches: int = MICROBATCHES
    rows: int = ROWS
    capacity: int | None = None
    max_batch_tokens: int | None = None
    # Of a microbatch's pages.
    pool_tokens: int | None = None
    # Of a device's memory, for weights and pages together; the rest is for temporaries.
    memory_share: float = 0.9
    average: Average = Average()
    # One plan each.
    policies: tuple[Objective, ...] = POLICIES
    # Of random weights; those of a folder are taken only if they are asked for.
    seed: int = 0
    random_weights: bool = False
    # Products of the same input are one.
    joined: bool = True


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


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture in a prompt: where its tokens begin, and its patches as the model reads them."""

    start: int
    patches: "torch.Tensor"

    @cached_property
    def digest(self) -> bytes:
        """Of its place and what is to be seen."""
        values = self.patches.float().numpy().tobytes()
        return blake2b(values + self.start.to_bytes(8, "little"), digest_size=16).digest()


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
    # For a model that sees, in the order of their places.
    pictures: tuple[PromptPicture, ...] = ()
    # The form that the answer has; None: any.
    grammar: "Grammar | None" = None
    # Alternatives to report for each token of the prompt after its first; None: nothing.
    prompt_logprobs: int | None = None


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
    reason: Reason
    prompt_tokens: int
    output_tokens: int
    # Of an error: one line, with the remedy.
    message: str = ""
    # The prompt's tokens after its first, where their logprobs were asked for.
    prompt: tuple[Token, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that clients waited lately: half of them no longer, and 99 of 100; None: nothing came yet."""

    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    # Between two tokens of an answer.
    token_p50_s: float | None = None
    token_p99_s: float | None = None


@dataclass(kw_only=True, eq=False)
class Counts:
    """From the start of a service."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    # Tokens of sequences that began, and how many of them were in pages already.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Sequences that were put aside because pages ran out.
    preemptions: int = 0
    # Requests that began again after a lost device.
    retried: int = 0
    # How often other plans were taken up.
    plan_changes: int = 0


@dataclass(kw_only=True, eq=False)
class Snapshot(Counts):
    """What the service is doing now."""

    model: str
    policy: str
    policies: tuple[str, ...]
    devices: tuple[DeviceView, ...]
    # (source, destination, share of the last seconds, bytes so far)
    links: tuple[tuple[str, str, float, int], ...]
    running: int
    waiting: int
    # Pages in use, of all pages.
    pages_used: int = 0
    pages: int = 0
    tokens_per_s: float = 0.0
    latency: Latency = Latency()
    # Seconds since the start, as the decisions count them.
    up_s: float = 0.0
    # Finished requests by reason.
    finished: dict[str, int] = field(default_factory=dict)
    # The newest ones, and how many of each kind there were.
    decisions: tuple[Decision, ...] = ()
    decided: dict[str, int] = field(default_factory=dict)


class ImageDraft(msgspec.Struct, frozen=True, tag=True):
    prompt: str
    n: int
    seed: int | None
    # png, jpeg or webp.
    form: str
    # What else a pipeline is told, by its own names; None: nothing.
    options: dict[str, int | float | str | None]


class AnswerService(Protocol):
    """Answers asks; from any thread or event loop."""

    def answer(self, ask: Ask) -> Events:
        """Pieces, then one finish; closing it cancels. A refusal is raised here or with the first event."""

    def snapshot(self) -> Snapshot:
        """What the service is doing now."""

    @property
    def failure(self) -> str:
        """Why nothing can be served any more; empty: it can."""
