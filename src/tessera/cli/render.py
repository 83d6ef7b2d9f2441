"""Renderer of commands' records for people.

Fields of a dataclass or msgspec struct are printed in order:

   scalar, list or dict of scalars   a labelled line
   list or dict of records           a table with a column for each field
   record                            a section; a labelled line if its field has a unit
   `headline`, `notes`               lines without a label
   None, or an empty list or dict    nothing

Units come from the end of a field's name (`_us`, `_bytes`, `_per_s`, ...). A field can say more with
`Annotated[T, HIDDEN]` (only in the JSON) or `Annotated[T, shown("label", "unit")]`.

A table wider than the terminal has its long words broken or is divided into pieces with the first column and
as many others as fit, whichever gives fewer pieces.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tessera.ir.units import duration, percent, size

# Cells of at least this length wrap, in columns of at least this width.
PROSE_LENGTH, PROSE_WIDTH = 28, 14
# Space between two columns.
GAP = 2
WORDS = {
    "usd": "USD", "ttft": "TTFT", "tpot": "TPOT", "gpu": "GPU", "gpus": "GPUs", "slo": "SLO",
    "tflops": "TFLOP/s", "gbps": "GB/s", "sms": "SMs", "us": "time",
}  # fmt: skip
# By the last word of a field's name. `LABELLESS` units are no part of the label.
LABELLESS: dict[str, Callable[[float], str]] = {
    "us": duration,
    "ms": lambda ms: duration(1e3 * ms),
    "s": lambda s: duration(1e6 * s),
    "bytes": size,
}
UNITS: dict[str, Callable[[float], str]] = {
    **LABELLESS,
    "seconds": lambda s: duration(1e6 * s),
    "hour": lambda usd: f"{usd:.2f}",
    **dict.fromkeys(("share", "utilisation", "error", "gap", "margin", "loss", "attainment"), percent),
    **dict.fromkeys(("ratio", "gain"), lambda value: f"{value:.3f}x"),
}


def number(value: float) -> str:
    """Four significant digits, thousands separated, never an exponent."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or not math.isfinite(value) or abs(value) >= 1e-4:
        return f"{value:.4g}"
    return f"{value:.{3 - math.floor(math.log10(abs(value)))}f}"


# Head, whether its cells are numbers, and the cells.
Column = tuple[str, bool, Sequence[str]]


class Field(NamedTuple):
    name: str
    label: str
    unit: str
    is_hidden: bool


def fields_of(record: type[Any]) -> tuple[Field, ...]:
    struct = getattr(record, "__struct_fields__", None)
    names = struct or [f.name for f in dataclasses.fields(record)]
    hints = get_type_hints(record, include_extras=True)
    fields = []
    for name in names:
        extra: dict[str, Any] = {}
        for meta in getattr(hints[name], "__metadata__", ()):
            extra |= getattr(meta, "extra", None) or {}
        unit = extra.get("unit") or _unit(name)
        fields.append(Field(name, extra.get("label") or label(name), unit, extra.get("hidden", False)))
    return tuple(fields)


def _unit(name: str) -> str:
    words = name.split("_")
    if "ratio" in words or words[0] == "gain":
        return "ratio"
    if words[-2:-1] == ["per"] and words[-1] == "s":
        return ""
    return words[-1] if words[-1] in UNITS else ""


def label(name: str) -> str:
    """`tokens_per_s` is "tokens/s", `latency_us` "latency"."""
    words = name.removeprefix("num_").removeprefix("is_").replace("_per_", "/").split("_")
    if len(words) > 1 and words[-1] in LABELLESS:
        words.pop()
    return re.sub(r"[^ /]+", lambda word: WORDS.get(word[0], word[0]), " ".join(words))


def is_record(value: object) -> bool:
    return isinstance(value, msgspec.Struct) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def text_of(value: Any, unit: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int | float):
        write = UNITS.get(unit)
        return write(value) if write and math.isfinite(value) else number(value)
    if isinstance(value, Mapping):
        if len(value) > 1 and len(set(map(str, value.values()))) == 1:
            return f"{text_of(next(iter(value.values())), unit)} each"
        return ", ".join(f"{key} {text_of(x, unit)}".strip() for key, x in value.items())
    if is_record(value):
        pairs = ((f, text_of(getattr(value, f.name), f.unit or unit)) for f in fields_of(type(value)))
        return ", ".join(f"{f.label} {text}" for f, text in pairs if text and not f.is_hidden)
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    return ", ".join(text_of(x, unit) for x in value)


def parts_of(record: Any) -> Iterator[RenderableType]:
    lines: list[tuple[str, str]] = []
    for field in fields_of(type(record)):
        value = getattr(record, field.name)
        if field.is_hidden or value is None or (isinstance(value, Sequence | Mapping) and not value):
            continue
        block = _block(field, value)
        if block is None:
            lines.append((field.label, text_of(value, field.unit)))
            continue
        yield from _grid(lines)
        yield block
        lines = []
    yield from _grid(lines)


def _block(field: Field, value: Any) -> RenderableType | None:
    """None: a labelled line."""
    if field.name == "headline":
        return Text(value, style="bold")
    if field.name == "notes":
        return Text("\n".join(value))
    if is_record(value) and not field.unit:
        return Group(_title(field.label), *parts_of(value))
    rows = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(rows, Sequence) and is_record(rows[0]):
        return RecordTable(field.label, value)
    return None


def _title(text: str) -> Text:
    return Text(text[:1].upper() + text[1:], style="bold")


def _grid(lines: Sequence[tuple[str, str]]) -> Iterator[Table]:
    if lines:
        grid = Table.grid(padding=(0, GAP))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in lines:
            grid.add_row(Text(name), Text(text))
        yield grid


@dataclass(frozen=True)
class RecordTable:
    """One row per record, after its key in a mapping."""

    title: str
    records: Sequence[Any] | Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._columns()
        yield _title(self.title)
        choices = [
            pieces for folds in (False, True) if (pieces := _pieces(columns, options.max_width, folds))
        ]
        fewest = min(choices, key=len) if choices else [_table(columns, True)]
        for number, piece in enumerate(fewest):
            yield from [Text()] if number else []
            yield piece

    def _columns(self) -> list[Column]:
        records, columns = self.records, list[Column]()
        if isinstance(records, Mapping):
            columns.append(("", False, list(map(str, records))))
            records = list(records.values())
        for field in fields_of(type(records[0])):
            values = [getattr(record, field.name) for record in records]
            cells = [text_of(value, field.unit) for value in values]
            if not field.is_hidden and any(cells):
                is_right = all(x is None or isinstance(x, int | float) for x in values)
                columns.append((field.label, is_right, cells))
        return columns


def _pieces(columns: Sequence[Column], max_width: int, folds: bool) -> list[Table]:
    """Empty: one is too wide."""

    def fits(piece: Sequence[Column]) -> bool:
        widths = (GAP + (column.min_width or 0) for column in _table(piece, folds).columns)
        return sum(widths) <= max_width + GAP

    pieces = [list(columns[:1])]
    for column in columns[1:]:
        if not fits([*pieces[-1], column]):
            pieces.append([columns[0]])
        pieces[-1].append(column)
    return [_table(piece, folds) for piece in pieces] if all(map(fits, pieces)) else []


def _table(columns: Sequence[Column], folds: bool) -> Table:
    """Long texts wrap, between words unless `folds`."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold underline")
    table.show_header = any(head for head, _, _ in columns)
    for head, is_right, cells in columns:
        wide = max(map(len, (*head.split(), *cells)), default=1)
        lines = textwrap.wrap(head, max(wide, 1), break_long_words=False, break_on_hyphens=False)
        width = max(map(len, (*lines, *cells)), default=0)
        longest = max((len(word) for text in (*lines, *cells) for word in text.split()), default=0)
        wraps = width >= PROSE_LENGTH and (folds or longest <= PROSE_WIDTH)
        table.add_column(
            Text("\n".join(lines)),
            justify="right" if is_right else "left",
            no_wrap=not wraps,
            min_width=PROSE_WIDTH if wraps else width,
            overflow="fold",
        )
    for row in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
