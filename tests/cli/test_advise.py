"""tessera advise, on a machine without GPUs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import PHONE, browser, width_of
from sampling import is_whole
from tessera.advise import search
from tessera.advise.search import in_ms
from tessera.cli import main
from tessera.flow import make_load_plan
from tessera.ir import Plan, Step, load
from tessera.plan import BATCHES, LoadConfig, Target
from tessera.profile import gpu, make_cluster, parse_devices

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
    names = ("--gpus", "l40s,l4,h20", "--max-devices", "2")
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
    assert choice["plan"]["simulated"] * choice["batch"] == pytest.approx(choice["capacity"], rel=0.02)
    assert 0.9 * 24e9 == load(Plan, tmp_path / "choice.plan").cluster.devices[0].memory_bytes


def test_higher_rate_costs_more(capsys: pytest.CaptureFixture[str]) -> None:
    """More work needs more or dearer GPUs."""
    names = ("--gpus", "l40s,l4", "--max-devices", "3", "--batches", "2")
    low = advised("--rate", "50", *names, capsys=capsys)["choice"]
    high = advised("--rate", 1.2 * low["capacity"], *names, capsys=capsys)["choice"]

    assert high["usd_per_hour"] > low["usd_per_hour"]
    assert high["capacity"] >= 1.2 * low["capacity"]


def test_latency_asked_for_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """With a tight limit a token the batch is as small as it has to be."""
    names = ("--gpus", "a100,l40s", "--max-devices", "1")
    free = advised("--rate", "20", *names, capsys=capsys)["choice"]["tpot_ms"]
    found = advised("--rate", "20", "--slo-tpot-ms", 1.01 * free, *names, capsys=capsys)["choice"]

    assert found["tpot_ms"] <= 1.01 * free


BAD: list[tuple[list[str], str]] = [
    (["--rate", "0"], "--rate: 0.0 is no load"),
    (["--rate", "inf"], "--rate: inf is no load"),
    (["--rate", "5", "--margin", "nan"], "--margin: nan is no margin"),
    (["--rate", "5", "--microbatches", "0"], "--microbatches: 0 batches in flight carry nothing"),
    (["--rate", "5", "--slo-ttft-ms", "inf"], "--slo-ttft-ms: inf ms is no objective"),
    (["--rate", "1e9", "--gpus", "l4", "--max-devices", "1"], "even with free transfers"),
    (["--rate", "5", "--gpus", "h20"], "no GPU is left to rent (h20: no price is known)"),
    (["--rate", "5", "--gpus", "gtx"], "unknown GPU 'gtx'"),
    (["--rate", "5", "--provider", "nobody"], "no price of 'nobody' is known"),
    (["--rate", "5", "--batches", "one"], "no list of batches"),
    (["--rate", "5", "--slo-tpot-ms", "0.0001", "--gpus", "l4", "--max-devices", "1"], "within the latency"),
    (["--rate", "600", "--slo-tpot-ms", "0.48", "--gpus", "l4", "--max-devices", "1"], "at any latency"),
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


def test_smallest_batch_that_carries_the_rate_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an objective of latency a larger batch only makes requests wait for one another."""
    found = advised("--rate", "5", "--gpus", "l4", "--max-devices", "1", capsys=capsys)["choice"]

    assert {"emu:l4": 1} == found["batches"]


def test_never_dearer_than_the_cheapest_card_that_carries_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every card by itself at every batch, planned as `tessera plan` does: the advice costs no more."""
    names = ("t4", "l4", "l40s", "a100", "h100") if is_whole() else ("l4",)
    batches = BATCHES if is_whole() else (32,)
    listed = ",".join(map(str, batches))
    words = f"--prompt 16 --output 4 --max-devices 2 --slo-tpot-ms 3 --batches {listed}".split()
    rents = {}
    for name in names:
        devices = parse_devices(f"emu:{name}")
        usable = make_cluster(
            (replace(devices[0], memory_bytes=int(0.9 * devices[0].memory_bytes)),), "pcie4"
        )
        steps = [Step("tiny-llama", "prefill", 1, 16, 0, 4), Step("tiny-llama", "decode", 1, 20)]
        made = make_load_plan(steps, usable, Target(4, tpot_ms=3.0), LoadConfig(batches))
        if made.chosen.tokens_per_s / 4 >= 1.1 * 4000:
            rents[name] = gpu(name).prices[0][1]
    code, out, err = run(
        "tiny-llama", *words, "--rate", "4000", "--gpus", ",".join(names), "--json", capsys=capsys
    )

    assert 0 == code, err
    assert rents
    assert json.loads(out)["choice"]["usd_per_hour"] <= min(rents.values()) + 1e-9


def test_answers_are_shown_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    """What is known before anything is planned is said at once."""
    words = ("tiny-llama", *SMALL, "--rate", "50", "--gpus", "l40s,l4", "--max-devices", "2")
    code, _, err = run(*words, capsys=capsys)

    assert 0 == code
    assert "so far: l4 at" in " ".join(err.split())


def test_a_search_that_has_no_time_left_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cheapest set whose cards carry the rate apart is advised, and what was not tried is counted."""
    monkeypatch.setattr(search, "SEARCH_S", -1.0)
    one = advised("--rate", "1", "--gpus", "l4", "--max-devices", "1", capsys=capsys)["choice"]["capacity"]
    names = ("--gpus", "l4,l40s", "--max-devices", "4")
    found = advised("--rate", 3.3 * one, *names, capsys=capsys)

    assert found["choice"]["capacity"] >= 3.3 * one
    assert not found["caveat"] or "lack of time" in found["caveat"]


def test_diffusion_is_counted_in_images(capsys: pytest.CaptureFixture[str]) -> None:
    """A request is one image, made in as many steps as are usual."""
    code, out, err = run(
        "tiny-sd3.5", "--rate", "1", "--prompt", "16", "--gpus", "l4,l40s", "--max-devices", "1", "--json",
        capsys=capsys,
    )  # fmt: skip
    assert 0 == code, err
    found = json.loads(out)

    assert ("images", 40) == (found["unit"], found["output"])
    assert found["choice"]["ttft_ms"] is None


def test_milliseconds_have_no_exponent() -> None:
    """Four digits where that is enough, all of them where it is not."""
    assert ("0.9361 ms", "1453 ms", "12990 ms") == tuple(map(in_ms, (0.93611, 1453.4, 12990.2)))


def test_cards_that_are_there_are_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What to do, what it gains and costs, what to rent next; on a page too, which a phone can show."""
    page_file = tmp_path / "advice.html"
    words = ("--rate", "50", "--have", "a100,l40s", "--gpus", "l4,l40s", "--page", page_file)
    found = advised(*words, "--save", tmp_path, "--batches", "8", "--microbatches", "1", capsys=capsys)

    ways = {way["name"]: way for way in found["ways"]}
    assert found["advice"]["name"] in ways
    best = max(way["tokens_per_s"] for way in ways.values())
    assert found["advice"]["tokens_per_s"] * (1 + found["rel_error"]) >= best
    assert ways["data-parallel"]["requests_per_s"] * 4 == pytest.approx(ways["data-parallel"]["tokens_per_s"])
    assert {"l4", "l40s"} == {card["gpu"] for card in found["next"]}
    rent = gpu("a100").usd_per_hour, gpu("l40s").usd_per_hour
    assert found["usd_per_hour"] <= sum(x for x in rent if x is not None)
    assert 4 == len(found["answer"])
    assert [str(tmp_path / "have.plan"), str(page_file)] == found["files"]
    with browser() as opened:
        page = opened.new_page(viewport=PHONE)
        page.goto(page_file.as_uri())
        assert found["answer"][0] == page.inner_text(".headline")
        assert PHONE["width"] >= width_of(page)
        assert "One more card" in page.inner_text("body")


def test_a_map_goes_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a page, or where the folder has none, that is told before anything is planned."""
    (tmp_path / "paper.json").write_text("{}")
    asked = ("tiny-llama", *SMALL, "--rate", "5", "--regimes", tmp_path)

    assert "--regimes: the map goes on a page" in run(*asked, capsys=capsys)[2]
    assert "it has no map of regimes" in run(*asked, "--page", tmp_path / "x.html", capsys=capsys)[2]
