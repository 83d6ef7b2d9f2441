"""tessera gpus: the GPUs that can be planned for without owning them."""

import dataclasses
from typing import Annotated

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
    caption = (
        "rates: sustained / data sheet (bf16, or fp16 where there is no bf16). Sources: tessera gpus NAME"
    )
    table = Table(title="GPUs that can be planned for", caption=caption)
    table.add_column("name", no_wrap=True)
    table.add_column("GPU", no_wrap=True)
    for title in ("memory GiB", "TFLOP/s", "memory GB/s", "USD/h"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("price of")
    for g in found:
        measured = g.effective
        flops, bandwidth = g.bf16_tflops or g.fp16_tflops, g.memory_gbps
        table.add_row(
            g.name,
            g.full_name,
            f"{g.memory_bytes / 2**30:.0f}",
            f"{measured.gemm_tflops:.0f} / {flops:.0f}" if measured else f"- / {flops:.0f}",
            f"{measured.decode_gbps:.0f} / {bandwidth:.0f}" if measured else f"- / {bandwidth:.0f}",
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
        value = getattr(g, field.name)
        if field.name == "effective" and value is not None:
            for part in dataclasses.fields(value):
                table.add_row(f"sustained {part.name}", str(getattr(value, part.name)))
        elif value not in (None, "", ()):
            table.add_row(field.name, str(value))
    return table
