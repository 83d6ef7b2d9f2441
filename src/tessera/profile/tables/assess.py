"""Is a table sound, how well does it interpolate, and how far do other stacks differ from it?

The verdict costs a second to find, so it is stored, named by every file it looked at and by the fitted
parameters.

Mechanical checks of a table; each failed one is a sentence that says why the table is not used.

A few rows faster than the GPU could compute or read memory are left out; a table with many of them is refused
as a whole, since whatever made those wrong touched the others. So is one with few rows, one in which
attention does not grow with the square of the prompt, and one that differs from every other table of the same
chip. Not found: a table that is wrong by less than SAME_CHIP_FACTOR, or on which all stacks agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.profile.counts import OpClass
from tessera.profile.fitted import LONG_US, Array, Loads, Peaks, model_for, peaks_of, predict, usual_spread
from tessera.profile.gpus import Gpu, gpu, known_gpus
from tessera.profile.tables.interpolate import Surface
from tessera.profile.tables.kinds import KINDS, Mask, arithmetic, usable
from tessera.profile.tables.read import (
    SYSTEMS,
    Absent,
    Rows,
    TableCache,
    TableFile,
    Unusable,
    key_of,
    read_rows,
    table_files,
)

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
