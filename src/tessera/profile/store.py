"""Store of measurements: one JSON document per line, append-only.

A row names its device (model, SMs, driver, torch version) and clock. Rows of other devices are ignored, and
rows at another clock unless `any_clock`. A half line, left by a killed command, is dropped; other damage is
an error with its line. With `warn`, an unusable store is left out.

A timing is a median with a 95 % interval from order statistics. Sampling stops when half the interval is
within 2 % of the median, or time is up. Links: us = latency + bytes / bandwidth, a least-squares fit of
relative error.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tessera.errors import ArtifactError, TesseraError
from tessera.ir import Link
from tessera.ir.files import cache_folder, read_file
from tessera.ir.timeline import HIDDEN, shown

# Relative difference that counts as equal.
CLOCK_TOLERANCE = 0.04
CONFIDENCE_Z = 1.96
TARGET_ERROR = 0.02
MIN_SAMPLES = 8
MAX_SAMPLES = 400
# Per launch.
CAP_S = 0.25
# 4 KB to 64 MB.
SIZES = tuple(4096 * 4**n for n in range(8))
NAME = "measured"
# Share of the bandwidth left with both directions busy.
SHARED = 0.8
# If latency dominates even the longest message.
MAX_GBPS = 1e5
# (samples, seconds) -> True to stop.
Enough = Callable[[Sequence[float], float], bool]
Kind = Literal["launch", "failed", "whole", "link"]


@dataclass(frozen=True, slots=True)
class Timing:
    us: Annotated[float, msgspec.Meta(ge=0)]
    # Half of the 95 % interval.
    half_us: Annotated[float, msgspec.Meta(ge=0)]
    num: int

    @property
    def rel_error(self) -> float:
        return self.half_us / self.us if self.us > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    identity: Mapping[str, str]
    # Under load; None if unreadable.
    clock_mhz: float | None


class StoredRow(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Kind
    # A key of `distinct`, or a digest of a trace.
    key: str = ""
    identity: Mapping[str, str] = {}
    clock_mhz: float | None = None
    kernel: str = ""
    timing: Timing | None = None
    why: str | None = None
    link: "LinkFit | None" = None


NOTHING = StoredRow("launch")


def default_store() -> Path:
    return cache_folder() / "measured.jsonl"


class Store:
    def __init__(
        self, path: Path, machine: Machine, any_clock: bool = False, warn: Callable[[str], None] | None = None
    ) -> None:
        self._path, self._machine = path, machine
        self._warn = warn
        self._rows: dict[tuple[str, str], StoredRow] = {}
        with self._guarded():
            for row in read_rows(path):
                is_near = any_clock or not _differ(row.clock_mhz, machine.clock_mhz)
                if row.identity == machine.identity and is_near:
                    self._rows[row.kind, row.key] = row

    def row(self, kind: Kind, key: str) -> StoredRow:
        return self._rows.get((kind, key), NOTHING)

    def add(self, kind: Kind, key: str, kernel: str = "", **values: Any) -> None:
        """Writes at once: a crash loses no row."""
        row = StoredRow(kind, key, self._machine.identity, self._machine.clock_mhz, kernel, **values)
        self._rows[kind, key] = row
        with self._guarded():
            append_rows(self._path, [row])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except TesseraError as error:
            if self._warn is None:
                raise
            self._warn(f"{self._path} {error.message}")


def append_rows(path: Path, rows: Iterable[StoredRow]) -> None:
    """Ends a half line first."""
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            file.write(text if file.read(1) in (b"", b"\n") else b"\n" + text)
    except OSError as error:
        raise TesseraError(f"cannot be written: {error.strerror}", "Choose --store.", str(path)) from error


def read_rows(path: Path) -> Iterator[StoredRow]:
    if not path.exists():
        return
    for number, line in enumerate(read_file(path, "Choose --store.").splitlines(), 1):
        if line.startswith(b"{") and not line.endswith(b"}"):  # cut off by a crash
            continue
        try:
            yield msgspec.json.decode(line, type=StoredRow)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            remedy = "Delete that line, or choose another --store."
            raise ArtifactError("no measurement but something else", remedy, f"{path}:{number}") from None


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > CLOCK_TOLERANCE * max(a, b)


def timing(samples: Sequence[float]) -> Timing:
    """Negative medians are noise around zero."""
    ordered = sorted(samples)
    num = len(ordered)
    skipped = max(0, math.floor((num - CONFIDENCE_Z * math.sqrt(num)) / 2))
    half = (ordered[num - 1 - skipped] - ordered[skipped]) / 2
    return Timing(max(0.0, median(ordered)), half, num)


def until(cap_s: float = CAP_S) -> Enough:

    def enough(samples: Sequence[float], seconds: float) -> bool:
        if len(samples) < MIN_SAMPLES:
            return seconds > 4 * cap_s and bool(samples)
        if seconds > cap_s or len(samples) >= MAX_SAMPLES:
            return True
        return timing(samples).rel_error <= TARGET_ERROR

    return enough


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One direction between two devices (measured)."""

    src: Annotated[str, shown("from")]
    dst: Annotated[str, shown("to")]
    via: str
    latency_us: Annotated[float, msgspec.Meta(ge=0)]
    gbps: Annotated[float, msgspec.Meta(gt=0)]
    # Median, relative.
    rel_error: Annotated[float, shown("fit", "error")]
    # With the other direction busy.
    both_gbps: Annotated[float, shown("GB/s, both ways")]
    # (bytes, median microseconds)
    samples: Annotated[tuple[tuple[int, float], ...], HIDDEN]
    # From the host's memory; 0: not measured.
    fetch_gbps: Annotated[float, HIDDEN, msgspec.Meta(ge=0)] = 0.0
    # See `Link`.
    fetch_slowdown: Annotated[float, HIDDEN] = 1.0

    @property
    def link(self) -> Link:
        fetching = self.fetch_gbps, self.fetch_slowdown
        return Link(self.src, self.dst, NAME, self.latency_us, self.gbps, "", *fetching)


def fit_link(
    src: str, dst: str, via: str, alone: Iterable[tuple[int, float]], both: Iterable[tuple[int, float]]
) -> LinkFit:
    samples = _medians(alone)
    latency_us, gbps = _fit(samples)
    errors = [abs(latency_us + n / (gbps * 1e3) - us) / us for n, us in samples]
    both_gbps = _fit(_medians(both))[1]
    return LinkFit(src, dst, via, latency_us, gbps, median(errors), both_gbps, tuple(samples))


def remark(fit: LinkFit) -> str:
    if fit.both_gbps >= SHARED * fit.gbps:
        return ""
    return (
        f"{fit.src} to {fit.dst}: {fit.gbps:.3g} GB/s alone, {fit.both_gbps:.3g} GB/s while the other "
        "direction is busy; plans count on the first"
    )


def _medians(times: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    by_size: dict[int, list[float]] = {}
    for num_bytes, us in times:
        by_size.setdefault(num_bytes, []).append(us)
    return [(n, max(1e-3, median(repeats))) for n, repeats in sorted(by_size.items())]


def _fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency, GB/s)."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    rows = np.stack([1.0 / times, sizes / times], axis=1)
    latency_us, us_per_byte = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)[0]
    if latency_us < 0:
        latency_us = 0.0
        us_per_byte = float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    if us_per_byte * MAX_GBPS * 1e3 < 1.0:
        return float(median(times)), MAX_GBPS
    return float(latency_us), float(1.0 / (us_per_byte * 1e3))


def keep_links(path: Path, fits: Sequence[LinkFit]) -> None:
    """The last fit of a pair counts."""
    append_rows(path, [StoredRow("link", link=fit) for fit in fits])


def stored_links(path: Path | None = None) -> tuple[Link, ...]:
    links = (row.link.link for row in read_rows(path or default_store()) if row.link is not None)
    return tuple({(link.src, link.dst): link for link in links}.values())
