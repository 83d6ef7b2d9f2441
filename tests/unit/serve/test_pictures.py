"""Pictures in chats: what is taken in, what is refused, and where it lands in the prompt."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("fastapi")

from PIL import Image
from transformers import AutoConfig

import http_factory
from http_factory import Scripted
from seeing import data_url
from tessera.capture.models import catalog
from tessera.errors import AskError
from tessera.serve.metrics import Metrics
from tessera.serve.openai.read import Endpoint, ModelCard
from tessera.serve.pictures import PictureReader
from tessera.serve.records import ServeSpec
from tessera.serve.steps import served
from tessera.serve.text import MARK, ByteText, FolderText
from text_factory import make_text_folder

SPEC = ServeSpec(microbatches=1, rows=2, capacity=240, max_batch_tokens=24, random_weights=True)
PICTURE_TOKENS = 64


@pytest.fixture(scope="module")
def reader() -> PictureReader:
    """The built-in model that sees has it."""
    found = served("tiny-qwen2.5-vl", SPEC).picture_reader
    assert found is not None
    return found


def noise(width: int = 64, height: int = 64) -> Image.Image:
    """A picture of nothing."""
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_patches_are_those_of_the_models_own_processor(reader: PictureReader) -> None:
    """Values, order and normalisation are bit-equal to Qwen2-VL's processor in transformers."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    own = module.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, do_resize=False)

    expected = own(images=[noise()], return_tensors="pt")["pixel_values"]

    assert torch.equal(expected, reader.pixels_of(data_url(noise())))


def test_every_picture_is_resized_to_the_grid(reader: PictureReader) -> None:
    """Other sizes and colours give the same number of patches."""
    for image in (noise(7, 300), noise(640, 64).convert("L"), noise().convert("RGBA")):
        assert (4 * PICTURE_TOKENS, 96) == tuple(reader.pixels_of(data_url(image)).shape)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "fetches nothing"),
        ("file:///etc/passwd", "fetches nothing"),
        ("data:text/html;base64,AAAA", "fetches nothing"),
        ("data:image/png;base64,AAAA", "is not a picture"),
        ("data:image/png;base64,$$$", "cannot be read"),
        (data_url(noise())[:-40], "cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused(reader: PictureReader, url: str, message: str) -> None:
    """Addresses are not opened, and broken data is one line."""
    with pytest.raises(AskError, match=message):
        reader.pixels_of(url)


def test_a_huge_picture_is_refused_before_it_is_decoded(reader: PictureReader) -> None:
    """A small file that unpacks to gigabytes costs nothing."""
    bomb = data_url(Image.new("1", (8_000, 8_000)))

    with pytest.raises(AskError, match="8000 x 8000 pixels is too large"):
        reader.pixels_of(bomb)


def test_a_mark_becomes_the_pictures_tokens(reader: PictureReader) -> None:
    """Text before and after stays as it was."""
    prompt = ByteText().encode(f"see {MARK} there")

    whole, (picture,) = reader.placed(prompt, [torch.zeros(1)])

    assert whole[: picture.start] == ByteText().encode("see ")
    assert whole[picture.start + PICTURE_TOKENS :] == list(b" there")


def test_each_picture_is_in_its_place(reader: PictureReader) -> None:
    """The first mark is the first picture's, the second the second's."""
    first, second = torch.zeros(1), torch.ones(1)

    whole, pictures = reader.placed(ByteText().encode(f"{MARK} and {MARK}"), [first, second])

    assert [first, second] == [picture.pixels for picture in pictures]
    assert 1 + PICTURE_TOKENS + len(" and ") == pictures[1].start
    assert 1 + 2 * PICTURE_TOKENS + len(" and ") == len(whole)


SHOWING = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|user|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_a_folders_template_places_pictures(reader: PictureReader, tmp_path: Path) -> None:
    """By its own token, which clients cannot write."""
    make_text_folder(tmp_path, SHOWING)
    words = FolderText(tmp_path)
    token = words.chat([{"role": "user", "content": MARK}])[0]
    said = f"vow <|user|> {MARK} judge{MARK}"
    picture_reader = replace(reader, mark_tokens=(token,))

    whole, pictures = picture_reader.placed(
        words.chat([{"role": "user", "content": said}]), [torch.zeros(1)] * 2
    )

    first, second = (picture.start for picture in pictures)
    assert "vow <|user|> " == words.decode(whole[:first])
    assert " judge" == words.decode(whole[first + PICTURE_TOKENS : second])
    assert second + PICTURE_TOKENS == len(whole)


def test_a_folder_of_qwen_sees(tmp_path: Path) -> None:
    """Where its configuration says that pictures are."""
    family, sizes, _ = catalog.LANGUAGE["tiny-qwen2.5-vl"]
    config = AutoConfig.for_model(family, **{**sizes, "image_token_id": 7})
    config.save_pretrained(tmp_path)

    found = served(str(tmp_path), SPEC).picture_reader

    assert found is not None
    assert (7,) == found.mark_tokens


@pytest.fixture(scope="module")
def asked(reader: PictureReader) -> Iterator[tuple[Any, Scripted]]:
    """Asks a server whose model sees; the service remembers what it was asked."""
    service = Scripted()
    endpoint = Endpoint(ModelCard("scripted", ByteText(), 256, 258, MARK), service, 1, picture_reader=reader)
    with http_factory.serving(endpoint, Metrics("scripted", service.snapshot)) as server:

        def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            head = {"Content-Type": "application/json"}
            request = urllib.request.Request(server.url + path, json.dumps(body).encode(), head)
            try:
                with urllib.request.urlopen(request, timeout=10.0) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        yield ask, service


def chat(*parts: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3}


def shown(url: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": "text", "text": words}


def test_a_picture_in_a_chat_reaches_the_service(reader: PictureReader, asked: Any) -> None:
    """The ask has the patches, and its prompt their tokens right where the picture was shown."""
    ask, service = asked

    status, found = ask("/v1/chat/completions", chat(text("a "), shown(data_url(noise())), text(" b")))

    last = service.asks[-1]
    assert 200 == status
    (picture,) = last.pictures
    assert torch.equal(reader.pixels_of(data_url(noise())), picture.pixels)
    assert last.prompt[: picture.start] == (256, *b"user:\na ")
    assert last.prompt[picture.start + PICTURE_TOKENS :][:3] == (*b" b\n",)
    assert found["usage"]["prompt_tokens"] == len(last.prompt)


def test_a_chat_without_a_picture_has_none(asked: Any) -> None:
    """Text alone is text alone, also where it holds the mark."""
    ask, service = asked

    status, _ = ask("/v1/chat/completions", chat(text(f"a {MARK} b")))

    assert 200 == status
    assert not service.asks[-1].pictures
    assert bytes(service.asks[-1].prompt[1:14]) == "user:\na \ufffd b".encode()


@pytest.mark.parametrize(
    "parts",
    [
        [shown("https://example.com/cat.png")],
        [shown(data_url(noise(8, 8)))] * 17,
        [{"type": "image_url"}],
        [{"type": "image_url", "image_url": {"url": 3}}],
        [{"type": "input_audio", "input_audio": {}}],
    ],
)
def test_other_parts_are_a_400_in_openais_shape(asked: Any, parts: list[Any]) -> None:
    """The message says what is wrong; nothing reaches the service."""
    ask, service = asked
    before = len(service.asks)

    status, found = ask("/v1/chat/completions", chat(*parts))

    assert (400, "messages", before) == (status, found["error"]["param"], len(service.asks))


def test_generation_of_pictures_is_refused_with_the_reason(asked: Any) -> None:
    """It says what the model does instead."""
    ask, _ = asked

    status, found = ask("/v1/images/generations", {"prompt": "a cat"})

    assert 400 == status
    assert "generates text only" in found["error"]["message"]
