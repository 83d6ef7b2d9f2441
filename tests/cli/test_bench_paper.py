"""`tessera bench paper`: the contract of its JSON, its files, and one line for every mistake."""

import json
from pathlib import Path

import pytest

from tessera.cli import _main

TINY = ("bench", "paper", "--quick", "--models", "tiny-llama", "--jobs", "1")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "paper-cache"))


def test_throughput_rows_have_the_keys_that_are_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """Model, pair, link, policies, the best baseline, the ratio to it and the source."""
    code = _main([*TINY, "--pairs", "a100+l40s", "--only", "throughput", "--json"])
    found = json.loads(capsys.readouterr().out)

    (row,) = found["throughput"]
    keys = {"model", "pair", "link", "policies", "best_baseline", "ratio_to_best_baseline", "source"}
    assert 0 == code
    assert keys <= set(row)
    assert row["ratio_to_best_baseline"] >= 0.995
    assert "arXiv 2604.10180" == found["published"]["throughput"]["cited"]


def test_a_folder_keeps_the_figures_of_earlier_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each figure by a command of its own gives one document and a plot each."""
    pytest.importorskip("matplotlib")
    for name in ("heterogeneity", "links"):
        assert 0 == _main([*TINY, "--pairs", "a100+l40s", "--only", name, "-o", str(tmp_path)])
    capsys.readouterr()

    found = json.loads((tmp_path / "paper.json").read_text())
    assert {"heterogeneity", "links"} == set(found["figures"])
    assert (tmp_path / "links.png").exists()


def test_json_needs_no_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra the document is written, and a note names the extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = _main([*TINY, "--only", "heterogeneity", "--json", "-o", str(tmp_path)])
    out, err = capsys.readouterr()

    assert 0 == code
    assert [str(tmp_path / "paper.json")] == json.loads(out)["files"]
    assert "tessera[report]" in err


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
    code = _main(["bench", "paper", "--quick", *words])
    err = capsys.readouterr().err

    assert 2 == code
    assert message in err
    assert 1 == len([line for line in err.splitlines() if line.startswith("error:")])
