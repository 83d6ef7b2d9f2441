"""Bodies are read in threads beside the event loop; nobody waits for them."""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("transformers", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from http_factory import MODEL, Running, Scripted, serving  # noqa: E402
from tessera.errors import AskError  # noqa: E402
from tessera.serve import templates  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.errors import ApiError  # noqa: E402
from tessera.serve.openai.read import (  # noqa: E402
    Draft,
    Endpoint,
    ModelCard,
    detokenize,
    read_chat,
    read_completion,
    tokenize,
)
from tessera.serve.reading import SMALL_BYTES, FairPool, Read, ReadBody, Reading  # noqa: E402
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
# Reads a chat body in four threads of a fresh process, of which each begins while msgspec, slowed down,
# inspects the body's types for the one before.
FIRST_USE = """
import threading, time
from tessera.serve.openai.bodies import ChatRequest, parse

def slow(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        time.sleep(0.05)

def read():
    parse(ChatRequest, b'{"messages": [{"role": "user", "content": "a"}]}', "m")
    print("read")

threading.setprofile(slow)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
    time.sleep(0.07)
"""
WORDS = "Sphinx of black quartz, judge my vow. "


READERS: dict[str, Read] = {
    "chat": read_chat,
    "completion": read_completion,
    "tokenize": tokenize,
    "detokenize": detokenize,
}


def text_of(path: Path, template: str = TEMPLATE) -> Text:
    """The text of a folder with this template."""
    make_text_folder(path, template)
    return open_text(str(path))


def read(text: Text, kind: str, body: dict[str, Any], num_padded: int) -> ReadBody:
    """What is read of a body, made longer by spaces."""
    raw = json.dumps(body).encode()
    found = Reading(ModelCard(MODEL, text, CAPACITY, 512))
    try:
        return asyncio.run(found.read(READERS[kind], raw + b" " * num_padded))
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
def test_every_kind_of_body_is_read_alike_small_or_large(tmp_path: Path, kind: str) -> None:
    """The same draft in either kind of thread, with a folder's tokenizer and template."""
    text = text_of(tmp_path, WITH_TOOLS)

    assert read(text, kind, BODIES[kind], 0) == read(text, kind, BODIES[kind], SMALL_BYTES)


@pytest.mark.parametrize("num_padded", [0, SMALL_BYTES])
@pytest.mark.parametrize(
    ("body", "field"), [({"prompt": 5}, "prompt"), ({"prompt": [600]}, "prompt"), ({"model": "x"}, "prompt")]
)
def test_errors_name_status_and_field(num_padded: int, body: dict[str, Any], field: str) -> None:
    """Whatever the size of the body."""
    with pytest.raises(ApiError) as raised:
        read(ByteText(), "completion", body, num_padded)

    assert (400, field) == (raised.value.status, raised.value.param)


def test_endless_template_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed; the next body is read."""
    monkeypatch.setattr(templates, "LIMIT_S", 1.0)
    text = text_of(tmp_path, "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}fine")
    bodies = [{"messages": [{"role": "user", "content": said}]} for said in "xy"]
    with pytest.raises(AskError, match="more than 1 s"):
        read(text, "chat", bodies[0], 0)

    assert isinstance(read(text, "chat", bodies[1], 0), Draft)


def test_clients_take_turns() -> None:
    """A client with one job waits for one job of a client with many; jobs of gone clients are skipped."""
    order: list[str] = []
    gate = threading.Event()

    async def main() -> None:
        pool: FairPool[None] = FairPool(1, "test")
        jobs = [pool.run("many", partial(_note, order, f"many {i}", gate)) for i in range(4)]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(pool.run("few", partial(_note, order, "few", gate))))
        await asyncio.sleep(0)
        tasks[2].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.close()

    asyncio.run(main())
    assert ["many 0", "many 1", "few", "many 3"] == order


def _note(order: list[str], name: str, gate: threading.Event) -> None:
    assert gate.wait(10)
    order.append(name)


def test_small_bodies_do_not_wait_for_large_ones(server: Running) -> None:
    """Four large bodies are being read; a small one is answered before the first of them."""
    large = json.dumps({"prompt": WORDS * 20_000}).encode()
    headers = {"content-type": "application/json"}
    ended: list[str] = []

    def post(name: str, path: str, raw: bytes) -> None:
        answer = httpx.post(f"{server.url}{path}", content=raw, headers=headers, timeout=120)
        assert answer.status_code == 200
        ended.append(name)

    threads = [threading.Thread(target=post, args=("large", "/tokenize", large)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    post("small", "/v1/completions", json.dumps({"prompt": WORDS * 500, "max_tokens": 1}).encode())
    for thread in threads:
        thread.join()

    assert "small" in ended[:2]


def test_a_text_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A prompt with far too many tokens is read only until that shows; other prompts are whole."""
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


DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]


def test_deep_nesting_is_named() -> None:
    """It is JSON; the message says what is wrong with it."""
    raw = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    found = Reading(ModelCard(MODEL, ByteText(), CAPACITY, 512))
    with closing(found), pytest.raises(ApiError, match="the body is nested too deeply"):
        asyncio.run(found.read(read_completion, raw))


HEAVY = {
    "a text of 3.6 MB": ("/v1/completions", {"prompt": (WORDS * 100_000)[:3_600_000], "max_tokens": 1}),
    "a conversation of 3.6 MB": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ("<|end|> < " * 400_000)[:3_600_000]}], "max_tokens": 1},
    ),
    "a text that fits": ("/v1/completions", {"prompt": WORDS * 5000, "max_tokens": 1}),
    "a million one-token prompts": ("/v1/completions", {"prompt": [[1]] * 900_000}),
    "deep nesting": ("/v1/completions", {"prompt": "a", "metadata": DEEP}),
    "half a million numbers": ("/v1/completions", {"prompt": [311] * 500_000, "max_tokens": 1}),
    "a million numbers": ("/v1/completions", {"prompt": [7] * 1_000_000, "max_tokens": 1}),
    "many texts": ("/v1/completions", {"prompt": ["x"] * 15_000, "max_tokens": 1}),
    "many tokens to count": ("/tokenize", {"prompt": WORDS * 20_000}),
    "many tokens to write": ("/detokenize", {"tokens": [300] * 500_000}),
}


@pytest.mark.rerun("times single answers of a server on a machine that runs other tests")
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


def test_first_bodies_may_come_at_once() -> None:
    """msgspec crashes the process if a thread uses a type that another inspects for the first time."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, timeout=120, check=False)

    assert (ended.returncode, ended.stdout.split()) == (0, [b"read"] * 4)
