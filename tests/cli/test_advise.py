"""tessera advise, on a machine without GPUs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import PHONE, browser, width_of
from tessera.advise import search
from tessera.advise.raters import ServiceRater
from tessera.cli import main
from tessera.ir import ServicePlan, load
from tessera.profile import gpu

SMALL = ("--prompt", "16", "--output", "4", "--effort", "quick")


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
    return advice_in(out)


def advice_in(out: str) -> dict[str, Any]:
    """The advice of a JSON document, with what stands beside it."""
    found: dict[str, dict[str, Any]] = json.loads(out)
    return found["advice"] | {name: found[name] for name in ("plans", "headline", "files")}


def test_cheapest_set_that_carries_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The choice carries the rate with its margin, the runner-up too and for more; plans are written.

    What is known before anything is planned is said at once.
    """
    names = ("--rate", "50", "--gpus", "l40s,l4,l20", "--max-devices", "2")
    code, out, err = run("tiny-llama", *SMALL, *names, "--save", tmp_path, "--json", capsys=capsys)
    found = advice_in(out)
    choice, second = found["candidates"]

    assert 0 == code
    assert "so far: l4 at" in " ".join(err.split())
    assert (True, False) == (choice["is_advised"], second["is_advised"])
    assert choice["requests_per_s"] >= 50 * 1.1
    assert second["requests_per_s"] >= 50 * 1.1
    assert choice["usd_per_hour"] <= second["usd_per_hour"]
    assert choice["gpus"] != second["gpus"]
    assert ["l4"] == choice["gpus"]
    assert {"l20": "no price is known; give one with --price l20=USD"} == found["skipped"]
    assert "2026-08-22" in found["price_source"]
    assert "RunPod" == choice["provider"]
    plan = found["plans"][0]
    assert plan["tokens_per_s"] / 4 == pytest.approx(choice["requests_per_s"])
    assert plan["service"]["groups"]
    assert 0 < choice["cost_error"] < 1
    assert choice["ttft_ms"] > 0
    memory = {m["capacity"]: m["weights"] + m["state"] for m in plan["memory"].values()}
    assert all(held <= 0.9 * capacity for capacity, held in memory.items())
    assert load(ServicePlan, tmp_path / "choice.plan").policy == choice["policy"]
    assert "first token after" in found["headline"]
    assert f"±{choice['cost_error']:.0%}" in found["headline"]


def test_a_price_of_your_own_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """A card without a known price can be rented, beside others at their providers' prices."""
    words = ("--rate", "50", "--gpus", "l4,l20", "--max-devices", "1", "--price", "l20=0.01")
    choice, second = advised(*words, capsys=capsys)["candidates"]

    assert (["l20"], 0.01, "--price") == (choice["gpus"], choice["usd_per_hour"], choice["provider"])
    assert (["l4"], "RunPod") == (second["gpus"], second["provider"])


@pytest.mark.slow
def test_no_more_is_rented_than_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--have` calls enough is rented, nothing dearer: both plan the same sets in the same way."""
    words = ("--gpus", "l4", "--max-devices", "3")
    one = advised("--rate", "1", "--have", "l4", *words, capsys=capsys)["candidates"][0]["requests_per_s"]
    asked = ("--rate", 1.9 * one / 1.1)
    enough = [
        num
        for num in (1, 2, 3)
        if any(
            way["is_enough"]
            for way in advised(*asked, "--have", ",".join(["l4"] * num), *words, capsys=capsys)["candidates"]
        )
    ]
    rented = advised(*asked, *words, capsys=capsys)["candidates"][0]

    assert len(rented["gpus"]) == min(enough)


def test_drafts_below_the_rate_are_planned_within_their_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set whose draft is a little too slow is no reason to rent a dearer one."""
    words = ("--gpus", "l4", "--max-devices", "2")
    one = advised("--rate", "1", "--have", "l4", *words, capsys=capsys)["candidates"][0]["requests_per_s"]
    asked = ("--rate", 0.99 * one / 1.1, *words)
    drafts = ServiceRater.drafts
    monkeypatch.setattr(
        ServiceRater,
        "drafts",
        lambda rater, *given: [replace(o, tokens_per_s=0.95 * o.tokens_per_s) for o in drafts(rater, *given)],
    )

    assert ["l4"] == advised(*asked, capsys=capsys)["candidates"][0]["gpus"]


@pytest.mark.slow
def test_higher_rate_costs_more(capsys: pytest.CaptureFixture[str]) -> None:
    """More work needs more or dearer GPUs."""
    names = ("--gpus", "l40s,l4", "--max-devices", "3")
    low = advised("--rate", "50", *names, capsys=capsys)["candidates"][0]
    high = advised("--rate", 1.2 * low["requests_per_s"], *names, capsys=capsys)["candidates"][0]

    assert high["usd_per_hour"] > low["usd_per_hour"]
    assert high["requests_per_s"] >= 1.2 * low["requests_per_s"]


@pytest.mark.slow
def test_latency_asked_for_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """With a tight limit a token the batch is as small as it has to be."""
    names = ("--gpus", "a100,l40s", "--max-devices", "1")
    free = advised("--rate", "20", *names, capsys=capsys)["candidates"][0]["tpot_ms"]
    found = advised("--rate", "20", "--slo-tpot-ms", 1.01 * free, *names, capsys=capsys)["candidates"][0]

    assert found["tpot_ms"] <= 1.01 * free


BAD: list[tuple[list[str], str]] = [
    (["--rate", "0"], "--rate: must be above 0, got 0"),
    (["--rate", "inf"], "--rate: must be a finite number, got inf"),
    (["--rate", "5", "--margin", "nan"], "--margin"),
    (["--rate", "5", "--slo-ttft-ms", "inf"], "--slo-ttft-ms: must be a finite number, got inf"),
    (["--rate", "1e9", "--gpus", "l4", "--max-devices", "1"], "even with free transfers"),
    (["--rate", "5", "--gpus", "l20"], "no GPU is left to rent (l20: no price is known; give one"),
    (["--rate", "5", "--gpus", "gtx"], "unknown GPU 'gtx'"),
    (["--rate", "5", "--price", "l4=cheap"], "--price: 'l4=cheap' is no price of a card"),
    (["--rate", "5", "--price", "l4=-1"], "--price: 'l4=-1' is no price of a card"),
    (["--rate", "5", "--price", "gtx=1"], "unknown GPU 'gtx'"),
    (["--rate", "5", "--provider", "nobody"], "no price of 'nobody' is known"),
    (["--rate", "5", "--slo-tpot-ms", "0.0001", "--gpus", "l4", "--max-devices", "1"], "within the latency"),
    (["--rate", "1e5", "--slo-tpot-ms", "5", "--gpus", "l4", "--max-devices", "1"], "even with free"),
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
    assert "Rent l4" in flat
    assert "TTFT" in flat
    assert {"cost", "error"} <= set(flat.split())
    assert "RunPod" in flat
    assert "skypilot-catalog" in flat


def test_a_search_that_has_no_time_left_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first set that carries the rate is advised, and what was not planned is counted."""
    monkeypatch.setattr(search, "SEARCH_S", -1.0)
    found = advised("--rate", "50", "--gpus", "l4,l40s", "--max-devices", "2", capsys=capsys)

    assert 1 == len(found["candidates"])
    assert any("lack of time" in note for note in found["notes"])


def test_answers_of_one_token_are_advised_without_times_per_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They have none, so every limit of it is kept and none is tried."""
    words = ("--rate", "50", "--have", "l4", "--gpus", "l4", "--output", "1", "--slo-tpot-ms", "0.001")
    found = advised(*words, capsys=capsys)

    assert [0.0] == [way["tpot_ms"] for way in found["candidates"]]
    assert [] == found["by_tpot"]


@pytest.mark.slow
def test_diffusion_is_counted_in_images(capsys: pytest.CaptureFixture[str]) -> None:
    """A request is one image, made in as many steps as are usual."""
    code, out, err = run(
        "tiny-sd3.5", "--rate", "1", "--prompt", "16", "--gpus", "l4,l40s", "--max-devices", "1", "--json",
        capsys=capsys,
    )  # fmt: skip
    assert 0 == code, err
    found = json.loads(out)["advice"]

    assert (True, 40) == (found["load"]["is_image"], found["load"]["output"])
    assert found["candidates"][0]["ttft_ms"] is None


def test_cards_that_are_there_are_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What to do, what it gains and costs, what to rent next; on a page too, which a phone can show."""
    page_file = tmp_path / "advice.html"
    words = ("--rate", "50", "--have", "a100,l40s", "--gpus", "l4,l40s", "--page", page_file)
    found = advised(*words, "--save", tmp_path, capsys=capsys)

    ways = {way["way"]: way for way in found["candidates"]}
    (advice,) = (way for way in ways.values() if way["is_advised"])
    best = max(way["requests_per_s"] for way in ways.values())
    assert advice["requests_per_s"] * (1 + advice["cost_error"]) >= best
    assert "data-parallel" in ways
    assert {"l4", "l40s"} == {card["gpus"][0] for card in found["next_cards"]}
    rent = gpu("a100").usd_per_hour, gpu("l40s").usd_per_hour
    assert advice["usd_per_hour"] <= sum(x for x in rent if x is not None)
    assert [str(tmp_path / "have.plan"), str(page_file)] == found["files"]
    with browser() as opened:
        page = opened.new_page(viewport=PHONE)
        page.goto(page_file.as_uri())
        assert found["headline"] == page.inner_text(".headline")
        assert PHONE["width"] >= width_of(page)
        assert "One more card" in page.inner_text("body")
