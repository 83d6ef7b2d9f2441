"""Prices launches from measured tables.

A table is refused if it has few rows or many impossible ones, if prompt attention is not quadratic, or if it
differs from every other table of the chip. Rows faster than the GPU's peaks are dropped. Not detected: errors
below SAME_CHIP_FACTOR, or shared by all stacks.

Interpolation is of log(measured / modelled), weighted by one over the squared distance to the nearest points,
in octaves. The error at a distance is measured on the table's own points with all nearer points hidden.
Beyond the last of RADII, or more than MAX_BEYOND outside the table's sizes, the fitted model is used. The
error combines interpolation, spread between stacks and, for grouped GEMMs, an assumption.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import MissingExtra
from tessera.ir import Cost, Source
from tessera.ir.files import cache_folder
from tessera.profile import fitted, table_files
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import Array, Loads
from tessera.profile.gpus import GPUS, Gpu, gpu
from tessera.profile.table_files import KINDS, Absent, Arrays, Mask, Rows, TableFile, Unusable

NEAREST = 8
# Octaves; an exact hit must not outweigh all other points by rounding.
SOFTENING = 0.05
# In octaves; the last one limits interpolation.
RADII = (0.01, 0.5, 1.0, 2.0)
MAX_BEYOND = 2.0
MAX_JUDGED = 120
MIN_ROWS = 300
# For clocks above the data sheet, inexact sizes.
ALLOWANCE = 1.10
MAX_IMPOSSIBLE = 0.02
# Prompts this long are quadratic; the limit is halfway to linear.
LONG_PROMPT = 4096
MIN_EXPONENT = 1.5
SAME_CHIP_FACTOR = 2.5
# Collectors read decode attention partly from L2; the model puts these bytes into memory. An assumption.
CORRECTION_ERROR = 0.25
# Clock and run-to-run noise: an assumption.
LEAST_ERROR = 0.02


@dataclass(frozen=True)
class Surface:
    # (points, sizes), in octaves.
    places: Array
    residual: Array

    @cached_property
    def tree(self) -> Any:
        # Slow to import; most commands read no table.
        from scipy.spatial import cKDTree

        return cKDTree(self.places)

    def at(self, places: Array) -> tuple[Array, Array]:
        """log(measured / modelled), and the distance to the nearest point."""
        count = min(NEAREST, len(self.places))
        distance, index = map(np.asarray, self.tree.query(places, k=list(range(1, count + 1))))
        nearest, between = distance[:, 0], _weighted(distance, self.residual[index])
        return np.where(nearest < RADII[0], self.residual[index[:, 0]], between), nearest

    def is_inside(self, places: Array) -> npt.NDArray[np.bool_]:
        margin = np.log2(MAX_BEYOND)
        low, high = self.places.min(axis=0) - margin, self.places.max(axis=0) + margin
        return np.asarray(((places >= low) & (places <= high)).all(axis=1), dtype=np.bool_)

    def errors(self) -> Array:
        """At each of RADII, never decreasing."""
        step = max(1, len(self.places) // MAX_JUDGED)
        errors = [self._errors_of(i) for i in range(step // 2, len(self.places), step)]
        means = np.nanmean(np.array(errors), axis=0)
        return np.asarray(np.maximum.accumulate(means), dtype=np.float64)

    def _errors_of(self, judged: int) -> list[float]:
        distance = np.sqrt(((self.places - self.places[judged]) ** 2).sum(axis=1))
        off = []
        for radius in RADII:
            seen = np.flatnonzero(distance >= radius)
            if seen.size == 0:
                off.append(float("nan"))
                continue
            count = min(NEAREST, seen.size)
            nearest = seen[np.argpartition(distance[seen], count - 1)[:count]]
            guess = _weighted(distance[nearest][None], self.residual[nearest][None])[0]
            off.append(abs(float(np.exp(guess - self.residual[judged])) - 1.0))
        return off


def error_at(distance: Array, errors: Array) -> Array:
    """0 at a point."""
    between = np.interp(distance, RADII, errors)
    return np.asarray(np.where(distance < RADII[0], 0.0, between), dtype=np.float64)


def _weighted(distance: Array, residual: Array) -> Array:
    weight = 1.0 / (distance + SOFTENING) ** 2
    return np.asarray((weight * residual).sum(axis=1) / weight.sum(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class VariantTable:
    file: TableFile
    variant: str
    kernel: str
    surface: Surface
    # At each of RADII.
    errors: Array
    # To other stacks on the same GPU.
    spread: float
    num_left_out: int

    @property
    def rel_error(self) -> float:
        return float(np.hypot(self.errors[0], self.spread))


def load_source(root: Path, file: TableFile, variant: str, cache_to: Path) -> VariantTable:
    """Raises Unusable with the first reason."""
    spec = gpu(file.gpu)
    rows = table_files.read_rows(file, variant, cache_to)
    if len(rows.us) < MIN_ROWS:
        raise Unusable(f"it has {len(rows.us)} rows, fewer than {MIN_ROWS}")
    base, usable, wrong = against_model(rows, spec)
    if (share := float(wrong.mean())) > MAX_IMPOSSIBLE:
        message = f"{share:.0%} of its rows are faster than a {spec.full_name} can compute or read memory"
        raise Unusable(message)
    if file.op is OpClass.PREFILL:
        _check_growth(rows)
    kept = np.flatnonzero(usable & ~wrong)
    places = KINDS[file.op].places(rows.columns)[kept]
    surface = Surface(places, np.asarray(np.log(rows.us[kept] / base[kept]), dtype=np.float64))
    errors, spread, ratios = _judged(root, rows, surface, cache_to)
    _check_chip(ratios, spec.chip)
    left_out = rows.num_without_time + int(wrong.sum())
    return VariantTable(file, variant, rows.kernel, surface, errors, spread, left_out)


def against_model(rows: Rows, spec: Gpu) -> tuple[Array, Mask, Mask]:
    """Modelled times; usable rows; impossible rows."""
    dtype = table_files.arithmetic(rows.variant)
    loads = KINDS[rows.file.op].loads(rows.columns, rows.variant, spec)
    peaks = fitted.peaks_of(spec, dtype)
    params = fitted.model_for(spec.name, rows.file.op, "f8" if dtype.startswith("float8") else "f16").params
    base = np.sum([fitted.predict(params, x, peaks) for x in loads], axis=0)
    wrong = impossible(rows.us, loads, peaks)
    usable = table_files.usable(rows.columns, loads, wrong, rows.file.op)
    # An impossible row of experts means another layer than assumed.
    return base, usable, wrong & usable if rows.file.op is OpClass.GROUPED else wrong


def _judged(root: Path, rows: Rows, surface: Surface, cache_to: Path) -> tuple[Array, float, list[float]]:
    """Errors by distance, spread between stacks, log ratios to tables of the chip."""
    chip = gpu(rows.file.gpu).chip
    alike = [g.name for g in GPUS.values() if g.chip == chip and g.name in table_files.SYSTEMS]
    found = (f for name in alike for f in table_files.files_of(root, name, rows.file.op))
    others = [file for file in found if file != rows.file]
    paths = [rows.file.path, *(other.path for other in others)]
    words = ("verdict", rows.file.op, rows.variant, _fitted())

    def make() -> Arrays:
        ratios, spreads = _compared(rows, others, cache_to)
        spread = float(np.median(spreads)) if spreads else fitted.usual_spread(rows.file.op)
        return {"errors": surface.errors(), "spread": np.array([spread]), "ratios": np.array(ratios)}

    arrays = table_files.cached(cache_to, paths, words, make)
    return arrays["errors"], float(arrays["spread"][0]), [float(r) for r in arrays["ratios"]]


def _compared(rows: Rows, others: list[TableFile], cache_to: Path) -> tuple[list[float], list[float]]:
    ratios, spreads = [], []
    for other in others:
        try:
            off = log_ratios(rows, table_files.read_rows(other, rows.variant, cache_to))
        except (Absent, Unusable):
            continue
        if off.size < 20:
            continue
        ratios.append(float(np.median(off)))
        if other.gpu == rows.file.gpu and other.stack != rows.file.stack:
            spreads.append(float(np.median(np.abs(off))))
    return ratios, spreads


@cache
def _fitted() -> str:
    return hashlib.sha256(files("tessera.profile").joinpath("fitted.json").read_bytes()).hexdigest()[:16]


def impossible(us: Array, loads: tuple[Loads, ...], peaks: fitted.Peaks) -> npt.NDArray[np.bool_]:
    """Counts bytes that cannot come from L2."""
    compute = sum(x.flops for x in loads) / (peaks.tflops * 1e6)
    memory = sum(x.num_bytes * (x.hit < 0.01) for x in loads) / (peaks.gbps * 1e3)
    return np.asarray(us * ALLOWANCE < np.maximum(compute, memory), dtype=np.bool_)


def _check_growth(rows: Rows) -> None:
    c = rows.columns
    curves: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for i in np.flatnonzero((c["isl"] >= LONG_PROMPT) & (c["step"] == 0)):
        key = (c["batch_size"][i], c["num_heads"][i], c["num_key_value_heads"][i])
        curves.setdefault(key, []).append((float(c["isl"][i]), float(rows.us[i])))
    exponents = [
        float(np.log(b_us / a_us) / np.log(b / a))
        for points in curves.values()
        for (a, a_us), (b, b_us) in pairwise(sorted(points))
        if b > a
    ]
    if len(exponents) >= 5 and (grows := float(np.median(exponents))) < MIN_EXPONENT:
        power = f"to the power of {grows:.1f} where it must be about 2"
        raise Unusable(f"its attention grows with the length {power}")


def log_ratios(rows: Rows, other: Rows) -> Array:
    """log(time / time in the other table) of long kernels that both have."""
    _, i, j = np.intersect1d(_keys(rows), _keys(other), return_indices=True)
    long = np.minimum(rows.us[i], other.us[j]) >= fitted.LONG_US
    return np.asarray(np.log(rows.us[i][long] / other.us[j][long]), dtype=np.float64)


def _keys(rows: Rows) -> npt.NDArray[np.void]:
    stacked = np.ascontiguousarray(np.stack([rows.columns[c] for c in sorted(rows.columns)], axis=-1))
    return stacked.view([("", stacked.dtype)] * stacked.shape[1]).ravel()


def _check_chip(ratios: Sequence[float], chip: str) -> None:
    """Refuses a table off by a factor, in one direction, from two others of the chip or more."""
    limit = float(np.log(SAME_CHIP_FACTOR))
    for sign, word in ((-1.0, "faster"), (1.0, "slower")):
        if len(ratios) >= 2 and all(sign * r > limit for r in ratios):
            factor = float(np.exp(min(abs(r) for r in ratios)))
            raise Unusable(f"it is {factor:.1f} times {word} than every other table of the {chip}")


@dataclass(frozen=True, slots=True)
class TableChoice:
    source: VariantTable | None
    rejected: tuple[tuple[TableFile, str], ...]


@dataclass(eq=False)
class Tables:
    root: Path
    cache_to: Path
    # Why no table can be read.
    problem: str = ""
    _choices: dict[tuple[str, OpClass, str], TableChoice] = field(default_factory=dict)

    def choice(self, gpu_name: str, op: OpClass, variant: str) -> TableChoice:
        """With the reasons against earlier ones."""
        key = (gpu_name, op, variant)
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def _choose(self, gpu_name: str, op: OpClass, variant: str) -> TableChoice:
        rejected: list[tuple[TableFile, str]] = []
        for file in table_files.files_of(self.root, gpu_name, op):
            try:
                return TableChoice(load_source(self.root, file, variant, self.cache_to), tuple(rejected))
            except Absent:
                continue
            except Unusable as reason:
                rejected.append((file, str(reason)))
            except MissingExtra as error:
                self.problem = str(error)
                break
        return TableChoice(None, tuple(rejected))

    def rejected_for(self, gpu_name: str, works: Sequence[Work]) -> list[tuple[TableFile, str]]:
        queries = [(w.op, KINDS[w.op].query(w)) for w in works if w.op in KINDS]
        variants = dict.fromkeys((op, query[0]) for op, query in queries if query)
        return [x for op, variant in variants for x in self.choice(gpu_name, op, variant).rejected]

    def price_many(self, works: Sequence[Work], gpu_name: str) -> list[Cost | None]:
        costs: list[Cost | None] = [None] * len(works)
        alike: dict[tuple[OpClass, str, str], list[tuple[int, tuple[float, ...]]]] = {}
        for i, work in enumerate(works):
            query = KINDS[work.op].query(work) if work.op in KINDS else None
            if query:
                variant, place = query
                alike.setdefault((work.op, variant, work.dtype), []).append((i, place))
        for (op, variant, _), members in alike.items():
            source = self.choice(gpu_name, op, variant).source
            if source:
                group, places = [works[i] for i, _ in members], [place for _, place in members]
                prices = _prices(source, group, places, gpu(gpu_name))
                for (i, _), cost in zip(members, prices, strict=True):
                    costs[i] = cost
        return costs


def _prices(
    source: VariantTable, works: Sequence[Work], places: Sequence[tuple[float, ...]], spec: Gpu
) -> list[Cost | None]:
    points = np.array(places, dtype=np.float64)
    residual, distance = source.surface.at(points)
    covered = source.surface.is_inside(points) & (distance <= RADII[-1])
    loads, peaks = fitted.loads_of(works), fitted.peaks_of(spec, works[0].dtype)
    params = fitted.model_of(works[0], spec).params
    base = fitted.predict(params, loads, peaks)
    us = base * np.exp(residual)
    in_cache = table_files.cache_share(loads, source.file.op, spec)
    as_timed = fitted.predict(params, replace(loads, hit=in_cache), peaks)
    parts = (
        error_at(distance, source.errors),
        CORRECTION_ERROR * np.log(base / as_timed),
        source.spread,
        KINDS[source.file.op].kernel_error,
        LEAST_ERROR,
    )
    error = np.sqrt(sum(np.square(x) for x in parts))
    return [
        Cost(float(t), Source.TABLE, float(e), detail=_detail(source, float(d))) if inside else None
        for t, e, d, inside in zip(us, error, distance, covered, strict=True)
    ]


def _detail(source: VariantTable, distance: float) -> str:
    near = "at a measured point" if distance < RADII[0] else f"{distance:.2f} octaves from a measured point"
    kernel = f" ({source.kernel})" if source.kernel else ""
    return f"{source.file.op} of {source.file.name}{kernel}, {near}"


@cache
def installed_tables() -> Tables | None:
    root = table_files.installed_root()
    return Tables(root, cache_folder("tables")) if root else None


def missing_note() -> str:
    return f"public tables are not installed: {MissingExtra(table_files.DISTRIBUTION, 'tables')}"
