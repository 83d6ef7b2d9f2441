"""`tessera report DIR`: one page for a folder, seen by a real browser."""

import json
from pathlib import Path
from typing import Any

import pytest

from browser import PHONE, browser, width_of
from online_factory import alone_plan, split_plan
from tessera.cli import _main
from tessera.ir import Clock, Plan, Timeline, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans."""
    path = tmp_path_factory.mktemp("plans")
    save(alone_plan(), path / "latency.plan")
    save(split_plan(), path / "throughput.plan")
    return path


def report(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON document of a report that succeeds."""
    assert 0 == _main(["report", *(str(w) for w in words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_page_holds_every_plan_of_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One article a plan, under its file's name, and the page is where the answer says."""
    found = report(folder, capsys=capsys)

    text = Path(found["page"]).read_text(encoding="utf-8")
    assert ["latency.plan", "throughput.plan"] == found["plans"]
    assert 2 == text.count("<article")
    assert text.count("What one layer waits for") == 2


def test_the_page_fits_a_phone_and_asks_nothing_of_the_network(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sideways scrolling at 360 px, no request but for the file itself, and arcs that can be seen."""
    page_file = report(folder, capsys=capsys)["page"]
    with browser() as opened:
        page = opened.new_page(viewport=PHONE)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{page_file}")

        assert PHONE["width"] >= width_of(page)
        assert [f"file://{page_file}"] == asked
        assert not page.locator(".deps").first.is_visible()
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert page.locator(".deps path").count() > 0
        assert page.locator(".deps").first.is_visible()
        assert PHONE["width"] >= width_of(page)


def test_a_timeline_beside_its_plan_is_shown_instead_of_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measured run of the same name is the one on the page."""
    plan: Plan = split_plan()
    save(plan, tmp_path / "a.plan")
    save(Timeline(Clock.MEASURED, (), ((0, 0.0, 10.0),)), tmp_path / "a.timeline")

    text = Path(report(tmp_path, capsys=capsys)["page"]).read_text(encoding="utf-8")

    assert "1 request in 10.0 us, 0 spans, measured" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "no such folder"), ("", "holds no plan and no evaluation"), ("note", "is a file, not a")],
)
def test_a_folder_with_nothing_to_show_ends_in_one_line(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to put there."""
    (tmp_path / "note").touch()
    assert 2 == _main(["report", str(tmp_path / name)])
    error = capsys.readouterr().err
    assert words in error
    assert 1 == error.count("\n")


def test_a_truncated_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written when one of the plans cannot be read."""
    save(split_plan(), tmp_path / "a.plan")
    whole = (tmp_path / "a.plan").read_bytes()
    (tmp_path / "a.plan").write_bytes(whole[: len(whole) // 2])

    assert 2 == _main(["report", str(tmp_path)])
    assert "a.plan: truncated" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def evaluation() -> dict[str, Any]:
    """A document as `python -m benchmarks.paper` writes it, with two figures."""
    beside = {"cited": "a publication", "reports": "2.3x <at most>", "why_ours_differs": "Other baselines."}
    load = {"model": "llama", "workload": "llama, decodes at 512 tokens"}
    shape = {**load, "link": "pcie4", "best_coarse": "data-parallel"}
    return {
        "figures": {
            name: {"title": f"The {name}", "scale": "quick", "label": "simulated"}
            for name in ("throughput", "regimes", "links")
        },
        "published": dict.fromkeys(("throughput", "regimes", "links"), beside),
        "throughput": [
            {
                "workload": "llama, batch 8", "pair": "a100+l40s", "link": "pcie4", "source": "simulated",
                "policies": {"throughput": 12.0, "data-parallel": 10.0, "prefill-decode": None},
                "best_baseline": "data-parallel", "ratio_to_best_baseline": 1.2, "why_none": None,
            }
        ],
        "regimes": {
            "cells": [
                {**shape, "pair": "a100+l40s", "ratio_to_best_coarse": 1.2, "verdict": "kernel-level"},
                {**shape, "pair": "h100+h20", "ratio_to_best_coarse": 1.0, "verdict": "data-parallel"},
                {**shape, "pair": "t4+l4", "ratio_to_best_coarse": None, "verdict": "does not fit"},
            ]
        },
    }  # fmt: skip


def test_an_evaluation_is_on_the_page_and_fits_a_phone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bars, the map with a shade for each gain, what was published, and a word where a plot is missing."""
    (tmp_path / "paper.json").write_text(json.dumps(evaluation()))
    page_file = report(tmp_path, capsys=capsys)["page"]
    with browser() as opened:
        page = opened.new_page(viewport=PHONE)
        page.goto(f"file://{page_file}")

        assert PHONE["width"] >= width_of(page)
        assert ["1.20x\ndata-parallel", "1.00x\ndata-parallel", "does not fit"] == [
            text.strip() for text in page.locator("td").all_inner_texts()
        ]
        assert "2.3x <at most>" in page.inner_text("body")
        assert "needs the extra report" in page.inner_text("body")


@pytest.mark.parametrize("text", ["{", "[]", '{"figures": {"regimes": {}}}'])
def test_a_broken_evaluation_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the file and the command that makes it again."""
    (tmp_path / "paper.json").write_text(text)

    assert 2 == _main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert "paper.json" in error
    assert "python -m benchmarks.paper" in error
