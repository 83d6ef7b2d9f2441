"""How `tessera profile --links` measures what joins the devices."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.table import Table

from tessera.cli.output import console, progress
from tessera.errors import TesseraError
from tessera.ir import Device


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
