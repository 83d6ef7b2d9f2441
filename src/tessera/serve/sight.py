"""Sight: pictures in prompts of a vision-language model, for the rows of one microbatch.

A prompt's picture is encoded before its first chunk, in the same microbatch; its embeddings are kept until
the next prompt begins there. Every chunk and decode is given its rotary positions (time, height, width): a
picture spans its grid, and text goes on behind its longer side. So a row's text is shifted by the same amount
for good; the shift of a prompt goes with it from the spare row to its row of the batch.

Pictures are resized to one grid; a prompt has at most one.
"""

from dataclasses import dataclass

import torch

from tessera.capture.models.seeing import PICTURE_TOKENS
from tessera.capture.models.vision import grid_of
from tessera.execute.stepper import Tensors
from tessera.serve.records import PromptPicture
from tessera.serve.steps import ServedModel

GRID = grid_of(PICTURE_TOKENS)
# What text behind a picture is shifted by: its tokens count as many positions as its longer side.
SHIFT = max(GRID) - PICTURE_TOKENS


def rotary(positions: torch.Tensor, start: int | None) -> torch.Tensor:
    """Time, height and width [3, ...] of tokens at these positions of a prompt with a picture at `start`."""
    if start is None:
        return positions.repeat(3, *(1 for _ in positions.shape))
    inside = (positions - start).clamp(0, PICTURE_TOKENS - 1)
    grid = torch.stack([torch.zeros_like(inside), inside // GRID[1], inside % GRID[1]]) + start
    text = torch.where(positions < start, positions, positions + SHIFT)
    is_seen = (positions >= start) & (positions < start + PICTURE_TOKENS)
    return torch.where(is_seen, grid, text)


def seen(positions: torch.Tensor, start: int | None) -> torch.Tensor:
    """Which of the picture's embeddings stands at each position; -1: none."""
    if start is None:
        return torch.full_like(positions, -1)
    index = positions - start
    return torch.where((index >= 0) & (index < PICTURE_TOKENS), index, -1)


@dataclass(frozen=True, eq=False)
class Sight:
    """What a model that sees needs besides pictures."""

    # Inputs of encode besides the patches, and embeddings where there is no picture.
    fixed: Tensors
    blank: torch.Tensor


def sight_of(model: ServedModel) -> Sight | None:
    """Of a model that sees; None for one that does not."""
    if "encode" not in model.workloads:
        return None
    fixed = model.workloads["encode"].make_inputs(0)
    del fixed["patches"]
    return Sight(fixed, torch.zeros_like(model.workloads["chunk"].make_inputs(0)["image"]))


class Seeing:
    """One microbatch: the prompt in its spare row, and by how much each row's text is shifted."""

    def __init__(self, sight: Sight, rows: int) -> None:
        self._sight = sight
        self._shifts = [0] * rows
        self._picture: PromptPicture | None = None
        self.image: torch.Tensor | None = None

    @property
    def is_blind(self) -> bool:
        """True if the prompt's picture has to be encoded first."""
        return self._picture is not None and self.image is None

    def begin(self, picture: PromptPicture | None) -> None:
        """A prompt begins."""
        self._picture, self.image = picture, None

    def insert(self, row: int) -> None:
        """The prompt becomes a row."""
        self._shifts[row] = 0 if self._picture is None else SHIFT

    def encode(self) -> Tensors:
        """Inputs of encode."""
        assert self._picture is not None, "only a picture is encoded"
        return {**self._sight.fixed, "patches": self._picture.patches}

    def chunk(self, inputs: Tensors) -> Tensors:
        """Inputs of a chunk, with what it sees."""
        positions, start = inputs["positions"], None if self._picture is None else self._picture.start
        image = self._sight.blank if self.image is None else self.image
        return {
            **inputs,
            "rotary": rotary(positions, start),
            "seen": seen(positions, start),
            "image": image,
        }

    def decode(self, inputs: Tensors) -> Tensors:
        """Inputs of a decode. Answers are text: shifted as the row's prompt was."""
        shifted = inputs["positions"] + torch.tensor(self._shifts)[:, None]
        return {**inputs, "rotary": shifted.repeat(3, 1, 1)}
