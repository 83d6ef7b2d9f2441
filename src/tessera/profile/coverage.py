"""Cost sources of a GPU by class, and the error of a plan's costs.

A table covers launches near its points, so each class also has a model. Kernels of a class on a device share
one error; others are independent and partly cancel.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tessera.ir import Cost, Plan, Source
from tessera.profile.counts import OpClass, Work
from tessera.profile.estimate import works
from tessera.profile.fitted import FAMILY_WORDS, family_of, model_for, model_of
from tessera.profile.gpus import GPUS, gpu
from tessera.profile.table_files import KINDS, files_of
from tessera.profile.tables import Tables

WIDE = 0.25
VARIANTS = {"bfloat16": "16 bits", "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class Covered:
    op: OpClass
    # "16 bits", "fp32", "fp8" or "any"; for attention also the head width.
    dtypes: str
    source: Source
    # Kernels of 30 us or longer; for a table, near its points.
    rel_error: float
    why: str


def coverage(gpu_name: str, tables: Tables | None = None) -> tuple[Covered, ...]:
    gpu(gpu_name)
    listed: list[Covered] = []
    for op in OpClass:
        if op is OpClass.ALLOCATION:
            continue
        listed += _from_tables(gpu_name, op, tables)
        for family in dict.fromkeys(family_of(op, dtype) for dtype in ("bfloat16", "float32")):
            model = model_for(gpu_name, op, family)
            listed.append(Covered(op, FAMILY_WORDS[family], model.source, model.long_error, model.why))
    return tuple(listed)


def _from_tables(gpu_name: str, op: OpClass, tables: Tables | None) -> list[Covered]:
    if tables is None or op not in KINDS:
        return []
    covered = []
    for variant in KINDS[op].variants:
        source = tables.choice(gpu_name, op, variant).source
        if source:
            dtypes = VARIANTS.get(variant, f"16 bits, head width {variant}")
            kernel = f" ({source.kernel})" if source.kernel else ""
            points = f"{len(source.surface.residual):,} points of {source.file.name}{kernel}"
            left = f", {source.num_left_out} impossible ones left out" if source.num_left_out else ""
            why = f"{points}{left}; other stacks differ by {source.spread:.0%}"
            covered.append(Covered(op, dtypes, Source.TABLE, source.rel_error, why))
    return covered


def rejected_tables(gpu_name: str, tables: Tables | None) -> dict[str, str]:
    """Tables above the chosen one, with the reason against each."""
    return {
        f"{op} {variant}, {file.name}": reason
        for op, kind in KINDS.items()
        for variant in kind.variants
        for file, reason in (tables.choice(gpu_name, op, variant).rejected if tables else ())
    }


def borrowed(gpu_name: str) -> tuple[str, ...]:
    """Empty if the GPU has its own rows."""
    return model_for(gpu_name, OpClass.GEMM, family_of(OpClass.GEMM, "bfloat16")).lenders


def best_sources(gpu_name: str, tables: Tables | None = None) -> dict[str, Source]:
    """Sources at 16 bits."""
    best: dict[str, Source] = {}
    for op in OpClass:
        if op is OpClass.ALLOCATION:
            continue
        has_table = tables is not None and bool(files_of(tables.root, gpu_name, op))
        modelled = model_for(gpu_name, op, family_of(op, "bfloat16")).source
        best[op.value] = Source.TABLE if has_table else modelled
    return best


@dataclass(frozen=True, slots=True)
class CostShare:
    """Launches of one class on one kind of device priced by one source."""

    op: str
    gpu: str
    source: Source
    share: float
    # Time-weighted mean.
    rel_error: float
    wide_share: float
    why: str


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure the costs are that a plan rests on."""

    rel_error: float
    # Share of the busy time with a wide error; shares by source.
    wide_share: float
    by_source: dict[str, float]
    parts: tuple[CostShare, ...]
    sentence: str


def sureness(plan: Plan) -> Sureness:
    return sureness_of(_placed(plan))


def sureness_of(priced: Iterable[tuple[Work, str, Cost, float]]) -> Sureness:
    rows: dict[tuple[str, str, Source], list[tuple[Work, Cost, float]]] = {}
    for work, where, cost, times in priced:
        if us := cost.us * times:
            rows.setdefault((work.op.value, where, cost.source), []).append((work, cost, us))
    total = sum(us for listed in rows.values() for _, _, us in listed) or 1.0
    parts = []
    for (op, where, source), listed in rows.items():
        part_us = sum(us for _, _, us in listed)
        error = sum(us * cost.rel_error for _, cost, us in listed) / part_us
        wide = sum(us for _, cost, us in listed if cost.rel_error > WIDE) / total
        why = _why(*listed[0][:2], where)
        parts.append(CostShare(op, where, source, part_us / total, error, wide, why))
    parts.sort(key=lambda p: -p.share * p.rel_error)
    error = math.hypot(*(p.share * p.rel_error for p in parts))
    wide_share = sum(p.wide_share for p in parts)
    by_source: dict[str, float] = {}
    for one in parts:
        by_source[one.source.value] = by_source.get(one.source.value, 0.0) + one.share
    return Sureness(error, wide_share, by_source, tuple(parts), _sentence(parts, error, wide_share))


def _why(work: Work, cost: Cost, gpu_name: str) -> str:
    is_modelled = cost.source in (Source.FITTED, Source.CLASS)
    if is_modelled and gpu_name in GPUS:
        return model_of(work, gpu(gpu_name)).why
    return cost.detail or cost.source.value


def _sentence(parts: Sequence[CostShare], error: float, wide_share: float) -> str:
    whole = f"the busy time as a whole is known to ±{error:.0%}"
    wide = sorted((p for p in parts if p.wide_share > 0), key=lambda p: -p.wide_share)
    if not wide:
        return f"No launch is priced with an error above {WIDE:.0%}; {whole} (modelled)."
    named = "; ".join(f"{p.op} on {p.gpu} {p.wide_share:.0%} (±{p.rel_error:.0%}: {p.why})" for p in wide[:3])
    more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
    return (
        f"{wide_share:.0%} of the busy time is priced with an error above {WIDE:.0%}: "
        f"{named}{more}. Different kernels are wrong independently, so that {whole}."
    )


def _placed(plan: Plan) -> Iterator[tuple[Work, str, Cost, float]]:
    counted = [works(graph.trace) for graph in plan.graphs]
    for lane in plan.lanes:
        for step, (costs, times) in enumerate(zip(plan.costs, plan.unit.counts, strict=True)):
            rows = zip(counted[step], lane.placement.devices[step], costs.costs, strict=True)
            for work, device, row in rows:
                yield work, plan.cluster.devices[device].gpu, row[device], times * lane.rate_per_s
