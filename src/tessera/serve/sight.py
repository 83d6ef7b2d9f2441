"""Sight: pictures in prompts of a vision-language model.

A picture is encoded by a step of its own before its tokens are read; its embeddings stand in their place.
Every token has rotary positions (time, height, width): a picture spans its grid, and text goes on behind its
longer side. So text behind pictures is shifted by the same amount for each of them.

Pictures are resized to one grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tessera.capture.models.vision import PICTURE_TOKENS, grid_of
from tessera.execute.stepper import Tensors
from tessera.serve.records import PromptPicture

if TYPE_CHECKING:
    from tessera.serve.steps import ServedModel

GRID = grid_of(PICTURE_TOKENS)
# What text behind a picture is shifted by: its tokens count as many positions as its longer side.
SHIFT = max(GRID) - PICTURE_TOKENS


def rotary(positions: npt.NDArray[np.int64], starts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Time, height and width [3, ...] of tokens at these positions; pictures begin at `starts`."""
    found = np.stack([positions] * 3)
    for number, start in enumerate(starts):
        inside = positions - start
        grid = np.stack([np.zeros_like(inside), inside // GRID[1], inside % GRID[1]])
        is_seen = (inside >= 0) & (inside < PICTURE_TOKENS)
        found = np.where(is_seen, grid + start + number * SHIFT, found)
        found = np.where(inside >= PICTURE_TOKENS, positions + (number + 1) * SHIFT, found)
    return found


class SeenPictures:
    """The pictures of one sequence, and the embeddings of those that were encoded."""

    def __init__(self, pictures: Sequence[PromptPicture]) -> None:
        self._pictures = pictures
        self.starts = [picture.start for picture in pictures]
        self.images: list[torch.Tensor | None] = [None] * len(pictures)

    def _next(self, read: int) -> int | None:
        """The first picture that is not encoded and not read."""
        for number, (start, image) in enumerate(zip(self.starts, self.images, strict=True)):
            if image is None and start + PICTURE_TOKENS > read:
                return number
        return None

    def patches_after(self, read: int) -> torch.Tensor | None:
        """What has to be encoded next, when so many tokens were read."""
        self._number = self._next(read)
        return None if self._number is None else self._pictures[self._number].patches

    def take(self, image: torch.Tensor) -> None:
        """What was to be encoded next is."""
        assert self._number is not None, "somebody asked what is next"
        self.images[self._number] = image.reshape(PICTURE_TOKENS, -1)

    def bounded(self, read: int, count: int) -> int:
        """How many of these tokens can be read now."""
        number = self._next(read)
        return count if number is None else max(0, min(count, self.starts[number] - read))


@dataclass(frozen=True, eq=False)
class Sight:
    """What a model that sees needs besides pictures."""

    # Inputs of encode besides the patches.
    fixed: Tensors
    # Of an embedding.
    width: int
    dtype: torch.dtype

    def inputs(self, planned: Sequence[tuple[SeenPictures, int, int]], size: int) -> dict[str, torch.Tensor]:
        """Inputs of a step of this size: the tokens from one number on, and how many, of each sequence."""
        image = torch.zeros((size, self.width), dtype=self.dtype)
        is_image = torch.zeros(size, dtype=torch.bool)
        places = np.zeros((3, size), dtype=np.int64)
        at = 0
        for seen, read, count in planned:
            places[:, at : at + count] = rotary(np.arange(read, read + count), seen.starts)
            for start, made in zip(seen.starts, seen.images, strict=True):
                first, after = max(read, start), min(read + count, start + PICTURE_TOKENS)
                if first < after:
                    assert made is not None, "only what was encoded is read"
                    here = slice(at + first - read, at + after - read)
                    image[here] = made[first - start : after - start]
                    is_image[here] = True
            at += count
        return {"rotary": torch.from_numpy(places), "image": image, "is_image": is_image}


def sight_of(model: "ServedModel") -> Sight | None:
    """Of a model that sees; None for one that does not."""
    encode = model.encode
    if encode is None:
        return None
    fixed = encode.make_inputs(0)
    del fixed["patches"]
    image = model.workloads[-1].make_inputs(0)["image"]
    return Sight(fixed, image.shape[-1], image.dtype)
