"""Folders of small vision-language models with their processors, and what transformers answers with them."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from own_code import reference
from paged_mixer import plain_model
from serving_factory import policies_of
from tessera.serve.records import Ask, Finish
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel
from tessera.serve.text import ByteText
from text_factory import make_text_folder

SIDE, PICTURE = 32, "<|user|>"
BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# Weights so large that every token and pixel matters.
TEXT = {**BLOCKS, "vocab_size": 320, "max_position_embeddings": 512, "head_dim": 8, "initializer_range": 0.3}
EYES = {**BLOCKS, "image_size": SIDE, "patch_size": 8, "initializer_range": 0.3}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}" + PICTURE + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@contextmanager
def running(made: ServedModel) -> Iterator[Service]:
    """A service that runs one step after the other."""
    with (
        reference(made, num_threads=1) as stepper,
        Service(
            stepper,
            policies_of(stepper, made.shape),
            made.shape,
            ByteText(),
            picture_inputs=made.picture_inputs,
        ) as service,
    ):
        yield service


def make_seeing_folder(name: str, path: Path) -> str:
    """A configuration, a tokenizer and a processor."""
    make_text_folder(path, TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(path, pad_token="<|end|>")
    config, processor = MAKERS[name](tokenizer, tokenizer.convert_tokens_to_ids(PICTURE))
    config.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def _llava(tokenizer: Any, word: int) -> tuple[Any, Any]:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    side = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side)
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    eyes = {"model_type": "clip_vision_model", **EYES, "projection_dim": 16, "initializer_factor": 6.0}
    parts = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": eyes}
    config = AutoConfig.for_model("llava", **parts, image_token_id=word, image_seq_length=16)
    return config, LlavaProcessor(images, tokenizer, image_token=PICTURE, **options)


def _aya_vision(tokenizer: Any, word: int) -> tuple[Any, Any]:
    """Its processor cuts a large picture into tiles, and writes tokens around each."""
    from transformers import AyaVisionProcessor, GotOcr2ImageProcessorPil

    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, crop_to_patches=True)
    words = {"start_of_img_token": "<", "end_of_img_token": ">", "image_token": PICTURE}
    words |= {"tile_token": "T", "tile_global_token": "G", "img_patch_token": PICTURE}
    eyes = {"model_type": "siglip_vision_model", **EYES, "vision_use_head": False}
    parts = {"text_config": {"model_type": "cohere2", **TEXT}, "vision_config": eyes}
    config = AutoConfig.for_model("aya_vision", **parts, image_token_id=word, downsample_factor=2)
    return config, AyaVisionProcessor(images, tokenizer, 8, SIDE, downsample_factor=2, **words)


def _gemma3(tokenizer: Any, word: int) -> tuple[Any, Any]:
    """Tokens of a picture attend to all others of it."""
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    named = {"image_token": PICTURE, "boi_token": "<|begin|>", "eoi_token": "<|end|>"}
    tokenizer._set_model_specific_special_tokens(named)
    parts = {"text_config": TEXT, "vision_config": {"model_type": "siglip_vision_model", **EYES}}
    config = AutoConfig.for_model("gemma3", **parts, image_token_id=word, mm_tokens_per_image=4)
    return config, Gemma3Processor(images, tokenizer, image_seq_length=4)


MAKERS = {"llava": _llava, "aya_vision": _aya_vision, "gemma3": _gemma3}


def random_picture(seed: int, side: int = SIDE) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def generated(module: Any, ask: Ask) -> list[int]:
    """What transformers' `generate` answers: the ask's prompt has the tokens of the processor."""
    ids = torch.tensor([ask.prompt])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if ask.pictures:
        given["pixel_values"] = torch.cat([picture.pixels for picture in ask.pictures])
    options = GenerationConfig(max_new_tokens=ask.max_tokens, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        answer = plain_model(module).generate(**given, generation_config=options)
    return [int(token) for token in answer[0, len(ask.prompt) :]]


async def tokens_of(service: Service, ask: Ask) -> list[int]:
    """The answer's tokens."""
    found: list[int] = []
    async for event in service.answer(ask):
        if isinstance(event, Finish):
            assert event.reason == "length"
        else:
            found += [token.number for token in event.tokens]
    return found


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """A picture as clients send it."""
    raw = io.BytesIO()
    image.save(raw, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(raw.getvalue()).decode()}"
