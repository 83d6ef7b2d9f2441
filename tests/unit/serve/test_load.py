"""The load generator against a stand-in server: what it asks, what it counts, and which faults it finds."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from load_factory import HEAD, Wire, answer, chunked, events, plain, prompt_of, refused, serving, words_of
from tessera.cli import main
from tessera.errors import LoadError
from tessera.ir import Arrivals
from tessera.serve import load
from tessera.serve.load import (
    Generation,
    LoadOptions,
    Ruler,
    _queries,
    figures,
    make_prompts,
    measure,
    send_times,
)


def run(url: str, **load: Any) -> dict[str, Any]:
    """The figures of a small load."""
    wanted: dict[str, Any] = {"num_requests": 12, "concurrency": 4, "output_tokens": 5, "timeout_s": 10.0}
    load = wanted | load
    return figures(asyncio.run(measure(url, LoadOptions(**load), lambda what: None)))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_answered_once(endpoint: str) -> None:
    """All are answered, tokens are counted by the server, and each prompt is another."""
    with serving() as stub:
        found = run(stub.url, api=endpoint)

    assert (12, 0, 60) == (found["completed"], found["errors"], found["total_output_tokens"])
    assert {"length": 12} == found["finish_reasons"]
    assert len({prompt_of(a) for a in stub.asked}) == 12 + 2


def test_prompts_have_the_tokens_asked_for() -> None:
    """The server is the ruler: its template and its tokens of a word are taken into account."""
    with serving() as stub:
        found = run(stub.url, prompt_tokens=100)

    assert 94 <= found["total_input_tokens"] / 12 <= 100


def test_no_more_than_the_concurrency_is_in_flight() -> None:
    """Four clients have at most four requests, each over one connection that is kept."""
    with serving(delay_s=0.001) as stub:
        run(stub.url, concurrency=4)

    assert stub.peak == 4
    assert stub.num_connections <= 4 + 1


def test_latencies_are_those_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text comes after the role, the end after the usage; gaps are those between two texts."""
    asked = {"messages": [{"content": "x"}]}
    pieces = [line for event in events(asked, "abcde") for line in event.splitlines(keepends=True)]
    now_ms = 100

    class Content:
        async def __aiter__(self) -> AsyncIterator[bytes]:
            """Every event comes 20 ms after the last, and an empty line after each."""
            nonlocal now_ms
            for piece in pieces:
                now_ms += 20 if piece.strip() else 0
                yield piece

    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_ms / 1e3))
    response: Any = SimpleNamespace(content=Content())
    answer = asyncio.run(load._read_stream(response, 0.1))
    found = load._latencies([answer])

    # The role, five texts, usage, [DONE].
    means = {name: found[f"mean_{name}_ms"] for name in ("ttfb", "ttft", "itl", "e2el", "tpot")}
    assert {"ttfb": 20, "ttft": 40, "itl": 20, "e2el": 160, "tpot": 30} == pytest.approx(means)
    assert 4 == len(answer.gaps_s)


def test_latencies_are_not_less_than_the_servers_pauses() -> None:
    """With 20 ms before every piece an answer of five texts takes at least 180 ms, however late they come."""
    with serving(delay_s=0.02) as stub:
        found = run(stub.url, num_requests=2, concurrency=1)

    assert found["mean_ttfb_ms"] >= 40
    assert found["mean_ttfb_ms"] <= found["mean_ttft_ms"] <= found["mean_e2el_ms"]
    assert found["mean_e2el_ms"] >= 180
    assert found["mean_tpot_ms"] == pytest.approx((found["mean_e2el_ms"] - found["mean_ttft_ms"]) / 4)


def test_a_rate_spreads_the_requests() -> None:
    """Forty requests at 200 a second take about 0.2 s, however quick the server is."""
    with serving() as stub:
        found = run(stub.url, num_requests=40, rate_per_s=200.0, concurrency=40)

    assert found["duration"] > 0.1
    assert found["mean_late_ms"] >= 0.0
    assert found["rate_not_reached"] is None


def test_a_rate_that_a_server_does_not_reach_is_said() -> None:
    """A server with one place and 20 ms for each piece of text answers no thousand requests a second."""
    with serving(delay_s=0.02) as stub:
        found = run(stub.url, num_requests=6, rate_per_s=1000.0, concurrency=1)

    said = r"[\d.]+ requests/s were sent, 1000 asked for: 1 were in flight"
    assert re.fullmatch(said, found["rate_not_reached"])


def test_a_log_gives_times_and_lengths() -> None:
    """Lengths of a log are kept, and cut where the server has no room."""
    log = Arrivals("log", (0.0, 0.01, 0.02), prompts=(20, 60, 90), outputs=(3, 200, 5))
    with serving() as stub:
        found = run(stub.url, arrivals=log, output_tokens=None)

    assert [3, 64, 5] == sorted((a["max_completion_tokens"] for a in stub.asked[2:]), key=[3, 64, 5].index)
    assert found["num_cut"] == 2


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("http 500", refused(500, "it broke")),
        ("http 429", refused(429, "too many")),
        ("closed", [HEAD, chunked(b"data: {}\n\n"), None]),
        ("closed", [None]),
        ("stream", [HEAD, chunked(b'data: {"choices": []}\n\n'), b"0\r\n\r\n"]),
        ("stream", [HEAD, chunked(b"data: {oops\n\n"), b"0\r\n\r\n"]),
        ("stream", [HEAD, chunked(b'data: {"choices": [3]}\n\n'), b"0\r\n\r\n"]),
        ("answer", [HEAD, chunked(b'data: {"error": {"message": "device lost"}}\n\n'), b"0\r\n\r\n"]),
        ("protocol", [b"nonsense\r\n\r\n", None]),
    ],
)
def test_a_failed_request_is_an_error_of_its_kind(kind: str, wire: Wire) -> None:
    """Whatever goes wrong is counted by kind, with what was said first; the others go on."""

    def handler(path: str, asked: dict[str, Any]) -> Wire:
        return wire if "broken" in seen(asked) else answer(asked)

    lock, count = threading.Lock(), [0]

    def seen(asked: dict[str, Any]) -> str:
        with lock:
            count[0] += 1
            return "broken" if count[0] in (5, 9) else "fine"

    with serving(handler) as stub:
        found = run(stub.url)

    assert (10, 2) == (found["completed"], found["errors"])
    assert {kind: 2} == {name: row["count"] for name, row in found["errors_by_kind"].items()}
    assert found["errors_by_kind"][kind]["first"]


def test_an_answer_that_never_ends_is_a_timeout() -> None:
    """A server that hangs is an error after the time limit, and the client goes on with a new connection."""
    with serving(lambda path, asked: answer(asked), delay_s=0.15) as stub, pytest.raises(LoadError) as caught:
        run(stub.url, timeout_s=0.2)

    assert caught.value.kind == "timeout"


def test_a_server_that_does_not_count_is_counted_by_events() -> None:
    """Without usage, tokens are events with text and the prompts' are unknown."""

    def handler(path: str, asked: dict[str, Any]) -> Wire:
        return [HEAD, *(chunked(e) for e in events(asked, words_of(asked), usage=False)), b"0\r\n\r\n"]

    with serving(handler) as stub:
        found = run(stub.url)

    assert ("events", 60, None) == (
        found["tokens_counted_by"],
        found["total_output_tokens"],
        found["total_input_tokens"],
    )


def test_mixed_up_answers_are_found() -> None:
    """An answer that belongs to another request is told from the one given alone."""
    last: list[Sequence[str]] = []

    def handler(path: str, asked: dict[str, Any]) -> Wire:
        words = words_of(asked)
        last.append(words)
        # The 12th question gets the answer to the one before it.
        given = last[-2] if len(last) == 12 else words
        return [HEAD, *(chunked(e) for e in events(asked, given)), b"0\r\n\r\n"]

    with serving(handler) as stub:
        found = run(stub.url, num_requests=12, num_distinct=4, concurrency=1)

    verified = found["verify"]
    assert (4, 4, 12, 1) == tuple(
        verified[key] for key in ("prompts", "distinct_answers", "compared", "mixed_up")
    )
    assert verified["first"]["alone"] != verified["first"]["in_the_crowd"]


def test_a_server_that_answers_alike_is_verified() -> None:
    """Nothing is mixed up where nothing is."""
    with serving() as stub:
        found = run(stub.url, num_distinct=3)

    assert 0 == found["verify"]["mixed_up"]
    assert len({prompt_of(a) for a in stub.asked[2:]}) == 3


def test_a_server_that_says_close_gets_new_connections() -> None:
    """`Connection: close` is obeyed, and costs no request."""
    closing = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    with serving(lambda path, asked: [closing, *list(answer(asked))[1:], None]) as stub:
        found = run(stub.url)

    assert (12, 0) == (found["completed"], found["errors"])
    assert stub.num_connections >= 12


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    """The message says what the server has."""
    with serving() as stub, pytest.raises(LoadError, match="no model 'other'; it has: stub"):
        run(stub.url, model="other")


def test_a_wrong_key_ends_before_the_load() -> None:
    """A refusal of the first question is the user's to mend: no load is sent."""
    with serving(lambda path, asked: refused(401, "wrong key")) as stub:
        with pytest.raises(LoadError, match="wrong key"):
            run(stub.url)

        assert 1 == len(stub.asked)


def test_the_key_goes_with_every_request() -> None:
    """An API key is sent as a bearer token."""
    with serving() as stub:
        asyncio.run(measure(stub.url + "/v1/", LoadOptions(4, 2), lambda what: None, "secret"))

    assert all("Authorization: Bearer secret\r\n" in head for head in stub.headers)


def test_the_key_may_be_that_of_the_servers_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the same form: a file with the key."""
    tmp_path.joinpath("keys").write_text("# ours\na-secret-of-ours\n")
    monkeypatch.setenv("TESSERA_API_KEY", f"@{tmp_path / 'keys'}")
    with serving() as stub, pytest.raises(SystemExit):
        main(["bench", "serve", "--url", stub.url, "--requests", "2"])

    assert all("Authorization: Bearer a-secret-of-ours\r\n" in head for head in stub.headers)


def test_a_load_needs_no_package_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an extra of its own."""
    for name in ("starlette", "starlette.datastructures"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tessera.serve.limits", raising=False)
    with serving() as stub, pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", stub.url, "--requests", "2"])

    assert 0 == ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:notaport"])
def test_a_wrong_address_is_refused(url: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(LoadError, match=r"--url: .*http://127.0.0.1:8000"):
        run(url)


def test_gaps_have_the_mean_and_the_burstiness_asked_for() -> None:
    """The mean gap is one over the rate; the squared variation one over the burstiness."""
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(np.array(send_times(LoadOptions(20_000, rate_per_s=50.0, burstiness=burstiness))))

        assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_prompts_are_distinct_and_seeded() -> None:
    """The same seed asks the same; another seed or number asks another."""
    prompts = make_prompts([1] * 500, seed=1)

    assert 500 == len(set(prompts))
    assert prompts == make_prompts([1] * 500, seed=1)
    assert not set(prompts) & set(make_prompts([1] * 500, seed=2))


def test_a_ruler_counts_the_template() -> None:
    """A template of 9 tokens and 6 tokens a word leave room for 6 words in 50 tokens."""
    ruler = Ruler.from_two((1, 15), (5, 39))

    assert (6, 1) == (ruler.words(50), ruler.words(3))


def test_command_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """The contract: completed and errors, as JSON."""
    words = ["--requests", "20", "--concurrency", "8", "--verify", "--json"]
    with serving() as stub, pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", stub.url, *words])

    found = json.loads(capsys.readouterr().out)
    assert (0, 20, 0) == (ended.value.code, found["completed"], found["errors"])
    keys = {
        f"{head}_{name}_ms" for head in ("mean", "median", "p90", "p99") for name in ("ttft", "tpot", "itl")
    }
    assert keys | {"duration", "request_throughput", "output_throughput", "total_token_throughput"} <= set(
        found
    )


def test_command_with_failures_ends_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are printed, and one line says how many failed and why."""
    count = [0]

    def handler(path: str, asked: dict[str, Any]) -> Wire:
        count[0] += 1
        return answer(asked) if count[0] < 4 else plain(503, {"error": {"message": "going down"}})

    with serving(handler) as stub, pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", stub.url, "--requests", "4"])

    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert ["errors", "3"] in [line.split() for line in shown.out.splitlines()]
    assert "3 of 4 requests failed; the first (http 503): going down" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "0"],
        ["--seed", "-1"],
        ["--rate", "-1"],
        ["--rate", "5", "--arrivals", "batch:3"],
        ["--arrivals", "batch:3", "--rate", "5"],
        ["--endpoint", "x"],
        ["--burstiness", "2"],
        ["--distinct", "5"],
        ["--api-key", "@/nowhere"],
    ],
)
def test_wrong_options_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the options ends in one line and exit code 2, even with no server there."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", "127.0.0.1:9", *words])

    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert "cannot connect" not in said


def test_an_answer_without_text_has_a_first_token() -> None:
    """Text that never came counts as come at the end, not at the beginning."""
    answer_ = Generation("", "stop", 3, 0, 0.1, 0.5, 0.5, ())

    assert 0 == answer_.num_tokens


def test_prompts_can_begin_alike() -> None:
    """As many tokens as asked for are the same for all, of those that a prompt has; the rest differ."""
    options = LoadOptions(4, prompt_tokens=100, prefix_tokens=60)
    queries, _ = _queries(options, None, Ruler(0.0, 1.0))
    words = [query.prompt.split() for query in queries]

    assert {100} == {len(prompt) for prompt in words}
    assert 1 == len({tuple(prompt[:60]) for prompt in words})
    assert 4 == len({tuple(prompt[60:]) for prompt in words})
