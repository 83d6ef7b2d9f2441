"""The evaluation of `tessera bench paper` as HTML: throughput bars, the map of regimes, and its plots.

Reads paper.json as it is written (see docs/evaluation.md); a part that is missing there is missing here.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tessera.errors import ArtifactError
from tessera.report.page_plan import cut
from tessera.report.units import percent, rate, ratio

# A gain of at least so much has this shade.
SHADES = ((1.30, "g4"), (1.15, "g3"), (1.06, "g2"), (1.02, "g1"))
Row = Mapping[str, Any]


def read_paper(path: Path) -> Mapping[str, Any]:
    """The document, or one clear message."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"cannot be read: {error}", "Make it again with `tessera bench paper`.", str(path)
        ) from error
    if not isinstance(found, dict):
        raise ArtifactError("not an evaluation", "Make it again with `tessera bench paper`.", str(path))
    return found


def paper_part(found: Mapping[str, Any], folder: Path) -> str:
    """All of it."""
    parts = [
        "<header><h2 class='title'>Evaluation</h2></header>",
        _section("Throughput on unlike pairs", _throughput(found.get("throughput", ()))),
        _section("Where placing single kernels wins", _regimes(found.get("regimes", ()))),
        *(_figure(figure, folder) for figure in found.get("figures", ())),
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _throughput(rows: Sequence[Row]) -> str:
    return "".join(_case(row) for row in rows)


def _case(row: Row) -> str:
    """One workload on one pair: every policy as a bar."""
    values = {name: value for name, value in row["policies"].items() if value}
    top = max(values.values(), default=0.0) or 1.0
    head = f"<h3>{escape(row['model'])} <small>{escape(row['pair'])}, {escape(row['link'])}; "
    note = (
        f"{ratio(row['ratio_to_best_baseline'])} of {escape(row['best_baseline'])}; {escape(row['source'])}"
    )
    bars = "".join(
        f"<div class='bar {'own' if name == 'throughput' else ''}'><div class='name'>{cut(name)}</div>"
        f"<div class='track'><i style='width:{100 * value / top:.2f}%'></i></div>"
        f"<div class='value'><b>{rate(value)}</b></div></div>"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
    )
    return f"{head}{note}</small></h3>{bars}"


def _regimes(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    tables: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        tables[row["model"], row["link"]].append(row)
    better = sum(row["ratio"] >= SHADES[-1][0] for row in rows)
    about = (
        f"<p class='note'>Simulated throughput against the best coarser policy, whose name stands below. "
        f"Better by 2 % or more in {better} of {len(rows)} cases ({percent(better / len(rows))}).</p>"
    )
    return about + "".join(_map(f"{m}, {link}", found) for (m, link), found in tables.items())


def _map(title: str, rows: Sequence[Row]) -> str:
    shapes = sorted({(row["batch"], row["context"]) for row in rows})
    pairs = sorted({row["pair"] for row in rows})
    cells = {(row["pair"], row["batch"], row["context"]): row for row in rows}
    head = "".join(f"<th>batch {batch}<br>context {context}</th>" for batch, context in shapes)
    body = "".join(
        f"<tr><th>{cut(pair)}</th>{''.join(_cell(cells.get((pair, *shape))) for shape in shapes)}</tr>"
        for pair in pairs
    )
    return (
        f"<div class='scroll'><table><caption>{escape(title)}</caption>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "<td class='none'>does not fit</td>"
    shade = next((name for least, name in SHADES if row["ratio"] >= least), "even")
    return f"<td class='{shade}'>{ratio(row['ratio'])}<small>{cut(str(row['best_baseline']))}</small></td>"


def _figure(figure: Row, folder: Path) -> str:
    """A plot beside what the publication reports."""
    plot = folder / str(figure.get("plot") or "")
    image = "".join(_image(plot, str(figure["title"]))) if plot.is_file() else ""
    lines = [("published", figure.get("published")), ("here", figure.get("why"))]
    texts = "".join(f"<p class='note'><b>{name}:</b> {escape(str(text))}</p>" for name, text in lines if text)
    return _section(f"{figure['title']} ({figure['source']})", image + texts)


def _image(plot: Path, title: str) -> Iterator[str]:
    data = base64.b64encode(plot.read_bytes()).decode()
    yield f"<img alt='{escape(title, quote=True)}' src='data:image/png;base64,{data}'>"
