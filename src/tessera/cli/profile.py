"""tessera profile: a trace and devices -> what every launch costs on each.

What can be measured here is measured, one device after the other, into a store. With --links what joins the
devices is measured, every two of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tessera.cli.output import AsJson, console, print_json, progress, warning
from tessera.errors import DeviceGone, TesseraError
from tessera.ir import Costs, Device, Source, Trace, load, save

if TYPE_CHECKING:
    from tessera.profile.measured import Measured, Reconciled
    from tessera.profile.store import Clocks, Machine, Store

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
    """One row per kernel, dearest first; one column per device."""
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
    from tessera.profile.store import SIZES, LinkFit, fit_link, keep_links, remark

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
    return [asdict(fit) | {"note": remark(fit)} for fit in fits]


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


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where measurements are kept, and what is done with those made at other clocks."""

    path: Path
    clocks: "Clocks"
    # Where nobody named the store: hears why it is done without, if it is.
    spare: Callable[[str], None] | None = None

    def open(self, machine: "Machine") -> "Store":
        """The store, as one device sees it."""
        from tessera.profile.store import Store

        return Store(self.path, machine, self.clocks, self.spare)


def keeping(store: Path | None, clocks: str) -> Keeping:
    """What the options say."""
    from tessera.profile.measured import clocks_named
    from tessera.profile.store import default_store

    return Keeping(store or default_store(), clocks_named(clocks), warning() if store is None else None)


def measure_devices(trace: Trace, devices: Sequence[Device], kept: Keeping) -> dict[str, "Measured"]:
    """What the devices that keep their own time take, by name."""
    from tessera.profile.measured import needs_measuring

    wanted = [d for d in devices if needs_measuring(d)]
    if not wanted:
        return {}
    with progress("importing torch", None) as advance:
        from tessera.flow import partition_streams

        streams = partition_streams(wanted)
        advance("building the model")
    return {device.name: _measure(trace, device, streams.get(device.name), kept) for device in wanted}


def _measure(trace: Trace, device: Device, stream: Any, kept: Keeping) -> "Measured":
    from tessera.flow import make_timer
    from tessera.profile.measured import count_distinct, measure

    timer = make_timer(trace, device, stream)
    num = 0

    def counted(advance: Callable[[str], None]) -> Callable[[str], None]:
        def on(what: str) -> None:
            nonlocal num
            num += 1
            advance(what)

        return on

    with progress(f"measuring {device.name}", 1 + count_distinct(trace, timer)) as advance:
        try:
            return measure(trace, device, timer, kept.open, counted(advance))
        except DeviceGone as error:
            message = f"{error.message}; {max(0, num - 2)} launches were timed before and are kept"
            raise DeviceGone(message, error.remedy, str(kept.path)) from error


def measured_document(found: dict[str, "Measured"], sums: dict[str, "Reconciled"]) -> dict[str, Any]:
    """What was measured, in figures: one entry a device."""
    return {
        name: {
            "identity": dict(m.machine.identity),
            "clock_mhz": m.machine.clock_mhz,
            "distinct": m.num_distinct,
            "timed_now": m.num_timed,
            "launches_measured": sum(t is not None for t in m.timings),
            "sum_us": sums[name].sum_us,
            "whole_us": sums[name].whole_us,
            "scale": sums[name].scale,
            "missed": [{"launches": list(x.launches), "kernel": x.kernel, "why": x.why} for x in m.missed],
        }
        for name, m in found.items()
    }


def remarks(found: dict[str, "Measured"], sums: dict[str, "Reconciled"]) -> tuple[str, ...]:
    """What a reader of measured prices should know."""
    said: list[str] = []
    for name, measured in found.items():
        said += [*measured.notes, *sums[name].notes, *_gap(name, sums[name])]
        for missed in measured.missed[:5]:
            said.append(
                f"{name}: launch {missed.launches[0]} ({missed.kernel}; {len(missed.launches)} alike) was "
                f"not timed: {missed.why}; priced by the next source"
            )
        if len(measured.missed) > 5:
            said.append(f"{name}: {len(measured.missed) - 5} more kinds of launch were not timed; see --json")
    return tuple(said)


def _gap(name: str, found: "Reconciled") -> list[str]:
    if found.whole_us is None:
        return []
    share = found.whole_us / found.sum_us - 1 if found.sum_us else 0.0
    return [
        f"{name}: the launches add up to {found.sum_us:.0f} us, the whole step takes {found.whole_us:.0f} us "
        f"({share:+.1%}); measured launches were multiplied by {found.scale:.3f}"
    ]
