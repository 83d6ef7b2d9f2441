"""Pictures in prompts of a vision-language model: `PictureReader` decodes them, `PictureInputs` feeds steps.

An encode step runs before a picture's tokens are read; its embeddings replace theirs. Where tokens have
rotary positions (time, height, width), a picture has its own, and shifts those of the text after it.

Pictures are data URLs; nothing is fetched, because a server could reach what its clients cannot. The model's
processor makes their pixels. A mark, which clients cannot write, stands for a picture in a turn's text; a
folder's template makes it a token.
"""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessera.capture import Workload, known_models
from tessera.capture.models.pictures import PILLOW, PictureForm, form_of
from tessera.capture.models.vision import rotary
from tessera.errors import AskError, extra_module, first_line
from tessera.serve.records import PromptPicture
from tessera.serve.text import MARK

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A decoded picture takes three bytes per pixel.
MAX_PIXELS = 32 << 20


class SequencePictures:
    def __init__(self, pictures: Sequence[PromptPicture], form: PictureForm) -> None:
        self._pictures, self._form = pictures, form
        self.starts = [picture.start for picture in pictures]
        self.images: list[torch.Tensor | None] = [None] * len(pictures)

    def _next(self, read: int) -> int | None:
        for number, (start, image) in enumerate(zip(self.starts, self.images, strict=True)):
            if image is None and start + len(self._form.tokens) > read:
                return number
        return None

    def pixels_after(self, read: int) -> torch.Tensor | None:
        self._number = self._next(read)
        return None if self._number is None else self._pictures[self._number].pixels

    def take(self, image: torch.Tensor) -> None:
        assert self._number is not None, "pixels_after was called"
        is_image, embeddings = self._form.is_image, image.flatten(0, 1)
        spread = embeddings.new_zeros(len(is_image), embeddings.shape[1])
        spread[is_image] = embeddings
        self.images[self._number] = spread

    def bounded(self, read: int, count: int) -> int:
        number = self._next(read)
        return count if number is None else max(0, min(count, self.starts[number] - read))


@dataclass(frozen=True, eq=False)
class PictureInputs:
    form: PictureForm
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, encode: Workload, tokens: Workload) -> "PictureInputs":
        image = tokens.make_inputs(0)["image"]
        return cls(form_of(encode.module, encode.step.model), image.shape[-1], image.dtype)

    def inputs(
        self, planned: Sequence[tuple[SequencePictures, int, int]], size: int
    ) -> dict[str, torch.Tensor]:
        """`planned`: pictures, first token and number of tokens by sequence."""
        image = torch.zeros((size, self.width), dtype=self.dtype)
        is_image = torch.zeros(size, dtype=torch.bool)
        places, form = np.zeros((3, size), dtype=np.int64), self.form
        at = 0
        for pictures, read, count in planned:
            if form.places is not None:
                positions = np.arange(read, read + count)
                places[:, at : at + count] = rotary(positions, pictures.starts, form.places)
            for start, embeddings in zip(pictures.starts, pictures.images, strict=True):
                first, after = max(read, start), min(read + count, start + len(form.tokens))
                if first < after:
                    assert embeddings is not None, "only encoded pictures are read"
                    span = slice(at + first - read, at + after - read)
                    image[span] = embeddings[first - start : after - start]
                    is_image[span] = form.is_image[first - start : after - start]
            at += count
        return {"rotary": torch.from_numpy(places), "image": image, "is_image": is_image}


@dataclass(frozen=True)
class PictureReader:
    form: PictureForm
    # Tokens that stand for a picture in a prompt; a folder's template has a token of its own.
    mark_tokens: tuple[int, ...] = tuple(MARK.encode())

    @classmethod
    def of(cls, encode: Workload) -> "PictureReader":
        form = form_of(encode.module, encode.step.model)
        return cls(form) if encode.step.model in known_models() else cls(form, form.mark)

    def pixels_of(self, url: str) -> torch.Tensor:
        return self.form.pixels_of(_decoded(url))

    def placed(
        self, prompt: Sequence[int], pixels: Sequence[torch.Tensor]
    ) -> tuple[list[int], tuple[PromptPicture, ...]]:
        mark = list(self.mark_tokens)
        whole, pictures, rest = list[int](), list[PromptPicture](), list(prompt)
        for picture in pixels:
            places = range(len(rest) - len(mark) + 1)
            start = next((i for i in places if rest[i : i + len(mark)] == mark), None)
            if start is None:
                raise AskError("a picture has no place in this conversation", place="messages")
            whole += rest[:start]
            pictures.append(PromptPicture(len(whole), picture))
            whole += self.form.tokens
            rest = rest[start + len(mark) :]
        return whole + rest, tuple(pictures)


def _decoded(url: str) -> Any:
    """Limits are checked before decoding."""
    library = extra_module(*PILLOW)
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        remedy = 'Send it as "data:image/png;base64,...": this server fetches nothing.'
        raise AskError("a picture must be a data URL", remedy, "messages")
    try:
        image = library.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            message = f"a picture of {image.width} x {image.height} pixels is too large"
            raise AskError(message, f"Send at most {MAX_PIXELS >> 20} million.", "messages")
        return image.convert("RGB")
    except library.UnidentifiedImageError:
        raise AskError("the data is not a picture", f"Use {', '.join(FORMATS)}.", "messages") from None
    except (binascii.Error, OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        message = f"the picture cannot be read: {first_line(error)}"
        raise AskError(message, f"Use {', '.join(FORMATS)}.", "messages") from None
