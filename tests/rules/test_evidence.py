"""Figures of the documents are those of their results files: docs/evidence.md says which is where."""

import re
from pathlib import Path

import pytest
from scripts.evidence import EVIDENCE, ROOT, Row, expected, mended, problems, rows, without_rows

ROWS = rows((ROOT / EVIDENCE).read_text(encoding="utf-8"))


def text_of(path: Path) -> str:
    """A document."""
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.document.name}-{row.results.stem}")
def test_a_figure_is_that_of_its_results(row: Row) -> None:
    """A document, and the page of evidence, say what the results file has."""
    assert problems(row, text_of(row.document)) == []


def test_every_figure_of_the_readme_has_evidence() -> None:
    """No number with a point or a comma in the README is without a row."""
    readme = Path("README.md")

    assert without_rows(text_of(readme), [row for row in ROWS if row.document == readme]) == []


@pytest.mark.parametrize("is_table", [False, True])
def test_a_wrong_figure_is_found_and_mended(is_table: bool) -> None:
    """A README with another number differs from the results, and `--write` mends it, also in a table."""
    row = next(row for row in ROWS if row.document == Path("README.md") and row.is_table == is_table)
    right = text_of(row.document)
    figure = expected(row)[-1] if is_table else expected(row)[0]
    wrong = right.replace(figure, re.sub(r"\d", "7", figure), 1)

    assert problems(row, wrong)
    assert right == mended(row, wrong)


def test_a_number_without_evidence_is_found() -> None:
    """A new number in the README needs a row."""
    assert without_rows("A plan has 1.99 of data-parallel's rate.", []) == ["1.99"]
