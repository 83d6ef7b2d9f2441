"""How commands talk: JSON for machines on standard output, tables for people, progress on standard error."""

import json
import os
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

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def console() -> Console:
    """Where people read."""
    return Console(highlight=False)


def print_json(document: Any) -> None:
    """Where machines read."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def cache_folder() -> Path:
    """Where results that can be made again are kept between commands."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; the yielded function names what is being done and moves it on by one."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    screen = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=screen, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance
