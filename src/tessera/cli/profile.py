"""tessera profile: a trace and devices -> what every launch costs on each."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tessera.cli.output import AsJson, console, print_json
from tessera.ir import Costs, Trace, load, save


def profile(
    trace: Annotated[Path, typer.Argument(help="The trace to price.")],
    devices: Annotated[str, typer.Option(help="Devices, such as emu:a100,emu:l40s.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The costs to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Price every launch of a trace on every device; each number says where it came from."""
    from tessera.profile import estimate, notes, parse_devices

    loaded = load(Trace, trace)
    parsed = parse_devices(devices)
    costs = estimate(loaded, parsed)
    path = output or trace.with_suffix(".costs")
    save(costs, path)
    remarks = notes(loaded, parsed)
    if as_json:
        print_json(_document(loaded, costs, str(path), remarks))
        return
    out = console()
    out.print(_table(loaded, costs))
    for remark in remarks:
        out.print(f"note: {remark}", markup=False)
    out.print(f"{path}: {len(costs.costs)} launches on {len(costs.devices)} devices (modelled)", markup=False)


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
    table = Table(title=f"{trace.step.kind} of {trace.step.model} (modelled)")
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
