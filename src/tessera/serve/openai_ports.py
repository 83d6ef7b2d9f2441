"""What HTTP needs of the rest: someone who answers asks, someone who knows words, and what is served.

The service and its text are made elsewhere and handed in, so that this half can be tested without a model.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tessera.ir import Plan
from tessera.serve.records import Ask, Event, Picture, Snapshot
from tessera.serve.text import Reader

if TYPE_CHECKING:
    import torch

Events = AsyncGenerator[Event, None]


class Answers(Protocol):
    """Answers asks; from any thread or event loop."""

    def answer(self, ask: Ask) -> Events:
        """Pieces, then one finish; closing it cancels. A refusal is raised here or with the first event."""

    def snapshot(self) -> Snapshot:
        """What the service is doing now."""

    @property
    def failure(self) -> str:
        """Why nothing can be served any more; empty: it can."""


class Words(Protocol):
    """Tokens of text and text of tokens."""

    def encode(self, text: str) -> list[int]:
        """A prompt in tokens, with what the model expects before it."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation in tokens, up to where the answer begins; AskError if it has no such form."""

    def reader(self) -> Reader:
        """Reads tokens one by one into text."""

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for; not always whole characters."""


class Eyes(Protocol):
    """Takes pictures in."""

    @property
    def mark(self) -> str:
        """Stands for a picture in the text of a turn."""

    def look(self, url: str) -> "torch.Tensor":
        """A picture as the model reads it; AskError if it is none."""

    def placed(self, prompt: Sequence[int], patches: "torch.Tensor") -> tuple[list[int], Picture]:
        """The prompt with the picture's tokens in place of its mark."""


@dataclass(frozen=True)
class Endpoint:
    """One model behind one address."""

    # What clients call it.
    model: str
    service: Answers
    words: Words
    # Tokens of a prompt and its answer together, at most.
    capacity: int
    # Tokens have numbers below this.
    vocab_size: int
    # Whole seconds since 1970.
    created: int
    # The plans that the policies follow now: a lost device may have changed them. None if undivided.
    plans: Callable[[], Sequence[Plan]] = tuple
    # Of a model that sees; None: it reads text only.
    eyes: Eyes | None = None
