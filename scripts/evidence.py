"""Figures of the documents against the results files they come from, by the tables of docs/evidence.md.

    python scripts/evidence.py            figures that differ; exit code 1 if there are any
    python scripts/evidence.py --write    documents and docs/evidence.md take the figures of the results

A section of docs/evidence.md is a results file, a row one sentence of a document with its figures in bold,
and where in the file each of them is. A figure is the file's value at the digits that the sentence has.

    a > 0 > b                the value at that path
    a > * > b                all of them, after `least`, `most`, `sum` or `count`
    a > [model=x, step=y]    the entry of a list that has these
    a ÷ b, 1 less a          computed, from left to right
    a in %                   times 100
    table FILE FUNCTION      what that function makes of the results is the table in the document

Not found: a figure that has no row, but in the README, where every number with a point or a comma needs one.
"""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = Path("docs/evidence.md")
FIGURE = re.compile(r"\*\*([^*]+)\*\*")
NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "÷": lambda a, b: a / b,
    "less": lambda a, b: a - b,
}
OVER_ALL: dict[str, Callable[[list[float]], float]] = {"least": min, "most": max, "sum": sum, "count": len}


@dataclass(frozen=True)
class Row:
    """One row of docs/evidence.md."""

    results: Path  # the file that its section is about
    document: Path
    says: str  # the sentence, figures in bold
    sources: tuple[str, ...]  # where each figure comes from

    @property
    def is_table(self) -> bool:
        """Whether the document has a whole table of the results."""
        return self.sources[0].startswith("table ")

    def pattern(self) -> re.Pattern[str]:
        """The sentence in its document: spaces may be ends of lines, figures any number."""
        pieces = FIGURE.split(self.says)
        words = [r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in pieces[::2]]
        return re.compile(NUMBER.join(words))


def rows(text: str) -> list[Row]:
    """The rows of docs/evidence.md."""
    found, results = [], Path()
    for line in text.splitlines():
        if head := re.match(r"### \[[^\]]*\]\(\.\./([^)]+)\)", line):
            results = Path(head[1])
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 5 and (link := re.match(r"\[[^\]]*\]\(([^)]+)\)", cells[1])):
            document = (ROOT / EVIDENCE.parent / link[1]).resolve().relative_to(ROOT)
            sources = tuple(source.strip(" `") for source in cells[3].split(";"))
            found.append(Row(results, document, cells[2].replace("\\|", "|"), sources))
    return found


def value(results: Any, source: str) -> float:
    """What a source comes to."""
    first, *rest = re.split(f" ({'|'.join(OPERATIONS)}) ", source.removesuffix(" in %"))
    total = _operand(results, first)
    for sign, operand in zip(rest[::2], rest[1::2], strict=True):
        total = OPERATIONS[sign](total, _operand(results, operand))
    return 100 * total if source.endswith(" in %") else total


def _operand(results: Any, text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    word, _, path = text.partition(" ")
    if word in OVER_ALL:
        return OVER_ALL[word](list(_at(results, path.split(" > "))))
    (only,) = _at(results, text.split(" > "))
    return float(only)


def _at(results: Any, path: list[str]) -> Iterator[Any]:
    """The values at a path."""
    if not path:
        yield results
        return
    part, *rest = path
    if part == "*":
        every = results.values() if isinstance(results, dict) else results
        inside = [
            entry for entry in every if isinstance(entry, dict) and (not rest or rest[0] in {*entry, "*"})
        ]
    elif part.startswith("["):
        wanted = [pair.split("=", 1) for pair in re.split(r", (?=\w+=)", part.strip("[]"))]
        inside = [entry for entry in results if all(str(entry.get(k)) == v for k, v in wanted)]
    else:
        inside = [results[int(part)] if isinstance(results, list) else results[part]]
    for entry in inside:
        yield from _at(entry, rest)


def written(number: float, like: str) -> str:
    """A number with the digits of another."""
    return f"{number:,.{len(like.partition('.')[2])}f}"


def expected(row: Row) -> list[str]:
    """The figures that a row's sentence should have: of a table, its lines."""
    results = json.loads((ROOT / row.results).read_text(encoding="utf-8"))
    if row.is_table:
        _, script, function = row.sources[0].split()
        text: str = runpy.run_path(str(ROOT / script))[function](results)
        return text.splitlines()
    figures = FIGURE.findall(row.says)
    if len(figures) != len(row.sources):
        raise SystemExit(f"{EVIDENCE}: {len(figures)} figures and {len(row.sources)} sources: {row.says}")
    return [
        written(value(results, source), figure) for source, figure in zip(row.sources, figures, strict=True)
    ]


def problems(row: Row, document: str) -> list[str]:
    """What is wrong with one row; nothing if its document and docs/evidence.md say what the results do."""
    wanted = expected(row)
    if row.is_table:
        lines = document.splitlines()
        return [f"{row.document}: no row {line!r}" for line in wanted if line not in lines]
    match = row.pattern().search(document)
    if match is None:
        return [f"{row.document} does not say: {row.says}"]
    said = [(str(row.document), list(match.groups())), (str(EVIDENCE), FIGURE.findall(row.says))]
    return [
        f"{name} says {', '.join(figures)} and {row.results} {', '.join(wanted)}: {row.says}"
        for name, figures in said
        if figures != wanted
    ]


def mended(row: Row, document: str) -> str:
    """The document with the figures of the results."""
    wanted = expected(row)
    if row.is_table:
        table = re.compile(re.escape(wanted[0]) + r"\n(\|.*\n)*")
        return table.sub(lambda _: "\n".join([*wanted, ""]), document)
    match = row.pattern().search(document)
    if match is None:
        return document
    for group in range(len(wanted), 0, -1):
        document = document[: match.start(group)] + wanted[group - 1] + document[match.end(group) :]
    return document


def without_rows(document: str, own: list[Row]) -> list[str]:
    """Numbers with a point or a comma of a document that no row speaks of."""
    for row in own:
        if row.is_table:
            for line in expected(row):
                document = document.replace(line, "")
        else:
            document = row.pattern().sub("", document)
    document = re.sub(r"^```sh.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)  # commands
    document = re.sub(r"\]\([^)]*\)|`[^`\n]*`", "", document)  # addresses, options
    document = re.sub(r"(Python|Apache-|arXiv|SD) ?[\d.]+", "", document)  # names
    return re.findall(r"\d+(?:[.,]\d+)+", document)


def main(write: bool) -> None:
    """Checks every row, after all figures were written where that is asked for."""
    if write:
        _write()
    own = rows((ROOT / EVIDENCE).read_text(encoding="utf-8"))
    wrong = [line for row in own for line in problems(row, (ROOT / row.document).read_text(encoding="utf-8"))]
    print("\n".join(wrong) or f"{len(own)} rows: all figures are those of the results")
    sys.exit(bool(wrong))


def _write() -> None:
    text = (ROOT / EVIDENCE).read_text(encoding="utf-8")
    for row in rows(text):
        document = (ROOT / row.document).read_text(encoding="utf-8")
        (ROOT / row.document).write_text(mended(row, document), encoding="utf-8")
        if not row.is_table:
            figures = iter(expected(row))
            says = FIGURE.sub(lambda _, f=figures: f"**{next(f)}**", row.says)  # type: ignore[misc]
            text = text.replace(row.says.replace("|", "\\|"), says.replace("|", "\\|"))
    (ROOT / EVIDENCE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
