"""Reads the rows of one variant of one table into arrays.

Times are milliseconds in the files and microseconds here. Where a file holds rows of several kernels, those
of the most frequent one are kept, so that a shape has one time. A file that cannot be read, lacks a column or
comes from another card is refused with a sentence; rows without a positive, finite time are counted and left
out.

Finds the table files of an installed `aiconfigurator-core`; never runs its code.

Layout: `<package>/systems/data/<system>/<family>/<stack>/<version>/<file>.parquet`. Which stack and version:
the first of the kind's stacks that has a sound table on that GPU, in the same order for every GPU, and of one
stack the newest version. So two GPUs are compared on the same software wherever the package has it for both.

Keeps what was read from the tables between commands, so that the second one is fast.

Entries lie under `$XDG_CACHE_HOME/tessera/tables`, named by a hash of the table's path, size and time of
change and of the reader's version. An entry that cannot be read is made again; a folder that cannot be
written is done without.
"""

import hashlib
import os
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import MissingExtra
from tessera.profile.counts import OpClass
from tessera.profile.fitted import Array
from tessera.profile.tables.kinds import KINDS, Columns, Kind

PACKAGE = "aiconfigurator_core"
DISTRIBUTION = "aiconfigurator-core"
# Which GPU each system of the package is.
SYSTEMS = {
    "a100": "a100_sxm", "l40s": "l40s", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
# What the tables call the card itself.
CARDS = {
    "a100": "A100", "l40s": "L40S", "h100": "H100", "h200": "H200", "b200": "B200",
    "rtx-pro-6000": "RTX PRO 6000",
}  # fmt: skip
# Raised whenever what is read from a table, or what is made of it, changes.
READER_VERSION = 2
Arrays = dict[str, npt.NDArray[Any]]


class Unusable(ValueError):
    """A table that must not be used; the message is one sentence."""


class Absent(ValueError):
    """A table that says nothing about the variant."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """One table of one GPU, as one version of one stack ran it."""

    gpu: str
    op: OpClass
    stack: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        """How people call it: "sglang 0.5.14"."""
        return f"{self.stack} {self.version}"


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


@dataclass(frozen=True, slots=True)
class Rows:
    """What one table says about one variant."""

    file: TableFile
    variant: str
    columns: Columns
    us: Array
    # What the table calls the kernel that it timed; empty if it does not say.
    kernel: str
    # Rows whose time was not a positive number.
    num_without_time: int


def read_rows(file: TableFile, variant: str, store: TableCache) -> Rows:
    """The rows of a variant, from the store if they were read before."""
    kind = KINDS[file.op]
    key = key_of([file.path], "rows", file.op, variant)
    found = store.get(key)
    if found is None:
        found = _read(file, kind, variant)
        store.put(key, found)
    us = found["us"]
    if not us.size:
        raise Absent
    columns = {name: found[name] for name in kind.columns}
    timed = np.isfinite(us) & (us > 0)
    kept = {c: x[timed] for c, x in columns.items()}
    return Rows(file, variant, kept, us[timed], str(found["kernel"]), int((~timed).sum()))


def _read(file: TableFile, kind: Kind, variant: str) -> Arrays:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "tables") from error
    try:
        present = set(parquet.read_schema(file.path).names)
        wanted = _wanted(kind, present)
        filters = [f for f in kind.filters(variant) if f[0] in present]
        table = parquet.read_table(file.path, columns=wanted, filters=filters)
    except (OSError, ValueError) as error:
        raise Unusable(f"it cannot be read: {str(error).splitlines()[0]}") from error
    _check_card(file, table)
    kernel, kept = _most_frequent(table["kernel_source"].to_pylist() if "kernel_source" in present else [])
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64)[kept] for name in kind.columns}
    latency_ms = np.asarray(table["latency"].to_numpy(), dtype=np.float64)[kept]
    return columns | {"us": latency_ms * 1e3, "kernel": np.array(kernel)}


def _wanted(kind: Kind, present: set[str]) -> list[str]:
    needed = [*kind.columns, "latency"]
    missing = [name for name in needed if name not in present]
    if missing:
        raise Unusable(f"it has no column {', '.join(missing)}")
    return needed + [name for name in ("device", "kernel_source") if name in present]


def _check_card(file: TableFile, table: Any) -> None:
    cards = set(table["device"].unique().to_pylist()) if "device" in table.column_names else set()
    foreign = sorted(str(card) for card in cards if CARDS[file.gpu].lower() not in str(card).lower())
    if foreign:
        raise Unusable(f"its rows were timed on {foreign[0]}")


def _most_frequent(names: list[str]) -> tuple[str, Any]:
    """The kernel that most rows have, and which rows those are."""
    if not names:
        return "", slice(None)
    ((most, _),) = Counter(names).most_common(1)
    return most, np.array([name == most for name in names])


@cache
def installed_root() -> Path | None:
    """The folder of systems of the installed package; None without it."""
    spec = find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        root = Path(place) / "systems" / "data"
        if root.is_dir():
            return root
    return None


def table_files(root: Path, gpu_name: str, op: OpClass) -> tuple[TableFile, ...]:
    """The tables of one GPU and class, best first."""
    if gpu_name not in SYSTEMS or op not in KINDS:
        return ()
    kind, found = KINDS[op], []
    for stack in kind.stacks:
        folder = root / SYSTEMS[gpu_name] / kind.family / stack
        versions = sorted(folder.glob(f"*/{kind.file}"), key=_version_key, reverse=True)
        found += [TableFile(gpu_name, op, stack, path.parent.name, path) for path in versions]
    return tuple(found)


def _version_key(path: Path) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", path.parent.name))


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
