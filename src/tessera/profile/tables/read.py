"""Reads the rows of one variant of one table into arrays.

Times are milliseconds in the files and microseconds here. Where a file holds rows of several kernels, those
of the most frequent one are kept, so that a shape has one time. A file that cannot be read, lacks a column or
comes from another card is refused with a sentence; rows without a positive, finite time are counted and left
out.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import MissingExtra
from tessera.profile.model import Array
from tessera.profile.tables.files import CARDS, TableFile
from tessera.profile.tables.kinds import KINDS, Columns, Kind
from tessera.profile.tables.store import Arrays, TableCache, key_of


class Unusable(ValueError):
    """A table that must not be used; the message is one sentence."""


class Absent(ValueError):
    """A table that says nothing about the variant."""


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
