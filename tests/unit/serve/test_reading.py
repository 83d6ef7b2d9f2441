"""Bodies that are read beside the event loop: alike in a thread and in a process; nobody waits for them."""

import asyncio
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("transformers", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from http_factory import MODEL, Running, Scripted, serving, wait_until  # noqa: E402
from tessera.errors import AskError  # noqa: E402
from tessera.serve import reading  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.errors import ApiError  # noqa: E402
from tessera.serve.openai.read import (  # noqa: E402
    Draft,
    Endpoint,
    ModelCard,
)
from tessera.serve.reading import SMALL_BYTES, Found, Reading  # noqa: E402
from tessera.serve.text import (  # noqa: E402
    ByteText,
    Text,
    open_text,
)
from text_factory import TEMPLATE, make_text_folder  # noqa: E402

CAPACITY = 100_000
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "<|end|>"}'}}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]
WITH_TOOLS = "{{ tools | tojson }}" + TEMPLATE + "{{ messages[1].tool_calls[0].function.arguments['a'] }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WORDS = "Sphinx of black quartz, judge my vow. "


def text_of(path: Path, template: str = TEMPLATE) -> Text:
    """The text of a folder with this template."""
    make_text_folder(path, template)
    return open_text(str(path))


def read(text: Text, kind: str, body: dict[str, Any], num_padded: int) -> Found:
    """What is read of a body, which is made longer by spaces; and read by a process if it is large."""
    raw = json.dumps(body).encode()
    found = Reading(ModelCard(MODEL, text, CAPACITY, 512))
    try:
        return asyncio.run(found.read(kind, raw + b" " * num_padded))
    finally:
        found.close()


BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "hi <|end|>"}, CALLED, {"role": "tool", "content": "7"}],
        "tools": TOOLS,
        "response_format": {"type": "json_object"},
        "logit_bias": {"3": 1.5},
        "stop": ["x"],
        "seed": 7,
    },
    "completion": {"prompt": ["a <|end|> b", "c"], "echo": True, "n": 2, "logprobs": None},
    "tokenize": {"prompt": WORDS, "return_token_strs": True},
    "detokenize": {"tokens": [5, 6, 300, 511]},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_process_reads_what_a_thread_reads(tmp_path: Path, kind: str) -> None:
    """The same draft, with a folder's tokenizer and template, for every kind of body."""
    text = text_of(tmp_path, WITH_TOOLS)

    assert read(text, kind, BODIES[kind], 0) == read(text, kind, BODIES[kind], SMALL_BYTES)


@pytest.mark.parametrize("num_padded", [0, SMALL_BYTES])
@pytest.mark.parametrize(
    ("body", "field"), [({"prompt": 5}, "prompt"), ({"prompt": [600]}, "prompt"), ({"model": "x"}, "prompt")]
)
def test_errors_are_told_alike(num_padded: int, body: dict[str, Any], field: str) -> None:
    """With status and field, wherever the body is read."""
    with pytest.raises(ApiError) as told:
        read(ByteText(), "completion", body, num_padded)

    assert (400, field) == (told.value.status, told.value.param)


@pytest.mark.parametrize("num_padded", [0, SMALL_BYTES])
def test_a_template_that_does_not_end_is_ended(tmp_path: Path, num_padded: int) -> None:
    """In its process or in that of the body; the next body is read."""
    text = text_of(tmp_path, "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}fine")
    raw = [json.dumps({"messages": [{"role": "user", "content": said}]}).encode() for said in "xy"]

    async def both() -> Found:
        found = Reading(ModelCard(MODEL, text, CAPACITY, 512))
        with pytest.raises((ApiError, AskError), match="CPU time"):
            await found.read("chat", raw[0] + b" " * num_padded)
        try:
            return await found.read("chat", raw[1] + b" " * num_padded)
        finally:
            found.close()

    assert isinstance(asyncio.run(both()), Draft)


def test_a_reader_that_died_is_started_again() -> None:
    """The next large body is read by another process."""
    raw = json.dumps({"prompt": "a" * SMALL_BYTES}).encode()

    async def twice() -> None:
        found = Reading(ModelCard(MODEL, ByteText(), CAPACITY, 258))
        first = found.start()
        await found.read("completion", raw)
        first.close()
        await found.read("completion", raw)
        assert first is not found.start()
        found.close()

    asyncio.run(twice())


def test_a_text_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Of a prompt with far too many tokens only so many are made as show that; the others are whole."""
    text = text_of(tmp_path)
    long = WORDS * 12_000
    whole = text.encode(long)
    part = text.encode(long, 1000)

    assert 1000 < len(part) < len(whole) / 5
    assert whole == text.encode(long, len(whole))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a folder's tokenizer and a scripted service."""
    service = Scripted()
    text = text_of(tmp_path_factory.mktemp("checkpoint"))
    endpoint = Endpoint(ModelCard(MODEL, text, CAPACITY, 512), service, 1_700_000_000)
    with serving(endpoint, Metrics(MODEL, service.snapshot)) as found:
        yield found


def wait_for_health(client: Any) -> float:
    """Seconds that somebody waits for /health."""
    asked = time.perf_counter()
    assert 200 == client.get("/health").status_code
    waited = time.perf_counter() - asked
    time.sleep(0.005)
    return waited


def measured(server: Running, path: str, raw: bytes) -> tuple[Any, float, list[float], list[float]]:
    """The answer to a body, how long it took, and how long others waited for /health before and meanwhile."""
    answers: list[Any] = []
    headers = {"content-type": "application/json"}

    def post() -> None:
        answers.append(httpx.post(f"{server.url}{path}", content=raw, headers=headers, timeout=120))

    thread = threading.Thread(target=post)
    waits: list[float] = []
    with httpx.Client(base_url=server.url) as client:
        before = [wait_for_health(client) for _ in range(40)]
        thread.start()
        started = time.perf_counter()
        while thread.is_alive():
            waits.append(wait_for_health(client))
        seconds = time.perf_counter() - started
    return answers[0], seconds, before, waits


HEAVY = {
    "a text of 3.6 MB": ("/v1/completions", {"prompt": (WORDS * 100_000)[:3_600_000], "max_tokens": 1}),
    "a conversation of 3.6 MB": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ("<|end|> < " * 400_000)[:3_600_000]}], "max_tokens": 1},
    ),
    "a text that fits": ("/v1/completions", {"prompt": WORDS * 5000, "max_tokens": 1}),
    "a million numbers": ("/v1/completions", {"prompt": [7] * 1_000_000, "max_tokens": 1}),
    "many texts": ("/v1/completions", {"prompt": ["x"] * 15_000, "max_tokens": 1}),
    "many tokens to count": ("/tokenize", {"prompt": WORDS * 20_000}),
    "many tokens to write": ("/detokenize", {"tokens": [300] * 900_000}),
}


@pytest.mark.parametrize("name", HEAVY)
def test_nobody_waits_for_a_heavy_body(server: Running, name: str) -> None:
    """It is refused or answered, and meanwhile others wait a small part of the time that it takes.

    The bound is 100 ms. A machine that is busy with something else may make anybody wait: there, a third of
    what the body took, of which all would be waited if it were read on the event loop.
    """
    path, body = HEAVY[name]
    raw = json.dumps(body, separators=(",", ":")).encode()
    answer, seconds, before, waits = measured(server, path, raw)

    assert answer.status_code in (200, 400)
    assert max(waits) < max(0.1, seconds / 3, 2 * max(before)), f"{seconds:.2f} s; {sorted(waits)[-5:]}"
    assert statistics.median(waits) < 0.1


def test_a_client_that_goes_takes_its_body_with_it(server: Running) -> None:
    """The process that reads it ends at once, whatever it is doing."""
    raw = json.dumps({"prompt": WORDS * 90_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    head += "content-type: application/json"
    process = server.server.config.app.state.reading.start()  # type: ignore[union-attr]

    def num_forks() -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return len(children.read_text().split())

    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + raw)
        wait_until(lambda: num_forks() > 0)
    gone = time.perf_counter()
    wait_until(lambda: num_forks() == 0)

    assert time.perf_counter() - gone < 1.0


def test_the_process_inherits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment but what Python needs to start."""
    monkeypatch.setenv("TESSERA_API_KEY", "secret")

    assert "TESSERA_API_KEY" not in reading._environment()
    assert os.environ["TESSERA_API_KEY"] == "secret"
