"""The page of `tessera advise`, for people who decide: the answer first, then what it rests on.

Knows nothing of how advice is made: it takes sentences, bars and tables, and the plan that is advised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tessera.ir import Plan
from tessera.report.page import cut, layers, write_shell
from tessera.report.page_folder import regimes_map
from tessera.report.units import digits


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
    top = max(bar.value for bar in bars)
    parts = [
        f"<header><h1 class='title'>{escape(title)}</h1></header>",
        f"<p class='headline'><b>{escape(first)}</b></p>",
        *(f"<p class='verdict'>{escape(text)}</p>" for text in others),
        f"<section><h2>The ways to go</h2><p class='note'>Each at its own best batch, within memory and "
        f"the limits; simulated on modelled costs.</p>{''.join(_bar(bar, top) for bar in bars)}</section>",
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


def _bar(bar: AdviceBar, top: float) -> str:
    style = "own" if bar.is_advised else ""
    return (
        f"<div class='bar {style}'><div class='name'>{cut(bar.name)} <small>{escape(bar.about)}</small></div>"
        f"<div class='track'><i style='width:{100 * bar.value / (top or 1.0):.2f}%'></i></div>"
        f"<div class='value'><b>{digits(bar.value)} {escape(bar.unit)}</b><small>{escape(bar.facts)}</small>"
        "</div></div>"
    )


def _table(table: AdviceTable) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        f"<section><h2>{escape(table.title)}</h2><p class='note'>{escape(table.note)}</p>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        "</section>"
    )
