"""Is a table sound, how well does it interpolate, and how far do other stacks differ from it?

The verdict costs a second to find, so it is stored, named by every file it looked at and by the fitted
parameters.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from tessera.profile.counts import OpClass
from tessera.profile.fitted import model_for, peaks_of, usual_spread
from tessera.profile.gpus import Gpu, gpu, known_gpus
from tessera.profile.model import Array, predict
from tessera.profile.tables import checks
from tessera.profile.tables.files import SYSTEMS, TableFile, table_files
from tessera.profile.tables.interpolate import Surface
from tessera.profile.tables.kinds import KINDS, Mask, arithmetic, usable
from tessera.profile.tables.read import Absent, Rows, Unusable, read_rows
from tessera.profile.tables.store import TableCache, key_of


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
    if sentence := checks.too_few(rows):
        raise Unusable(sentence)
    base, may, wrong = against_model(rows, spec)
    for sentence in (checks.too_fast(rows, wrong, spec), checks.not_square(rows)):
        if sentence:
            raise Unusable(sentence)
    kept = np.flatnonzero(may & ~wrong)
    places = KINDS[file.op].places(rows.columns)[kept]
    surface = Surface(places, np.asarray(np.log(rows.us[kept] / base[kept]), dtype=np.float64))
    errors, spread, ratios = _judged(root, rows, surface, store)
    if sentence := checks.unlike_its_chip(ratios, spec.chip):
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
    wrong = checks.impossible(rows.us, loads, peaks)
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
            off = checks.log_ratios(rows, read_rows(other, rows.variant, store))
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
