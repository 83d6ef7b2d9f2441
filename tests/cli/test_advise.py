"""tessera advise, on a machine without GPUs."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tessera.advise import search
from tessera.advise.records import in_ms
from tessera.capture import record_step
from tessera.cli import main
from tessera.ir import Plan, load

SMALL = ("--prompt", "16", "--output", "4", "--batches", "1,2")


@pytest.fixture(scope="module", autouse=True)
def _recorded_once() -> Iterator[None]:
    """The same steps are asked for again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.advise.search.record_step", cache(record_step))
        yield


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
    names = ("--gpus", "l40s,l4", "--max-devices", "3", "--batches", "2")
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
    (["--rate", "inf"], "--rate: inf is no load"),
    (["--rate", "5", "--margin", "nan"], "--margin: nan is no margin"),
    (["--rate", "5", "--slots", "0"], "--slots: 0 batches in flight carry nothing"),
    (["--rate", "5", "--slo-ttft-ms", "inf"], "--slo-ttft-ms: inf ms is no objective"),
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
    code, out, _ = run(
        "tiny-llama", *SMALL, "--rate", "10", "--gpus", "l4", "--max-devices", "1", capsys=capsys
    )
    flat = " ".join(out.split())

    assert 0 == code
    assert "choice" in flat
    assert "RunPod" in flat
    assert "skypilot-catalog" in flat
    assert "One device: there is nothing to divide" in flat
    assert "use data-parallel" not in flat


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


def test_smallest_batch_that_carries_the_rate_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an objective of latency a larger batch only makes requests wait for one another."""
    found = advised("--rate", "5", "--gpus", "l4", "--max-devices", "1", capsys=capsys)["choice"]

    assert 1 == found["batch"]


def test_latency_counts_the_load_that_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU that is nearly idle makes no request wait; one that is nearly full does."""
    names = ("--gpus", "l4", "--max-devices", "1", "--batches", "1")
    idle = advised("--rate", "0.01", *names, capsys=capsys)["choice"]
    full = advised("--rate", 0.9 * idle["capacity"], *names, capsys=capsys)["choice"]

    assert full["tpot_ms"] == pytest.approx(4 * idle["tpot_ms"], rel=1e-2)


def test_set_that_keeps_the_latency_is_found_behind_cheaper_ones_that_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are not spent on sets that are too slow for one request alone."""
    monkeypatch.setattr(search, "MAX_PLANNED", search.NUM_KEPT)
    fast, one = "rtx-pro-6000", ("--rate", "1", "--max-devices", "1", "--batches", "1")
    alone = advised(*one, "--gpus", fast, capsys=capsys)["choice"]["tpot_ms"]
    names = ("--gpus", f"t4,l4,{fast}", "--max-devices", "2")
    found = advised(*one, *names, "--slo-tpot-ms", 1.05 * alone, capsys=capsys)

    assert [fast] == found["choice"]["gpus"]


def test_a_search_that_gave_up_does_not_speak_for_all_sets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many plans were made, and what the nearest gives."""
    monkeypatch.setattr(search, "MAX_PLANNED", search.NUM_KEPT + 1)
    alone = advised("--rate", "1", "--gpus", "a40", "--max-devices", "1", "--batches", "1", capsys=capsys)
    slo = ("--slo-tpot-ms", 0.95 * alone["choice"]["tpot_ms"])
    words = ("tiny-llama", *SMALL, "--rate", "1", "--gpus", "l4,a40", "--max-devices", "2", *slo)
    code, _, err = run(*words, capsys=capsys)

    assert 2 == code
    assert "none of 2 plans, of the cheapest sets first" in " ".join(err.split())


def test_milliseconds_have_no_exponent() -> None:
    """Four digits where that is enough, all of them where it is not."""
    assert ("0.9361 ms", "1453 ms", "12990 ms") == tuple(map(in_ms, (0.93611, 1453.4, 12990.2)))
