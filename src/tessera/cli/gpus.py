"""tessera gpus: the GPUs that can be planned for without owning them, and where their costs come from."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tessera.cli.output import AsJson, console, print_json
from tessera.ir import Source
from tessera.profile import (
    SYSTEMS,
    Covered,
    Gpu,
    Tables,
    best_sources,
    borrowed,
    coverage,
    gpu,
    installed_tables,
    known_gpus,
    missing_note,
    rejected_tables,
)


def gpus(
    name: Annotated[str | None, typer.Argument(help="One GPU, in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the GPUs Tessera knows: specs, sustained rates, price, and which sources cover their costs."""
    tables = installed_tables()
    found = (gpu(name),) if name else known_gpus()
    if as_json:
        print_json([_document(g, tables, in_full=bool(name)) for g in found])
    elif name:
        console().print(Group(_card(found[0]), _coverage(found[0], tables)))
        for table, reason in rejected_tables(name, tables):
            console().print(f"note: the table {table} is not used: {reason}", markup=False)
        if tables is None and name in SYSTEMS:
            console().print(f"note: {missing_note()}", markup=False)
    else:
        console().print(_table(found, tables))


def _document(g: Gpu, tables: Tables | None, in_full: bool) -> dict[str, Any]:
    document = dataclasses.asdict(g) | {"usd_per_hour": g.usd_per_hour}
    document["borrowed_from"] = list(borrowed(g.name))
    document["sources"] = {op.value: source.value for op, source in best_sources(g.name, tables).items()}
    if in_full:
        document["coverage"] = [_row(c) for c in coverage(g.name, tables)]
        document["rejected_tables"] = [
            {"table": table, "reason": reason} for table, reason in rejected_tables(g.name, tables)
        ]
    return document


def _row(c: Covered) -> dict[str, Any]:
    words = {"class": c.op.value, "dtypes": c.dtypes, "source": c.source.value}
    return words | {"rel_error": c.rel_error, "why": c.why}


def _table(found: tuple[Gpu, ...], tables: Tables | None) -> Table:
    caption = (
        "Rates: sustained / data sheet (bf16; fp16 where there is none). Costs: how many classes of kernels"
        " have a public table / a model fitted to that GPU / only the class model; by class and with sources:"
        " tessera gpus NAME. Models: of matrix products, fitted to it or borrowed from its nearest relatives"
    )
    if tables is None:
        caption += f". {escape(missing_note())}"
    table = Table(title="GPUs that can be planned for", caption=caption, caption_justify="left")
    table.add_column("name", no_wrap=True)
    for title in ("GB", "TFLOP/s", "GB/s", "USD/h"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("price of")
    table.add_column("costs", justify="right", no_wrap=True)
    table.add_column("models")
    for g in found:
        sustained = g.effective
        flops = g.bf16_tflops or g.fp16_tflops
        sources = list(best_sources(g.name, tables).values())
        counts = [sources.count(kind) for kind in (Source.TABLE, Source.FITTED, Source.CLASS)]
        table.add_row(
            g.name,
            f"{g.memory_bytes / 1e9:.0f}",
            f"{f'{sustained.gemm_tflops:.0f}' if sustained else '-'} / {flops:.0f}",
            f"{f'{sustained.decode_gbps:.0f}' if sustained else '-'} / {g.memory_gbps:.0f}",
            f"{g.usd_per_hour:.2f}" if g.usd_per_hour is not None else "-",
            g.price_provider or "-",
            " / ".join(str(n) for n in counts),
            f"borrowed: {', '.join(lent)}" if (lent := borrowed(g.name)) else "own",
        )
    return table


def _card(g: Gpu) -> Table:
    """Every figure of one GPU with its source."""
    table = Table(title=g.full_name, show_header=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", overflow="fold")
    for field in dataclasses.fields(g):
        for label, value in _lines(field.name, getattr(g, field.name)):
            table.add_row(label.replace("_", " "), value)
    return table


def _coverage(g: Gpu, tables: Tables | None) -> Table:
    """Where the cost of each class comes from, best source first."""
    table = Table(title=f"Where costs on the {g.full_name} come from (modelled)")
    table.add_column("class", no_wrap=True)
    table.add_column("dtypes")
    table.add_column("source", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for c in coverage(g.name, tables):
        table.add_row(c.op.value, c.dtypes, c.source.value, f"±{c.rel_error:.0%}", c.why)
    return table


def _lines(name: str, value: Any) -> list[tuple[str, str]]:
    """One field as rows of a card; none if nothing is known."""
    if name == "effective" and value is not None:
        return [(f"sustained {f.name}", str(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if name == "prices":
        return [(f"USD/h, {provider}", f"{price:.2f}") for provider, price in value]
    return [] if value in (None, "") else [(name, str(value))]
