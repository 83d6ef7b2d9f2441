"""Which sources cover a GPU, class by class: what `tessera gpus` shows.

Several sources may cover one class; the first listed is the one that prices a launch it covers. A table
covers only launches near its points, so a model stands behind every table.
"""

from dataclasses import dataclass

from tessera.ir import Source
from tessera.profile.counts import OpClass
from tessera.profile.fitted import family_of, model_for
from tessera.profile.gpus import gpu
from tessera.profile.tables import KINDS, Tables, table_files

FAMILIES = {"any": "any", "f16": "16 bits", "f32": "fp32"}
VARIANTS = {"bfloat16": "16 bits", "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class Covered:
    """One source of one class on one GPU."""

    op: OpClass
    # "16 bits", "fp32", "fp8" or "any"; of attention with the width of a head.
    dtypes: str
    source: Source
    # Expected relative error of a kernel of 30 us or more; of a table, near its points.
    rel_error: float
    # One sentence for people.
    why: str


def coverage(gpu_name: str, tables: Tables | None = None) -> tuple[Covered, ...]:
    """Every source of every class, best first."""
    gpu(gpu_name)
    listed: list[Covered] = []
    for op in OpClass:
        if op is OpClass.ALLOCATION:
            continue
        listed += _from_tables(gpu_name, op, tables)
        for family in dict.fromkeys(family_of(op, dtype) for dtype in ("bfloat16", "float32")):
            model = model_for(gpu_name, op, family)
            listed.append(Covered(op, FAMILIES[family], model.source, model.long_error, model.why))
    return tuple(listed)


def _from_tables(gpu_name: str, op: OpClass, tables: Tables | None) -> list[Covered]:
    if tables is None or op not in KINDS:
        return []
    found = []
    for variant in KINDS[op].variants:
        source = tables.choice(gpu_name, op, variant).source
        if source:
            dtypes = VARIANTS.get(variant, f"16 bits, head width {variant}")
            kernel = f" ({source.kernel})" if source.kernel else ""
            points = f"{len(source.surface.residual):,} points of {source.file.name}{kernel}"
            left = f", {source.num_left_out} impossible ones left out" if source.num_left_out else ""
            why = f"{points}{left}; other stacks differ by {source.spread:.0%}"
            found.append(Covered(op, dtypes, Source.TABLE, source.rel_error, why))
    return found


def rejected_tables(gpu_name: str, tables: Tables | None) -> tuple[tuple[str, str], ...]:
    """(table, reason) for every table that stands before the chosen one and is not sound."""
    if tables is None:
        return ()
    found = {
        (f"{op} {variant}, {file.name}", reason)
        for op, kind in KINDS.items()
        for variant in kind.variants
        for file, reason in tables.choice(gpu_name, op, variant).rejected
    }
    return tuple(sorted(found))


def borrowed(gpu_name: str) -> tuple[str, ...]:
    """The GPUs whose rows stand in for this one's in matrix products; none if it has rows of its own."""
    return model_for(gpu_name, OpClass.GEMM, family_of(OpClass.GEMM, "bfloat16")).lenders


def best_sources(gpu_name: str, tables: Tables | None = None) -> dict[OpClass, Source]:
    """The best source of each class in 16 bits, by the tables that are there; none is read or checked."""
    best: dict[OpClass, Source] = {}
    for op in OpClass:
        if op is OpClass.ALLOCATION:
            continue
        has_table = tables is not None and bool(table_files(tables.root, gpu_name, op))
        modelled = model_for(gpu_name, op, family_of(op, "bfloat16")).source
        best[op] = Source.TABLE if has_table else modelled
    return best
