"""Answers of a form and calls of tools, over HTTP by OpenAI's own client, from a model that says anything."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")

from http_factory import Running, Scripted, running, serving  # noqa: E402
from sampling import examples  # noqa: E402
from serving_factory import ToyStepper, service_of  # noqa: E402
from tessera.serve.grammar import GrammarCompiler  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.read import Endpoint, ModelCard  # noqa: E402
from tessera.serve.records import Shape  # noqa: E402
from tessera.serve.service import Service  # noqa: E402
from tessera.serve.text import ByteText  # noqa: E402

MODEL = "toy"
SHAPE = Shape(microbatches=2, rows=4, capacity=2048, sizes=(4, 64), pool_tokens=16 * 257, vocab_size=258)
SCHEMA = {
    "$defs": {"day": {"enum": ["Monday", "Friday"]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "minItems": 1, "maxItems": 3},
        "price": {"type": "number", "minimum": 0, "maximum": 10},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
    },
    "required": ["name", "days", "price", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "offer", "strict": True, "schema": SCHEMA}}
PARAMETERS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with service_of(ToyStepper(SHAPE, ("quick",)), model=MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Running]:
    sizes = (SHAPE.capacity, SHAPE.vocab_size)
    grammars = GrammarCompiler(ByteText(), SHAPE.vocab_size)
    endpoint = Endpoint(ModelCard(MODEL, ByteText(), *sizes), service, 1_700_000_000, grammars=grammars)
    with serving(endpoint, Metrics(MODEL, service.snapshot)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def ask(client: Any, said: str = "go", **options: Any) -> Any:
    """A chat of one turn."""
    given = {"max_tokens": 1000} | options
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": said}], **given)


@pytest.mark.parametrize("seed", range(examples(4, 2)))
def test_a_schema_is_followed(client: Any, seed: int) -> None:
    """Whatever a random model says is JSON that validates, whole and as a stream."""
    whole = ask(client, response_format=FORMAT, seed=seed).choices[0]
    chunks = list(ask(client, response_format=FORMAT, seed=seed, stream=True))

    assert "stop" == whole.finish_reason
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    assert whole.message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_choices_of_a_completion_follow_a_schema_too(client: Any) -> None:
    """Each for itself, with several prompts."""
    found = client.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=1000, extra_body={"response_format": FORMAT}
    )

    texts = [choice.text for choice in found.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def test_a_json_object_is_one_as_far_as_it_goes(client: Any) -> None:
    """Without a schema a random model may not come to an end; then the reason says so."""
    found = ask(client, response_format={"type": "json_object"}, max_tokens=30).choices[0]

    assert found.message.content.startswith("{")
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    else:
        assert "length" == found.finish_reason


def test_the_client_parses_a_form_by_its_own_class(client: Any) -> None:
    """`parse` with a pydantic model, as OpenAI documents it."""
    from pydantic import BaseModel, Field

    class Offer(BaseModel):
        """What is offered."""

        name: str = Field(max_length=4)
        is_new: bool

    messages = [{"role": "user", "content": "go"}]
    options: dict[str, Any] = {"response_format": Offer, "max_tokens": 200}
    found = client.chat.completions.parse(model=MODEL, messages=messages, **options)

    assert isinstance(found.choices[0].message.parsed, Offer)


def test_required_tools_are_called(client: Any) -> None:
    """One call or several, each of a known tool with arguments by its schema."""
    seen = set()
    for seed in range(examples(16, 8)):
        choice = ask(client, tools=TOOLS, tool_choice="required", seed=seed).choices[0]
        assert ("tool_calls", None) == (choice.finish_reason, choice.message.content)
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls) >= 1
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
            seen.add(call.function.name)

    assert set(PARAMETERS) == seen


def test_the_named_tool_is_called_once(client: Any) -> None:
    """And no other."""
    choice = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        found = ask(client, tools=TOOLS, tool_choice=choice, seed=seed).choices[0]
        (call,) = found.message.tool_calls
        assert ("weather", "tool_calls") == (call.function.name, found.finish_reason)


def test_one_call_at_a_time_if_so_wanted(client: Any) -> None:
    """With parallel_tool_calls false."""
    for seed in range(6):
        options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        assert 1 == len(ask(client, tools=TOOLS, **options).choices[0].message.tool_calls)


def test_calls_are_streamed_in_parts(client: Any) -> None:
    """The name first, then the arguments; together they are the whole answer's."""
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 3}
    whole = ask(client, **options).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    calls: dict[int, list[Any]] = {}
    for chunk in chunks:
        for part in chunk.delta.tool_calls or ():
            calls.setdefault(part.index, []).append(part)

    assert "tool_calls" == chunks[-1].finish_reason
    assert [call.function.name for call in whole] == [parts[0].function.name for parts in calls.values()]
    joined = ["".join(part.function.arguments for part in parts) for parts in calls.values()]
    assert [call.function.arguments for call in whole] == joined
    assert all(parts[0].id and not any(part.id for part in parts[1:]) for parts in calls.values())


def test_a_form_and_tools_go_together(client: Any) -> None:
    """The answer follows the schema or calls a tool."""
    seen = set()
    for seed in range(examples(12, 8)):
        choice = ask(client, tools=TOOLS, response_format=FORMAT, seed=seed).choices[0]
        seen.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        else:
            for call in choice.message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])

    assert {"stop", "tool_calls"} == seen


def test_a_conversation_goes_on_after_a_call(client: Any) -> None:
    """The assistant's call and the tool's answer are part of the next prompt."""
    call = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        call,
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "7"},
    ]
    found = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=5)

    assert found.usage.prompt_tokens > len("".join(json.dumps(tool) for tool in TOOLS))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": FORMAT | {"json_schema": {"schema": {"type": "dog"}}}}, "response_format"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "dog"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_no_form_is_refused_by_its_field(client: Any, options: dict[str, Any], field: str) -> None:
    """400, before anything is computed."""
    with pytest.raises(openai.BadRequestError) as told:
        ask(client, **options)

    assert field == told.value.param


def test_a_schema_that_only_names_itself_is_refused(client: Any) -> None:
    """400 with a reason; nothing could be said that follows it."""
    form = FORMAT | {"json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError) as told:
        ask(client, response_format=form)

    assert "response_format" == told.value.param


def test_a_grammar_that_fails_while_generating_is_400(client: Any) -> None:
    """In our words; in a stream, which has begun, as its last event. The next request is answered."""
    wide = {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(1500)}}
    form = FORMAT | {"json_schema": {"name": "x", "schema": wide}}
    with pytest.raises(openai.BadRequestError, match="became too large to follow"):
        ask(client, response_format=form)
    with pytest.raises(openai.APIError, match="became too large to follow"):
        list(ask(client, response_format=form, stream=True))

    assert ask(client, max_tokens=3, seed=1).choices[0].message.content


def test_the_missing_extra_is_named() -> None:
    """Where llguidance is not installed, a form is refused with the line that installs it."""
    with running(Scripted()) as server:
        body = {"prompt": "a", "response_format": {"type": "json_object"}}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)

    assert 400 == answer.status_code
    error = answer.json()["error"]
    assert ("response_format", "missing_extra") == (error["param"], error["code"])
    assert 'pip install "tessera-gpu[grammar]"' in error["message"]


def test_calls_that_a_model_writes_itself_are_found() -> None:
    """With tool_choice auto, an answer that is a call in one of the common formats is told as one."""
    service = Scripted()
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    service.script, tools = said, [{"type": "function", "function": {"name": "add"}}]
    with (
        running(service) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "x"}]
        options: dict[str, Any] = {"model": "scripted", "messages": messages, "tools": tools}
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(**options, stream=True))
        plain = client.chat.completions.create(**options, tool_choice="none").choices[0]

    (call,) = whole.message.tool_calls
    assert ("add", '{"a": 1}') == (call.function.name, call.function.arguments)
    assert ("tool_calls", None) == (whole.finish_reason, whole.message.content)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.content for delta in deltas)
    assert '{"a": 1}' == "".join(
        part.function.arguments for delta in deltas for part in delta.tool_calls or () if not part.id
    )
    assert (said, "stop", None) == (plain.message.content, plain.finish_reason, plain.message.tool_calls)


def test_tokens_and_text_are_converted(server: Running) -> None:
    """As vLLM's routes do: a prompt or a conversation to tokens, and tokens to text."""
    found = httpx.post(f"{server.url}/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    bare = httpx.post(f"{server.url}/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    messages = [{"role": "user", "content": "hi"}]
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": [104, 105]}).json()
    wrong = httpx.post(f"{server.url}/detokenize", json={"tokens": [258]})

    assert found["tokens"] == [256, 104, 105]
    assert (found["count"], found["max_model_len"], found["token_strs"]) == (3, 2048, ["", "h", "i"])
    assert ([104, 105], None) == (bare["tokens"], bare["token_strs"])
    assert chat["tokens"] == ByteText().chat(messages)
    assert text == {"prompt": "hi"}
    assert (400, "tokens") == (wrong.status_code, wrong.json()["error"]["param"])
