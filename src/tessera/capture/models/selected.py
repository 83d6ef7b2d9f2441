"""Rows that a model selects by value, in tensors of fixed sizes.

Loops over experts ask which are chosen (`nonzero`), which rows chose one (`where`) or how many did (`tolist`,
`split`). While `selecting`, the answer is every row with a condition (`Selected`). Functions of single rows
apply to it; where results are stored (`index_add`, `cat`), rows with a false condition add nothing. Each
expert computes all rows: slower than grouped products.

Not handled: other uses of selected rows, which raise ValueError with the line; effects of a loop's number on
other values, unnoticed (`paged` compares logits).
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from traceback import walk_stack
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tessera.capture.operators import is_program

PAIRS = ("add", "sub", "mul", "div", "truediv", "pow", "matmul")
# Functions of single rows. Products take rows as the first operand.
PRODUCTS = ("linear", "mm", "matmul", "__matmul__")
OF_ROWS = frozenset({
    *PRODUCTS, *PAIRS, *(f"__{side}{name}__" for name in PAIRS for side in ("", "r")), "chunk", "unsqueeze",
    "view", "reshape", "contiguous", "to", "type", "type_as", "float", "silu", "gelu", "relu", "sigmoid",
    "tanh", "softplus", "exp", "square", "neg", "clamp", "clamp_min", "clamp_max", "minimum", "maximum",
})  # fmt: skip
COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@dataclass(frozen=True, eq=False)
class RowCondition:
    """One value per row, or one for everything (no dimension)."""

    holds: torch.Tensor
    # Conditions of all parts, where rows were split.
    parts: list["RowCondition"] = field(default_factory=list)


class Selected(torch.Tensor):
    every: torch.Tensor
    rows: RowCondition | None
    whole: tuple[RowCondition, ...]
    # Value of a loop's number.
    number: int | None

    @staticmethod
    def of(
        values: torch.Tensor,
        rows: RowCondition | None,
        whole: Sequence[RowCondition] = (),
        number: int | None = None,
    ) -> "Selected":
        selected: Any = torch.Tensor._make_wrapper_subclass(
            Selected, values.shape, dtype=values.dtype, device=values.device
        )
        selected.every, selected.rows, selected.number = values, rows, number
        selected.whole = tuple(dict.fromkeys(whole))
        return selected  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(str(func))

    def item(self) -> int:
        return _refuse("item") if self.number is None else self.number

    __int__ = __index__ = __bool__ = item  # type: ignore[assignment]

    def tolist(self) -> NoReturn:
        _refuse("tolist")

    def stored(self) -> torch.Tensor:
        assert self.rows is not None
        holds = self.rows.holds
        for condition in self.whole:
            holds = holds & condition.holds
        return torch.where(holds.view(-1, *[1] * (self.every.dim() - 1)), self.every, 0)


class Sizes(list[None]):
    """Numbers of rows, which only `split` reads."""

    def __init__(self, sizes: torch.Tensor) -> None:
        super().__init__([None] * len(sizes))
        self.sizes = sizes


@contextmanager
def selecting() -> Iterator[None]:
    read = torch.Tensor.tolist

    def sizes(tensor: torch.Tensor) -> Any:
        has_sizes = tensor.dim() == 1 and is_program(sys._getframe(1).f_code.co_filename)
        return Sizes(tensor) if has_sizes else read(tensor)

    with patch.object(torch.Tensor, "tolist", sizes), _Selecting():
        yield


class _Selecting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "nonzero" or (name == "where" and len(args) == 1):
            return _places(args[0], name == "where" or kwargs.get("as_tuple", False))
        if name == "split" and isinstance(args[1], Sizes):
            return _split(args[0], args[1].sizes, **kwargs)
        selected = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Selected)]
        if not selected:
            return func(*args, **kwargs)
        if name in SPECIAL:
            return SPECIAL[name](func, *args, **kwargs)
        compare, number = COMPARED.get(name.strip("_")), selected[0].number
        if compare is not None and number is not None:
            return compare(number, args[1])
        return _of_rows(name, func, selected, args, kwargs)


def _refuse(name: str) -> NoReturn:
    files = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe()))
    place = next(f"{file}:{line}" for file, line in files if file != __file__ and is_program(file))
    raise ValueError(f"{place} selects rows by value and uses them by {name}")


def _plain(value: Any) -> Any:
    return tree_map_only(Selected, lambda selected: selected.every, value)


def _places(mask: torch.Tensor, is_apart: bool) -> Any:
    whole = mask.whole if isinstance(mask, Selected) else ()
    if isinstance(mask, Selected) and mask.rows is not None:
        _refuse("nonzero")
    mask = _plain(mask)
    rows, place = RowCondition(mask.flatten() != 0), torch.arange(mask.numel(), device=mask.device)
    columns = [place // prod(mask.shape[dim + 1 :]) % size for dim, size in enumerate(mask.shape)]
    if is_apart:
        return tuple(Selected.of(column, rows, whole) for column in columns)
    return Selected.of(torch.stack(columns, 1), rows, whole)


def _split(values: torch.Tensor, sizes: torch.Tensor, dim: int = 0) -> list[Selected]:
    if dim or isinstance(values, Selected):
        _refuse("split")
    part = (torch.arange(len(values), device=values.device)[:, None] >= sizes.cumsum(0)).sum(1)
    parts: list[RowCondition] = []
    parts += (RowCondition(part == number, parts) for number in range(len(sizes)))
    return [Selected.of(values, rows) for rows in parts]


def _joined(func: Any, parts: Sequence[Any], dim: int = 0) -> torch.Tensor:
    rows = [getattr(part, "rows", None) for part in parts]
    if dim or rows[0] is None or rows != rows[0].parts:
        _refuse("cat")
    return torch.stack([part.stored() for part in parts]).sum(0)


def _unbound(func: Any, selected: Selected, dim: int = 0) -> list[Selected]:
    if selected.rows is None or dim:
        _refuse("unbind")
    is_place = selected.every.shape[1:] == (1,)
    return [
        Selected.of(row, None, (*selected.whole, RowCondition(holds)), place if is_place else None)
        for place, (row, holds) in enumerate(zip(selected.every, selected.rows.holds, strict=True))
    ]


def _indexed(func: Any, source: Any, index: Any) -> Selected:
    places = index if isinstance(index, tuple) else (index,)
    selected = [place for place in places if isinstance(place, Selected)]
    whole = [condition for one in (source, *selected) for condition in getattr(one, "whole", ())]
    rows = {place.rows for place in selected}
    is_first = bool(selected) and (rows == {None} or places[0] is selected[0])
    held = getattr(source, "rows", None)
    if held is not None and not selected and places[0] == slice(None):
        return Selected.of(source.every[index], held, whole)
    if held is not None or len(rows) > 1 or (selected and not is_first):
        _refuse("an index")
    indices = tuple(map(_index, places, (*source.shape, *places)))
    number = None if selected else source.number
    return Selected.of(_plain(source)[indices], rows.pop() if rows else None, whole, number)


def _index(place: Any, size: Any) -> Any:
    """A number beyond the end is an expert that no row can choose."""
    if isinstance(place, Selected) and place.rows is None:
        return min(place.item(), size - 1)
    return _plain(place)


def _added(func: Any, target: torch.Tensor, dim: int, index: Any, source: Any) -> torch.Tensor:
    is_alike = isinstance(index, Selected) and isinstance(source, Selected) and index.rows is source.rows
    if dim or not is_alike or index.rows is None or isinstance(target, Selected):
        _refuse("index_add")
    return func(target, 0, index.every, source.stored())  # type: ignore[no-any-return]


SPECIAL: dict[str, Callable[..., Any]] = {
    "unbind": _unbound, "__getitem__": _indexed, "index_add": _added, "index_add_": _added, "cat": _joined,
}  # fmt: skip


def _of_rows(name: str, func: Any, selected: Sequence[Selected], args: Any, kwargs: Any) -> Any:
    """Other results than tensors are shapes or types."""
    result = func(*_plain(args), **_plain(kwargs))
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    rows = {one.rows for one in selected if one.rows is not None}
    by_row = [one for one in selected if one.rows is not None]
    is_changed = name.endswith("_") and not name.endswith("__")
    if tensors and (is_changed or (rows and not _is_by_row(name, by_row, args, tensors))):
        _refuse(name)
    whole = [condition for one in selected for condition in one.whole]
    held = by_row[0].rows if by_row else None
    return tree_map_only(torch.Tensor, lambda tensor: Selected.of(tensor, held, whole), result)


def _is_by_row(name: str, by_row: Sequence[Selected], args: Any, results: Sequence[torch.Tensor]) -> bool:
    num, dims = by_row[0].shape[0], by_row[0].dim()
    others = [
        t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and getattr(t, "rows", None) is None
    ]
    if name in PRODUCTS:
        is_fit = len(by_row) == 1 and args[0] is by_row[0]
    else:  # others have no rows of their own
        is_fit = all(t.dim() < dims or t.shape[:1] == (1,) for t in others) or name in ("to", "type_as")
    is_alike = all(one.rows is by_row[0].rows for one in by_row)
    return name in OF_ROWS and is_fit and is_alike and all(t.shape[:1] == (num,) for t in results)
