"""tessera gpus: the GPUs that can be planned for without owning them, and where their costs come from."""

from typing import Annotated

import typer

from tessera import profile
from tessera.cli.output import HIDDEN, Record, shown
from tessera.ir import Source
from tessera.profile.cpus import CPUS

NOTE = (
    "Rates: sustained / data sheet, of bf16 (fp16 where there is none). Costs: kernel classes with a public "
    "table / a model fitted to this GPU / only the class model; `tessera gpus NAME` lists them. A GPU "
    "without matrix measurements borrows the model of its nearest relatives. CPUs beside a GPU, modelled by "
    f"data sheets: {', '.join(CPUS)}."
)


class GpuLine(Record, frozen=True):
    name: str
    memory_bytes: Annotated[int, shown("memory")]
    tflops: str
    gbps: str
    usd_per_hour: Annotated[float | None, shown("USD/h")]
    price_provider: Annotated[str, HIDDEN]
    costs: str
    borrowed_from: Annotated[tuple[str, ...], shown("borrows")]
    # Best source by kernel class.
    sources: Annotated[dict[str, Source], HIDDEN]
    specs: Annotated[profile.Gpu, HIDDEN]


class GpuList(Record, frozen=True):
    gpus: Annotated[tuple[GpuLine, ...], shown("GPUs that can be planned for")]
    notes: tuple[str, ...]


class GpuCard(Record, frozen=True):
    """One GPU in full, each figure with its source."""

    specs: profile.Gpu
    borrowed_from: tuple[str, ...]
    sources: Annotated[dict[str, Source], HIDDEN]
    coverage: Annotated[tuple[profile.Covered, ...], shown("sources of costs, best first (modelled)")]
    # Table -> why it is not used.
    rejected_tables: dict[str, str]
    notes: tuple[str, ...]


def gpus(name: Annotated[str | None, typer.Argument(help="One GPU, in full.")] = None) -> GpuList | GpuCard:
    """List the GPUs Tessera knows.

    Specs, sustained rates, price, and which sources cover their costs.
    """
    tables = profile.installed_tables()
    if name is None:
        notes = (NOTE,) if tables else (NOTE, profile.missing_note())
        return GpuList(gpus=tuple(_line(g, tables) for g in profile.GPUS.values()), notes=notes)
    one = profile.gpu(name)
    return GpuCard(
        specs=one,
        borrowed_from=profile.borrowed(name),
        sources=profile.best_sources(name, tables),
        coverage=profile.coverage(name, tables),
        rejected_tables=profile.rejected_tables(name, tables),
        notes=(profile.missing_note(),) if tables is None and name in profile.SYSTEMS else (),
    )


def _line(g: profile.Gpu, tables: profile.Tables | None) -> GpuLine:
    sources = profile.best_sources(g.name, tables)
    counts = [list(sources.values()).count(kind) for kind in (Source.TABLE, Source.FITTED, Source.CLASS)]
    return GpuLine.of(
        g,
        tflops=_pair(g.effective.gemm_tflops if g.effective else None, g.bf16_tflops or g.fp16_tflops),
        gbps=_pair(g.effective.decode_gbps if g.effective else None, g.memory_gbps),
        costs="/".join(map(str, counts)),
        borrowed_from=profile.borrowed(g.name),
        sources=sources,
        specs=g,
    )


def _pair(sustained: float | None, sheet: float) -> str:
    return f"{'-' if sustained is None else f'{sustained:.0f}'} / {sheet:.0f}"
