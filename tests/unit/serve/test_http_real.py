"""HTTP over the real service: tiny-llama, on one device, behind a socket, and what schemathesis thinks of."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("transformers", reason="needs the extra 'hf'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from http_factory import Running, serving, wait_until  # noqa: E402
from own_code import reference  # noqa: E402
from sampling import examples  # noqa: E402
from serving_factory import policies_of  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.read import Endpoint, ModelCard  # noqa: E402
from tessera.serve.records import ServeSpec  # noqa: E402
from tessera.serve.service import Service  # noqa: E402
from tessera.serve.steps import served  # noqa: E402
from tessera.serve.text import ByteText  # noqa: E402

MODEL = "tiny-llama"
ROWS, CAPACITY = 8, 128


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    model = served(MODEL, ServeSpec(microbatches=2, rows=ROWS, capacity=CAPACITY, max_batch_tokens=32))
    with (
        reference(model, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText(), model=MODEL) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Running]:
    endpoint = Endpoint(
        ModelCard(MODEL, service.text, CAPACITY, service.shape.vocab_size), service, 1_700_000_000
    )
    with serving(endpoint, Metrics(MODEL, service.snapshot)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def answer(client: Any, word: str, **options: Any) -> Any:
    """A greedy answer of full length, unless the options say otherwise."""
    given = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": word}], **given)


def test_stream_says_the_same_as_the_whole(client: Any) -> None:
    """The pieces of a stream are the text of the whole answer, in whole characters."""
    whole = answer(client, "hello").choices[0].message.content
    chunks = list(answer(client, "hello", stream=True, stream_options={"include_usage": True}))

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_crowd_gets_the_answers_of_one_alone(client: Any) -> None:
    """Thirty requests at once, more than there are rows, each get the tokens they get alone."""

    def tokens(number: int) -> list[list[int]]:
        options = {"logprobs": True, "max_tokens": 6, "temperature": 1, "seed": number}
        found = answer(client, f"word {number}", **options).choices[0].logprobs.content
        return [token.bytes for token in found]

    alone = [tokens(number) for number in range(6)]
    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(tokens, list(range(6)) * 5))

    assert found == alone * 5
    assert len({str(x) for x in alone}) == 6


def test_far_more_clients_than_places_are_answered(server: Running, client: Any) -> None:
    """Nobody is refused, and the state tells how many places are in use."""
    num = examples(200, 4 * 2 * ROWS)
    with httpx.Client(base_url=server.url) as http, ThreadPoolExecutor(num) as pool:
        answers = [pool.submit(answer, client, f"word {number}", max_tokens=4) for number in range(num)]
        wait_until(lambda: http.get("/v1/state").json()["groups"][0]["places"] > 0)
        (group,) = http.get("/v1/state").json()["groups"]
        lengths = {done.result().usage.completion_tokens for done in answers}

    assert {4} == lengths
    assert 2 * ROWS == group["max_sequences"]
    assert 0 <= group["places"] <= 2 * ROWS


def test_seeded_answers_repeat_and_choices_differ(client: Any) -> None:
    """The same seed gives the same choices, which are not the same as one another."""
    first, second = (
        [c.message.content for c in answer(client, "dice", temperature=1, seed=5, n=3).choices]
        for _ in range(2)
    )

    assert first == second
    assert len(set(first)) == 3


def test_stop_string_ends_the_answer(client: Any) -> None:
    """The answer ends before the stop string, and says so."""
    whole = answer(client, "stop here").choices[0].message.content
    stop = whole[4:6]
    found = answer(client, "stop here", stop=[stop]).choices[0]

    assert found.message.content == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


def test_logprobs_are_those_of_the_likeliest(client: Any) -> None:
    """A greedy answer's tokens are the first of their alternatives, with the same logprob."""
    found = answer(client, "odds", logprobs=True, top_logprobs=3).choices[0].logprobs.content

    assert len(found) == 12
    for token in found:
        likely = [x.logprob for x in token.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert token.logprob == pytest.approx(likely[0], abs=1e-4)


@pytest.fixture(scope="module")
def model() -> Any:
    """The very model that is served, as transformers has it."""
    return (
        served(MODEL, ServeSpec(microbatches=2, rows=ROWS, capacity=CAPACITY, max_batch_tokens=32))
        .workloads[-1]
        .module
    )


def expected_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logarithms of probability [tokens - 1, vocabulary] of what follows each token."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1)


def test_a_prompts_logprobs_are_the_models_own(client: Any, model: Any) -> None:
    """Every token after the first, with the likeliest ones, once for all choices; in vLLM's form."""
    tokens = [256, *b"hello world, hello"]
    options = {"prompt_logprobs": 2, "ignore_eos": True}
    found = client.completions.create(model=MODEL, prompt=tokens, max_tokens=3, n=2, extra_body=options)
    logs = expected_logprobs(model, tokens)

    for choice in found.choices:
        first, *rest = choice.prompt_logprobs
        assert first is None
        assert len(rest) == len(tokens) - 1
        for token, noted, own in zip(tokens[1:], rest, logs, strict=True):
            assert noted[str(token)]["logprob"] == pytest.approx(float(own[token]), abs=1e-3)
            assert noted[str(token)]["decoded_token"] == chr(token)
            assert [noted[str(number)]["rank"] for number in own.topk(2).indices.tolist()] == [1, 2]


def test_a_chats_prompt_has_logprobs_too(client: Any) -> None:
    """Beside its choices, one for every token of the prompt."""
    found = answer(client, "hi", max_tokens=2, extra_body={"prompt_logprobs": 0})

    assert len(found.prompt_logprobs) == found.usage.prompt_tokens
    assert found.prompt_logprobs[0] is None
    assert all(len(noted) == 1 for noted in found.prompt_logprobs[1:])


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_has_the_logprobs_of_the_prompt(client: Any, model: Any, max_tokens: int) -> None:
    """As evaluations of answers that are given want it: prompt and answer in one, or the prompt alone."""
    said = "the quick brown fox"
    options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    found = client.completions.create(model=MODEL, prompt=said, extra_body={"ignore_eos": True}, **options)
    logprobs = found.choices[0].logprobs
    tokens = [256, *said.encode()]
    logs = expected_logprobs(model, tokens)

    assert found.choices[0].text.startswith(said)
    assert found.usage.completion_tokens == max_tokens
    assert len(logprobs.tokens) == len(tokens) + max_tokens
    assert "".join(logprobs.tokens) == found.choices[0].text
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    own = [float(row[token]) for row, token in zip(logs, tokens[1:], strict=True)]
    assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(own, abs=1e-3)


def test_client_that_goes_frees_its_row(client: Any, service: Service) -> None:
    """A stream that is closed by the client leaves no request running."""
    for chunk in (stream := answer(client, "bye", stream=True, max_tokens=80)):
        assert chunk.choices
        break
    stream.close()

    wait_until(lambda: service.snapshot().running == 0)


def test_metrics_count_what_was_answered(client: Any, server: Running) -> None:
    """Tokens of the counters grow by what the answers' usage says."""

    def counted() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        found = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name: s.value for s in found if s.name.endswith("_tokens_total")}

    before = counted()
    usage = answer(client, "count me").usage
    after = counted()

    grown = {name: after[name] - before[name] for name in after}
    assert grown["tessera:generation_tokens_total"] == usage.completion_tokens
    assert grown["tessera:prompt_tokens_total"] == usage.prompt_tokens


QUICK = settings(
    max_examples=examples(10, 2),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def short(body: Any) -> Any:
    """A body that asks for few tokens where it asks for many, so that the test is quick."""
    if not isinstance(body, dict):
        return body
    most = {"n": 2, "max_tokens": 3, "max_completion_tokens": 3}
    numbers = {k: min(v, most[k]) for k, v in body.items() if k in most and isinstance(v, int)}
    return {"max_tokens": 3} | body | numbers


def test_openapi_requests_never_break_the_server(server: Running) -> None:
    """Whatever follows the OpenAPI page, or breaks it: no 5xx, and every error in OpenAI's shape."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: set[int] = set()

    def check(case: Any) -> None:
        case.body = short(case.body)
        found = case.call(timeout=30)
        statuses.add(found.status_code)
        assert found.status_code < 500, found.text
        if found.status_code >= 400:
            assert json.loads(found.text)["error"].keys() == {"message", "type", "param", "code"}

    for operation in (found.ok() for found in schema.get_all_operations()):
        # Without anything to send there is nothing to send wrongly.
        modes = (
            list(schemathesis.GenerationMode)
            if list(operation.body)
            else [schemathesis.GenerationMode.POSITIVE]
        )
        for mode in modes:
            drawn: Any = given(operation.as_strategy(generation_mode=mode))
            QUICK(drawn(check))()
    assert {200, 400, 404} <= statuses
