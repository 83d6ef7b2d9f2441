"""Sight: a vision-language model behind the stepper's protocol; who drives it need not know about pictures.

A chunk may come with `patches`, a picture, and `start`, the position of the first of the tokens that stand
for it. The picture is then encoded first, in the same slot, and its embeddings are kept until the next prompt
begins there (a chunk at position 0). Every chunk and decode is given its rotary positions (time, height,
width): a picture spans its grid, and text goes on behind its longer side. So a row's text is shifted by the
same amount for good; the shift of a prompt goes with it from the spare row to its row of the batch.

Pictures are resized to one grid; a prompt has at most one.
"""

import time
from dataclasses import dataclass
from types import TracebackType

import torch

from tessera.capture.models.seeing import PICTURE_TOKENS
from tessera.capture.models.vision import grid_of
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Stepper, Tensors, Use
from tessera.serve.steps import Served

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


def with_sight(stepper: Stepper, model: Served) -> Stepper:
    """A stepper for a model that sees; the same one for a model that does not."""
    if "encode" not in model.workloads:
        return stepper
    fixed = model.workloads["encode"].make_inputs(0)
    del fixed["patches"]
    return SightStepper(stepper, fixed, torch.zeros_like(model.workloads["chunk"].make_inputs(0)["image"]))


@dataclass
class _Spot:
    """One slot: the prompt in its spare row, and by how much each row's text is shifted."""

    shifts: list[int]
    image: torch.Tensor | None = None
    start: int | None = None
    # A chunk that waits for its picture: its inputs, and the outputs nobody wants.
    waiting: tuple[Tensors, tuple[str, ...]] | None = None


class SightStepper:
    """A stepper over one that has the steps encode, chunk, insert and decode of a vision-language model."""

    def __init__(self, inner: Stepper, fixed: Tensors, blank: torch.Tensor) -> None:
        """`fixed`: inputs of encode besides the patches; `blank`: embeddings where there is no picture."""
        self._inner, self._fixed, self._blank = inner, dict(fixed), blank
        self.shape: Shape = inner.shape
        self.policies = inner.policies
        self._spots: dict[int, _Spot] = {}

    def __enter__(self) -> "SightStepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """The inner stepper is its owner's to end."""

    def open(self, slot: int, policy: int) -> int:
        """As the inner one."""
        lane = self._inner.open(slot, policy)
        self._spots[slot] = _Spot([0] * self.shape.rows)
        return lane

    def close(self, slot: int) -> None:
        """As the inner one."""
        self._inner.close(slot)
        del self._spots[slot]

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Starts a step, or the encode that goes before it."""
        spot = self._spots[slot]
        if kind == "decode":
            self._inner.run(slot, kind, {**inputs, "rotary": self._rotary(spot, inputs["positions"])}, skips)
        elif kind == "insert":
            spot.shifts[int(inputs["row"])] = 0 if spot.start is None else SHIFT
            self._inner.run(slot, kind, inputs, skips)
        else:
            self._read(slot, spot, inputs, skips)

    def _read(self, slot: int, spot: _Spot, inputs: Tensors, skips: tuple[str, ...]) -> None:
        if int(inputs["positions"][0, 0]) == 0:
            spot.image = None
            spot.start = int(inputs["start"]) if "patches" in inputs else None
        if "patches" in inputs and spot.image is None:
            spot.waiting = (inputs, skips)
            self._inner.run(slot, "encode", {**self._fixed, "patches": inputs["patches"]})
            return
        self._chunk(slot, spot, inputs, skips)

    def _chunk(self, slot: int, spot: _Spot, inputs: Tensors, skips: tuple[str, ...]) -> None:
        positions = inputs["positions"]
        given = {
            "tokens": inputs["tokens"],
            "positions": positions,
            "last": inputs["last"],
            "rotary": rotary(positions, spot.start),
            "seen": seen(positions, spot.start),
            "image": self._blank if spot.image is None else spot.image,
        }
        self._inner.run(slot, "chunk", given, skips)

    @staticmethod
    def _rotary(spot: _Spot, positions: torch.Tensor) -> torch.Tensor:
        """Answers are text: shifted as the row's prompt was."""
        return (positions + torch.tensor(spot.shifts)[:, None]).repeat(3, 1, 1)

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """The next thing that happened; an encode that ended only starts its chunk."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            event = self._inner.take(None if until is None else max(0.0, until - time.monotonic()))
            if isinstance(event, SlotsLost):
                for slot in event.slots:
                    self._spots.pop(slot, None)
                return event
            if event is None:
                return None
            spot = self._spots[event.slot]
            waiting, spot.waiting = spot.waiting, None
            if waiting is None:
                return event
            spot.image = event.outputs["image"]
            self._chunk(event.slot, spot, *waiting)

    def wake(self) -> None:
        """Makes `take` return; from any thread."""
        self._inner.wake()

    def use(self) -> Use:
        """Of the inner one."""
        return self._inner.use()
