"""`python -m benchmarks.paper`: the contract of its JSON, its files, and one line for every mistake."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.paper.__main__ import app, shared_folder
from benchmarks.paper.records import Effort

from tessera.cli import run_app

TINY = ("--quick", "--models", "tiny-llama", "--jobs", "1")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "paper-cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two figures, by a command each, into one folder; the document of the second."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "paper-cache"))
        patch.setattr("benchmarks.paper.scale.COARSELY", Effort((8,), "quick"))
        for name in ("heterogeneity", "throughput"):
            words = [*TINY, "--pairs", "a100+l40s", "--only", name, "--json", "-o", str(folder)]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert 0 == run_app(app, words, "paper")
    return json.loads(out.getvalue()), folder


def test_throughput_rows_have_the_keys_that_are_promised(made: tuple[dict[str, Any], Path]) -> None:
    """Model, pair, link, policies, the best baseline, the ratio to it and the source."""
    found, _ = made

    (row,) = found["throughput"]
    keys = {"model", "pair", "link", "policies", "best_baseline", "ratio_to_best_baseline", "source"}
    assert keys <= set(row)
    assert row["ratio_to_best_baseline"] >= 0.99  # within the fifth of a second
    assert "arXiv 2604.10180" == found["published"]["throughput"]["cited"]


def test_a_folder_keeps_the_figures_of_earlier_runs(made: tuple[dict[str, Any], Path]) -> None:
    """Each figure by a command of its own gives one document and a plot each."""
    pytest.importorskip("matplotlib")
    _, folder = made

    found = json.loads((folder / "paper.json").read_text())
    assert {"heterogeneity", "throughput"} == set(found["figures"])
    assert (folder / "throughput.png").exists()


def test_json_needs_no_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra the document is written, and a note names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code = run_app(app, [*TINY, "--only", "heterogeneity", "--json", "-o", str(tmp_path)], "paper")
    out, err = capsys.readouterr()

    assert 0 == code
    assert [str(tmp_path / name) for name in ("paper.json", "paper.md")] == json.loads(out)["files"]
    assert "tessera-gpu[report]" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "figure-9"), "figure-9"),
        (("--models", "llama-9"), "llama-9"),
        (("--pairs", "a100"), "no pair"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what to do."""
    code = run_app(app, ["--quick", *words], "paper")
    err = capsys.readouterr().err

    assert 2 == code
    assert message in err
    assert 1 == len([line for line in err.splitlines() if line.startswith("error:")])


def test_a_shared_folder_that_cannot_be_made_is_one_for_this_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone afterwards."""
    (tmp_path / "file").write_text("")
    for place, is_kept in ((tmp_path, True), (tmp_path / "file", False)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        with shared_folder("x") as found:
            (found / "y").write_text("z")
        assert is_kept == found.exists()
    assert 1 == capsys.readouterr().err.count("warning: ")
