"""Which of many schedules are not as late as another in everything.

Few rows are compared one with another. Of many, each column is sorted once: the rows no later than a given
one in that column are then a prefix, kept as a bit set, and the sets of all columns are intersected.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from tessera.plan.problem import Bools, Floats, Ints

# Rows up to which comparing one with another is faster.
FEW_ROWS = 40
WORD = 64

Words = npt.NDArray[np.uint64]


def non_dominated(flat: Floats) -> Ints:
    """[column, row] -> the rows of which none before them is no later in every column."""
    num = flat.shape[1]
    if num <= FEW_ROWS:
        no_later = np.asarray(flat[:, :, None] <= flat[:, None]).all(axis=0)
        return np.flatnonzero(~(no_later & _before(num)).any(axis=0))
    return np.flatnonzero(~_by_bits(flat))


@cache
def _before(num: int) -> Bools:
    return np.triu(np.ones((num, num), dtype=np.bool_), 1)


@cache
def _bits(words: int) -> tuple[Words, Words]:
    """[word, row]: the row's own bit, and those of all rows before it."""
    rows = np.arange(words * WORD)
    own = np.zeros((words, len(rows)), dtype=np.uint64)
    own[rows // WORD, rows] = np.uint64(1) << (rows % WORD).astype(np.uint64)
    earlier = np.zeros_like(own)
    earlier[:, 1:] = np.bitwise_or.accumulate(own, axis=1)[:, :-1]
    return own, earlier


def _by_bits(flat: Floats) -> Bools:
    """Is a row before this one no later in every column?"""
    num_columns, num = flat.shape
    own, earlier = _bits(-(-num // WORD))
    order = flat.argsort(axis=1)
    # Rows of the columns one after the other.
    offset = np.arange(0, num_columns * num, num)[:, None]
    times = flat.take(order + offset)
    prefix = np.bitwise_or.accumulate(own.take(order, axis=1), axis=2)
    # Of equal times, the last place counts for all.
    last = np.where(times[:, 1:] == times[:, :-1], num, np.arange(num - 1))
    place = np.full((num_columns, num), num - 1)
    place[:, :-1] = np.minimum.accumulate(last[:, ::-1], axis=1)[:, ::-1]
    np.minimum(place, num - 1, out=place)
    at = np.empty_like(order)
    at.put(order + offset, place + offset)
    no_later = np.bitwise_and.reduce(prefix.reshape(len(prefix), -1).take(at, axis=1), axis=1)
    return np.asarray((no_later & earlier[:, :num]).any(axis=0))
