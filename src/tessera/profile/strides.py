"""Geometry of tensors: what is dense, and which dimensions several tensors share.

Strides count elements. A dimension of one element has no stride that matters.
"""

import math
from collections.abc import Sequence

from tessera.ir import View
from tessera.ir.trace import item_bytes

# What one vector load reads.
VECTOR_BYTES = 16


def joined_dims(views: Sequence[View], out: View) -> tuple[list[int], list[list[int]]]:
    """Sizes and, for each tensor, strides, innermost first, after joining what is contiguous in all.

    Tensors are broadcast to `out`, whose strides give the order. A joined dimension has the stride of its
    innermost part.
    """
    rank = len(out.shape)
    spread = [_broadcast(v, rank) for v in views]
    order = sorted((i for i in range(rank) if out.shape[i] > 1), key=lambda i: (abs(out.stride[i]), -i))
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for i in order:
        steps = [column[i] for column in spread]
        if sizes and all(s == col[-1] * sizes[-1] for s, col in zip(steps, strides, strict=True)):
            sizes[-1] *= out.shape[i]
            continue
        sizes.append(out.shape[i])
        for col, s in zip(strides, steps, strict=True):
            col.append(s)
    return sizes, strides


def _broadcast(view: View, rank: int) -> list[int]:
    """The strides along the last `rank` dimensions; 0 along those that the tensor lacks."""
    steps = [0 if n == 1 else s for n, s in zip(view.shape, view.stride, strict=True)]
    return ([0] * (rank - len(steps)) + steps)[len(steps) - rank if len(steps) > rank else 0 :]


def is_dense(view: View) -> bool:
    """True iff elements lie one after the other, the last dimension innermost."""
    expected = 1
    for n, s in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def dense(view: View) -> View:
    """A tensor of the same shape whose elements lie one after the other."""
    steps = tuple(math.prod(view.shape[i + 1 :]) for i in range(len(view.shape)))
    return View(view.buffer, view.dtype, view.shape, steps, 0)


def starts_at_vectors(view: View) -> bool:
    """True iff every row of a matrix begins where a vector load may."""
    outer = [s for n, s in zip(view.shape, view.stride, strict=True) if n > 1 and s > 1]
    return all(s * item_bytes(view.dtype) % VECTOR_BYTES == 0 for s in outer)
