"""tessera profile: a trace and devices -> what every launch costs on each.

With --links what joins the devices is measured, every two of them.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tessera.cli.measuring import keeping, measure_devices, measured_document, remarks
from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import TesseraError
from tessera.ir import Costs, Device, Source, Trace, load, save

DEVICES_HELP = "Devices, such as cuda:0,cpu or emu:a100,emu:l40s. Those of this machine are measured."


def profile(
    trace: Annotated[Path | None, typer.Argument(help="The trace to price.", show_default=False)] = None,
    devices: Annotated[str, typer.Option(help=DEVICES_HELP)] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The costs to write.", show_default="TRACE.costs")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Where measurements are kept between commands.", show_default=False)
    ] = None,
    clocks: Annotated[
        str,
        typer.Option(help="Stored times of other clocks: same (refuse them), any (use them), now (redo)."),
    ] = "same",
    links: Annotated[
        bool, typer.Option("--links", help="Measure what joins the devices; the plan's --link measured.")
    ] = False,
    transport: Annotated[
        str, typer.Option(help="Of --links: over auto, shm, ipc, nvshmem or host.")
    ] = "auto",
    plot: Annotated[
        Path | None, typer.Option(help="Draw how much two devices differ, as PNG, SVG or PDF.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Price every launch of a trace on every device; each number says where it came from."""
    from tessera.profile import parse_devices

    parsed = parse_devices(devices)
    kept = keeping(store, clocks)
    document: dict[str, Any] = {}
    if links:
        document["links"] = measure_links(parsed, kept.path, transport)
        if not as_json:
            show_links(document["links"])
    if trace is None:
        if not links:
            raise TesseraError("no trace was given", "Name one, or measure the links alone with --links.")
    else:
        document |= _price(trace, parsed, output, kept, plot, as_json)
    if as_json:
        print_json(document)


def _price(
    trace: Path, devices: tuple[Device, ...], output: Path | None, kept: Any, plot: Path | None, quiet: bool
) -> dict[str, Any]:
    """Prices, saves and shows; returns the JSON document."""
    from tessera.profile.measured import combine

    if plot is not None:
        _check_plot(devices)
    with progress(f"reading {trace.name}"):
        loaded = load(Trace, trace)
    found = measure_devices(loaded, devices, kept)
    with progress("pricing"):
        costs, sums = combine(loaded, devices, found)
    path = output or trace.with_suffix(".costs")
    save(costs, path)
    said = (*_modelled_notes(loaded, costs), *remarks(found, sums))
    document = _document(loaded, costs, str(path), said)
    if found:
        document["measured"] = measured_document(found, sums)
    if plot is not None:
        document["plot"] = str(_draw(loaded, costs, plot))
    if not quiet:
        out = console()
        out.print(_table(loaded, costs))
        for remark in said:
            out.print(f"note: {remark}", markup=False)
        if plot is not None:
            out.print(f"{plot}: ratios of {len(costs.costs)} launches", markup=False)
        num = len(costs.devices)
        where = f"{num} device{'s' if num > 1 else ''}"
        how = f"{len(costs.costs)} launches on {where} ({_sources(costs)})"
        out.print(f"{path}: {how}", markup=False)
    return document


def _modelled_notes(trace: Trace, costs: Costs) -> tuple[str, ...]:
    """Remarks on those devices that a model prices, wholly or in part."""
    from tessera.profile import notes

    rows = enumerate(costs.devices)
    modelled = [
        d
        for i, d in rows
        if d.gpu and any(r[i].source is not Source.MEASURED and r[i].us for r in costs.costs)
    ]
    return notes(trace, tuple(modelled)) if modelled else ()


def _sources(costs: Costs) -> str:
    """Measured, modelled, or how many of each."""
    found = [c.source is Source.MEASURED for row in costs.costs for c in row if c.us > 0]
    if not any(found):
        return "modelled"
    return "measured" if all(found) else f"{sum(found)} prices measured, {len(found) - sum(found)} modelled"


def _check_plot(devices: tuple[Device, ...]) -> None:
    from tessera.report.ratios import check_matplotlib

    if len(devices) != 2:
        message = f"a plot compares two devices; {len(devices)} were named"
        raise TesseraError(message, "Name two with --devices.", "--plot")
    check_matplotlib()


def _draw(trace: Trace, costs: Costs, path: Path) -> Path:
    from tessera.profile import works
    from tessera.report.ratios import draw_ratios

    draw_ratios(trace, costs, [work.op.value for work in works(trace)], path)
    return path


def _document(trace: Trace, costs: Costs, path: str, remarks: tuple[str, ...]) -> dict[str, Any]:
    names = [d.name for d in costs.devices]
    return {
        "output": path,
        "devices": names,
        "total_us": {name: costs.total_us(i) for i, name in enumerate(names)},
        "notes": list(remarks),
        "launches": [
            {
                "launch": index,
                "kernel": trace.kernel_of(index).name,
                "costs": {
                    name: {"us": c.us, "source": c.source.value, "rel_error": c.rel_error}
                    | ({"detail": c.detail} if c.detail else {})
                    for name, c in zip(names, row, strict=True)
                },
            }
            for index, row in enumerate(costs.costs)
        ],
    }


def _table(trace: Trace, costs: Costs) -> Table:
    """One row a kernel, dearest first; one column a device."""
    from tessera.report import duration

    kernels: dict[str, list[int]] = {}
    for index in range(len(trace.launches)):
        kernels.setdefault(trace.kernel_of(index).name, []).append(index)
    table = Table(title=f"{trace.step.kind} of {trace.step.model} ({_sources(costs)})")
    table.add_column("kernel")
    table.add_column("launches", justify="right")
    for device in costs.devices:
        table.add_column(device.name, justify="right")
    table.add_column("source")
    table.add_column("error", justify="right")
    order = sorted(kernels, key=lambda k: -sum(costs.us(i, 0) for i in kernels[k]))
    for name in order:
        rows = kernels[name]
        cells = [duration(sum(costs.us(i, d) for i in rows)) for d in range(len(costs.devices))]
        found = [c for i in rows for c in costs.costs[i]]
        sources = ", ".join(sorted({c.source.value for c in found}))
        error = max(c.rel_error for c in found)
        table.add_row(name, str(len(rows)), *cells, sources, f"±{error:.0%}")
    table.add_section()
    totals = [duration(costs.total_us(d)) for d in range(len(costs.devices))]
    table.add_row("whole step", str(len(trace.launches)), *totals, "", "")
    return table


def measure_links(devices: Sequence[Device], path: Path, transport: str) -> list[dict[str, Any]]:
    """Measures every two devices, keeps the links in the store and returns them in figures."""
    from tessera.profile.measured.links import SIZES, LinkFit, document, fit_link, keep_links, remark

    _check(devices)
    fits: list[LinkFit] = []
    pairs = list(combinations(devices, 2))
    with progress("measuring links", len(pairs)) as advance:
        from tessera.flow import time_link

        for a, b in pairs:
            advance(f"{a.name} and {b.name}")
            via, times = time_link(a, b, SIZES, transport)
            fits += [fit_link(x.name, y.name, via, times.alone, times.both) for x, y in ((a, b), (b, a))]
            keep_links(path, fits[-2:])
    return [document(fit) | {"note": remark(fit)} for fit in fits]


def _check(devices: Sequence[Device]) -> None:
    from tessera.profile.measured import needs_measuring

    if len(devices) < 2:
        message = f"a link joins two devices; {len(devices)} was named"
        raise TesseraError(message, "Name two or more, such as cpu,cpu or cuda:0,cuda:1.", "--links")
    for device in devices:
        if not needs_measuring(device):
            raise TesseraError(
                f"{device.name} stands for a GPU that is not here: nothing joins it",
                "Name its link when planning: tessera plan --link pcie4.",
                "--links",
            )


def show_links(found: Sequence[dict[str, Any]]) -> None:
    """A table, one row a direction."""
    table = Table(title="links (measured)")
    for head in ("from", "to", "by"):
        table.add_column(head)
    for head in ("latency", "GB/s", "GB/s, both ways", "fit"):
        table.add_column(head, justify="right")
    for row in found:
        figures = (f"{row['latency_us']:.1f} us", f"{row['gbps']:.3g}", f"{row['both_gbps']:.3g}")
        table.add_row(row["src"], row["dst"], row["via"], *figures, f"±{row['rel_error']:.0%}")
    out = console()
    out.print(table)
    for row in found:
        if row["note"]:
            out.print(f"note: {row['note']}", markup=False)
