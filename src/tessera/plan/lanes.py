"""From shares to slots: which lane each slot follows.

By Little's law a lane holds slots in proportion to its share of the requests times how long one of them
takes, its path; in whole numbers, by largest remainder. The entries of a table are spread evenly, so that any
first part of it is a fair choice where fewer requests are in flight.
"""

from itertools import islice

import numpy as np

from tessera import ir
from tessera.plan.problem import Floats, Ints, Mix


def slot_table(mix: Mix, slots: int) -> tuple[int, ...]:
    """The lane of every slot; of more lanes than slots, each once, those with most requests first."""
    counts = slot_counts(mix, slots)
    if len(counts) > slots:
        return tuple(np.argsort(-np.array(mix.shares), kind="stable").tolist())
    return tuple(islice(ir.lane_sequence(counts), sum(counts)))


def slot_counts(mix: Mix, slots: int) -> tuple[int, ...]:
    """Slots that follow each column of a mix, at least one each."""
    if mix.slots:
        return mix.slots
    held = np.array([s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True)])
    return tuple(rounded(held / held.sum(), max(slots, len(held))).tolist())


def rounded(shares: Floats, length: int) -> Ints:
    """Whole numbers that sum to `length`, near the shares, none of them zero."""
    exact = shares * length
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while counts.sum() < length:
        counts[int((exact - counts).argmax())] += 1
    while counts.sum() > length:
        spare = np.where(counts > 1, counts - exact, -np.inf)
        counts[int(spare.argmax())] -= 1
    return counts
