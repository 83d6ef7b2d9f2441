"""How commands talk: JSON for machines on standard output, tables for people, progress on standard error."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

# Before the first plain line, and between two about many things.
QUIET_S, PAUSE_S = 2.0, 10.0
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def console() -> Console:
    """Where people read."""
    return Console(highlight=False)


def print_json(document: Any) -> None:
    """Where machines read."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def warning() -> Callable[[str], None]:
    """Says on standard error that something is done without, the first time it is called."""
    said: list[str] = []

    def warn(what: str) -> None:
        if not said:
            said.append(what)
            Console(stderr=True, highlight=False).print(
                f"warning: {what}; it is done without", markup=False, soft_wrap=True
            )

    return warn


def cache_folder() -> Path:
    """Where results that can be made again are kept between commands."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """A folder of the cache that can be written; where it cannot be, one that is gone after the command."""
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        warning()(f"{folder} cannot be written: {error.strerror}")
        with tempfile.TemporaryDirectory() as other:
            yield Path(other)
        return
    yield folder


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; the yielded function names what is being done and moves it on by one.

    Where standard error is no terminal: plain lines after the first seconds, one for each thing, or of many
    the latest now and then.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    screen = Console(stderr=True)
    if not screen.is_terminal:
        lines = _Lines(label, total)
        try:
            yield lines.advance
        finally:
            lines.end()
        return
    with Progress(*columns, TimeElapsedColumn(), console=screen, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance


class _Lines:
    """Says on standard error what is being done, a line each; nothing of what is over at once."""

    def __init__(self, label: str, total: int | None) -> None:
        self._total, self._num_done, self._next_s = total, 0, 0.0
        self._what, self._said = label, ""
        self._lock = threading.Lock()
        self._is_late = False
        self._timer = threading.Timer(QUIET_S, self._begin)
        self._timer.daemon = True
        self._timer.start() if QUIET_S else self._begin()

    def advance(self, what: str) -> None:
        """It goes on with this."""
        with self._lock:
            self._num_done += 1
            self._what = what
            self._say()

    def end(self) -> None:
        """It is done."""
        self._timer.cancel()

    def _begin(self) -> None:
        """It takes long enough for people to wonder."""
        with self._lock:
            self._is_late = True
            self._say()

    def _say(self) -> None:
        now_s = time.monotonic()
        is_soon = self._total is not None and now_s < self._next_s
        if not self._is_late or self._what == self._said or is_soon:
            return
        self._said, self._next_s = self._what, now_s + PAUSE_S
        counted = "" if self._total is None else f" ({self._num_done} of {self._total})"
        print(f"tessera: {self._what}{counted}", file=sys.stderr, flush=True)
