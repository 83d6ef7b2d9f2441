"""Prices launches from the tables: chooses one for each GPU and variant, asks it, says how sure it is.

The relative error joins, as independent, what interpolating at that distance costs on the table's own points,
how far other stacks are from this one on the same GPU, and, for grouped GEMMs, an assumption. A launch that
no table covers gets no price here, and the fitted model prices it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from tessera.errors import MissingExtra
from tessera.ir import Cost, Source
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import loads_of, model_of, peaks_of, predict
from tessera.profile.gpus import Gpu, gpu
from tessera.profile.tables.assess import VariantTable, load_source
from tessera.profile.tables.interpolate import RADII, error_at
from tessera.profile.tables.kinds import KINDS, cache_share
from tessera.profile.tables.read import (
    DISTRIBUTION,
    Absent,
    TableCache,
    TableFile,
    Unusable,
    default_folder,
    installed_root,
    table_files,
)

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

    def covers(self, gpu_name: str) -> bool:
        """True iff there is any table of that GPU."""
        return any(table_files(self.root, gpu_name, op) for op in KINDS)

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
    """The tables of the installed package; None without it."""
    root = installed_root()
    return Tables(root, TableCache(default_folder())) if root else None


def missing_note() -> str:
    """What to tell a reader whose GPUs have tables that are not installed."""
    return f"public tables are not installed: {MissingExtra(DISTRIBUTION, 'tables')}"
