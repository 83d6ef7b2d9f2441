"""Calibration: the few launches whose prices matter most, measured on a card, and what they teach.

    chosen       of a step's works, those that carry most of its error: time times error
    Calibration  those of one GPU with their measured times. A launch of the same work takes the measured
                 time; another of its class the model's, times the median ratio of measured to modelled over
                 the class, with the spread of the ratios as its error, where that is less than it was

One file a GPU lies under `$XDG_CACHE_HOME/tessera/calibrations`, as `tessera calibrate` writes it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median

import msgspec

from tessera.errors import ArtifactError
from tessera.ir import Cost, Source
from tessera.profile.counts import OpClass, Work

FORMAT = 1
# Of a measured launch; a machine's clock and software differ from another's of the same card by as much.
MEASURED_ERROR = 0.03
# Ratios of fewer launches than this say nothing about their class.
MIN_RATIOS = 3
# No class is taken to be surer than this by a few launches.
LEAST_ERROR = 0.08


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One measured launch."""

    work: Work
    us: float
    # What the models said, when it was measured.
    modelled_us: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on one GPU."""

    gpu: str
    # The driver's name of the card, and the versions of driver and torch.
    about: Mapping[str, str]
    rows: tuple[CalibrationRow, ...]
    _known: dict[Work, float] = field(default_factory=dict, compare=False)
    _ratios: dict[tuple[OpClass, str], list[float]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            self._known[row.work] = row.us
            if row.modelled_us > 0:
                self._ratios.setdefault((row.work.op, row.work.dtype), []).append(row.us / row.modelled_us)

    def applied(self, work: Work, cost: Cost) -> Cost:
        """The price of one launch with what was measured."""
        if work in self._known:
            return Cost(self._known[work], Source.MEASURED, MEASURED_ERROR, f"calibrated on {self.gpu}")
        ratios = self._ratios.get((work.op, work.dtype), [])
        if len(ratios) < MIN_RATIOS or cost.us <= 0:
            return cost
        middle = median(ratios)
        spread = median(abs(r - middle) for r in ratios) / middle
        error = max(LEAST_ERROR, 1.5 * spread)
        said = f"times {middle:.2f}, as {len(ratios)} launches of its class measured on {self.gpu}"
        detail = f"{cost.detail}; {said}" if cost.detail else said
        return replace(cost, us=cost.us * middle, rel_error=min(cost.rel_error, error), detail=detail)


def step_error(works: Sequence[Work], costs: Sequence[Cost]) -> float:
    """Relative error of the sum, if classes are wrong independently and each within itself alike."""
    total = sum(cost.us for cost in costs)
    parts: dict[OpClass, float] = {}
    for work, cost in zip(works, costs, strict=True):
        parts[work.op] = parts.get(work.op, 0.0) + cost.us * cost.rel_error
    return math.hypot(*parts.values()) / total if total else 0.0


def chosen(works: Sequence[Work], costs: Sequence[Cost], num: int) -> list[Work]:
    """The distinct works whose measuring takes most error out of a step, the largest first.

    Launches of one class share their model's error, so after the first few of a class the others are known by
    their ratio: each further one counts half of what the one before it did.
    """
    weight: dict[Work, float] = {}
    for work, cost in zip(works, costs, strict=True):
        if cost.us > 0 and cost.source is not Source.MEASURED:
            weight[work] = weight.get(work, 0.0) + cost.us * cost.rel_error
    taken: dict[tuple[OpClass, str], int] = {}
    found: list[Work] = []
    while weight and len(found) < num:
        best = max(
            weight, key=lambda w: weight[w] * 0.5 ** max(0, taken.get((w.op, w.dtype), 0) - MIN_RATIOS)
        )
        found.append(best)
        taken[best.op, best.dtype] = taken.get((best.op, best.dtype), 0) + 1
        del weight[best]
    return found


def folder() -> Path:
    """Where calibrations are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / "calibrations"


def save(found: Calibration, path: Path) -> None:
    """Written whole, over what was there."""
    document = {"format": FORMAT, "gpu": found.gpu, "about": found.about, "rows": found.rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    text = msgspec.json.encode(document, enc_hook=str)  # versions may be strings of a class of their own
    part.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    part.replace(path)
    calibration_of.cache_clear()


def load(path: Path) -> Calibration:
    """As it was written."""
    try:
        document = msgspec.json.decode(path.read_bytes())
        for row in document["rows"]:
            if "walk" in row["work"]:  # its name of before
                row["work"]["overhead"] = row["work"].pop("walk")
        rows = msgspec.convert(document["rows"], tuple[CalibrationRow, ...], strict=False)
        return Calibration(str(document["gpu"]), dict(document["about"]), rows)
    except (OSError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        remedy = "Run `tessera calibrate` again, or delete it."
        raise ArtifactError(f"no calibration: {error}", remedy, str(path)) from error


@cache
def calibration_of(gpu_name: str) -> Calibration | None:
    """The one that is kept for a GPU, if any."""
    path = folder() / f"{gpu_name}.json"
    return load(path) if path.is_file() else None
