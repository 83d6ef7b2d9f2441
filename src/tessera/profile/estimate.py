"""Prices a trace on devices without running anything.

The best source prices work: a measured table that covers it, the GPU's fitted model, or the class model; then
measured corrections apply. Launches with empty results cost the floor of their class. Operators without a
kernel (allocations, views) cost nothing.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from tessera.ir import Arg, Cost, Device, Launch, Source, Symbol, Trace, View
from tessera.ir.trace import item_bytes
from tessera.profile.corrections import Corrections, calibration_of, packaged
from tessera.profile.counts import OpClass, Work, is_zero_size, work_of
from tessera.profile.cpus import CPUS, price_on_cpu
from tessera.profile.fitted import ANY, FAMILY_WORDS, family_of, model_of, price_many
from tessera.profile.gpus import gpu
from tessera.profile.table_files import SYSTEMS
from tessera.profile.tables import Tables, missing_note

# Torch picks other kernels for tensors not aligned to this.
ALIGN = 16


def modelled(trace: Trace, gpu_names: Iterable[str], tables: Tables | None) -> dict[str, tuple[Cost, ...]]:
    counted = works(trace)
    distinct = list(dict.fromkeys(counted))
    columns = {}
    for name in dict.fromkeys(gpu_names):
        priced = dict(zip(distinct, price_works(distinct, name, tables), strict=True))
        columns[name] = tuple(priced[work] for work in counted)
    return columns


def price_works(
    works: Sequence[Work], gpu_name: str, tables: Tables | None, corrections: Corrections | None = None
) -> list[Cost]:
    """`corrections` replaces the package's and the GPU's calibration."""
    if gpu_name in CPUS:
        return [price_on_cpu(work, CPUS[gpu_name]) for work in works]
    costs = price_many(works, gpu_name)
    if tables is not None:
        measured = tables.price_many(works, gpu_name)
        costs = [table or model for table, model in zip(measured, costs, strict=True)]
    spec = gpu(gpu_name)
    for layer in (corrections,) if corrections else (packaged(), calibration_of(gpu_name)):
        if layer is not None:
            costs = [layer.apply(work, cost, spec) for work, cost in zip(works, costs, strict=True)]
    return costs


def works(trace: Trace) -> tuple[Work, ...]:
    by_key: dict[object, Work] = {}
    counted = []
    for launch in trace.launches:
        # Accesses of a PTX kernel follow from its code.
        key = launch.kernel, signature(launch), launch.accesses if launch.grid else ()
        if key not in by_key:
            by_key[key] = work_of(trace.kernels[launch.kernel], launch)
        counted.append(by_key[key])
    return tuple(counted)


def signature(launch: Launch, cold: Set[int] = frozenset()) -> tuple[Any, ...]:
    """Types, shapes, strides and alignment of tensors, plain arguments, memory sharing, and `cold`
    buffers.
    """
    first: dict[int, int] = {}

    def words(arg: Arg) -> Any:
        if isinstance(arg, View):
            start = arg.offset * item_bytes(arg.dtype) % ALIGN
            number = first.setdefault(arg.buffer, len(first))
            return number, arg.dtype, arg.shape, arg.stride, start, arg.buffer in cold
        if isinstance(arg, Symbol):
            return "device" if arg.kind == "device" else f"{arg.kind} {arg.name}"
        return tuple(map(words, arg)) if isinstance(arg, tuple) else repr(arg)

    named = tuple((name, words(a)) for name, a in launch.kwargs)
    results = tuple(map(words, launch.outputs))
    return tuple(map(words, launch.args)), named, results, launch.grid, launch.block


def notes(trace: Trace, devices: tuple[Device, ...], tables: Tables | None) -> tuple[str, ...]:
    counted = works(trace)
    lines = []
    unknown = {trace.kernel_of(i).name for i, work in enumerate(counted) if work.op is OpClass.OTHER}
    if unknown:
        lines.append(f"priced by bytes alone, operator unknown: {', '.join(sorted(unknown))}")
    empty = [i for i, launch in enumerate(trace.launches) if is_zero_size(launch)]
    if empty:
        named = ", ".join(f"{i} ({trace.kernel_of(i).name})" for i in empty[:8])
        more = f" and {len(empty) - 8} more" if len(empty) > 8 else ""
        lines.append(f"zero-size launches, priced at the floor of their class: {named}{more}")
    names = tuple(dict.fromkeys(d.gpu for d in devices))
    distinct = list(dict.fromkeys(counted))
    for name in names:
        if name in CPUS:
            lines.append(f"{name} is modelled by its data sheet ({CPUS[name].source})")
            continue
        guessed = _guessed(name, distinct, tables)
        if guessed:
            lines.append(f"{name}: no measurements of {', '.join(guessed)}; the class model is used")
    return (*lines, *_about_tables(names, distinct, tables))


def _guessed(name: str, distinct: list[Work], tables: Tables | None) -> list[str]:
    worst: dict[str, float] = {}
    for work, cost in zip(distinct, price_works(distinct, name, tables), strict=True):
        if work.op is not OpClass.ALLOCATION and cost.source is Source.CLASS:
            family = family_of(work.op, work.dtype)
            words = str(work.op) if family == ANY else f"{work.op} in {FAMILY_WORDS[family]}"
            worst[words] = max(worst.get(words, 0.0), model_of(work, gpu(name)).short_error)
    return [f"{words} (±{error:.0%})" for words, error in sorted(worst.items())]


def _about_tables(names: tuple[str, ...], distinct: list[Work], tables: Tables | None) -> list[str]:
    if tables is None:
        covered = [name for name in names if name in SYSTEMS]
        return [f"{', '.join(covered)}: {missing_note()}"] if covered else []
    if tables.problem:
        return [f"public tables cannot be read: {tables.problem}"]
    return [
        f"{file.gpu}: the {file.op} table of {file.name} is not used: {reason}"
        for name in names
        for file, reason in tables.rejected_for(name, distinct)
    ]
