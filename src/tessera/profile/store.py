"""Store of measurements: one JSON document per line, append-only.

A row belongs to a session: one device (model, SMs, driver, torch version) at one clock. Rows of other devices
are ignored, and rows at another clock unless `any_clock`. A half line, left by a killed command, is dropped;
other damage is an error with its line. With `spare`, an unusable store is ignored.

A timing is a median with a 95 % interval from order statistics. Sampling stops when half the interval is
within 2 % of the median, or time is up. Links: us = latency + bytes / bandwidth, a least-squares fit of
relative error.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from tessera.errors import ArtifactError, TesseraError
from tessera.ir import Link
from tessera.ir.files import cache_folder
from tessera.ir.timeline import HIDDEN, shown

FORMAT = 1
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
# Used if latency dominates even the longest message.
MAX_GBPS = 1e5
# (samples, seconds) -> True to stop.
Enough = Callable[[Sequence[float], float], bool]


@dataclass(frozen=True, slots=True)
class Timing:
    us: float
    # Half of the 95 % interval.
    half_us: float
    num: int

    @property
    def rel_error(self) -> float:
        return self.half_us / self.us if self.us > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    identity: Mapping[str, str]
    # Under load; None if unreadable.
    clock_mhz: float | None

    @property
    def key(self) -> str:
        text = json.dumps(sorted(self.identity.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# By kind ("launch", "failed", "whole") and key (of `distinct`, or a trace's digest).
StoredRows = dict[tuple[str, str], Timing | str]


def default_store() -> Path:
    return cache_folder() / "measured.jsonl"


class Store:
    def __init__(
        self,
        path: Path,
        machine: Machine,
        any_clock: bool = False,
        spare: Callable[[str], None] | None = None,
    ) -> None:
        self._path, self._machine = path, machine
        self._spare = spare
        self._rows: StoredRows = {}
        for clock_mhz, rows in self._known():
            if any_clock or not _differ(clock_mhz, machine.clock_mhz):
                self._rows |= rows
        self._session = os.urandom(6).hex()
        self._announced = False

    def launch(self, key: str) -> Timing | None:
        return cast("Timing | None", self._rows.get(("launch", key)))

    def failure(self, key: str) -> str | None:
        return cast("str | None", self._rows.get(("failed", key)))

    def whole(self, digest: str) -> Timing | None:
        return cast("Timing | None", self._rows.get(("whole", digest)))

    def add_launch(self, key: str, kernel: str, found: Timing, clock_mhz: float | None) -> None:
        """At once: a crash does not lose it."""
        self._rows["launch", key] = found
        self._append({"kind": "launch", "key": key, "kernel": kernel, **asdict(found), "mhz": clock_mhz})

    def add_failure(self, key: str, kernel: str, why: str) -> None:
        self._rows["failed", key] = why
        self._append({"kind": "failed", "key": key, "kernel": kernel, "why": why})

    def add_whole(self, digest: str, found: Timing) -> None:
        self._rows["whole", digest] = found
        self._append({"kind": "whole", "trace": digest, **asdict(found)})

    def _known(self) -> list[tuple[float | None, StoredRows]]:
        try:
            return _known(self._path, self._machine.key)
        except TesseraError as error:
            if self._spare is None:
                raise
            self._spare(f"{self._path} {error.message}")
            return []

    def _append(self, row: dict[str, Any]) -> None:
        lines = [{"session": self._session, **row}]
        if not self._announced:
            about = {"device": self._machine.key, "identity": dict(self._machine.identity)}
            head = {"kind": "session", "session": self._session, "format": FORMAT, **about}
            lines.insert(0, {**head, "clock_mhz": self._machine.clock_mhz})
            self._announced = True
        try:
            append_lines(self._path, lines)
        except TesseraError as error:
            if self._spare is None:
                raise
            self._spare(f"{self._path} {error.message}")


def append_lines(path: Path, documents: list[dict[str, Any]]) -> None:
    """After ending a half line."""
    text = "".join(json.dumps(d, allow_nan=False) + "\n" for d in documents)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell() and not _ends_line(path):
                text = "\n" + text
            file.write(text.encode())
    except OSError as error:
        raise TesseraError(f"cannot be written: {error.strerror}", "Choose --store.", str(path)) from error


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TesseraError(f"cannot be read: {error.strerror}", "Choose --store.", str(path)) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            # Cut off by a crash: the last line, or one ended by a later session.
            if number == len(lines) or '"kind": "session"' in lines[number]:
                continue
            remedy = "Delete that line, or choose another --store."
            raise ArtifactError("no measurement but something else", remedy, f"{path}:{number}") from None
        if not isinstance(row, dict) or "kind" not in row:
            raise ArtifactError("no measurement but something else", "Delete it.", f"{path}:{number}")
        yield row


def _known(path: Path, device: str) -> list[tuple[float | None, StoredRows]]:
    sessions: dict[str, tuple[float | None, StoredRows]] = {}
    try:
        for row in read_lines(path):
            kind, session = row["kind"], row.get("session", "")
            if kind == "session" and row.get("device") == device:
                sessions[session] = (row["clock_mhz"], {})
            elif session in sessions and kind in ("launch", "failed", "whole"):
                key = row["trace" if kind == "whole" else "key"]
                known = row["why"] if kind == "failed" else Timing(row["us"], row["half_us"], row["num"])
                sessions[session][1][kind, key] = known
    except (KeyError, TypeError) as error:
        message = f"holds a line that is no measurement: {error!r}"
        raise ArtifactError(message, "Delete it, or choose another --store.", str(path)) from error
    return list(sessions.values())


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


def until(cap_s: float = CAP_S, error: float = TARGET_ERROR) -> Enough:

    def enough(samples: Sequence[float], seconds: float) -> bool:
        if len(samples) < MIN_SAMPLES:
            return seconds > 4 * cap_s and bool(samples)
        if seconds > cap_s or len(samples) >= MAX_SAMPLES:
            return True
        return timing(samples).rel_error <= error

    return enough


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One direction between two devices (measured)."""

    src: Annotated[str, shown("from")]
    dst: Annotated[str, shown("to")]
    via: str
    latency_us: float
    gbps: float
    # Median, relative.
    rel_error: Annotated[float, shown("fit", "error")]
    # With the other direction busy.
    both_gbps: Annotated[float, shown("GB/s, both ways")]
    # (bytes, median microseconds)
    samples: Annotated[tuple[tuple[int, float], ...], HIDDEN]
    # From the host's memory; 0: not measured.
    fetch_gbps: Annotated[float, HIDDEN] = 0.0
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
    return [(n, max(1e-3, median(found))) for n, found in sorted(by_size.items())]


def _fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency, GB/s); residuals are relative."""
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
    """The last one of a pair counts."""
    append_lines(path, [{"kind": "link", **asdict(fit)} for fit in fits])


def stored_links(path: Path | None = None) -> tuple[Link, ...]:
    found: dict[tuple[str, str], Link] = {}
    for row in read_lines(path or default_store()):
        if row["kind"] == "link":
            link = msgspec.convert(row, LinkFit).link
            found[link.src, link.dst] = link
    return tuple(found.values())
