"""OpenAI's routes over a scripted service: documents, streams, what is refused, and the official client."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")

from http_factory import CAPACITY, MODEL, Running, Scripted, letters, running  # noqa: E402
from tessera.errors import ServiceBusy, ServiceClosing  # noqa: E402
from tessera.serve.openai.bodies import FIELDS, ChatRequest  # noqa: E402

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def service() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def server(service: Scripted) -> Iterator[Running]:
    with running(service) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with httpx.Client(base_url=server.url) as found:
        yield found


@pytest.fixture
def official(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def events(text: str) -> list[Document]:
    """The documents of a stream, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def said(service: Scripted) -> str:
    """What the scripted service answers to its last ask."""
    return "".join(map(chr, letters(service.asks[-1])))


def error_of(answer: Any) -> Document:
    """The error, which must have OpenAI's shape."""
    document = answer.json()
    assert document.keys() == {"error"}
    error: Document = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def test_chat_is_answered_as_a_document(client: Any, service: Scripted) -> None:
    """A chat has one choice by the assistant, and counts its tokens."""
    document = client.post("/v1/chat/completions", json=CHAT).json()

    assert document["object"] == "chat.completion"
    (choice,) = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": said(service), "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = len(service.asks[-1].prompt)
    assert document["usage"] == {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}


def test_stream_begins_with_the_role_and_ends_with_the_reason(client: Any, service: Scripted) -> None:
    """A stream is: the role, the text in pieces, the reason; without usage unless asked for."""
    found = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)

    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == said(service)
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 5 + ["length"]
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in found}) == 1
    assert not any("usage" in chunk for chunk in found)


def test_usage_comes_last_without_choices(client: Any) -> None:
    """With include_usage every chunk has a usage, which is null but in the last."""
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    found = events(client.post("/v1/chat/completions", json=body).text)

    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in found[:-1])


def test_choices_of_a_stream_are_told_apart(client: Any, service: Scripted) -> None:
    """Two prompts with n = 2 give choices 0 to 3, prompt by prompt."""
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True, "temperature": 0}
    found = events(client.post("/v1/completions", json=body).text)

    texts = dict.fromkeys(range(4), "")
    for chunk in found:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    expected = ["".join(map(chr, letters(ask))) for ask in service.asks[-4:]]
    assert list(texts.values()) == expected
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(256, 97, 98)]),
        (["a", "b"], [(256, 97), (256, 98)]),
        ([7, 8], [(7, 8)]),
        ([[7], [8]], [(7,), (8,)]),
    ],
)
def test_prompts_of_every_kind(client: Any, service: Scripted, prompt: Any, tokens: list[tuple[int]]) -> None:
    """A prompt is a text, texts, token ids or lists of them."""
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})

    assert answer.status_code == 200
    assert [ask.prompt for ask in service.asks[-len(tokens) :]] == tokens


def test_completion_logprobs_have_offsets(client: Any) -> None:
    """Logprobs of a completion are four lists of one length; offsets are characters of the text."""
    body = {"prompt": "x", "max_tokens": 3, "logprobs": 2}
    found = client.post("/v1/completions", json=body).json()["choices"][0]

    assert found["logprobs"]["text_offset"] == [0, 1, 2]
    assert "".join(found["logprobs"]["tokens"]) == found["text"]
    assert [len(top) for top in found["logprobs"]["top_logprobs"]] == [2, 2, 2]
    streamed = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    offsets = [x["choices"][0]["logprobs"]["text_offset"] for x in streamed[:-1]]
    assert offsets == [[0], [1], [2]]


def test_chat_logprobs_have_bytes(client: Any) -> None:
    """Logprobs of a chat tell each token's bytes and its alternatives."""
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]

    first = choice["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"] == choice["message"]["content"][0]
    assert [x["logprob"] for x in first["top_logprobs"]] == [-0.5, -1.5]


def test_echo_gives_the_prompt_back(client: Any, service: Scripted) -> None:
    """With echo the text begins with the prompt, also of token ids, also without an answer."""
    found = client.post("/v1/completions", json={"prompt": "abc", "echo": True, "max_tokens": 2}).json()
    assert found["choices"][0]["text"] == "abc" + said(service)
    body = {"prompt": [104, 105], "echo": True, "max_tokens": 0}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hi"
    streamed = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    assert streamed[0]["choices"][0]["text"] == "hi"


def test_options_reach_the_ask(client: Any, service: Scripted) -> None:
    """OpenAI's options and vLLM's arrive at the engine; what would change nothing is ignored."""
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": "x", "min_tokens": 2}
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "tools": [], "presence_penalty": 0}
    answer = client.post("/v1/chat/completions", json=CHAT | options | ignored | {"ignore_eos": True})

    assert answer.status_code == 200
    ask = service.asks[-1]
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k) == (0.5, 0.9, 5)
    assert (ask.sampling.seed, ask.stop, ask.min_tokens, ask.ignores_end) == (7, ("x",), 2, True)
    assert client.post("/v1/chat/completions", json=CHAT | {"top_p": 0}).status_code == 200


def test_options_that_change_logits_reach_the_ask(client: Any, service: Scripted) -> None:
    """Penalties, biases by token, min_p and tokens that stop."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25}
    options = {"logit_bias": {"7": -100, "8": 2.5}, "min_p": 0.1, "stop_token_ids": [3, 4]}
    answer = client.post("/v1/chat/completions", json=CHAT | penalties | options)

    assert answer.status_code == 200
    sampling = service.asks[-1].sampling
    assert penalties == {name: getattr(sampling, name) for name in penalties}
    assert (sampling.logit_bias, sampling.min_p) == (((7, -100.0), (8, 2.5)), 0.1)
    assert service.asks[-1].stop_tokens == (3, 4)


def test_choices_of_one_seed_differ(client: Any, service: Scripted) -> None:
    """With n and a seed, every choice has a seed of its own, the same every time."""
    client.post("/v1/chat/completions", json=CHAT | {"n": 3, "seed": 2**63 - 1})

    assert len({ask.sampling.seed for ask in service.asks[-3:]}) == 3
    assert all(ask.sampling.seed is not None and ask.sampling.seed >= 0 for ask in service.asks[-3:])


def test_chat_may_use_what_is_left(client: Any, service: Scripted) -> None:
    """Without a limit, a chat's answer may fill the model's positions."""
    client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})

    assert service.asks[-1].max_tokens == CAPACITY - len(service.asks[-1].prompt)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"{", 400, None, "invalid_json"),
        (b"[" * 10_000, 400, None, "invalid_type"),
        (b"[" * 100_000, 400, None, "request_too_large"),
        (b'{"prompt": "\\ud800"}', 400, None, "invalid_json"),
        (b"\xff\xfe", 400, None, "invalid_json"),
        (b"[]", 400, None, "invalid_type"),
        ({}, 400, "prompt", "missing_required_parameter"),
        ({"prompt": []}, 400, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, 400, "prompt", "invalid_type"),
        ({"prompt": ["a", 1]}, 400, "prompt", "invalid_value"),
        ({"prompt": "a", "max_token": 1}, 400, "max_token", "unknown_parameter"),
        ({"prompt": [9999]}, 400, "prompt", "invalid_value"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "invalid_type"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": 2**40}, 400, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": 300}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": "a" * 300}, 400, None, "context_length_exceeded"),
        (b'{"prompt": "a", "temperature": NaN}', 400, None, "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "invalid_value"),
        ({"prompt": "a", "n": 129}, 400, "n", "invalid_value"),
        ({"prompt": ["a"] * 65, "n": 2}, 400, "n", "invalid_value"),
        ({"prompt": "a", "stop": [""]}, 400, "stop", "invalid_value"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of", "unsupported_value"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo", "invalid_value"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "invalid_value"),
        ({"prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs", "invalid_value"),
        ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "invalid_value"),
        ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty", "invalid_value"),
        ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"7": 101}}, 400, "logit_bias", "invalid_value"),
        ({"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids", "invalid_value"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "model", "model_not_found"),
    ],
)
def test_bad_bodies_are_refused_by_field(
    client: Any, body: Any, status: int, param: str | None, code: str
) -> None:
    """What is malformed is a 4xx in OpenAI's shape that names the field."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)


@pytest.mark.parametrize(
    ("name", "values"),
    sorted((k, v) for k, v in FIELDS.items() if v is not None and k not in ChatRequest.__struct_fields__),
)
def test_what_would_change_the_answer_is_refused(client: Any, name: str, values: list[Any]) -> None:
    """A field that is not supported is refused by name, unless its value asks for nothing."""
    refused = client.post("/v1/chat/completions", json=CHAT | {name: {"some": "thing"}})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == name
    for harmless in values:
        assert client.post("/v1/chat/completions", json=CHAT | {name: harmless}).status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x"},
        {"role": "user"},
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_messages_that_cannot_be_read_are_refused(client: Any, message: Document) -> None:
    """Functions, pictures, unknown roles and broken calls are refused as part of `messages`."""
    answer = client.post("/v1/chat/completions", json={"messages": [message]})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_wrong_paths_have_the_same_shape(client: Any, method: str, path: str, status: int) -> None:
    """An unknown path and a wrong method are errors in OpenAI's shape too."""
    answer = client.request(method, path)

    assert answer.status_code == status
    error_of(answer)


def test_only_json_is_read(client: Any) -> None:
    """A form, which any site may make a browser send, is refused."""
    answer = client.post("/v1/completions", data={"prompt": "a"})

    assert answer.status_code == 415
    error_of(answer)


@pytest.mark.parametrize("prompt", [[1, -2], [[1], [2, -2]]])
def test_a_negative_token_of_a_prompt_is_named(client: Any, prompt: Any) -> None:
    """A padding id that was left in is found at once."""
    answer = client.post("/v1/completions", json={"prompt": prompt})

    assert answer.status_code == 400
    assert "token -2 is negative" in error_of(answer)["message"]


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 200)])
def test_a_compressed_body_is_refused_by_its_header(client: Any, coding: str, status: int) -> None:
    """The header may also lie: a plain body under it is not what the client says."""
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)

    assert answer.status_code == status
    assert status == 200 or "without 'Content-Encoding'" in error_of(answer)["message"]


def test_refusals_of_the_engine_keep_their_status(client: Any, service: Scripted) -> None:
    """A full queue is 429 and a closing service 503, also for a stream."""
    for refusal, status in ((ServiceBusy("8 requests wait"), 429), (ServiceClosing("closing"), 503)):
        service.refusal = refusal
        for body in (CHAT, CHAT | {"stream": True}, CHAT | {"stream": True, "n": 2}):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status
            assert answer.headers["retry-after"]
            error_of(answer)
    service.refusal = None


def test_bug_is_told_without_its_inside(client: Any, service: Scripted, logged: io.StringIO) -> None:
    """An error of the server's own is a 500 in the same shape; what it was is in the log only."""
    service.refusal = ValueError("the inside")
    answer = client.post("/v1/chat/completions", json=CHAT)
    service.refusal = None

    assert answer.status_code == 500
    assert "inside the server" in error_of(answer)["message"]
    assert "the inside" not in answer.text
    assert "the inside" in logged.getvalue()


def test_error_within_a_stream_is_an_event(client: Any, service: Scripted) -> None:
    """A generation that fails after its first token says so in the stream; before it, by its status."""
    service.fails_after = 2
    found = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
    assert found[-1]["error"]["message"] == "emu:a100 was lost twice"
    service.fails_after = 0
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "generation_failed"
    service.fails_after = None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a", "max_tokens": 4, "repetition_penalty": 1.0, "logprobs": None}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "max_completion_tokens": 4,
            },
        ),
    ],
)
def test_load_generators_of_vllm_are_understood(client: Any, path: str, body: Document) -> None:
    """What `vllm bench serve` sends is streamed with one usage at the end."""
    common = {"model": MODEL, "temperature": 0.0, "stream": True, "ignore_eos": True}
    answer = client.post(f"/v1/{path}", json=body | common | {"stream_options": {"include_usage": True}})

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events(answer.text)[-1]["usage"]["completion_tokens"] == 4


def test_official_client_chats(official: Any, service: Scripted) -> None:
    """OpenAI's own client reads models, a chat, a completion and a stream."""
    assert [model.id for model in official.models.list()] == [MODEL]
    chat = official.chat.completions.create(model=MODEL, messages=CHAT["messages"], max_completion_tokens=3)
    assert chat.choices[0].message.content == said(service)
    whole = official.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=1)
    assert whole.choices[0].text == said(service)
    stream = official.chat.completions.create(
        model=MODEL,
        messages=CHAT["messages"],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said(service)
    assert chunks[-1].usage.completion_tokens == 3


def test_official_client_raises_its_own_errors(official: Any, service: Scripted) -> None:
    """Each refusal is the exception that a user of OpenAI's client catches."""
    ask = official.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="not served"):
        ask(model="other", messages=CHAT["messages"])
    with pytest.raises(openai.BadRequestError, match="suffix"):
        ask(model=MODEL, messages=CHAT["messages"], extra_body={"suffix": "x"})
    service.refusal = ServiceBusy("too many")
    with pytest.raises(openai.RateLimitError, match="too many"):
        ask(model=MODEL, messages=CHAT["messages"])
    service.refusal, service.fails_after = None, 1
    with pytest.raises(openai.APIError, match="lost twice"):
        list(ask(model=MODEL, messages=CHAT["messages"], stream=True))
    service.fails_after = None
