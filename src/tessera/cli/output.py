"""How commands talk: JSON for machines on standard output, tables for people, progress on standard error."""

import json
import os
import sys
import tempfile
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

# Between two plain lines about many things.
PAUSE_S = 10.0
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

    Where standard error is no terminal: plain lines, one for each thing, or of many the latest now and then.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield _lines(label, total)
        return
    with Progress(*columns, TimeElapsedColumn(), console=screen, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance


def _lines(label: str, total: int | None) -> Callable[[str], None]:
    """Says on standard error what is being done, a line each."""
    last, num_done, next_s = "", 0, 0.0

    def say(what: str) -> None:
        nonlocal last, next_s
        now_s = time.monotonic()
        if what == last or (total is not None and now_s < next_s):
            return
        last, next_s = what, now_s + PAUSE_S
        counted = "" if total is None else f" ({num_done} of {total})"
        print(f"tessera: {what}{counted}", file=sys.stderr, flush=True)

    def advance(what: str) -> None:
        nonlocal num_done
        num_done += 1
        say(what)

    say(label)
    return advance
