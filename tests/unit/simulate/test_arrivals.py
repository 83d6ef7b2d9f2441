"""Arrivals: streams by a formula have the figures they should; logs are read, or refused with the line."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import ArrivalsError, RuleBroken, UnknownName
from tessera.ir import Arrivals, verify
from tessera.simulate.arrivals import make_arrivals, read_arrivals

BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
46,GPT-4,417,0,417,Conversation log
118.5,ChatGPT,1360,47,1407,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,10,2
"""


def dispersion(arrivals: Arrivals, seconds: float) -> float:
    """Variance over mean of the counts in windows: 1 for Poisson."""
    counts = np.bincount((np.array(arrivals.times_s) / seconds).astype(int))[:-1]
    return float(counts.var() / counts.mean())


def written(folder: Path, text: str) -> Path:
    """A log on disk."""
    path = folder / "log.csv"
    path.write_text(text)
    return path


def test_a_poisson_stream_has_its_rate_and_dispersion() -> None:
    """20 a second, as many in a window as chance says."""
    arrivals = make_arrivals("poisson:20", 20_000)

    assert arrivals.rate_per_s == pytest.approx(20.0, rel=0.03)
    assert dispersion(arrivals, 1.0) == pytest.approx(1.0, abs=0.15)


def test_a_bursty_stream_has_the_same_mean_and_more_dispersion() -> None:
    """Bursts do not add requests, they crowd them."""
    arrivals = make_arrivals("bursty:20,4,0.1,2", 40_000)

    assert arrivals.rate_per_s == pytest.approx(20.0, rel=0.1)
    assert dispersion(arrivals, 1.0) > 5.0


def test_a_batch_comes_at_once() -> None:
    """batch:7 is seven requests at zero, at an infinite rate."""
    arrivals = make_arrivals("batch:7")

    assert (0.0,) * 7 == arrivals.times_s
    assert float("inf") == arrivals.rate_per_s


def test_lengths_have_the_means_that_were_asked_for() -> None:
    """Geometric and lognormal lengths are at least one and have the given means."""
    for text in ("geometric:300,50", "lognormal:300,50,0.7"):
        arrivals = make_arrivals("poisson:1", 20_000, lengths=text)
        assert np.mean(arrivals.prompts) == pytest.approx(300, rel=0.05)
        assert np.mean(arrivals.outputs) == pytest.approx(50, rel=0.05)
        assert min(arrivals.outputs) >= 1


def test_a_burstgpt_log_is_read(tmp_path: Path) -> None:
    """Times count from the first row; a request that failed when it was recorded is left out."""
    arrivals = read_arrivals(written(tmp_path, BURST_GPT))

    assert (0.0, 40.0, 113.5) == arrivals.times_s
    assert (472, 1087, 1360) == arrivals.prompts
    assert (18, 230, 47) == arrivals.outputs
    assert 73.5 == max(b - a for a, b in pairwise(arrivals.times_s))


def test_an_azure_log_is_read(tmp_path: Path) -> None:
    """Dates with seven decimals become seconds."""
    rows = AZURE.splitlines(keepends=True)[:3]
    arrivals = make_arrivals(str(written(tmp_path, "".join(rows))))

    assert arrivals.times_s == pytest.approx((0.0, 4.314579), abs=1e-6)
    assert (44, 109) == arrivals.outputs


def test_an_azure_log_with_a_time_zone_is_read(tmp_path: Path) -> None:
    """The later traces write the offset from UTC."""
    rows = AZURE.splitlines(keepends=True)

    assert (2,) == read_arrivals(written(tmp_path, rows[0] + rows[3])).outputs


def test_an_azure_log_without_a_time_zone_does_not_follow_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New York turned its clocks back between these rows; the log did not."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-05 01:59:59,3,4", "2023-11-05 02:00:01,3,4"]
    try:
        assert (0.0, 2.0) == read_arrivals(written(tmp_path, "\n".join(rows))).times_s
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "119,ChatGPT,,47,1407,API log",
            r"log.csv:6: a hole in the log: there is nothing under 'Request tokens'",
        ),
        ("119,ChatGPT,12,n/a,1407,API log", r"log.csv:6: .* 'n/a' is no number under 'Response tokens'"),
        (",ChatGPT,12,13,1407,API log", r"log.csv:6: .* under 'Timestamp'"),
        ("119", r"log.csv:6: a hole in the log"),
        ("3,ChatGPT,12,13,25,API log", r"log.csv:6: this request came 115.5 s before the one above it"),
    ],
)
def test_a_log_with_a_hole_is_refused_with_its_line(tmp_path: Path, row: str, message: str) -> None:
    """What is missing is not guessed, and time does not run backwards."""
    with pytest.raises(ArrivalsError, match=message):
        read_arrivals(written(tmp_path, BURST_GPT + row + "\n"))


def test_a_mark_at_the_beginning_of_a_log_is_no_part_of_it(tmp_path: Path) -> None:
    """Spreadsheets write one before the first column's name."""
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,ChatGPT,9,5,14,API log\n"
    path = tmp_path / "log.csv"
    path.write_text(text, encoding="utf-8-sig")

    assert (9,) == read_arrivals(path).prompts


def test_a_rate_beyond_all_reason_is_refused() -> None:
    """With the limit, instead of an error of the generator."""
    with pytest.raises(ArrivalsError, match="at most 1e"):
        make_arrivals("bursty:20,4,0.1,1e25", 10)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the columns that would do."""
    with pytest.raises(ArrivalsError, match="BurstGPT: Timestamp"):
        read_arrivals(written(tmp_path, text))


def test_a_log_without_answers_is_refused(tmp_path: Path) -> None:
    """There is nothing to serve in it."""
    with pytest.raises(ArrivalsError, match="no request in it has an answer"):
        read_arrivals(written(tmp_path, "\n".join(BURST_GPT.splitlines()[:1])))


@pytest.mark.parametrize(
    "text",
    ["poisson:0", "poisson:-1", "poisson:x", "poisson:1,2", "bursty:5,20,0.5", "batch:1.5", "missing.csv"],
)
def test_arrivals_that_make_no_sense_are_refused(text: str) -> None:
    """One line, no traceback."""
    with pytest.raises(ArrivalsError):
        make_arrivals(text)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    """A typing mistake is told with what would be understood."""
    with pytest.raises(UnknownName, match="known: batch, bursty, poisson"):
        make_arrivals("posson:3")


@pytest.mark.parametrize("text", ["fixed:5", "fixed:0,5", "geometric:a,b", "lognormal:5,5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    """A pair of means, and a spread where there is one."""
    with pytest.raises(ArrivalsError):
        make_arrivals("batch:3", lengths=text)


def test_arrivals_out_of_order_break_a_rule() -> None:
    """The record itself refuses what no system can see."""
    with pytest.raises(RuleBroken, match="ascending"):
        verify(Arrivals("made", (2.0, 1.0)))
