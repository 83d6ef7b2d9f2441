"""One layer's placement for the terminal: a column a device, a coloured block where launches run there.

An arrow in the column a value comes from points to the block that waits for it and carries its bytes. Without
colour the columns still tell; on a terminal without Unicode the arrows are ASCII.
"""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tessera.ir import Plan
from tessera.report.picture import Crossing, Picture, Row, picture
from tessera.report.units import duration, plural, size

# One a device, in order; repeated when there are more devices.
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
MODULE_WIDTH, TIME_WIDTH = 26, 9
MIN_WIDTH, MAX_WIDTH = 12, 26


def layer_picture(plan: Plan, lane: int, step: int) -> RenderableType:
    """The placement of one representative layer (or of the whole step where none repeats)."""
    return LayerPicture(picture(plan, lane, step), plan.cluster.names)


def device_colour(device: int) -> str:
    """The colour that stands for a device wherever it is shown."""
    return COLOURS[device % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class LayerPicture:
    """A picture that fits itself to the console."""

    picture: Picture
    names: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.picture.devices
        room = (options.max_width - MODULE_WIDTH - TIME_WIDTH - 4) // max(1, len(columns))
        width = max(MIN_WIDTH, min(MAX_WIDTH, room))
        title = f"{self.picture.subject} ({self.picture.step}; {self.picture.lane})"
        yield Text(title, style="bold")
        yield self._table(width, options.ascii_only)
        yield from self._summary()

    def _table(self, width: int, ascii_only: bool) -> Table:
        shown = self.picture
        table = Table(box=None, show_edge=False, pad_edge=False, padding=0, header_style="dim")
        table.add_column("sub-module", width=MODULE_WIDTH, no_wrap=True, overflow="ellipsis")
        for device in shown.devices:
            name = Text(self.names[device].center(width), style=f"bold {device_colour(device)}")
            table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
        table.add_column("modelled", width=TIME_WIDTH, justify="right", no_wrap=True)
        previous = ""
        for number, row in enumerate(shown.rows):
            if number == shown.hidden_after and shown.num_hidden:
                table.add_row(Text(f"... {shown.num_hidden:,} launches between", style="dim"))
            module = "" if row.module == previous else row.module
            previous = row.module
            cells = [_cell(row, device, width, ascii_only) for device in shown.devices]
            table.add_row(Text(module), *cells, Text(duration(row.us), style="dim"))
        return table

    def _summary(self) -> RenderResult:
        shown = self.picture
        busy = zip(shown.devices, shown.us, strict=True)
        parts = [f"{self.names[device]} {duration(us)}" for device, us in busy if us]
        arrivals = [c for row in shown.rows for c in row.arrivals]
        moved = sum(c.num_bytes for c in arrivals)
        parts.append(
            f"{size(moved)} arrive at {plural(len(arrivals), 'block')}" if arrivals else "nothing crosses"
        )
        for c in shown.leaving:
            parts.append(f"{size(c.num_bytes)} leave {self.names[c.src]} for {self.names[c.dst]}")
        yield Text("; ".join(parts), style="dim")


def _cell(row: Row, device: int, width: int, ascii_only: bool) -> Text:
    """A block, an arrow, the shaft of an arrow that passes through, or nothing."""
    if device == row.device:
        label = Text(f" {row.text}", style=f"black on {device_colour(device)}", no_wrap=True)
        label.truncate(width - 1, overflow="ellipsis" if not ascii_only else "crop", pad=True)
        return label + Text(" ", style=f"black on {device_colour(device)}")
    crossing = next((c for c in row.arrivals if c.src == device), None)
    if crossing is not None:
        return Text(_arrow(crossing, width, ascii_only), style=device_colour(device))
    passing = any(min(c.src, row.device) < device < max(c.src, row.device) for c in row.arrivals)
    return Text(("-" if ascii_only else "─") * width if passing else "", style="dim")


def _arrow(crossing: Crossing, width: int, ascii_only: bool) -> str:
    """ "── 32.8 KB ──▶" filling the column, pointing at the receiver."""
    shaft, left, right = ("-", "<", ">") if ascii_only else ("─", "◀", "▶")
    label = f" {size(crossing.num_bytes)} "
    if crossing.src < crossing.dst:
        return " " + label.center(width - 2, shaft) + right
    return left + label.center(width - 2, shaft) + " "
