"""Embeddings: vectors of a folder's encoder, pooled as the folder says, over HTTP by OpenAI's own client."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")

from http_factory import Running, Scripted, running, serving, wait_until  # noqa: E402
from tessera.errors import ArtifactError  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.errors import ApiError  # noqa: E402
from tessera.serve.openai.read import (  # noqa: E402
    Endpoint,
    ModelCard,
    read_embedding,
)
from tessera.serve.single_device import Encoder, Pooling, SingleDeviceService, embeds  # noqa: E402
from tessera.serve.text import ByteText, open_text  # noqa: E402
from text_factory import make_text_folder  # noqa: E402

MODEL = "encoder"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
INPUTS = ["Sphinx", "of black quartz, judge my vow", "naïve façade"]


def make_encoder(path: Path, kind: str = "Bert", **changes: Any) -> Any:
    """A small encoder with random weights, saved with a tokenizer; and the model itself."""
    make_text_folder(path)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(path)
    return model


def say_pooling(path: Path, mode: str, *more: str) -> None:
    """The files by which sentence-transformers says what follows the encoder."""
    modules = ["", "1_Pooling", *(f"{2 + i}_{name}" for i, name in enumerate(more))]
    kinds = ["Transformer", "Pooling", *more]
    listed = [
        {"idx": i, "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (place, name) in enumerate(zip(modules, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, mode: True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def states_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The last hidden states of one input, computed alone."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return found


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "MPNet"])
def test_a_vector_is_the_mean_of_the_states_that_the_input_has_alone(tmp_path: Path, kind: str) -> None:
    """Whatever it is computed together with, and up to all positions that the model has."""
    model = make_encoder(tmp_path, kind)
    encoder = Encoder.open(str(tmp_path))
    inputs = [(5, 6, 7), tuple(range(3, 3 + encoder.max_tokens)), (9,)]
    found = encoder.encode(inputs)

    for vector, tokens in zip(found, inputs, strict=True):
        torch.testing.assert_close(states_of(model, tokens).mean(0), vector, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "more", "expected"),
    [
        ("pooling_mode_mean_tokens", (), lambda x: x.mean(0)),
        ("pooling_mode_cls_token", (), lambda x: x[0]),
        ("pooling_mode_lasttoken", (), lambda x: x[-1]),
        ("pooling_mode_max_tokens", (), lambda x: x.amax(0)),
        ("pooling_mode_cls_token", ("Normalize",), lambda x: x[0] / x[0].norm()),
    ],
)
def test_states_are_pooled_as_the_folder_says(
    tmp_path: Path, mode: str, more: tuple[str, ...], expected: Any
) -> None:
    """In the words of sentence-transformers."""
    model = make_encoder(tmp_path)
    say_pooling(tmp_path, mode, *more)
    found = Encoder.open(str(tmp_path)).encode([(5, 6, 7, 8), (5, 6)])

    for vector, tokens in zip(found, [(5, 6, 7, 8), (5, 6)], strict=True):
        torch.testing.assert_close(expected(states_of(model, tokens)), vector, atol=1e-5, rtol=1e-4)


def test_limits_and_prompts_of_the_folder_hold(tmp_path: Path) -> None:
    """The longest input, and what stands before every text."""
    make_encoder(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    found = Encoder.open(str(tmp_path))

    assert (16, "query: ") == (found.max_tokens, found.pooling.prompt)


@pytest.mark.parametrize("more", ["Dense", "../../Normalize"])
def test_modules_that_are_not_handled_are_refused(tmp_path: Path, more: str) -> None:
    """In one line, when the folder is opened."""
    (tmp_path / "config.json").write_text("{}")
    say_pooling(tmp_path, "pooling_mode_cls_token", more)

    with pytest.raises(ArtifactError, match=r"Dense is not supported|matching regex"):
        Pooling.of(tmp_path)


def test_two_poolings_at_once_are_refused(tmp_path: Path) -> None:
    """Their vectors would be joined."""
    (tmp_path / "config.json").write_text("{}")
    say_pooling(tmp_path, "pooling_mode_cls_token")
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(both))

    with pytest.raises(ArtifactError, match="cls and mean"):
        Pooling.of(tmp_path)


def test_only_encoders_embed(tmp_path: Path) -> None:
    """Models that generate, built-in ones, and models that read no text do not."""
    for name in ("bert", "gpt2", "vit"):
        (tmp_path / name).mkdir()
    make_encoder(tmp_path / "bert")
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    transformers.ViTConfig(architectures=["ViTModel"]).save_pretrained(tmp_path / "vit")

    found = [embeds(str(tmp_path / name)) for name in ("bert", "gpt2", "vit")]
    assert [True, False, False] == found
    assert not embeds("tiny-llama")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleDeviceService]:
    """One that can be cut to any size."""
    path = tmp_path_factory.mktemp("encoder")
    make_encoder(path, is_matryoshka=True)
    with SingleDeviceService(Encoder.open(str(path)), MODEL) as found:
        found.folder = path  # type: ignore[attr-defined]
        yield found


@pytest.fixture(scope="module")
def server(service: Any) -> Iterator[Running]:
    text = open_text(str(service.folder))
    sizes = (service.model.max_tokens, service.model.vocab_size)
    card = ModelCard(MODEL, text, *sizes, vector_sizes=service.model.pooling.sizes, makes="vectors")
    endpoint = Endpoint(card, service, 1_700_000_000)
    with serving(endpoint, Metrics(MODEL, service.snapshot)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_the_official_client_gets_vectors(client: Any, service: Any) -> None:
    """One text, several, or tokens, in their order, as numbers or in base64; tokens are counted."""
    text = open_text(str(service.folder))
    tokens = [text.encode(x) for x in INPUTS]
    expected = service.model.encode(tokens)
    several = client.embeddings.create(model=MODEL, input=INPUTS)
    listed = client.embeddings.create(model=MODEL, input=INPUTS, encoding_format="float")
    ids = client.embeddings.create(model=MODEL, input=tokens)
    single = client.embeddings.create(model=MODEL, input=INPUTS[1])

    for found in (several, listed, ids):
        assert [0, 1, 2] == [x.index for x in found.data]
        vectors = torch.tensor([x.embedding for x in found.data])
        torch.testing.assert_close(expected, vectors, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(expected[1], torch.tensor(single.data[0].embedding), atol=1e-5, rtol=1e-4)
    assert sum(map(len, tokens)) == several.usage.prompt_tokens == several.usage.total_tokens


def test_a_vector_that_may_be_cut_is_cut(client: Any) -> None:
    """To the first numbers, of length 1."""
    whole = torch.tensor(client.embeddings.create(model=MODEL, input="x").data[0].embedding)
    found = torch.tensor(client.embeddings.create(model=MODEL, input="x", dimensions=8).data[0].embedding)

    torch.testing.assert_close(whole[:8] / whole[:8].norm(), found)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [320]}, "input"),
        ({"input": "long " * 100}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_embedded_is_refused(server: Running, body: dict[str, Any], field: str) -> None:
    """400 with the field's name."""
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body)

    assert (400, field) == (answer.status_code, answer.json()["error"]["param"])


def test_an_encoder_says_nothing_and_others_embed_nothing(server: Running) -> None:
    """Each refuses the other's route, by the model's name."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    said = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    with running(Scripted()) as other:
        embedded = httpx.post(f"{other.url}/v1/embeddings", json={"input": "x"})

    assert (400, "unsupported_model") == (said.status_code, said.json()["error"]["code"])
    assert (400, "unsupported_model") == (embedded.status_code, embedded.json()["error"]["code"])


def test_sizes_that_a_model_was_not_made_for_are_refused(tmp_path: Path) -> None:
    """Unless its configuration lists them."""
    make_encoder(tmp_path, matryoshka_dimensions=[8, 16])
    sizes = Pooling.of(tmp_path).sizes

    def asked(size: int, known: tuple[int, ...]) -> int | None:
        raw = json.dumps({"input": "x", "dimensions": size}).encode()
        return read_embedding(raw, ModelCard(MODEL, ByteText(), 64, 320, vector_sizes=known)).size

    assert 8 == asked(8, sizes)
    for size, known in ((9, sizes), (8, ())):
        with pytest.raises(ApiError) as told:
            asked(size, known)
        assert "dimensions" == told.value.param


def test_many_clients_are_computed_together(service: Any) -> None:
    """Each gets its own vectors, those that it gets alone."""
    asks = [[(n, n + 1), (n,) * (1 + n % 40)] for n in range(3, 60)]

    async def all_of_them() -> list[list[torch.Tensor]]:
        return list(await asyncio.gather(*(service.compute(x) for x in asks)))

    for inputs, vectors in zip(asks, asyncio.run(all_of_them()), strict=True):
        for tokens, vector in zip(inputs, vectors, strict=True):
            torch.testing.assert_close(service.model.encode([tokens])[0], vector, atol=1e-5, rtol=1e-4)


def test_a_client_that_goes_is_not_computed(server: Running, service: Any) -> None:
    """What waits is left out; what comes afterwards is computed."""
    gate, slow = threading.Event(), service.model.encode

    def held(inputs: Sequence[Sequence[int]]) -> torch.Tensor:
        gate.wait(10)
        vectors: torch.Tensor = slow(inputs)
        return vectors

    service.model.encode = held
    before = service.snapshot().finished["cancelled"]
    raw = json.dumps({"input": ["x" * 20] * 1000}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
            wait_until(lambda: service.snapshot().waiting > 900)
        limiter = server.server.config.app.state.limiter  # type: ignore[union-attr]
        wait_until(lambda: limiter.inside == 0)
    finally:
        gate.set()
        service.model.encode = slow
    wait_until(lambda: service.snapshot().finished["cancelled"] - before > 900)
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x"})

    assert 200 == answer.status_code


def test_a_failure_counts_as_an_error(server: Running, service: SingleDeviceService) -> None:
    """Nobody cancelled it."""
    assert isinstance(service.model, Encoder)
    encode, before = service.model.encode, service.snapshot().finished

    def fail(inputs: Sequence[Sequence[int]]) -> torch.Tensor:
        raise MemoryError

    service.model.encode = fail  # type: ignore[method-assign]
    try:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x"})
    finally:
        service.model.encode = encode  # type: ignore[method-assign]

    assert 500 == answer.status_code
    wait_until(lambda: before | {"error": before["error"] + 1} == service.snapshot().finished)
