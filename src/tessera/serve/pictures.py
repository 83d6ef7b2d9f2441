"""Pictures in chats: from what a client sends to what a vision-language model reads.

A picture comes as a data URL. Nothing is fetched: a server that opened addresses for its clients would reach
what they cannot. It is decoded within limits, resized to the one grid that the model was captured for (its
proportions are not kept), and cut into patches as Qwen2-VL's own processor does.

In a turn's text a mark stands for a picture. The mark's tokens are replaced by as many as the picture has; a
client cannot write the mark.
"""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tessera.capture.models.vision import PICTURE_TOKENS
from tessera.errors import AskError, MissingExtra
from tessera.serve.records import PromptPicture
from tessera.serve.sight import GRID

if TYPE_CHECKING:
    from tessera.serve.steps import ServedModel

# A character of no language.
MARK = "\U0010fff1"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Decoded, a picture takes three bytes a pixel.
MAX_PIXELS = 32 << 20
# What the model's training subtracted from each colour, and divided by.
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Eyes:
    """How one model looks at pictures."""

    # Pixels of a patch's side, patches of a token's side, and frames that a still picture is repeated for.
    patch: int
    merge: int
    frames: int
    dtype: torch.dtype
    mark: str = MARK

    @classmethod
    def of(cls, model: "ServedModel") -> "Eyes":
        """The eyes of a served model that has them."""
        _pillow()  # now, and not with the first picture
        encode = model.encode
        assert encode is not None, "only a model that sees has eyes"
        module: Any = encode.module
        config = module.config.vision_config
        return cls(config.patch_size, config.spatial_merge_size, config.temporal_patch_size, module.dtype)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels that every picture is resized to."""
        return GRID[0] * self.merge * self.patch, GRID[1] * self.merge * self.patch

    def look(self, url: str) -> torch.Tensor:
        """The patches of a picture; AskError if it is none."""
        image = _decoded(url).resize(self.size[::-1], resample=3)  # 3: bicubic
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        values = pixels.reshape(*self.size, 3).permute(2, 0, 1).to(torch.float32) / 255.0
        return self.patches(values).to(self.dtype)

    def patches(self, values: torch.Tensor) -> torch.Tensor:
        """Patches of a picture [3, height, width] with values from 0 to 1; those of one token together."""
        scaled = (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
        rows, columns = GRID
        cut = scaled.reshape(3, rows, self.merge, self.patch, columns, self.merge, self.patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        cut = cut.expand(-1, -1, -1, -1, -1, self.frames, -1, -1)
        return cut.reshape(rows * columns * self.merge**2, -1)

    def placed(
        self, prompt: Sequence[int], patches: Sequence[torch.Tensor]
    ) -> tuple[list[int], tuple[PromptPicture, ...]]:
        """The prompt with the pictures' tokens in place of their marks, one after the other."""
        mark = list(MARK.encode())  # tokens are bytes: only built-in models are served with eyes
        whole, pictures, rest = list[int](), list[PromptPicture](), list(prompt)
        for picture in patches:
            places = range(len(rest) - len(mark) + 1)
            start = next((i for i in places if rest[i : i + len(mark)] == mark), None)
            if start is None:
                raise AskError("a picture has no place in this conversation", place="messages")
            whole += rest[:start]
            pictures.append(PromptPicture(len(whole), picture))
            whole += [0] * PICTURE_TOKENS
            rest = rest[start + len(mark) :]
        return whole + rest, tuple(pictures)


def _decoded(url: str) -> Any:
    """A picture in three colours; limits are checked before its pixels are made."""
    library = _pillow()
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        remedy = 'Send it as "data:image/png;base64,...": this server fetches nothing.'
        raise AskError("a picture comes as a data URL", remedy, "messages")
    try:
        image = library.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            message = f"a picture of {image.width} x {image.height} pixels is too large"
            raise AskError(message, f"Send at most {MAX_PIXELS >> 20} million.", "messages")
        return image.convert("RGB")
    except library.UnidentifiedImageError:
        raise AskError("the picture is none", f"Use {', '.join(FORMATS)}.", "messages") from None
    except (binascii.Error, OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise AskError(
            f"the picture cannot be read: {said}", f"Use {', '.join(FORMATS)}.", "messages"
        ) from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "serve") from error
    return Image
