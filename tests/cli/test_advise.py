"""tessera advise, on a machine without GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.advise import search
from tessera.cli import main
from tessera.ir import Plan, load

SMALL = ("--prompt", "16", "--output", "4", "--batches", "1,2")


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["advise", *map(str, words)])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def advised(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON document."""
    code, out, err = run("tiny-llama", *SMALL, *words, "--json", capsys=capsys)
    assert 0 == code, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_cheapest_set_that_carries_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The choice carries the rate with its margin, the runner-up too and for more; plans are written."""
    names = ("--gpus", "a100,l40s,l4,h20", "--max-devices", "2")
    found = advised("--rate", "50", *names, "--save", tmp_path, capsys=capsys)
    choice, second = found["choice"], found["runner_up"]

    assert choice["capacity"] >= 50 * 1.1
    assert second["capacity"] >= 50 * 1.1
    assert choice["usd_per_hour"] <= second["usd_per_hour"]
    assert choice["gpus"] != second["gpus"]
    assert ["l4"] == choice["gpus"]
    assert [{"gpu": "h20", "why": "no price is known"}] == found["skipped"]
    assert "2026-08-22" in found["price_source"]
    assert "RunPod" == choice["provider"]
    assert choice["plan"]["simulated"] * choice["batch"] == pytest.approx(choice["capacity"])
    assert 0.9 * 24e9 == load(Plan, tmp_path / "choice.plan").cluster.devices[0].memory_bytes


def test_higher_rate_costs_more(capsys: pytest.CaptureFixture[str]) -> None:
    """More work needs more or dearer GPUs."""
    names = ("--gpus", "l40s,l4", "--max-devices", "3")
    low = advised("--rate", "50", *names, capsys=capsys)["choice"]
    high = advised("--rate", 1.2 * low["capacity"], *names, capsys=capsys)["choice"]

    assert high["usd_per_hour"] > low["usd_per_hour"]
    assert high["capacity"] >= 1.2 * low["capacity"]


def test_latency_asked_for_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """With a tight limit to the first token a batch that has to fill is not taken."""
    names = ("--gpus", "a100,l40s", "--max-devices", "1")
    found = advised("--rate", "20", "--slo-ttft-ms", "30", *names, capsys=capsys)["choice"]

    assert found["ttft_ms"] <= 30
    assert 1 == found["batch"]


BAD: list[tuple[list[str], str]] = [
    (["--rate", "0"], "--rate: 0.0 is no load"),
    (["--rate", "1e9", "--gpus", "l4"], "even with free transfers"),
    (["--rate", "5", "--gpus", "h20"], "no GPU is left to rent (h20: no price is known)"),
    (["--rate", "5", "--gpus", "gtx"], "unknown GPU 'gtx'"),
    (["--rate", "5", "--provider", "nobody"], "no price of 'nobody' is known"),
    (["--rate", "5", "--batches", "one"], "no list of batches"),
    (["--rate", "5", "--slo-tpot-ms", "0.0001", "--gpus", "l4", "--max-devices", "1"], "within the latency"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_what_cannot_be_advised_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the constraint and by how much it is missed."""
    code, _, err = run("tiny-llama", *SMALL, *words, capsys=capsys)

    assert 2 == code
    assert message in " ".join(err.split())


def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs, rent, rate and where the prices come from."""
    code, out, _ = run("tiny-llama", *SMALL, "--rate", "10", "--gpus", "l4", capsys=capsys)
    flat = " ".join(out.split())

    assert 0 == code
    assert "choice" in flat
    assert "RunPod" in flat
    assert "skypilot-catalog" in flat


def test_runner_up_is_found_where_divided_requests_disappoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last plans go to sets whose GPUs carry the rate each by itself, and the advice says so."""
    monkeypatch.setattr(search, "MAX_PLANNED", search.NUM_KEPT)
    names = ("--gpus", "l40s,l4", "--max-devices", "2")
    found = advised("--rate", "50", *names, capsys=capsys)

    assert found["runner_up"]["capacity"] >= 50 * 1.1
    assert found["planned"] <= search.NUM_KEPT
    assert "each by itself" in found["caveat"]
