"""The evaluation of `tessera bench paper` as HTML: throughput bars and the map of regimes drawn from their
rows, the other figures as the plots beside paper.json. docs/evaluation.md has the document's form.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    try:
        parts = [
            "<header><h2 class='title'>Evaluation</h2></header>",
            *(_part(found, name, about, folder) for name, about in found["figures"].items()),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        remedy = "Make it again with `tessera bench paper`."
        raise ArtifactError(f"not an evaluation: {error!r}", remedy, str(folder / "paper.json")) from error
    return "\n".join(parts)


def _part(found: Mapping[str, Any], name: str, about: Row, folder: Path) -> str:
    """One figure beside what the publication reports."""
    if name == "throughput":
        body = "".join(_case(row) for row in found[name])
    elif name == "regimes":
        body = regimes_map(found[name]["cells"])
    else:
        body = _image(folder / f"{name}.png", str(about["title"]))
    published = found["published"][name]
    lines = (
        (f"published ({published['cited']})", published["reports"]),
        ("why ours differs", published["why_ours_differs"]),
    )
    texts = "".join(f"<p class='note'><b>{escape(k)}:</b> {escape(str(text))}</p>" for k, text in lines)
    return (
        f"<section><h2>{escape(about['title'])}</h2>"
        f"<p class='note'>{escape(about['label'])}; {escape(about['scale'])} run</p>{body}{texts}</section>"
    )


def _case(row: Row) -> str:
    """One workload on one pair: every policy as a bar."""
    values = {name: value for name, value in row["policies"].items() if value}
    head = f"<h3>{escape(row['workload'])} <small>{escape(row['pair'])}, {escape(row['link'])}; "
    if not values or row["ratio_to_best_baseline"] is None:
        return f"{head}{escape(row['why_none'] or 'no comparison')}</small></h3>"
    top = max(values.values())
    note = f"{ratio(row['ratio_to_best_baseline'])} of {row['best_baseline']}; {row['source']}"
    bars = "".join(
        f"<div class='bar {'own' if name == 'throughput' else ''}'><div class='name'>{cut(name)}</div>"
        f"<div class='track'><i style='width:{100 * value / top:.2f}%'></i></div>"
        f"<div class='value'><b>{rate(value)}</b></div></div>"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
    )
    return f"{head}{escape(note)}</small></h3>{bars}"


def regimes_map(rows: Sequence[Row]) -> str:
    """Who is best where, and by how much: a table for each model and link."""
    tables: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        tables[row["model"], row["link"]].append(row)
    better = sum(row["verdict"] == "kernel-level" for row in rows)
    about = (
        f"<p class='note'>Throughput against the best coarser policy, whose name stands below. "
        f"Clearly better in {better} of {len(rows)} cases ({percent(better / max(1, len(rows)))}).</p>"
    )
    return about + "".join(_map(f"{m}, {link}", found) for (m, link), found in tables.items())


def _map(title: str, rows: Sequence[Row]) -> str:
    loads = list(dict.fromkeys(row["workload"] for row in rows))
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    cells = {(row["pair"], row["workload"]): row for row in rows}
    head = "".join(f"<th>{escape(load.split(', ', 1)[-1])}</th>" for load in loads)
    body = "".join(
        f"<tr><th>{cut(pair)}</th>{''.join(_cell(cells.get((pair, load))) for load in loads)}</tr>"
        for pair in pairs
    )
    return (
        f"<div class='scroll'><table><caption>{escape(title)}</caption>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(row: Row | None) -> str:
    gain = row["ratio_to_best_coarse"] if row else None
    if row is None or gain is None:
        return f"<td class='none'>{'does not fit' if row else ''}</td>"
    shade = next((name for least, name in SHADES if gain >= least), "even")
    return f"<td class='{shade}'>{ratio(gain)}<small>{cut(str(row['best_coarse']))}</small></td>"


def _image(plot: Path, title: str) -> str:
    if not plot.is_file():
        return "<p class='note'>The plot was not made: it needs the extra report.</p>"
    data = base64.b64encode(plot.read_bytes()).decode()
    return f"<img alt='{escape(title, quote=True)}' src='data:image/png;base64,{data}'>"
