"""Shape: what one service serves, and the kinds of steps it runs."""

from dataclasses import dataclass
from typing import Literal

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
