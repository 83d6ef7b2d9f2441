"""Prices launches from the tables: chooses one for each GPU and variant, asks it, says how sure it is.

The relative error joins, as independent, what interpolating at that distance costs on the table's own points,
how far other stacks are from this one on the same GPU, and, for grouped GEMMs, an assumption. A launch that
no table covers gets no price here, and the fitted model prices it.

Before that: is a table sound, how well does it interpolate, and how far do other stacks differ from it? The
verdict costs a second to find, so it is stored, named by every file it looked at and by the fitted
parameters.

Each failed check is a sentence that says why a table is not used. A few rows faster than the GPU could
compute or read memory are left out; a table with many of them is refused as a whole, since whatever made
those wrong touched the others. So is one with few rows, one in which attention does not grow with the square
of the prompt, and one that differs from every other table of the same chip. Not found: a table that is wrong
by less than SAME_CHIP_FACTOR, or on which all stacks agree.

Interpolation between measured points, in logarithms, with an error that was measured.

What is interpolated is not the time but its ratio to the model's (`tessera.profile.fitted`), which changes
little from point to point: the mean of the logarithms of the nearest points' ratios, weighted by one over the
squared distance; at a measured point, its own. Distances are octaves: 1 is one doubling of one size.

The error at a distance is what the same rule makes on the table's own points when every point nearer than
that is hidden, the point itself included: leave-one-out, and more. Beyond the last such distance, or more
than a factor of MAX_BEYOND outside the table's sizes, there is no answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tessera.errors import MissingExtra
from tessera.ir import Cost, Source
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import (
    LONG_US,
    Array,
    Loads,
    Peaks,
    loads_of,
    model_for,
    model_of,
    peaks_of,
    predict,
    usual_spread,
)
from tessera.profile.gpus import Gpu, gpu, known_gpus
from tessera.profile.table_files import (
    DISTRIBUTION,
    KINDS,
    SYSTEMS,
    Absent,
    Mask,
    Rows,
    TableCache,
    TableFile,
    Unusable,
    arithmetic,
    cache_share,
    default_folder,
    installed_root,
    key_of,
    read_rows,
    table_files,
    usable,
)

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

NEAREST = 8
# Keeps a point that is hit from outweighing all others by chance of rounding, in octaves.
SOFTENING = 0.05
# At which distances the error is measured; the last is as far as is interpolated.
RADII = (0.01, 0.5, 1.0, 2.0)
MAX_BEYOND = 2.0
# Points whose error is measured; more do not change it.
MAX_JUDGED = 120


@dataclass(frozen=True)
class Surface:
    """Measured points of one table and what they say about the model."""

    # (points, sizes), in octaves.
    places: Array
    # log(measured / modelled).
    residual: Array

    @cached_property
    def tree(self) -> "cKDTree[None]":
        # Slow to import, and most commands ask no table.
        from scipy.spatial import cKDTree

        return cKDTree(self.places)

    def at(self, places: Array) -> tuple[Array, Array]:
        """log(measured / modelled) at each place, and how far the nearest point is."""
        count = min(NEAREST, len(self.places))
        found = self.tree.query(places, k=list(range(1, count + 1)))
        distance, index = (np.asarray(x) for x in found)
        nearest, between = distance[:, 0], _weighted(distance, self.residual[index])
        return np.where(nearest < RADII[0], self.residual[index[:, 0]], between), nearest

    def is_inside(self, places: Array) -> npt.NDArray[np.bool_]:
        """True where no size is further than MAX_BEYOND outside the table's."""
        margin = np.log2(MAX_BEYOND)
        low, high = self.places.min(axis=0) - margin, self.places.max(axis=0) + margin
        return np.asarray(((places >= low) & (places <= high)).all(axis=1), dtype=np.bool_)

    def errors(self) -> Array:
        """Mean relative error at each of RADII, never falling with distance."""
        step = max(1, len(self.places) // MAX_JUDGED)
        found = [self._errors_of(i) for i in range(step // 2, len(self.places), step)]
        means = np.nanmean(np.array(found), axis=0)
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
    """The expected relative error of interpolating so far from the nearest point; a hit has none."""
    between = np.interp(distance, RADII, errors)
    return np.asarray(np.where(distance < RADII[0], 0.0, between), dtype=np.float64)


def _weighted(distance: Array, residual: Array) -> Array:
    weight = 1.0 / (distance + SOFTENING) ** 2
    return np.asarray((weight * residual).sum(axis=1) / weight.sum(axis=1), dtype=np.float64)


MIN_ROWS = 300
# Clocks above the data sheet's and sizes that are not quite those timed, before a row is called impossible.
ALLOWANCE = 1.10
MAX_IMPOSSIBLE = 0.02
# Prompts from this length on are bound by the square; half way between linear and square is not square.
LONG_PROMPT = 4096
MIN_EXPONENT = 1.5
SAME_CHIP_FACTOR = 2.5


@dataclass(frozen=True, slots=True)
class VariantTable:
    """A sound table of one variant, ready to be asked."""

    file: TableFile
    variant: str
    # What the table calls the kernel.
    kernel: str
    surface: Surface
    # Mean relative error of interpolating, at each of `interpolate.RADII`.
    errors: Array
    # Median difference of the same kernels in other stacks on the same GPU: what software alone changes.
    spread: float
    # Left out: impossible times, and times that are no positive number.
    num_left_out: int

    @property
    def rel_error(self) -> float:
        """Expected relative error near the table's points."""
        return float(np.hypot(self.errors[0], self.spread))


def load_source(root: Path, file: TableFile, variant: str, store: TableCache) -> VariantTable:
    """The table, checked; raises Unusable with the first reason against it."""
    spec = gpu(file.gpu)
    rows = read_rows(file, variant, store)
    if sentence := too_few(rows):
        raise Unusable(sentence)
    base, may, wrong = against_model(rows, spec)
    for sentence in (too_fast(rows, wrong, spec), not_square(rows)):
        if sentence:
            raise Unusable(sentence)
    kept = np.flatnonzero(may & ~wrong)
    places = KINDS[file.op].places(rows.columns)[kept]
    surface = Surface(places, np.asarray(np.log(rows.us[kept] / base[kept]), dtype=np.float64))
    errors, spread, ratios = _judged(root, rows, surface, store)
    if sentence := unlike_its_chip(ratios, spec.chip):
        raise Unusable(sentence)
    left_out = rows.num_without_time + int(wrong.sum())
    return VariantTable(file, variant, rows.kernel, surface, errors, spread, left_out)


def against_model(rows: Rows, spec: Gpu) -> tuple[Array, Mask, Mask]:
    """The model's time of every row, which rows may be used, and which are impossible."""
    dtype = arithmetic(rows.variant)
    loads = KINDS[rows.file.op].loads(rows.columns, rows.variant, spec)
    peaks = peaks_of(spec, dtype)
    params = model_for(spec.name, rows.file.op, "f8" if dtype.startswith("float8") else "f16").params
    base = np.sum([predict(params, x, peaks) for x in loads], axis=0)
    wrong = impossible(rows.us, loads, peaks)
    may = usable(rows.columns, loads, wrong, rows.file.op)
    # Among experts, an impossible row means another layer than assumed, not a wrong time.
    return base, may, wrong & may if rows.file.op is OpClass.GROUPED else wrong


def _judged(root: Path, rows: Rows, surface: Surface, store: TableCache) -> tuple[Array, float, list[float]]:
    """Errors by distance, spread between stacks, and median log ratio to each other table of the chip."""
    others = _of_the_same_chip(root, rows.file)
    key = key_of(
        [rows.file.path, *(o.path for o in others)], "verdict", rows.file.op, rows.variant, _fitted()
    )
    found = store.get(key)
    if found is None:
        ratios, spreads = _compared(rows, others, store)
        spread = float(np.median(spreads)) if spreads else usual_spread(rows.file.op)
        found = {"errors": surface.errors(), "spread": np.array([spread]), "ratios": np.array(ratios)}
        store.put(key, found)
    return found["errors"], float(found["spread"][0]), [float(r) for r in found["ratios"]]


def _compared(rows: Rows, others: list[TableFile], store: TableCache) -> tuple[list[float], list[float]]:
    ratios, spreads = [], []
    for other in others:
        try:
            off = log_ratios(rows, read_rows(other, rows.variant, store))
        except (Absent, Unusable):
            # The unusable are named where they would have been used themselves.
            continue
        if off.size < 20:
            continue
        ratios.append(float(np.median(off)))
        if other.gpu == rows.file.gpu and other.stack != rows.file.stack:
            spreads.append(float(np.median(np.abs(off))))
    return ratios, spreads


def _of_the_same_chip(root: Path, file: TableFile) -> list[TableFile]:
    chip = gpu(file.gpu).chip
    alike = [g.name for g in known_gpus() if g.chip == chip and g.name in SYSTEMS]
    return [f for name in alike for f in table_files(root, name, file.op) if f != file]


@cache
def _fitted() -> str:
    """Names the parameters, since residuals depend on them."""
    import hashlib

    return hashlib.sha256(files("tessera.profile").joinpath("fitted.json").read_bytes()).hexdigest()[:16]


def impossible(us: Array, loads: tuple[Loads, ...], peaks: Peaks) -> npt.NDArray[np.bool_]:
    """Rows faster than the data sheet allows, counting only bytes that cannot have come from the L2 cache."""
    compute = sum(x.flops for x in loads) / (peaks.tflops * 1e6)
    memory = sum(x.num_bytes * (x.hit < 0.01) for x in loads) / (peaks.gbps * 1e3)
    return np.asarray(us * ALLOWANCE < np.maximum(compute, memory), dtype=np.bool_)


def too_few(rows: Rows) -> str:
    """A table this small was cut short."""
    count = len(rows.us)
    return f"it has {count} rows, fewer than {MIN_ROWS}" if count < MIN_ROWS else ""


def too_fast(rows: Rows, wrong: npt.NDArray[np.bool_], spec: Gpu) -> str:
    """Many impossible rows spoil the others."""
    share = float(wrong.mean()) if wrong.size else 0.0
    if share <= MAX_IMPOSSIBLE:
        return ""
    return f"{share:.0%} of its rows are faster than a {spec.full_name} can compute or read memory"


def not_square(rows: Rows) -> str:
    """Prompt attention must grow with the square of the prompt."""
    if rows.file.op is not OpClass.PREFILL:
        return ""
    exponents = _exponents(rows)
    if len(exponents) < 5 or float(np.median(exponents)) >= MIN_EXPONENT:
        return ""
    grows = float(np.median(exponents))
    return f"its attention grows with the length to the power of {grows:.1f} where it must be about 2"


def _exponents(rows: Rows) -> list[float]:
    """Growth between neighbouring lengths of long prompts without a prefix, all else equal."""
    c = rows.columns
    long = np.flatnonzero((c["isl"] >= LONG_PROMPT) & (c["step"] == 0))
    curves: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for i in long:
        key = (c["batch_size"][i], c["num_heads"][i], c["num_key_value_heads"][i])
        curves.setdefault(key, []).append((float(c["isl"][i]), float(rows.us[i])))
    return [
        float(np.log(b_us / a_us) / np.log(b / a))
        for points in curves.values()
        for (a, a_us), (b, b_us) in pairwise(sorted(points))
        if b > a
    ]


def log_ratios(rows: Rows, other: Rows) -> Array:
    """log(time here / time there) of every long kernel that both tables hold."""
    here, there = _keys(rows), _keys(other)
    _, i, j = np.intersect1d(here, there, return_indices=True)
    long = np.minimum(rows.us[i], other.us[j]) >= LONG_US
    return np.asarray(np.log(rows.us[i][long] / other.us[j][long]), dtype=np.float64)


def _keys(rows: Rows) -> npt.NDArray[np.void]:
    stacked = np.ascontiguousarray(np.stack([rows.columns[c] for c in sorted(rows.columns)], axis=-1))
    return stacked.view([("", stacked.dtype)] * stacked.shape[1]).ravel()


def unlike_its_chip(ratios: Sequence[float], chip: str) -> str:
    """Off by a factor from each of at least two other tables of the chip, always the same way."""
    limit = float(np.log(SAME_CHIP_FACTOR))
    for sign, word in ((-1.0, "faster"), (1.0, "slower")):
        if len(ratios) >= 2 and all(sign * r > limit for r in ratios):
            factor = float(np.exp(min(abs(r) for r in ratios)))
            return f"it is {factor:.1f} times {word} than every other table of the {chip}"
    return ""


# A table's decode attention read what fits the L2 cache from there, and the model puts it back into memory.
# How wrong that is, as a share of the correction: an assumption.
CORRECTION_ERROR = 0.25
# No table is better than the clock that timed it and the chance of a run: an assumption.
LEAST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Which table prices one variant on one GPU, and what spoke against those before it."""

    source: VariantTable | None
    rejected: tuple[tuple[TableFile, str], ...]


@dataclass(frozen=True)
class Tables:
    """The tables below one folder."""

    root: Path
    store: TableCache
    # Why nothing can be read at all, such as a missing reader; empty if all is well.
    _trouble: list[str] = field(default_factory=list)
    _choices: dict[tuple[str, OpClass, str], TableChoice] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """Why nothing could be read; empty if all is well."""
        return self._trouble[0] if self._trouble else ""

    def choice(self, gpu_name: str, op: OpClass, variant: str) -> TableChoice:
        """The first sound table, with the reasons against those before it."""
        key = (gpu_name, op, variant)
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def _choose(self, gpu_name: str, op: OpClass, variant: str) -> TableChoice:
        rejected: list[tuple[TableFile, str]] = []
        for file in table_files(self.root, gpu_name, op):
            try:
                return TableChoice(load_source(self.root, file, variant, self.store), tuple(rejected))
            except Absent:
                continue
            except Unusable as reason:
                rejected.append((file, str(reason)))
            except MissingExtra as error:
                self._trouble.append(str(error))
                break
        return TableChoice(None, tuple(rejected))

    def passed_over(self, gpu_name: str, works: Sequence[Work]) -> list[tuple[TableFile, str]]:
        """The tables that these launches would have been priced by, were they sound, and why they are not."""
        asked = [(w.op, KINDS[w.op].query(w)) for w in works if w.op in KINDS]
        variants = dict.fromkeys((op, query[0]) for op, query in asked if query)
        return [x for op, variant in variants for x in self.choice(gpu_name, op, variant).rejected]

    def price_many(self, works: Sequence[Work], gpu_name: str) -> list[Cost | None]:
        """The cost of each launch that a table covers; None for the others."""
        costs: list[Cost | None] = [None] * len(works)
        alike: dict[tuple[OpClass, str, str], list[tuple[int, tuple[float, ...]]]] = {}
        for i, work in enumerate(works):
            asked = KINDS[work.op].query(work) if work.op in KINDS else None
            if asked:
                alike.setdefault((work.op, asked[0], work.dtype), []).append((i, asked[1]))
        for (op, variant, _), asked_of in alike.items():
            source = self.choice(gpu_name, op, variant).source
            if source:
                indices = [i for i, _ in asked_of]
                group = [works[i] for i in indices]
                found = _ask(source, group, [place for _, place in asked_of], gpu(gpu_name))
                for i, cost in zip(indices, found, strict=True):
                    costs[i] = cost
        return costs


def _ask(
    source: VariantTable, works: Sequence[Work], places: Sequence[tuple[float, ...]], spec: Gpu
) -> list[Cost | None]:
    points = np.array(places, dtype=np.float64)
    residual, distance = source.surface.at(points)
    covered = source.surface.is_inside(points) & (distance <= RADII[-1])
    loads, peaks = loads_of(works), peaks_of(spec, works[0].dtype)
    params = model_of(works[0], spec).params
    base = predict(params, loads, peaks)
    us = base * np.exp(residual)
    as_timed = predict(params, replace(loads, hit=cache_share(loads, source.file.op, spec)), peaks)
    parts = (
        error_at(distance, source.errors),
        CORRECTION_ERROR * np.log(base / as_timed),
        source.spread,
        KINDS[source.file.op].stand_in_error,
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
    root = installed_root()
    return Tables(root, TableCache(default_folder())) if root else None


def missing_note() -> str:
    """What to tell a reader whose GPUs have tables that are not installed."""
    return f"public tables are not installed: {MissingExtra(DISTRIBUTION, 'tables')}"
