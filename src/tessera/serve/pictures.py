"""Pictures in prompts of a vision-language model: `PictureReader` decodes them, `PictureInputs` feeds steps.

An encode step runs before a picture's tokens are read; its embeddings replace theirs. Tokens have rotary
positions (time, height, width): a picture spans its grid, and text continues after its longer side, so every
picture shifts the text after it by the same amount.

Pictures are data URLs; nothing is fetched, because a server could reach what its clients cannot. They are
resized to the captured grid (proportions are not kept), and cut into patches as Qwen2-VL's processor does. A
mark, which clients cannot write, stands for a picture in a turn's text; a folder's template makes it a token.
"""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tessera.capture import Workload, known_models
from tessera.capture.models.vision import PICTURE_TOKENS, grid_of, rotary
from tessera.errors import AskError, extra_module, first_line
from tessera.execute.stepper import Tensors
from tessera.serve.records import PromptPicture
from tessera.serve.text import MARK

GRID = grid_of(PICTURE_TOKENS)
PILLOW = ("PIL.Image", "serve", "pillow")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A decoded picture takes three bytes per pixel.
MAX_PIXELS = 32 << 20
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class SequencePictures:
    def __init__(self, pictures: Sequence[PromptPicture]) -> None:
        self._pictures = pictures
        self.starts = [picture.start for picture in pictures]
        self.images: list[torch.Tensor | None] = [None] * len(pictures)

    def _next(self, read: int) -> int | None:
        for number, (start, image) in enumerate(zip(self.starts, self.images, strict=True)):
            if image is None and start + PICTURE_TOKENS > read:
                return number
        return None

    def patches_after(self, read: int) -> torch.Tensor | None:
        self._number = self._next(read)
        return None if self._number is None else self._pictures[self._number].patches

    def take(self, image: torch.Tensor) -> None:
        assert self._number is not None, "patches_after was called"
        self.images[self._number] = image.reshape(PICTURE_TOKENS, -1)

    def bounded(self, read: int, count: int) -> int:
        number = self._next(read)
        return count if number is None else max(0, min(count, self.starts[number] - read))


@dataclass(frozen=True, eq=False)
class PictureInputs:
    # Inputs of encode besides the patches.
    fixed: Tensors
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, encode: Workload, tokens: Workload) -> "PictureInputs":
        fixed = encode.make_inputs(0)
        del fixed["patches"]
        image = tokens.make_inputs(0)["image"]
        return cls(fixed, image.shape[-1], image.dtype)

    def inputs(
        self, planned: Sequence[tuple[SequencePictures, int, int]], size: int
    ) -> dict[str, torch.Tensor]:
        """`planned`: pictures, first token and number of tokens by sequence."""
        image = torch.zeros((size, self.width), dtype=self.dtype)
        is_image = torch.zeros(size, dtype=torch.bool)
        places = np.zeros((3, size), dtype=np.int64)
        at = 0
        for pictures, read, count in planned:
            places[:, at : at + count] = rotary(np.arange(read, read + count), pictures.starts)
            for start, embedding in zip(pictures.starts, pictures.images, strict=True):
                first, after = max(read, start), min(read + count, start + PICTURE_TOKENS)
                if first < after:
                    assert embedding is not None, "only encoded pictures are read"
                    span = slice(at + first - read, at + after - read)
                    image[span] = embedding[first - start : after - start]
                    is_image[span] = True
            at += count
        return {"rotary": torch.from_numpy(places), "image": image, "is_image": is_image}


@dataclass(frozen=True)
class PictureReader:
    # Pixels per patch side, patches per token side, and frames per still picture.
    patch: int
    merge: int
    frames: int
    dtype: torch.dtype
    # Tokens that stand for a picture in a prompt; a folder's template has a token of its own.
    mark_tokens: tuple[int, ...] = tuple(MARK.encode())

    @classmethod
    def of(cls, encode: Workload) -> "PictureReader":
        extra_module(*PILLOW)  # fails now, not with the first picture
        module: Any = encode.module
        config = module.config.vision_config
        reader = cls(config.patch_size, config.spatial_merge_size, config.temporal_patch_size, module.dtype)
        is_built_in = encode.step.model in known_models()
        return reader if is_built_in else replace(reader, mark_tokens=(module.config.image_token_id,))

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return GRID[0] * self.merge * self.patch, GRID[1] * self.merge * self.patch

    def patches_of(self, url: str) -> torch.Tensor:
        image = _decoded(url).resize(self.size[::-1], resample=3)  # 3: bicubic
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        values = pixels.reshape(*self.size, 3).permute(2, 0, 1).to(torch.float32) / 255.0
        return self.patches(values).to(self.dtype)

    def patches(self, values: torch.Tensor) -> torch.Tensor:
        """Patches of a picture [3, height, width] in 0..1, grouped by token."""
        scaled = (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
        rows, columns = GRID
        cut = scaled.reshape(3, rows, self.merge, self.patch, columns, self.merge, self.patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        cut = cut.expand(-1, -1, -1, -1, -1, self.frames, -1, -1)
        return cut.reshape(rows * columns * self.merge**2, -1)

    def placed(
        self, prompt: Sequence[int], patches: Sequence[torch.Tensor]
    ) -> tuple[list[int], tuple[PromptPicture, ...]]:
        mark = list(self.mark_tokens)
        whole, pictures, rest = list[int](), list[PromptPicture](), list(prompt)
        for picture in patches:
            places = range(len(rest) - len(mark) + 1)
            start = next((i for i in places if rest[i : i + len(mark)] == mark), None)
            if start is None:
                raise AskError("a picture has no place in this conversation", place="messages")
            whole += rest[:start]
            pictures.append(PromptPicture(len(whole), picture))
            whole += mark[:1] * PICTURE_TOKENS
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
