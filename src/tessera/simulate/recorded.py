"""read_arrivals: request logs in the two public forms.

    BurstGPT   Timestamp (seconds), Model, Request tokens, Response tokens, ...
    Azure      TIMESTAMP (date and time), ContextTokens, GeneratedTokens

Columns are found by name, in any order; others are ignored. Times count from the first row and may not go
back. A row without answer tokens is a request that failed when it was recorded, and is left out. A row with a
hole (a cell that is empty or no number) is refused with its line: what is missing cannot be guessed.
"""

import csv
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tessera.errors import ArrivalsError
from tessera.ir import Arrivals, verify


class _Form(NamedTuple):
    time: str
    prompt: str
    output: str


FORMS = {
    "BurstGPT": _Form("Timestamp", "Request tokens", "Response tokens"),
    "Azure": _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


def read_arrivals(path: Path, num: int | None = None) -> Arrivals:
    """The first `num` requests of a log, or all."""
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    last = 0.0
    for line, time_s, prompt, output in _rows(path):
        if times and time_s < last:
            message = f"this request came {last - time_s:g} s before the one above it"
            raise ArrivalsError(message, "Sort the file by time.", f"{path}:{line}")
        last = time_s
        if prompt < 1 or output < 1:
            continue
        times.append(time_s)
        prompts.append(prompt)
        outputs.append(output)
        if len(times) == num:
            break
    if not times:
        raise ArrivalsError("no request in it has an answer", "Give a log with some.", str(path))
    found = Arrivals(str(path), tuple(t - times[0] for t in times), tuple(prompts), tuple(outputs))
    verify(found)
    return found


def _rows(path: Path) -> Iterator[tuple[int, float, int, int]]:
    """(line, seconds, prompt, answer) of every row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark first
            reader = csv.DictReader(file)
            form = _form(reader.fieldnames or (), path)
            for row in reader:
                place = f"{path}:{reader.line_num}"
                yield (
                    reader.line_num,
                    _time(row[form.time], form.time, place),
                    _tokens(row[form.prompt], form.prompt, place),
                    _tokens(row[form.output], form.output, place),
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArrivalsError(f"cannot be read as CSV: {error}", "Give a CSV file.", str(path)) from error


def _form(columns: Sequence[str], path: Path) -> _Form:
    for form in FORMS.values():
        if set(form) <= set(columns):
            return form
    forms = "; ".join(f"{name}: {', '.join(form)}" for name, form in FORMS.items())
    message = f"the columns are not those of a known form ({', '.join(columns) or 'there are none'})"
    raise ArrivalsError(message, f"Name them as one of these does. {forms}.", str(path))


def _time(text: str | None, column: str, place: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        pass
    try:
        # Seven decimals of a second are more than Python reads.
        head, dot, tail = (text or "").partition(".")
        digits = len(tail) - len(tail.lstrip("0123456789"))
        return datetime.fromisoformat(f"{head}{dot}{tail[: min(6, digits)]}{tail[digits:]}").timestamp()
    except ValueError:
        raise _hole(text, column, place) from None


def _tokens(text: str | None, column: str, place: str) -> int:
    try:
        return int(float(text or ""))
    except (ValueError, OverflowError):
        raise _hole(text, column, place) from None


def _hole(text: str | None, column: str, place: str) -> ArrivalsError:
    what = f"'{text}' is no number" if text else "there is nothing"
    return ArrivalsError(f"a hole in the log: {what} under '{column}'", "Fill it or delete the row.", place)
