"""Keeps what was read from the tables between commands, so that the second one is fast.

Entries lie under `$XDG_CACHE_HOME/tessera/tables`, named by a hash of the table's path, size and time of
change and of the reader's version. An entry that cannot be read is made again; a folder that cannot be
written is done without.
"""

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Raised whenever what is read from a table, or what is made of it, changes.
READER_VERSION = 2

Arrays = dict[str, npt.NDArray[Any]]


def default_folder() -> Path:
    """Where results that can be made again are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / "tables"


def key_of(paths: Iterable[Path], *words: str) -> str:
    """Names an entry by the files it was made from."""
    digest = hashlib.sha256(repr((READER_VERSION, words)).encode())
    for path in paths:
        digest.update(repr((str(path), *_stamp(path))).encode())
    return digest.hexdigest()[:32]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        # Gone since it was listed; reading it will say so.
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TableCache:
    """Arrays by key; without a folder it keeps nothing."""

    folder: Path | None

    def get(self, key: str) -> Arrays | None:
        """What was put under the key; None if nothing, or nothing readable."""
        if self.folder is None:
            return None
        try:
            with np.load(self.folder / f"{key}.npz", allow_pickle=False) as entry:
                return {name: entry[name] for name in entry.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None

    def put(self, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keeps the arrays; written beside its place and moved there, so that nobody reads half of it."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".npz")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, allow_pickle=False, **dict(arrays))
            os.replace(name, self.folder / f"{key}.npz")
        except OSError:
            Path(name).unlink(missing_ok=True)
