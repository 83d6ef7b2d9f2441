"""Pages of a folder and of advice.

The page of a folder: a summary of its plans, best first; then each of them, then its evaluation. The
evaluation is that of `benchmarks.paper`: throughput bars and the map of regimes drawn from their rows, the
other figures as the plots beside paper.json. docs/evaluation.md has the document's form.

The page of `tessera advise`, for people who decide: the answer first, then what it rests on. Knows nothing of
how advice is made: it takes sentences, bars and tables, and the plan that is advised.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tessera.errors import ArtifactError
from tessera.ir import Plan
from tessera.report.figures import best_baseline, digits, gain, percent, rate, ratio
from tessera.report.page import Shown, bar, cut, headline_text, layers, plan_part, write_shell


def write_report(
    folder: Path, plans: Sequence[tuple[str, Shown]], evaluation: Path | None, path: Path
) -> None:
    """Writes one file; `plans` are (name, what to show), `evaluation` is a paper.json."""
    ordered = sorted(plans, key=lambda named: -(gain(named[1].plan, named[1].plan) or 0.0))
    parts = [(f"plan-{n}", plan_part(shown, "2")) for n, (_, shown) in enumerate(ordered)]
    rows = [_row(f"plan-{n}", name, shown) for n, (name, shown) in enumerate(ordered)]
    if evaluation is not None:
        parts.append(("evaluation", paper_part(read_paper(evaluation), evaluation.parent)))
        about = "<span class='said'>figures beside what was published</span>"
        rows.append(f"<a href='#evaluation'><b>evaluation</b><span></span>{about}</a>")
    title = folder.resolve().name
    note = "<p class='note'>Best first, by what each gains over its best coarser policy.</p>" if plans else ""
    body = "\n".join(
        [
            f"<h1 class='title'>{escape(title)}</h1>",
            f"{note}<section><nav>{''.join(rows)}</nav></section>",
            *(f"<article id='{anchor}'>{html}</article>" for anchor, html in parts),
        ]
    )
    write_shell(path, title, body, "Every figure says whether it was measured, simulated or modelled.")


def _row(anchor: str, name: str, shown: Shown) -> str:
    """One plan of the summary: what it is of, its rate, what it gains and the verdict."""
    plan = shown.plan
    factor, best = gain(plan, plan), best_baseline(plan)
    gained = "" if factor is None or best is None else f"{ratio(factor)} {best.name}, modelled"
    where = f"{plan.unit.graphs[0].trace.step.model}, {plan.policy} plan on {', '.join(plan.cluster.names)}"
    return (
        f"<a href='#{anchor}'><span><b>{escape(name)}</b><small>{escape(where)}</small></span>"
        f"<span><strong>{escape(headline_text(plan))}</strong><small>simulated</small></span>"
        f"<span class='said'>{escape(gained)}<small>{escape(shown.verdict)}</small></span></a>"
    )


# A gain of at least so much has this shade.
SHADES = ((1.30, "g4"), (1.15, "g3"), (1.06, "g2"), (1.02, "g1"))
Row = Mapping[str, Any]


def read_paper(path: Path) -> Mapping[str, Any]:
    """The document, or one clear message."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"cannot be read: {error}", "Make it again with `python -m benchmarks.paper`.", str(path)
        ) from error
    if not isinstance(found, dict):
        raise ArtifactError(
            "not an evaluation", "Make it again with `python -m benchmarks.paper`.", str(path)
        )
    return found


def paper_part(found: Mapping[str, Any], folder: Path) -> str:
    """All of it."""
    try:
        parts = [
            "<header><h2 class='title'>Evaluation</h2></header>",
            *(_part(found, name, about, folder) for name, about in found["figures"].items()),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        remedy = "Make it again with `python -m benchmarks.paper`."
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
        bar(name, "", value / top, f"<b>{rate(value)}</b>", "own" if name == "throughput" else "")
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


@dataclass(frozen=True, slots=True)
class AdviceBar:
    """One way to go: how much it gives, and the facts that count beside it."""

    name: str
    about: str
    value: float
    unit: str
    facts: str
    is_advised: bool = False


@dataclass(frozen=True, slots=True)
class AdviceTable:
    """A table under a heading."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_advice(
    path: str | Path,
    title: str,
    answer: Sequence[str],
    bars: Sequence[AdviceBar],
    tables: Sequence[AdviceTable],
    plan: Plan,
    remarks: Sequence[str],
    regimes: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes one self-contained file; `regimes` are the cells of an evaluation's map, where there is one."""
    first, *others = answer
    top = max(way.value for way in bars) or 1.0
    ways = (
        bar(
            way.name,
            way.about,
            way.value / top,
            f"<b>{digits(way.value)} {escape(way.unit)}</b><small>{escape(way.facts)}</small>",
            "own" if way.is_advised else "",
        )
        for way in bars
    )
    parts = [
        f"<header><h1 class='title'>{escape(title)}</h1></header>",
        f"<p class='headline'><b>{escape(first)}</b></p>",
        *(f"<p class='verdict'>{escape(text)}</p>" for text in others),
        f"<section><h2>The ways to go</h2><p class='note'>Each at its own best batch, within memory and "
        f"the limits; simulated on modelled costs.</p>{''.join(ways)}</section>",
        *map(_table, tables),
        "<details><summary>Where one layer runs, if divided by kernel</summary>"
        f"<p class='note'>Times are modelled.</p>{layers(plan)}</details>",
        "<details><summary>How sure this is</summary>"
        f"{''.join(f'<p>{escape(text)}</p>' for text in remarks)}</details>",
    ]
    if regimes:
        parts.append(
            "<details><summary>Other models, cards and loads: the map of regimes</summary>"
            f"{regimes_map(regimes)}</details>"
        )
    write_shell(path, title, "\n".join(parts), "All figures are modelled or simulated; none was measured.")


def _table(table: AdviceTable) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        f"<section><h2>{escape(table.title)}</h2><p class='note'>{escape(table.note)}</p>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        "</section>"
    )
