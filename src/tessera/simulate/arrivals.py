"""Arrivals from a seeded formula or a log, and lengths of requests.

    batch:N                     N requests at time zero
    poisson:RATE                independent, mean RATE per second
    bursty:RATE[,PEAK[,SHARE[,SECONDS]]]
                                Markov-modulated Poisson: PEAK times RATE during SHARE of the time,
                                in bursts of SECONDS on average
    FILE                        a log, in one of two public forms:
        BurstGPT   Timestamp (seconds), Model, Request tokens, Response tokens, ...
        Azure      TIMESTAMP (date and time), ContextTokens, GeneratedTokens

Times count from the first row and must not go back. Rows without answer tokens (failed requests) are skipped;
other cells without a number are errors with their line.

Lengths (prompt, answer): `fixed:P,O`; `uniform:P,O` (half to one and a half times the means);
`geometric:P,O`; `lognormal:P,O,SIGMA`.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tessera.errors import ArrivalsError, UnknownName, check_known
from tessera.ir import Arrivals, Load, verify

Floats = npt.NDArray[np.float64]
T = TypeVar("T")

# Four times the mean rate in a tenth of the time, ten seconds long.
BURST = (4.0, 0.1, 10.0)
DEFAULT_NUM = 1000
# Largest number that fits a draw.
MOST = 1e9
NUM_PARTS = 16
SIGMA = 0.7
LENGTHS = ("fixed", "uniform", "geometric", "lognormal")


def make_arrivals(text: str, num: int | None = None, seed: int = 0, lengths: str | None = None) -> Arrivals:
    kind, colon, rest = text.partition(":")
    if colon and kind in FORMULAS:
        arrivals = Arrivals(text, tuple(FORMULAS[kind](_numbers(text, rest), num, seed).tolist()))
    elif Path(text).is_file():
        arrivals = read_arrivals(Path(text), num)
    elif colon and kind.isidentifier() and Path(text).suffix != ".csv":
        raise UnknownName("kind of arrivals", kind, FORMULAS)
    else:
        forms = ", ".join(f"{name}:..." for name in FORMULAS)
        raise ArrivalsError(f"there is no file '{text}'", f"Give a CSV file or {forms}.", "--arrivals")
    if lengths is not None:
        prompts, outputs = make_lengths(lengths, len(arrivals.times_s), seed)
        arrivals = replace(arrivals, prompts=prompts, outputs=outputs)
    verify(arrivals)
    return arrivals


def _batch(numbers: Sequence[float], num: int | None, seed: int) -> Floats:
    del num, seed
    size = numbers[0]
    if len(numbers) != 1 or size != int(size):
        raise ArrivalsError(f"{size:g} is not a number of requests", "Write batch:100.", "--arrivals")
    return np.zeros(int(size))


def _poisson(numbers: Sequence[float], num: int | None, seed: int) -> Floats:
    if len(numbers) != 1:
        raise ArrivalsError("a Poisson stream has one rate", "Write poisson:20.", "--arrivals")
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0 / numbers[0], num or DEFAULT_NUM))


def _bursty(numbers: Sequence[float], num: int | None, seed: int) -> Floats:
    rate, peak, share, seconds = (*numbers, *BURST[len(numbers) - 1 :])[:4]
    if len(numbers) > 4 or share >= 1.0 or peak * share > 1.0:
        message = f"bursts of {peak:g} times the mean rate cannot last {share:g} of the time"
        raise ArrivalsError(message, "PEAK times SHARE is at most 1: bursty:20,4,0.1.", "--arrivals")
    random = np.random.default_rng([seed, 2])
    # The rate outside bursts keeps the mean.
    rates = (rate * (1.0 - peak * share) / (1.0 - share), rate * peak)
    stays = (seconds * (1.0 - share) / share, seconds)
    times: list[float] = []
    is_burst, start = bool(random.random() < share), 0.0
    while len(times) < (num or DEFAULT_NUM):
        stop = start + random.exponential(stays[is_burst])
        size = int(random.poisson(rates[is_burst] * (stop - start)))
        times += np.sort(random.uniform(start, stop, size)).tolist()
        is_burst, start = not is_burst, stop
    return np.array(times[: num or DEFAULT_NUM])


FORMULAS: dict[str, Callable[[Sequence[float], int | None, int], Floats]] = {
    "batch": _batch,
    "poisson": _poisson,
    "bursty": _bursty,
}


def make_lengths(text: str, num: int, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kind, _, rest = text.partition(":")
    check_known("kind of lengths", kind, LENGTHS)
    numbers = _numbers(text, rest, "--lengths")
    num_numbers = 3 if kind == "lognormal" else 2
    if len(numbers) != num_numbers or min(numbers[:2]) < 1.0:
        remedy = "Write fixed:512,128, uniform:512,128, geometric:512,128 or lognormal:512,128,0.7."
        raise ArrivalsError(f"'{text}' is not a pair of mean lengths of at least one", remedy, "--lengths")
    random = np.random.default_rng([seed, 3])
    drawn = [_drawn(kind, mean, numbers[-1], num, random) for mean in numbers[:2]]
    prompts, outputs = (tuple(np.maximum(1, np.rint(x)).astype(int).tolist()) for x in drawn)
    return prompts, outputs


def check_load(load: Load) -> None:
    """The lengths, and how they spread; means and limits are options of `tessera plan`."""
    check_known("spread of lengths", load.spread, LENGTHS)
    for pair in load.lengths:
        if len(pair) != 2 or not all(type(tokens) is int and tokens >= 1 for tokens in pair):
            message = f"must be pairs of tokens of a prompt and its answer, at least 1 each, got {pair!r}"
            raise ArrivalsError(message, "", "lengths")


def lengths_of(load: Load, num: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, answer) tokens."""
    if load.lengths:
        chosen = np.random.default_rng([seed, 4]).integers(len(load.lengths), size=num)
        return [load.lengths[i] for i in chosen]
    sigma = f",{SIGMA}" if load.spread == "lognormal" else ""
    means = f"{load.spread}:{load.prompt_tokens},{load.output_tokens}{sigma}"
    return list(zip(*make_lengths(means, num, seed), strict=True))


def _drawn(kind: str, mean: float, sigma: float, num: int, random: np.random.Generator) -> Floats:
    if kind == "fixed":
        return np.full(num, mean)
    if kind == "uniform":
        # One of every part of the range, so that few requests give the mean.
        parts = np.concatenate([random.permutation(NUM_PARTS) for _ in range(-(-num // NUM_PARTS))])[:num]
        return mean * (0.5 + (parts + random.random(num)) / NUM_PARTS)
    if kind == "geometric":
        return random.geometric(1.0 / mean, num).astype(np.float64)
    return random.lognormal(np.log(mean) - sigma * sigma / 2, sigma, num)


def _numbers(text: str, rest: str, place: str = "--arrivals") -> list[float]:
    try:
        numbers = [float(word) for word in rest.split(",")]
    except ValueError:
        message = f"'{rest}' in '{text}' is not a list of numbers"
        raise ArrivalsError(message, "Write numbers with commas between.", place) from None
    if not all(0.0 < x <= MOST for x in numbers):
        message = f"the numbers of '{text}' must be above zero and at most {MOST:g}"
        raise ArrivalsError(message, "Write rates a second, seconds and shares.", place)
    return numbers


# Columns: time, tokens of the prompt, tokens of the answer.
FORMS = {
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens"),
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


def read_arrivals(path: Path, num: int | None = None) -> Arrivals:
    rows: list[tuple[float, int, int]] = []
    last = 0.0
    for line, time_s, prompt, output in _rows(path):
        if rows and time_s < last:
            message = f"this request came {last - time_s:g} s before the one above it"
            raise ArrivalsError(message, "Sort the file by time.", f"{path}:{line}")
        last = time_s
        if min(prompt, output) >= 1:
            rows.append((time_s, prompt, output))
            if len(rows) == num:
                break
    if not rows:
        raise ArrivalsError("no request in it has an answer", "Give a log with some.", str(path))
    times, prompts, outputs = zip(*rows, strict=True)
    return Arrivals(str(path), tuple(t - times[0] for t in times), prompts, outputs)


def _rows(path: Path) -> Iterator[tuple[int, float, int, int]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # byte order mark of spreadsheets
            reader = csv.DictReader(file)
            time, prompt, output = _form(reader.fieldnames or (), path)
            for row in reader:
                place = f"{path}:{reader.line_num}"
                tokens = [_cell(row[column], column, place, _whole) for column in (prompt, output)]
                yield reader.line_num, _cell(row[time], time, place, _seconds), tokens[0], tokens[1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArrivalsError(f"cannot be read as CSV: {error}", "Give a CSV file.", str(path)) from error


def _form(columns: Sequence[str], path: Path) -> tuple[str, str, str]:
    for form in FORMS.values():
        if set(form) <= set(columns):
            return form
    forms = "; ".join(f"{name}: {', '.join(form)}" for name, form in FORMS.items())
    message = f"the columns are not those of a known form ({', '.join(columns) or 'there are none'})"
    raise ArrivalsError(message, f"Name them as one of these does. {forms}.", str(path))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _whole(text: str) -> int:
    return int(float(text))


def _cell(text: str | None, column: str, place: str, read: Callable[[str], T]) -> T:
    try:
        return read(text or "")
    except (ValueError, OverflowError):
        what = f"'{text}' is no number" if text else "there is nothing"
        message = f"a hole in the log: {what} under '{column}'"
        raise ArrivalsError(message, "Fill it or delete the row.", place) from None
