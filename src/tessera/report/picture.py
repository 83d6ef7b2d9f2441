"""Picture of one layer's placement: rows in program order, one device each, with transfers.

The layer is found in module lists: scopes equal up to a number. A list is repeated if at least two items run
the same kernels in the same children. The middle item of the list with most such launches is drawn, else the
whole trace. A value crosses once per destination; weights and inputs do not count.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tessera.ir import Costs, Graph, Plan, Trace
from tessera.ir.units import duration, percent, plural, size
from tessera.report.figures import shares, short_name, step_title

MAX_ROWS = 26
# Above this many devices, idle ones are hidden.
MAX_COLUMNS = 4
MIN_LAUNCHES = 3
INDEX = re.compile(r"(?:^|\.)\d+(?=\.|$)")
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
MODULE_WIDTH, TIME_WIDTH = 26, 9
MIN_WIDTH, MAX_WIDTH = 12, 26


@dataclass(frozen=True, slots=True)
class Crossing:
    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive launches of one sub-module on one device."""

    module: str
    device: int
    # "mm x3, add".
    text: str
    num_launches: int
    us: float
    # Transfers needed first, one per source.
    arrivals: tuple[Crossing, ...]

    def arrow_from(self, device: int) -> Crossing | None:
        return next((c for c in self.arrivals if c.src == device), None)

    def is_passed(self, device: int) -> bool:
        return any(min(c.src, self.device) < device < max(c.src, self.device) for c in self.arrivals)


@dataclass(frozen=True, slots=True)
class Picture:
    """One layer, or a trace without repeated layers; fits the console's width."""

    subject: str
    step: str
    lane: str
    rows: tuple[Row, ...]
    # Elided rows follow the first `hidden_after`.
    hidden_after: int
    num_hidden: int
    # Columns, and names of all devices.
    devices: tuple[int, ...]
    names: tuple[str, ...]
    leaving: tuple[Crossing, ...]
    us: tuple[float, ...]

    def lines(self) -> Iterator[tuple[str, Row | None]]:
        """No row at the elision."""
        previous = ""
        for number, row in enumerate(self.rows):
            if number == self.hidden_after and self.num_hidden:
                yield f"{self.num_hidden:,} launches between", None
            yield "" if row.module == previous else row.module, row
            previous = row.module

    @property
    def summary(self) -> str:
        busy = zip(self.devices, self.us, strict=True)
        parts = [f"{self.names[device]} {duration(us)}" for device, us in busy if us]
        arrivals = [c for row in self.rows for c in row.arrivals]
        moved = f"{size(sum(c.num_bytes for c in arrivals))} arrive at {plural(len(arrivals), 'block')}"
        parts.append(moved if arrivals else "nothing crosses")
        for c in self.leaving:
            parts.append(f"{size(c.num_bytes)} leave {self.names[c.src]} for {self.names[c.dst]}")
        return "; ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = (options.max_width - MODULE_WIDTH - TIME_WIDTH - 4) // max(1, len(self.devices))
        yield Text(f"{self.subject} ({self.step}; {self.lane})", style="bold")
        yield self._table(max(MIN_WIDTH, min(MAX_WIDTH, room)), options.ascii_only)
        yield Text(self.summary, style="dim")

    def _table(self, width: int, ascii_only: bool) -> Table:
        table = Table(box=None, show_edge=False, pad_edge=False, padding=0, header_style="dim")
        table.add_column("sub-module", width=MODULE_WIDTH, no_wrap=True, overflow="ellipsis")
        for device in self.devices:
            name = Text(self.names[device].center(width), style=f"bold {device_colour(device)}")
            table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
        table.add_column("modelled", width=TIME_WIDTH, justify="right", no_wrap=True)
        for module, row in self.lines():
            if row is None:
                table.add_row(Text(f"... {module}", style="dim"))
                continue
            cells = [_cell(row, device, width, ascii_only) for device in self.devices]
            table.add_row(Text(module), *cells, Text(duration(row.us), style="dim"))
        return table


@dataclass(frozen=True, slots=True)
class Layer:
    scope: str
    launches: tuple[int, ...]
    num_alike: int


def layer_of(trace: Trace) -> Layer | None:
    items: dict[str, list[int]] = defaultdict(list)
    for number, launch in enumerate(trace.launches):
        for match in INDEX.finditer(launch.scope):
            items[launch.scope[: match.end()]].append(number)
    alike: dict[object, list[str]] = defaultdict(list)
    for scope, numbers in items.items():
        launches = (trace.launches[number] for number in numbers)
        kernels = frozenset((_inside(x.scope, scope).split(".")[0], x.kernel) for x in launches)
        if len(numbers) >= MIN_LAUNCHES:
            alike[scope.rpartition(".")[0], kernels].append(scope)
    repeated = [scopes for scopes in alike.values() if len(scopes) > 1]
    if not repeated:
        return None
    scopes = max(repeated, key=lambda scopes: sum(len(items[scope]) for scope in scopes))
    middle = scopes[len(scopes) // 2]
    return Layer(middle, tuple(items[middle]), len(scopes))


def _inside(scope: str, layer: str) -> str:
    return scope[len(layer) :].lstrip(".")


def layer_picture(plan: Plan, lane: int, step: int) -> Picture:
    trace, devices = plan.graphs[step].trace, plan.lanes[lane].placement.devices[step]
    layer, transfers = layer_of(trace), list(crossings(plan.graphs[step], devices))
    launches = layer.launches if layer else tuple(range(len(devices)))
    rows = _rows(trace, layer.scope if layer else "", launches, devices, plan.costs[step], transfers)
    shown, hidden_after = _elide(rows)
    busy: dict[int, float] = defaultdict(float)
    for row in rows:
        busy[row.device] += row.us
    inside = frozenset(launches)
    leaving = _joined(crossing for x, y, crossing in transfers if x in inside and y not in inside)
    columns = _columns(len(plan.cluster.devices), shown, leaving)
    return Picture(
        f"{layer.scope}, one of {layer.num_alike} alike" if layer else "the whole step: no layer repeats",
        step_title(trace.step),
        f"lane {lane}, {percent(shares(plan)[lane])} of the work",
        shown,
        hidden_after,
        sum(r.num_launches for r in rows) - sum(r.num_launches for r in shown),
        columns,
        plan.cluster.names,
        leaving,
        tuple(busy[device] for device in columns),
    )


def _columns(num: int, rows: Sequence[Row], leaving: Sequence[Crossing]) -> tuple[int, ...]:
    if num <= MAX_COLUMNS:
        return tuple(range(num))
    named = {*(r.device for r in rows), *(c.src for r in rows for c in r.arrivals), *(c.dst for c in leaving)}
    return tuple(sorted(named))


def _rows(
    trace: Trace,
    scope: str,
    launches: Sequence[int],
    devices: Sequence[int],
    costs: Costs,
    transfers: Sequence[tuple[int, int, Crossing]],
) -> tuple[Row, ...]:
    """The finest rows that fit: by sub-module, by child, or by device alone."""
    layer = ".".join(scope.split(".")[-2:]) if scope else "(outside modules)"

    def full(launch: int) -> str:
        return _inside(trace.launches[launch].scope, scope) or layer

    def child(launch: int) -> str:
        return full(launch) if full(launch) == layer else full(launch).split(".")[0]

    arrivals: dict[int, list[Crossing]] = defaultdict(list)
    for _, reader, crossing in transfers:
        arrivals[reader].append(crossing)
    rows: list[Row] = []
    for module in (full, child, lambda _: ""):
        rows = []
        for (name, device), group in groupby(launches, key=lambda x: (module(x), devices[x])):
            times = {x: costs.us(x, device) for x in group}
            arrived = _joined(c for x in times for c in arrivals.get(x, ()))
            rows.append(Row(name, device, _kernels(trace, times), len(times), sum(times.values()), arrived))
        if len(rows) <= MAX_ROWS:
            break
    return tuple(rows)


def _kernels(trace: Trace, times: dict[int, float]) -> str:
    """Slowest first: "mm x3, add +2"."""
    us: dict[str, float] = defaultdict(float)
    num: Counter[str] = Counter()
    for launch, time in times.items():
        name = short_name(trace.kernel_of(launch).name)
        us[name] += time
        num[name] += 1
    names = sorted(us, key=lambda name: -us[name])
    shown = [f"{n} x{num[n]}" if num[n] > 1 else n for n in names[:2]]
    rest = sum(num[n] for n in names[2:])
    return ", ".join(shown) + (f" +{rest}" if rest else "")


def crossings(graph: Graph, devices: Sequence[int]) -> Iterator[tuple[int, int, Crossing]]:
    """(producer, first reader on another device, transfer)"""
    for value in graph.values:
        if value.producer is None:
            continue
        home = devices[value.producer]
        holders = {home}
        for reader in value.readers:
            device = devices[reader]
            if device not in holders:
                holders.add(device)
                yield value.producer, reader, Crossing(home, device, value.num_bytes)


def _joined(transfers: Iterable[Crossing]) -> tuple[Crossing, ...]:
    total: Counter[tuple[int, int]] = Counter()
    for crossing in transfers:
        total[crossing.src, crossing.dst] += crossing.num_bytes
    return tuple(Crossing(src, dst, num) for (src, dst), num in sorted(total.items()))


def _elide(rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], int]:
    """First and last rows that fit, and the place of the elision."""
    if len(rows) <= MAX_ROWS:
        return rows, len(rows)
    head = MAX_ROWS // 2
    return rows[:head] + rows[head - MAX_ROWS :], head


def device_colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]


def _cell(row: Row, device: int, width: int, ascii_only: bool) -> Text:
    if device == row.device:
        label = Text(f" {row.text}", style=f"black on {device_colour(device)}", no_wrap=True)
        label.truncate(width - 1, overflow="ellipsis" if not ascii_only else "crop", pad=True)
        return label + Text(" ", style=f"black on {device_colour(device)}")
    crossing = row.arrow_from(device)
    if crossing is not None:
        return Text(_arrow(crossing, width, ascii_only), style=device_colour(device))
    return Text(("-" if ascii_only else "─") * width if row.is_passed(device) else "", style="dim")


def _arrow(crossing: Crossing, width: int, ascii_only: bool) -> str:
    shaft, left, right = ("-", "<", ">") if ascii_only else ("─", "◀", "▶")
    label = f" {size(crossing.num_bytes)} "
    if crossing.src < crossing.dst:
        return " " + label.center(width - 2, shaft) + right
    return left + label.center(width - 2, shaft) + " "
