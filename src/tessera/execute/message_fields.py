"""What every field of a message must be; anything else is refused before a record is made of it.

A whole number is 64 bits and no truth value, a number is finite, a text is a text, a table has rows of its
own width whose first number counts from 0. A tensor has a dtype that torch knows, and as many bytes as its
shape says. Bytes that belong to no field are refused too.

Not checked: whether a ticket, slot, launch or transfer exists. Whoever takes the message knows that.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch

from tessera.execute.packing import Packed

Check = Callable[[Any], Any]
LIMIT = 1 << 63
# Beyond this no sum of a clock's seconds keeps microseconds.
MAX_NUMBER = 2.0**53


def whole(value: Any) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise ValueError(f"a whole number is expected, not {_shown(value)}")
    return value


def number(value: Any) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"a finite number is expected, not {_shown(value)}")
    return float(value)


def truth(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError(f"true or false is expected, not {_shown(value)}")
    return value


def text(value: Any) -> str:
    """Characters that can be shown and sent on."""
    if type(value) is not str:
        raise ValueError(f"a text is expected, not {_shown(value)}")
    value.encode()  # half of a surrogate pair is none; raises a ValueError
    return value


def hexadecimal(value: Any) -> str:
    """Bytes in hexadecimal."""
    bytes.fromhex(text(value))
    return str(value)


def table(width: int) -> Check:
    """Rows of `width` numbers, of which the first is an index. Long ones are common, so no loop in Python."""

    def check(rows: Any) -> list[list[float]]:
        if type(rows) is not list or not set(map(type, rows)) <= {list} or not set(map(len, rows)) <= {width}:
            raise ValueError(f"rows of {width} numbers are expected, not {_shown(rows)}")
        flat = list(chain.from_iterable(rows))
        if not flat:
            return rows
        if not set(map(type, flat)) <= {int, float} or min(flat) < -MAX_NUMBER or max(flat) > MAX_NUMBER:
            raise ValueError("a row has something else than finite numbers")
        first = flat[::width]
        if set(map(type, first)) != {int} or min(first) < 0:
            raise ValueError("a row does not begin with an index")
        return rows

    return check


def tensors(rows: Any, data: bytes, at: int) -> tuple[dict[str, Packed], int]:
    """The tensors of one field, whose bytes start at `at`; and where they end."""
    if type(rows) is not list:
        raise ValueError(f"a list of tensors is expected, not {_shown(rows)}")
    found: dict[str, Packed] = {}
    for row in rows:
        if type(row) is not list or len(row) != 4:
            raise ValueError(f"name, dtype, shape and size are expected, not {_shown(row)}")
        name, dtype, shape, size = text(row[0]), text(row[1]), _shape(row[2]), whole(row[3])
        if name in found:
            raise ValueError(f"tensor '{name}' comes twice")
        if size != math.prod(shape) * _item_bytes(dtype):
            raise ValueError(f"a tensor of {size} bytes is no {dtype} of shape {list(shape)}")
        if at + size > len(data):
            raise ValueError("truncated")
        found[name] = (dtype, shape, data[at : at + size])
        at += size
    return found, at


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or any(type(n) is not int or not 0 <= n < LIMIT for n in value):
        raise ValueError(f"a shape is expected, not {_shown(value)}")
    return tuple(value)


@cache
def _known() -> Mapping[str, int]:
    """The dtypes whose values are plain bytes."""
    named = {str(value).removeprefix("torch."): value for value in vars(torch).values() if _is_dtype(value)}
    return {name: dtype.itemsize for name, dtype in named.items()}


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))


def _item_bytes(dtype: str) -> int:
    if dtype not in _known():
        raise ValueError(f"there is no dtype {_shown(dtype)}")
    return _known()[dtype]


def _shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return shown if len(shown) <= 40 else shown[:37] + "..."
