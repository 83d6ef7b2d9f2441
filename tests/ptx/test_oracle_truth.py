"""The static analysis against the golden sentences: nothing missed, honest stops, few extra flags."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera_ptx import KernelReport, collect
from tessera_ptx.fixpoint import Flow
from tessera_ptx.nodes import ParamHints

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))
checks: Any = importlib.import_module("checks")
table: Any = importlib.import_module("table")

ROWS = checks.rows()
# Kernels of one source, for every architecture: hundreds of tests would say the same.
SOURCES = sorted({(row["part"], row["theme"]) for row in ROWS})


def reports(source: tuple[str, str]) -> Iterator[tuple[dict[str, Any], KernelReport]]:
    """The truth of every kernel of a source, and its report."""
    for row in ROWS:
        if (row["part"], row["theme"]) == source:
            yield row, checks.report_of(row)


@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_nothing_is_missed(source: tuple[str, str]) -> None:
    """A kernel called movable has every access of its sentence in the report."""
    for row, report in reports(source):
        missed = [p["name"] for p in row["pointers"] if table.verdict(row, report, p) == "missed"]

        assert not report.movable or [] == missed, checks.name_of(row)


@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_kernels_stop_where_they_must(source: tuple[str, str]) -> None:
    """A kernel whose sentence says immovable is stopped with a reason; another one is not stopped."""
    for row, report in reports(source):
        if row["immovable"]:
            assert not report.movable, checks.name_of(row)
        elif not row["may_be_immovable"]:
            assert report.movable, (checks.name_of(row), report.why)
        assert report.movable == (not report.why), checks.name_of(row)


@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_scalars_are_no_buffers(source: tuple[str, str]) -> None:
    """No parameter that the sentence does not call a pointer is reported as accessed."""
    for row, report in reports(source):
        known = {(p["param"], p["offset"]) for p in row["pointers"]}
        extra = [a for a in report.accesses if (a.param, a.offset) not in known]

        assert row["immovable"] or [] == extra, checks.name_of(row)


def test_indirect_accesses_name_their_table() -> None:
    """Pointers loaded from memory are reported with the parameter they came through."""
    for row in (row for row in ROWS if row["indirect"]):
        places = {p["name"]: ("param", p["param"], p["offset"]) for p in row["pointers"]}
        found = {place for indirect in checks.report_of(row).indirect for place in indirect.tables}

        assert {places[name] for name in row["indirect"]} <= found, checks.name_of(row)


def test_module_variables_are_reported() -> None:
    """Every access to a module variable is in the report."""
    for row in ROWS:
        found = {s.name: s for s in checks.report_of(row).symbols}
        for told in row["symbols"]:
            got = found[told["name"]]
            assert got.read or got.atomic or not (told["read"] or told["atomic"]), checks.name_of(row)
            assert got.write or got.atomic or not (told["write"] or told["atomic"]), checks.name_of(row)


def test_most_pointers_are_exact() -> None:
    """At least 97 % of the pointer parameters have exactly the flags of their sentence."""
    counts = table.count(ROWS)
    judged = counts.exact + counts.extra + counts.missed

    assert counts.missed == 0
    assert counts.exact >= 0.97 * judged


@pytest.mark.slow
def test_docs_table_is_up_to_date() -> None:
    """The table in the documentation is what the command prints."""
    page = Path(__file__).resolve().parents[2] / "docs" / "ptx-corpus.md"

    assert table.render() in page.read_text()


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["arch"] == "sm_80" and r["part"] == "triton"], ids=lambda r: str(r["kernel"])
)
def test_flags_are_found_without_extents(row: dict[str, Any]) -> None:
    """Where every value gives up its offset at once, no access is missed and none is added in a launch."""
    module = checks.module_of(row["ptx"])
    entry = next(e for e in module.entries if e.name == row["entry"])
    pointers = frozenset(p["param"] for p in row["pointers"])
    given = ParamHints(pointers, frozenset(range(len(entry.params))) - pointers)
    facts = collect.read(Flow(module, entry, given, coarse=True))
    told = {(p["param"], p["offset"]): (p["read"], p["write"]) for p in row["pointers"]}

    assert row["immovable"] or not facts.stops
    for place, touch in facts.params.items():
        read, write = told.pop(place)
        assert (read or touch.atomic, write or touch.atomic) == (touch.read, touch.write)
    assert row["immovable"] or not any(any(flags) for flags in told.values())
