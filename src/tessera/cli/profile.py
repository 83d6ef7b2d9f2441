"""tessera profile: the cost of every launch of a trace on each device, modelled, or measured into a store."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tessera.cli.output import HIDDEN, Record, option, progress, say, shown, written
from tessera.cli.run import TransportOption
from tessera.errors import DeviceGone, TesseraError
from tessera.ir import Cost, Costs, Device, Source, Trace, load, save
from tessera.ir.units import duration
from tessera.profile import installed_tables, notes, parse_devices, works
from tessera.profile.measured import Measured, Missed, Reconciled, combine, distinct, measure, needs_measuring
from tessera.profile.store import SIZES, LinkFit, Store, default_store, fit_link, keep_links, remark
from tessera.report import short_name

DEVICES_HELP = "Devices, such as cuda:0,cpu or emu:a100,emu:l40s. Those of this machine are measured."


class KernelCost(Record, frozen=True):
    """All launches of one kernel."""

    kernel: str
    launches: int
    us: Annotated[dict[str, float], HIDDEN]
    # For people, in the order of the devices.
    time: str
    source: str
    # Largest relative error of a price.
    error: float


class LaunchCost(Record, frozen=True):
    launch: int
    kernel: str
    costs: dict[str, Cost]


class MeasuredDevice(Record, frozen=True):
    identity: dict[str, str]
    clock_mhz: float | None
    distinct: int
    timed_now: int
    launches_measured: int
    # Sum of the launches, time of the whole step, and their ratio.
    sum_us: float
    whole_us: float | None
    scale: float
    missed: tuple[Missed, ...]


class ProfileReport(Record, frozen=True):
    """Prices of a trace's launches, and measured links."""

    links: Annotated[tuple[LinkFit, ...], shown("links (measured)")] = ()
    headline: str = ""
    output: str | None = None
    devices: Annotated[tuple[str, ...], HIDDEN] = ()
    kernels: tuple[KernelCost, ...] = ()
    total_us: Annotated[dict[str, float], shown("whole step", "us")] = msgspec.field(default_factory=dict)
    launches: Annotated[tuple[LaunchCost, ...], HIDDEN] = ()
    measured: Annotated[dict[str, MeasuredDevice], HIDDEN] = msgspec.field(default_factory=dict)
    plot: str | None = None
    notes: tuple[str, ...] = ()


def profile(
    trace: Annotated[Path | None, typer.Argument(help="The trace to price.", show_default=False)] = None,
    devices: str = option("", DEVICES_HELP),
    output: Path | None = written("costs", "TRACE.costs"),
    store: Path | None = option(
        None, "Where measurements are kept between commands.", shown="$XDG_CACHE_HOME/tessera/measured.jsonl"
    ),
    links: bool = option(False, "Measure what joins the devices; the plan's --link measured.", "--links"),
    transport: TransportOption = "auto",
    plot: Path | None = option(None, "Draw how much two devices differ, as PNG, SVG or PDF."),
) -> ProfileReport:
    """Price every launch of a trace on every device.

    Each number says where it came from.
    """
    if trace is None and not links:
        raise TesseraError("no trace was given", "Name one, or measure the links alone with --links.")
    parsed = parse_devices(devices)
    kept = store_at(store)
    rows = measure_links(parsed, store or default_store(), transport) if links else ()
    report = ProfileReport() if trace is None else _price(trace, parsed, output, kept, plot)
    return msgspec.structs.replace(
        report, links=rows, notes=(*report.notes, *filter(None, map(remark, rows)))
    )


def _price(
    trace: Path, devices: tuple[Device, ...], output: Path | None, kept: partial[Store], plot: Path | None
) -> ProfileReport:
    if plot is not None:
        from tessera.report.ratios import check_plot, draw_ratios

        check_plot(len(devices), plot)
    with progress(f"reading {trace.name}"):
        loaded = load(Trace, trace)
    measured = measure_devices(loaded, devices, kept)
    with progress("pricing"):
        costs, sums = combine(loaded, devices, measured)
    path = output or trace.with_suffix(".costs")
    save(costs, path)
    if plot is not None:
        draw_ratios(loaded, costs, [work.op.value for work in works(loaded)], plot)
    names, step = tuple(d.name for d in costs.devices), loaded.step
    return ProfileReport(
        headline=f"{step.kind} of {step.model}: {len(costs.costs)} launches on {', '.join(names)} "
        f"({_sources(costs)})",
        output=str(path),
        devices=names,
        kernels=_kernels(loaded, costs),
        total_us={name: costs.total_us(i) for i, name in enumerate(names)},
        launches=tuple(
            LaunchCost(
                launch=index, kernel=loaded.kernel_of(index).name, costs=dict(zip(names, row, strict=True))
            )
            for index, row in enumerate(costs.costs)
        ),
        measured={name: _measured_device(m, sums[name]) for name, m in measured.items()},
        plot=str(plot) if plot else None,
        notes=(*_modelled_notes(loaded, costs), *remarks(measured, sums)),
    )


def _kernels(trace: Trace, costs: Costs) -> tuple[KernelCost, ...]:
    indices: dict[str, list[int]] = {}
    for index in range(len(trace.launches)):
        indices.setdefault(trace.kernel_of(index).name, []).append(index)
    rows = []
    for name, launches in indices.items():
        prices = [c for i in launches for c in costs.costs[i]]
        us = {d.name: sum(costs.us(i, n) for i in launches) for n, d in enumerate(costs.devices)}
        rows.append(
            KernelCost(
                kernel=short_name(name),
                launches=len(launches),
                us=us,
                time=" / ".join(map(duration, us.values())),
                source=", ".join(sorted({c.source.value for c in prices})),
                error=max(c.rel_error for c in prices),
            )
        )
    return tuple(sorted(rows, key=lambda row: -next(iter(row.us.values()))))


def _measured_device(measured: Measured, sums: Reconciled) -> MeasuredDevice:
    return MeasuredDevice.of(
        sums,
        measured,
        identity=dict(measured.machine.identity),
        clock_mhz=measured.machine.clock_mhz,
        distinct=measured.num_distinct,
        timed_now=measured.num_timed,
        launches_measured=sum(t is not None for t in measured.timings),
    )


def _modelled_notes(trace: Trace, costs: Costs) -> tuple[str, ...]:
    def is_modelled(number: int) -> bool:
        return any(row[number].source is not Source.MEASURED and row[number].us for row in costs.costs)

    modelled = tuple(d for n, d in enumerate(costs.devices) if d.gpu and is_modelled(n))
    return notes(trace, modelled, installed_tables()) if modelled else ()


def _sources(costs: Costs) -> str:
    measured = [c.source is Source.MEASURED for row in costs.costs for c in row if c.us > 0]
    num = sum(measured)
    if num in (0, len(measured)):
        return "measured" if num else "modelled"
    return f"{num} prices measured, {len(measured) - num} modelled"


def measure_links(devices: Sequence[Device], path: Path, transport: str) -> tuple[LinkFit, ...]:
    if len(devices) < 2:
        message = f"a link joins two devices; {len(devices)} was named"
        raise TesseraError(message, "Name two or more, such as cpu,cpu or cuda:0,cuda:1.", "--links")
    for device in devices:
        if not needs_measuring(device):
            message = f"{device.name} stands for a GPU that is not here: nothing joins it"
            raise TesseraError(message, "Name its link when planning: tessera plan --link pcie4.", "--links")
    fits: list[LinkFit] = []
    pairs = list(combinations(devices, 2))
    with progress("measuring links", len(pairs)) as advance:
        from tessera.flow import time_fetches, time_link

        for a, b in pairs:
            advance(f"{a.name} and {b.name}")
            via, times = time_link(a, b, SIZES, transport)
            for x, y in ((a, b), (b, a)):
                gbps, slowdown = time_fetches(x, y)
                fit = fit_link(x.name, y.name, via, times.alone, times.both)
                fits.append(replace(fit, fetch_gbps=gbps, fetch_slowdown=slowdown))
            keep_links(path, fits[-2:])
    return tuple(fits)


def store_at(path: Path | None, any_clock: bool = False) -> partial[Store]:
    """A default store that cannot be used is left out, with a warning."""
    warn = None if path else cache(lambda what: say(f"warning: {what}; it is done without"))
    return partial(Store, path or default_store(), any_clock=any_clock, warn=warn)


def measure_devices(trace: Trace, devices: Sequence[Device], kept: partial[Store]) -> dict[str, Measured]:
    timed = [d for d in devices if needs_measuring(d)]
    if not timed:
        return {}
    with progress("importing torch", None) as advance:
        from tessera.flow import partition_streams

        streams = partition_streams(timed)
        advance("building the model")
    return {device.name: measure_device(trace, device, kept, streams.get(device.name)) for device in timed}


def measure_device(
    trace: Trace, device: Device, kept: partial[Store], stream: Any = None, only: frozenset[int] | None = None
) -> Measured:
    from tessera.flow import make_timer

    timer = make_timer(trace, device, stream)
    num = len(distinct(trace, timer.cache_bytes)) if only is None else len(only)
    with progress(f"measuring {trace.step.kind} on {device.name}", 1 + num) as advance:
        try:
            return measure(trace, device, timer, kept, advance, only=only)
        except DeviceGone as error:
            message = f"{error.message}; launches timed before are kept"
            raise DeviceGone(message, error.remedy, str(kept.args[0])) from error


def remarks(devices: dict[str, Measured], sums: dict[str, Reconciled]) -> tuple[str, ...]:
    said: list[str] = []
    for name, measured in devices.items():
        reconciled = sums[name]
        said += [*measured.notes, *reconciled.notes]
        if reconciled.whole_us is not None:
            share = reconciled.whole_us / reconciled.sum_us - 1 if reconciled.sum_us else 0.0
            said.append(
                f"{name}: the launches add up to {reconciled.sum_us:.0f} us, the whole step takes "
                f"{reconciled.whole_us:.0f} us ({share:+.1%}); measured launches were multiplied by "
                f"{reconciled.scale:.3f}"
            )
        for missed in measured.missed[:5]:
            said.append(
                f"{name}: launch {missed.launches[0]} ({missed.kernel}; {len(missed.launches)} alike) was "
                f"not timed: {missed.why}; priced by the next source"
            )
        if len(measured.missed) > 5:
            said.append(f"{name}: {len(measured.missed) - 5} more kinds of launch were not timed; see --json")
    return tuple(said)
