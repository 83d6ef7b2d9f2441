"""Inputs of tessera::choose: columns of its tables and shared limits."""

from enum import IntEnum

INPUTS = ("settings", "numbers", "edits", "masks")
# A step may be ordered without these; they follow while it runs.
LATE_INPUTS = frozenset({"masks"})
MAX_TOP = 20
EDIT_FIELDS = 3
# Tokens with scaled logits this far below the largest cannot win: -log(E) is in -2.82 : 22.88.
OUT_OF_REACH = -26.0
# Below this, -log(1 - v) is a polynomial.
SMALL_DRAW = 1.0 / 16.0


class Setting(IntEnum):
    # 1 / temperature; 0: greedy.
    SHARPNESS = 0
    # 1 keeps all for top-p, 0 for min-p.
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class Number(IntEnum):
    SEED = 0
    POSITION = 1
    # 0: all tokens.
    TOP_K = 2
    EDITS_BEGIN = 3
    EDITS_END = 4
    # Row of `masks` + 1; 0: any token.
    MASK = 5
    # 1: the token just read is part of the answer and not yet counted.
    COUNTS_LAST = 6
    # Token + 1 to choose whatever the logits say, for its logprob; 0: none.
    FORCED = 7
    # Alternatives to report + 1; 0: no logprobs.
    NUM_TOP = 8


def num_words(vocab: int) -> int:
    return -(-vocab // 32)


def max_edits(rows: int, vocab: int) -> int:
    """Linear in rows, and enough for one row that edits every token."""
    return vocab + 256 * rows
