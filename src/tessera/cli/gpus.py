"""tessera gpus: the GPUs that can be planned for without owning them."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table

from tessera.cli.output import AsJson, console, print_json
from tessera.profile import Gpu, gpu, known_gpus


def gpus(
    name: Annotated[str | None, typer.Argument(help="One GPU, in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the GPUs Tessera knows: specs, sustained rates, price, and the source of each figure."""
    found = (gpu(name),) if name else known_gpus()
    if as_json:
        print_json([dataclasses.asdict(g) | {"usd_per_hour": g.usd_per_hour} for g in found])
    else:
        console().print(_card(found[0]) if name else _table(found))


def _table(found: tuple[Gpu, ...]) -> Table:
    caption = "Rates: sustained / data sheet (bf16; fp16 where there is none). Sources: tessera gpus NAME"
    table = Table(title="GPUs that can be planned for", caption=caption, caption_justify="left")
    table.add_column("name", no_wrap=True)
    for title in ("GB", "TFLOP/s", "GB/s", "USD/h"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("price of")
    for g in found:
        sustained = g.effective
        flops = g.bf16_tflops or g.fp16_tflops
        table.add_row(
            g.name,
            f"{g.memory_bytes / 1e9:.0f}",
            f"{f'{sustained.gemm_tflops:.0f}' if sustained else '-'} / {flops:.0f}",
            f"{f'{sustained.decode_gbps:.0f}' if sustained else '-'} / {g.memory_gbps:.0f}",
            f"{g.usd_per_hour:.2f}" if g.usd_per_hour is not None else "-",
            g.price_provider or "-",
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


def _lines(name: str, value: Any) -> list[tuple[str, str]]:
    """One field as rows of a card; none if nothing is known."""
    if name == "effective" and value is not None:
        return [(f"sustained {f.name}", str(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if name == "prices":
        return [(f"USD/h, {provider}", f"{price:.2f}") for provider, price in value]
    return [] if value in (None, "") else [(name, str(value))]
