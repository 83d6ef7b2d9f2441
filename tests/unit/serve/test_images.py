"""Pictures from words: a small pipeline of diffusers with all parts, over HTTP by OpenAI's client."""

import base64
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
diffusers = pytest.importorskip("diffusers", reason="needs the extra 'diffusers'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs openai")
image = pytest.importorskip("PIL.Image", reason="needs pillow")

from http_factory import Running, serving, wait_until  # noqa: E402
from tessera.cli.serve_options import ServeConfig  # noqa: E402
from tessera.cli.start import started  # noqa: E402
from tessera.errors import ArtifactError  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.openai.read import Endpoint, ModelCard  # noqa: E402
from tessera.serve.single_device import (  # noqa: E402
    SingleDeviceService,
    TextToImage,
    is_single_device,
    makes_images,
)
from tessera.serve.text import ByteText  # noqa: E402

MODEL = "small-diffusion"
# diffusers imports a model of transformers that is scripted.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def make_pipeline(path: Path) -> Any:
    """A latent diffusion pipeline with random weights, saved; and the pipeline itself."""
    torch.manual_seed(0)
    denoiser = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=2,
        attention_head_dim=2,
    )
    decoder = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2,
        sample_size=16,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    letters = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = {word: number for number, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    made = diffusers.StableDiffusionPipeline(
        vae=decoder,
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77),
        unet=denoiser,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(path)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / MODEL
    make_pipeline(path)
    return path


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[SingleDeviceService]:
    with SingleDeviceService(TextToImage.open(str(folder)), MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def server(service: SingleDeviceService) -> Iterator[Running]:
    endpoint = Endpoint(ModelCard(MODEL, ByteText(), 0, 0, makes="pictures"), service, 1_700_000_000)
    with serving(endpoint, Metrics(MODEL, service.snapshot)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def pictures(client: Any, **options: Any) -> list[Any]:
    """The pictures of a request, opened."""
    extra = {"num_inference_steps": 3} | options.pop("extra_body", {})
    found = client.images.generate(model=MODEL, prompt="a cat", extra_body=extra, **options)
    return [image.open(io.BytesIO(base64.b64decode(x.b64_json))) for x in found.data]


def test_a_picture_is_the_pipelines_own(client: Any, folder: Path) -> None:
    """The same seed gives the picture that diffusers makes of the same folder."""
    (found,) = pictures(client, size="32x16", extra_body={"seed": 7})
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 3, "width": 32, "height": 16}
    expected = pipeline("a cat", generator=torch.Generator().manual_seed(7), **options).images[0]

    assert ("PNG", (32, 16)) == (found.format, found.size)
    assert expected.tobytes() == found.tobytes()


def test_several_pictures_of_one_seed_differ_and_repeat(client: Any) -> None:
    """In any of three formats."""
    options: dict[str, Any] = {"n": 2, "size": "16x16", "extra_body": {"seed": 3}}
    first, second = pictures(client, **options)
    again = pictures(client, output_format="webp", **options)

    assert first.tobytes() != second.tobytes()
    assert [x.tobytes() for x in pictures(client, **options)] == [first.tobytes(), second.tobytes()]
    assert {"WEBP"} == {x.format for x in again}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "n": 11}, "n"),
        ({"prompt": "x", "size": "big"}, "size"),
        ({"prompt": "x", "size": "4096x4096"}, "size"),
        ({"prompt": "x", "size": "33x33"}, "prompt"),
        ({"prompt": "x", "response_format": "url"}, "response_format"),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "num_inference_steps": 0}, "num_inference_steps"),
    ],
)
def test_what_cannot_be_made_is_refused(server: Running, body: dict[str, Any], field: str) -> None:
    """400 with the field's name; what the pipeline itself refuses, with its words."""
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body)

    assert (400, field) == (answer.status_code, answer.json()["error"]["param"])


def test_a_pipeline_says_nothing(server: Running) -> None:
    """Its other routes are refused by the model's name."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        answer = httpx.post(f"{server.url}{path}", json=body)
        assert (400, "unsupported_model") == (answer.status_code, answer.json()["error"]["code"])


def test_a_client_that_goes_stops_its_picture(server: Running, service: SingleDeviceService) -> None:
    """At its next step, and those that wait begin."""
    before = service.snapshot().finished["cancelled"]
    raw = json.dumps({"prompt": "x", "n": 10, "size": "64x64", "num_inference_steps": 200}).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        wait_until(lambda: service.snapshot().running == 1)
    wait_until(lambda: service.snapshot().finished["cancelled"] == before + 1, 5)

    assert 0 == service.snapshot().running


def test_a_pipeline_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    """With the part's name."""
    listed = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"], "vae": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(listed))

    assert makes_images(str(tmp_path))
    with pytest.raises(ArtifactError, match="lacks its parts unet"):
        TextToImage.open(str(tmp_path))


def test_a_pipelines_folder_is_served(folder: Path) -> None:
    """From its folder to an application, on the CPU."""
    from tessera.profile import parse_devices, wire

    assert is_single_device(str(folder))
    with started(str(folder), wire(parse_devices("cpu"), []), ServeConfig()) as running:
        assert {"model": MODEL, "devices": ["cpu"]} == running.facts
        assert "single-device" == running.service.snapshot().policy
