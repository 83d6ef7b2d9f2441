"""Ask, AnswerPiece, Finish: a generation and its events; Snapshot: the state of the service.

Every ask is answered by pieces and then one finish, also when it is cancelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import msgspec

from tessera.adapt.history import LoadView
from tessera.ir import MEMORY_SHARE, Cluster, Decision, DeviceKind, Expected, Group, GroupSize, Load, Step
from tessera.kernels import PAGE, max_pages
from tessera.serve.pages import first_seen

if TYPE_CHECKING:
    import torch

    from tessera.serve.grammar import Grammar

# The best policy, and `latency` beside it where that is quicker.
AUTO = "auto"
# Rows are for CPUs; on GPUs memory decides.
MICROBATCHES, ROWS = 2, 8
# Relative error of modelled rates: less is no reason to leave data-parallel.
COST_ERROR = 0.03
LOAD = Load(prompt_tokens=128, output_tokens=64)

Reason = Literal["stop", "length", "cancelled", "error"]


def step_name(step: Step) -> str:
    return f"tokens-{step.context}" if step.kind == "tokens" else step.kind


@dataclass(frozen=True, slots=True)
class Shape:
    microbatches: int
    rows: int
    # Tokens of a prompt and its answer.
    capacity: int
    # Tokens, ascending. Steps of up to `rows` tokens have a row for each token.
    sizes: tuple[int, ...]
    # Positions of a microbatch's pages, with the unused page 0.
    pool_tokens: int
    vocab_size: int
    # False if every step has one token of each sequence, in the sequence's row.
    is_flat: bool = True
    # Recurrent layers keep a state by row.
    has_rows: bool = False
    # By group of layers, the token itself included; 0: none.
    windows: tuple[int, ...] = (0,)

    def of_group(self, group: Group) -> "Shape":
        sizes = (group.microbatches, group.sequences, self.capacity, group.sizes, group.pool_tokens)
        return Shape(*sizes, self.vocab_size, self.is_flat, self.has_rows, self.windows)

    @property
    def is_paged(self) -> bool:
        """True if sequences can share and move all their state."""
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
        """Lengths of page tables by group: for `tokens` tokens, or the most held at once after `read`."""
        return [
            first_seen(read, w) + max_pages(tokens - PAGE * first_seen(read, w), (w,), self.sizes[-1])
            for w in self.windows
        ]

    @property
    def max_tokens(self) -> int:
        pages, most = self.pool_tokens // PAGE - 1, self.capacity
        if max_pages(most, self.windows, self.sizes[-1]) <= pages:
            return most
        num_full = self.windows.count(0)
        behind = max_pages(most, [w for w in self.windows if w], self.sizes[-1])
        return min(
            most, PAGE * max(pages // len(self.windows), (pages - behind) // num_full if num_full else 0)
        )


def sizes_for(cluster: Cluster) -> tuple[int, int | None]:
    """Microbatches, and rows; None: chosen by memory. One GPU has nothing to overlap."""
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
    pool_tokens: int | None = None
    # For weights and pages; the rest is for temporaries.
    memory_share: float = MEMORY_SHARE
    load: Load = LOAD
    # Sequences, microbatches and step sizes are chosen.
    is_for_load: bool = False
    # The first is current at the start.
    policies: tuple[str, ...] = (AUTO,)
    seed: int = 0
    random_weights: bool = False
    # True to join products of the same input.
    joined: bool = True
    effort: str = "full"
    # (name for clients, folder)
    adapters: tuple[tuple[str, str], ...] = ()
    # By module: how often each expert is chosen.
    expert_frequencies: tuple[tuple[str, tuple[float, ...]], ...] = ()
    # Why prompts have no pictures; empty: they have them if the model takes them.
    text_only: str = ""

    def sized(self, max_batch_tokens: int) -> "ServeSpec":
        """With a default for the tokens of a step."""
        return replace(self, max_batch_tokens=self.max_batch_tokens or max_batch_tokens)


@dataclass(frozen=True, slots=True)
class Sampling:
    """A temperature of 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all tokens.
    top_k: int = 0
    # None: a new one per request.
    seed: int | None = None
    # Alternatives per token; 0: only the chosen token; None: no logprobs.
    logprobs: int | None = None
    # Relative to the likeliest token.
    min_p: float = 0.0
    # Subtracted from the logit once, and per occurrence in the answer.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # For tokens in prompt or answer: divides positive logits, multiplies negative ones.
    repetition_penalty: float = 1.0
    # (token, added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class PromptPicture:
    start: int
    pixels: "torch.Tensor"

    @cached_property
    def digest(self) -> bytes:
        values = self.pixels.float().numpy().tobytes()
        return blake2b(values + self.start.to_bytes(8, "little"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ask:
    """The engine checks that `prompt` is not empty and fits with `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    # Texts that end the answer, not part of it.
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    # Continues past the model's end token.
    ignores_end: bool = False
    # No end before this many tokens.
    min_tokens: int = 0
    # Clients share the queue fairly.
    client: str = ""
    pictures: tuple[PromptPicture, ...] = ()
    grammar: "Grammar | None" = None
    # As `Sampling.logprobs`, for the prompt after its first token.
    prompt_logprobs: int | None = None
    # From 1; 0: the base model.
    adapter: int = 0
    # The answer's text goes on from the prompt's: it may begin with a space.
    continues: bool = False


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
    # One line with the remedy.
    message: str = ""
    # The prompt after its first token, if logprobs were requested.
    prompt: tuple[Token, ...] = ()
    # The ask was at fault.
    is_refused: bool = False


Event = AnswerPiece | Finish


@dataclass(frozen=True, slots=True)
class DeviceView:
    name: str
    utilisation: float
    memory_bytes: int
    is_lost: bool = False
    # Its worker; `state` is "starting", "ready" or "lost".
    pid: int | None = None
    state: str = "ready"
    restarts: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Recent median and 99th percentile; None: no data yet."""

    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    token_p50_s: float | None = None
    token_p99_s: float | None = None


@dataclass(kw_only=True, eq=False)
class Counts:
    prompt_tokens: int = 0
    output_tokens: int = 0
    # Tokens of started sequences, and those of cached pages.
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    # Requests restarted after a lost device.
    retried: int = 0
    plan_changes: int = 0
    # A switch takes until no group of the last policy has a sequence.
    switches: int = 0
    last_switch_ms: float | None = None
    pages_moved: int = 0
    # Sequences moved in place of preemption.
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class GroupView(GroupSize):
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
    # `expected` is modelled, at full load.
    groups: tuple[GroupView, ...] = ()
    expected: Expected | None = None
    load: LoadView = field(default_factory=LoadView)
    # Rows by expert, of mixtures that have parts on a CPU.
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Mean time of the host from the end of a step until the next is ordered.
    host_ms: float | None = None
    pages_used: int = 0
    pages: int = 0
    tokens_per_s: float = 0.0
    latency: Latency = Latency()
    up_s: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    # The newest decisions; their number by kind.
    decisions: tuple[Decision, ...] = ()
    decided: dict[str, int] = field(default_factory=dict)


class ImageDraft(msgspec.Struct, frozen=True, tag=True):
    prompt: str
    n: int
    seed: int | None
    # png, jpeg or webp.
    form: str
    # By the pipeline's names.
    options: dict[str, int | float | str | None]
