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
    [("nowhere", "no such folder"), ("", "holds no plan"), ("note", "is a file, not a")],
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
