"""Ask, AnswerPiece, Finish: a generation and its events; Snapshot: the state of the service.

An ask is in tokens; `text` converts to and from text, `app` to HTTP. Every ask is answered by pieces and then
one finish, also when it is cancelled or a device is lost.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from tessera.adapt.history import LoadView
from tessera.ir import MEMORY_SHARE, Cluster, Decision, DeviceKind, Expected, Group, GroupSize, Load, Step
from tessera.kernels import PAGE, max_pages
from tessera.serve.pages import first_seen

if TYPE_CHECKING:
    import torch

    from tessera.serve.grammar import Grammar

# Default number of microbatches, and rows of each on CPUs; on GPUs they are chosen by memory.
MICROBATCHES, ROWS = 2, 8
# Relative error of modelled rates: less is no reason to leave data-parallel.
COST_ERROR = 0.03
# Default load of a service.
LOAD = Load(prompt_tokens=128, output_tokens=64)

Reason = Literal["stop", "length", "cancelled", "error"]


def step_name(step: Step) -> str:
    return f"tokens-{step.context}" if step.kind == "tokens" else step.kind


@dataclass(frozen=True, slots=True)
class Shape:
    # Microbatches, and maximum sequences of each.
    microbatches: int
    rows: int
    # Maximum tokens of a prompt and its answer.
    capacity: int
    # Step sizes in tokens, ascending. Steps of up to `rows` tokens have one token per sequence.
    sizes: tuple[int, ...]
    # Positions of a microbatch's pages, with the unused page 0.
    pool_tokens: int
    vocab_size: int
    # False if every step has one token of each sequence, in the sequence's row.
    is_flat: bool = True
    # True if recurrent layers keep a state in a row per sequence, beside pages.
    has_rows: bool = False
    # Attention window of each group of layers, the token itself included; 0: none.
    windows: tuple[int, ...] = (0,)

    def of_group(self, group: Group) -> "Shape":
        """Shape of a group of this model."""
        sizes = (group.microbatches, group.sequences, self.capacity, group.sizes, group.pool_tokens)
        return Shape(*sizes, self.vocab_size, self.is_flat, self.has_rows, self.windows)

    @property
    def is_paged(self) -> bool:
        """True if all state is in pages: sequences can share and move it."""
        return self.is_flat and not self.has_rows

    @property
    def part_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.sizes if size > self.rows)

    def num_sequences(self, size: int) -> int:
        return min(size, self.rows)

    @property
    def num_page_entries(self) -> int:
        return 2 * self.pool_tokens // PAGE

    def ends(self, tokens: int, read: int) -> list[int]:
        """By group, pages up to so many tokens, or to what a sequence holds that has read `read`."""
        return [
            first_seen(read, w) + max_pages(tokens - PAGE * first_seen(read, w), (w,), self.sizes[-1])
            for w in self.windows
        ]

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a sequence: as many as fit in the pages."""
        pages, most = self.pool_tokens // PAGE - 1, self.capacity
        if max_pages(most, self.windows, self.sizes[-1]) <= pages:
            return most
        num_full = self.windows.count(0)
        behind = max_pages(most, [w for w in self.windows if w], self.sizes[-1])
        return min(
            most, PAGE * max(pages // len(self.windows), (pages - behind) // num_full if num_full else 0)
        )


def sizes_for(cluster: Cluster) -> tuple[int, int | None]:
    """Default microbatches and rows; None: chosen by memory. One GPU has nothing to overlap."""
    kinds = {device.kind for device in cluster.devices}
    if kinds == {DeviceKind.CUDA, DeviceKind.CPU}:  # a host reads its weights again for every microbatch
        return 1, ROWS
    if kinds != {DeviceKind.CUDA}:
        return MICROBATCHES, ROWS
    return min(MICROBATCHES, len(cluster.devices)), None


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What a service is planned for; None: chosen for the model."""

    microbatches: int = MICROBATCHES
    rows: int | None = ROWS
    capacity: int | None = None
    max_batch_tokens: int | None = None
    # Positions of a microbatch's pages.
    pool_tokens: int | None = None
    # Share of a device's memory for weights and pages; the rest is for temporaries.
    memory_share: float = MEMORY_SHARE
    load: Load = LOAD
    # True if sequences, microbatches and step sizes are chosen for the load.
    is_for_load: bool = False
    # Names of `policies`, such as auto or data-parallel; the first is current at the start.
    policies: tuple[str, ...] = ("auto",)
    # Seed of random weights; a folder's weights are used unless `random_weights`.
    seed: int = 0
    random_weights: bool = False
    # True to join products of the same input.
    joined: bool = True
    # Planning effort: full or quick; see `plan.config`.
    effort: str = "full"
    # LoRA adapters: (name for clients, folder).
    adapters: tuple[tuple[str, str], ...] = ()
    # (module of a mixture of experts, how often each is chosen).
    expert_frequencies: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all tokens.
    top_k: int = 0
    # None: a new seed per request.
    seed: int | None = None
    # Alternatives to report per token; 0: only the chosen token; None: no logprobs.
    logprobs: int | None = None
    # min-p: minimum probability relative to the likeliest token.
    min_p: float = 0.0
    # Presence and frequency penalties: subtracted from the logit once, and per occurrence in the answer.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Repetition penalty of tokens in prompt or answer: divides positive logits, multiplies negative ones.
    repetition_penalty: float = 1.0
    # (token, added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture in a prompt: position of its first token, and its patches."""

    start: int
    patches: "torch.Tensor"

    @cached_property
    def digest(self) -> bytes:
        values = self.patches.float().numpy().tobytes()
        return blake2b(values + self.start.to_bytes(8, "little"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation. The engine checks that `prompt` is not empty and fits with `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    # Texts that end the answer, not part of it.
    stop: tuple[str, ...] = ()
    # More end tokens; their text is not part of the answer.
    stop_tokens: tuple[int, ...] = ()
    # True to continue past the model's own end token.
    ignores_end: bool = False
    # No end and no stop text before this many tokens.
    min_tokens: int = 0
    # Clients share the queue fairly.
    client: str = ""
    # In order of position.
    pictures: tuple[PromptPicture, ...] = ()
    # Grammar of the answer; None: any text.
    grammar: "Grammar | None" = None
    # Alternatives per token of the prompt after its first; None: no logprobs.
    prompt_logprobs: int | None = None
    # LoRA adapter, from 1; 0: the base model.
    adapter: int = 0


class Token(msgspec.Struct, frozen=True, gc=False):
    number: int
    logprob: float | None = None
    # (token, logprob), likeliest first.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: Reason
    prompt_tokens: int
    output_tokens: int
    # Reason "error": one line with the remedy.
    message: str = ""
    # The prompt's tokens after its first, if their logprobs were requested.
    prompt: tuple[Token, ...] = ()
    # Reason "error": true if the ask was at fault.
    is_refused: bool = False


Event = AnswerPiece | Finish
Events = AsyncGenerator[Event, None]


@dataclass(frozen=True, slots=True)
class DeviceView:
    name: str
    # Share of the last seconds with a launch.
    utilisation: float
    memory_bytes: int
    is_lost: bool = False
    # Its worker: process (None: none or unknown), "starting", "ready" or "lost", restarts and losses.
    pid: int | None = None
    state: str = "ready"
    restarts: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Recent latencies in seconds, median and 99th percentile; None: no data yet."""

    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    # Between two tokens of an answer.
    token_p50_s: float | None = None
    token_p99_s: float | None = None


@dataclass(kw_only=True, eq=False)
class Counts:
    prompt_tokens: int = 0
    output_tokens: int = 0
    # Tokens of started sequences, and those found in cached pages.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Sequences preempted because pages ran out.
    preemptions: int = 0
    # Requests restarted after a lost device.
    retried: int = 0
    # Changes of plans.
    plan_changes: int = 0
    # Changes of policy; milliseconds of the last, until no sequence was left in a group of the one before.
    switches: int = 0
    last_switch_ms: float | None = None
    pages_moved: int = 0
    # Sequences moved in place of preemption.
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class GroupView(GroupSize):
    """A group of the current policy, and its sequences now."""

    # At most, and now.
    max_sequences: int = 0
    places: int = 0
    # On their way to it.
    waiting: int = 0


@dataclass(kw_only=True, eq=False)
class Snapshot(Counts):
    model: str
    policy: str
    policies: tuple[str, ...]
    devices: tuple[DeviceView, ...]
    # (source, destination, recent share, total bytes)
    links: tuple[tuple[str, str, float, int], ...]
    running: int
    waiting: int
    # Groups of the current policy, and its figures on a virtual clock at full load.
    groups: tuple[GroupView, ...] = ()
    expected: Expected | None = None
    # Lengths and arrivals of the latest requests.
    load: LoadView = field(default_factory=LoadView)
    # Mixture of experts -> rows by expert, of mixtures that have parts on a CPU.
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Mean milliseconds of the host from the end of a step until the next is ordered.
    host_ms: float | None = None
    # Pages in use, of all pages.
    pages_used: int = 0
    pages: int = 0
    tokens_per_s: float = 0.0
    latency: Latency = Latency()
    # Seconds since the start.
    up_s: float = 0.0
    # Finished requests by reason.
    finished: dict[str, int] = field(default_factory=dict)
    # The newest decisions, and their number by kind.
    decisions: tuple[Decision, ...] = ()
    decided: dict[str, int] = field(default_factory=dict)


class ImageDraft(msgspec.Struct, frozen=True, tag=True):
    prompt: str
    n: int
    seed: int | None
    # png, jpeg or webp.
    form: str
    # Further arguments of the pipeline, by its own names.
    options: dict[str, int | float | str | None]


class AnswerService(Protocol):
    """Answers asks; from any thread or event loop."""

    def answer(self, ask: Ask) -> Events:
        """Pieces, then one finish; closing it cancels. Refusals are raised here or with the first event."""

    def snapshot(self) -> Snapshot: ...

    @property
    def failure(self) -> str:
        """Why the service failed; empty: it has not."""
