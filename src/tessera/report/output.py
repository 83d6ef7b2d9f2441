"""Writing a report file: whole or not at all, and one clear error where that is impossible."""

import os
from collections.abc import Iterable
from pathlib import Path

from tessera.errors import ArtifactError


def write_text(path: str | Path, chunks: Iterable[str]) -> None:
    """Writes the chunks beside `path`, then moves the file there, so that no reader sees half of it."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(chunks)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        remedy = "Choose a place that can be written."
        raise ArtifactError(f"cannot write: {error.strerror}", remedy, str(path)) from error
