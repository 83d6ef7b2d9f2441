"""Pictures in prompts of any vision-language model whose picture is one tensor of a fixed size.

`form_of` asks the folder's processor what a picture becomes: its pixels, further arguments of
`get_image_features` (sizes, grids, masks) and the tokens that stand for it in a prompt. Where these follow a
picture's size, all become one square first. An encode step returns what `get_image_features` returns, which a
served step has in place of the tokens.

Served only if the model's own forward, with pixels, has the logits of a text with these embeddings. Attention
in both directions, or features for several layers, give others: such models read text only.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tessera.capture.models import checkpoint, generic
from tessera.capture.models.examples import ANY_SIZE, PICTURE_WORDS, PIXELS, setting
from tessera.capture.models.vision import Places, own_processor, rotary
from tessera.capture.reads import traced
from tessera.capture.workload import Tensors, Workload
from tessera.errors import AskError, CaptureError, extra_module
from tessera.ir import Step

PILLOW = ("PIL.Image", "serve", "pillow")
BICUBIC = 3
# Largest side where a processor keeps a picture's size.
MAX_SIDE = 448
FILES = ("preprocessor_config.json", "processor_config.json")
# Relative to the largest logit.
MAX_ERROR = 3e-4
# What a processor makes of the text: 1 for a picture's tokens.
TYPES = ("token_type_ids", "mm_token_type_ids")
UNLIKE = "attention in both directions, or features for several layers"


@dataclass(frozen=True, eq=False)
class PictureForm:
    """What the folder's processor makes of a picture, in a text or alone."""

    processor: Any
    text: str = ""
    # Side of the square that every picture becomes first; 0: the processor makes one size of all.
    side: int = 0
    example: Mapping[str, Any] = field(default_factory=dict)
    # Tokens of a prompt, before and after the processor; which of the latter are `word`, for an embedding.
    word: int = 0
    mark: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    is_image: torch.Tensor = field(default_factory=torch.Tensor)
    # None: positions are plain.
    places: Places | None = None
    # A tokenizer may not be used twice at once.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def made_of(self, image: Any) -> dict[str, Any]:
        image = image.resize((self.side, self.side), resample=BICUBIC) if self.side else image
        text = {"text": [self.text]} if self.text else {}
        with self.lock:
            made = dict(self.processor(images=[image], return_tensors="pt", **text))
        made.pop("labels", None)
        return made

    def pixels_of(self, image: Any) -> torch.Tensor:
        made = self.made_of(image)
        if _described({**self.example, **made}) != _described(self.example):
            raise AskError("the model's processor makes another size of a picture", place="messages")
        pixels: torch.Tensor = made[PIXELS].to(self.example[PIXELS].dtype)
        return pixels

    def arguments(self, part: Callable[..., Any], *without: str) -> dict[str, Any]:
        return {n: x for n, x in self.example.items() if n not in without and generic.takes(part, n)}


_FORMS: "WeakKeyDictionary[torch.nn.Module, PictureForm]" = WeakKeyDictionary()


def form_of(model: Any, folder: str) -> PictureForm:
    """`CaptureError` says why a model takes no pictures."""
    if model not in _FORMS:
        blamed = checkpoint.blamed(folder, "its pictures cannot be read")
        with blamed, torch.no_grad(), generic.attributes_kept(model):
            _FORMS[model] = _find_form(model, Path(folder))
    return _FORMS[model]


def encode_workload(model: Any, step: Step) -> Workload:
    form = form_of(model, step.model)

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        with traced(), generic.attributes_kept(model):
            return {"image": _embeddings(model, form, inputs[PIXELS])[None]}

    def make(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        return {PIXELS: torch.randn(form.example[PIXELS].shape, generator=random).to(model.dtype)}

    return Workload(step, model, call, make, lambda seed: {}, lambda first, run, last: dict(first))


def _embeddings(model: Any, form: PictureForm, pixels: torch.Tensor) -> torch.Tensor:
    get = model.get_image_features
    return generic.embeddings(model, get(pixels, **form.arguments(get, PIXELS, "attention_mask")))


def _find_form(model: Any, folder: Path) -> PictureForm:
    from tessera.capture.models.paged import FLAT, layout_of

    word = setting(model.config, PICTURE_WORDS)
    if word is None or not hasattr(model, "get_image_features"):
        raise CaptureError("it has no get_image_features, or no token for a picture")
    if layout_of(model).kind != FLAT:
        raise CaptureError("its steps do not have all tokens in one row")
    extra_module(*PILLOW)
    return _in_prompt(model, _of_one_size(model.config, _opened(model, folder, word)))


def _opened(model: Any, folder: Path, word: int) -> PictureForm:
    library, own = extra_module("transformers", "hf"), own_processor(model.config)
    if any((folder / name).is_file() for name in FILES):
        # Where positions follow a grid, tokens around a picture are the template's.
        has_grid = generic.rope_index_of(model) is not None
        kind = library.AutoImageProcessor if has_grid else library.AutoProcessor
        own = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if own is None:
        raise CaptureError(f"the folder has no {FILES[0]}")
    if not hasattr(own, "image_processor"):
        return PictureForm(own, word=word, mark=(word,))
    image = getattr(own, "image_token", None) or own.tokenizer.convert_ids_to_tokens(word)
    mark = tuple(own.tokenizer(image, add_special_tokens=False)["input_ids"])
    return PictureForm(own, f"a{image}a", word=word, mark=mark)


def _of_one_size(config: Any, form: PictureForm) -> PictureForm:
    noise = np.random.default_rng(0).integers(0, 256, (96, 240, 3), dtype=np.uint8)
    images = [extra_module(*PILLOW).fromarray(noise[:, :width]) for width in (96, 240)]
    size = setting(config, ("image_size",), ANY_SIZE)
    square = replace(form, side=min(MAX_SIDE, size if isinstance(size, int) else size[0]))
    first, second = (_described(form.made_of(image)) for image in images)
    form = form if first == second else square
    return replace(form, example=form.made_of(images[0]))


def _described(made: Mapping[str, Any]) -> str:
    shown = {n: x.tolist() if isinstance(x, torch.Tensor) else x for n, x in made.items() if n != PIXELS}
    return repr((shown, getattr(made[PIXELS], "shape", None)))


def _in_prompt(model: Any, form: PictureForm) -> PictureForm:
    """The form with the tokens, places and embeddings of a picture between two other tokens."""
    example, word, mark = {**form.example}, form.word, [*form.mark]
    example[PIXELS] = example[PIXELS].to(model.dtype)
    num, before = len(_embeddings(model, form, example[PIXELS])), [1, word, 1]
    if form.text:
        before = form.processor.tokenizer(form.text)["input_ids"]
    else:
        example["input_ids"] = torch.tensor([[1, *[word] * num, 1]])
        example |= dict.fromkeys(TYPES, (example["input_ids"] == word).long())
    ids, first = example["input_ids"][0].tolist(), before.index(mark[0])
    end = len(ids) - len(before) + first + len(mark)
    if ids.count(word) != num or [*ids[:first], *mark, *ids[end:]] != before or end == len(ids):
        raise CaptureError("its processor gives a picture no tokens of its own")
    is_known = word < model.get_input_embeddings().num_embeddings
    tokens = tuple(token if is_known or token != word else 0 for token in ids[first:end])
    form = replace(form, example=example, tokens=tokens, is_image=example["input_ids"][0, first:end] == word)
    if (find := generic.rope_index_of(model)) is not None:
        places = find(**form.arguments(find))[0][:, 0]
        form = replace(form, places=((places[:, first:end] - first).numpy(), int(places[0, end]) - end))
    _check(model, form, first)
    return form


def _check(model: Any, form: PictureForm, first: int) -> None:
    """Raises unless pixels and embeddings give equal logits."""
    own, is_image = form.arguments(model), form.example["input_ids"][0] == form.word
    words = model.get_input_embeddings()(own["input_ids"].masked_fill(is_image, 0))
    words[0, is_image] = _embeddings(model, form, own[PIXELS])
    same = {name: own[name] for name in own.keys() & {"attention_mask"}}
    if form.places is not None:
        positions = rotary(np.arange(len(is_image)), [first], form.places)
        same["position_ids"] = torch.from_numpy(positions)[:, None]
    plain, found = model(**own).logits, model(inputs_embeds=words, **same).logits
    if not (found - plain).abs().max() <= MAX_ERROR * plain.abs().max():
        raise CaptureError("with a picture its forward is not that of a text: " + UNLIKE)
