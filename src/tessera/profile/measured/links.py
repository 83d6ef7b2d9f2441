"""What joins two devices: latency and bandwidth fitted to measured transfers, and kept in the store.

    us = latency + bytes / bandwidth

fitted by least squares of the relative error, so that short messages count as much as long ones. The fit is
to transfers one at a time. What each direction keeps when both are busy is fitted beside it and stored; a
plan takes the first figure, and the caller is told where the second is much lower.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from tessera.ir import Link
from tessera.profile.measured.store import append_lines, default_store, read_lines

# 4 KB to 64 MB.
SIZES = tuple(4096 * 4**n for n in range(8))
# Link name of a plan that took measured links.
NAME = "measured"
# A direction that keeps less than this share of its bandwidth when both are busy is worth a remark.
SHARED = 0.8
# Where even the longest message tells no bandwidth from latency.
MAX_GBPS = 1e5


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One direction between two devices."""

    src: str
    dst: str
    # How bytes travel, in words.
    via: str
    latency_us: float
    gbps: float
    # Median relative error of the fit on the transfers it was fitted to.
    rel_error: float
    # Bandwidth while the other direction is busy too.
    both_gbps: float
    # (bytes, median microseconds)
    samples: tuple[tuple[int, float], ...]

    @property
    def link(self) -> Link:
        """As a plan takes it."""
        return Link(self.src, self.dst, NAME, self.latency_us, self.gbps)


def fit_link(
    src: str, dst: str, via: str, alone: Iterable[tuple[int, float]], both: Iterable[tuple[int, float]]
) -> LinkFit:
    """Latency and bandwidth of one direction from (bytes, microseconds) of many transfers."""
    samples = _medians(alone)
    latency_us, gbps = _fit(samples)
    errors = [abs(latency_us + n / (gbps * 1e3) - us) / us for n, us in samples]
    both_gbps = _fit(_medians(both))[1]
    return LinkFit(src, dst, via, latency_us, gbps, median(errors), both_gbps, tuple(samples))


def remark(fit: LinkFit) -> str:
    """What a reader should know of a link; empty if nothing."""
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
    """(latency, GB/s): both terms over the measured time, so that residuals are relative."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    rows = np.stack([1.0 / times, sizes / times], axis=1)
    latency_us, us_per_byte = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)[0]
    if latency_us < 0:  # no message is early: the shortest has none
        latency_us = 0.0
        us_per_byte = float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    if us_per_byte * MAX_GBPS * 1e3 < 1.0:
        return float(median(times)), MAX_GBPS
    return float(latency_us), float(1.0 / (us_per_byte * 1e3))


def keep_links(path: Path, fits: Sequence[LinkFit]) -> None:
    """Adds links to a store; of several between the same two, the last counts."""
    append_lines(path, [{"kind": "link", **asdict(fit)} for fit in fits])


def stored_links(path: Path | None = None) -> tuple[Link, ...]:
    """The links of a store, by default the one that commands share."""
    found: dict[tuple[str, str], Link] = {}
    for row in read_lines(path or default_store()):
        if row["kind"] == "link":
            link = Link(row["src"], row["dst"], NAME, row["latency_us"], row["gbps"])
            found[link.src, link.dst] = link
    return tuple(found.values())
