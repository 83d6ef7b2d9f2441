"""Endpoint: what HTTP needs of the rest, handed in so that it can be tested without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.ir import Plan
from tessera.serve.records import AnswerService
from tessera.serve.text import Text

if TYPE_CHECKING:
    from tessera.serve.embedding import EmbeddingService
    from tessera.serve.grammar import GrammarCompiler
    from tessera.serve.images import ImageService
    from tessera.serve.sight import Eyes


@dataclass(frozen=True)
class Endpoint:
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
    # The plans that the policies follow now: a lost device may have changed them. None if there are none.
    plans: Callable[[], Sequence[Plan]] = tuple
    # Of a model that sees; None: it reads text only.
    eyes: "Eyes | None" = None
    # For answers of a form; None: the extra 'grammar' is not installed.
    grammars: "GrammarCompiler | None" = None
    # Of an encoder, which is the service then; None: the model generates.
    embeddings: "EmbeddingService | None" = None
    # Of a pipeline that makes pictures, likewise.
    images: "ImageService | None" = None
