"""Serving: what a stepper is, which runs single steps of a served model in slots, wherever its devices are.

A slot is one batch of rows with state of its own, on one lane of one policy. It runs one step at a time:

    chunk   reads up to `chunk` tokens of one prompt into the slot's spare row
    insert  copies the spare row's state into row `row` of the batch
    decode  reads one token a row, each at its own position

The slots run beside one another, which is what hides transfers. A lane is chosen when a slot is opened and
holds until it is closed. A model without chunks (`chunk` is 0) reads its prompt by decoding; its spare row
stays empty, so `insert` clears a row. A vision-language model has a fourth step, `encode`; `serve.sight` runs
it before a chunk that comes with a picture, so that who drives the stepper sees three.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Tensors = Mapping[str, torch.Tensor]
StepKind = Literal["encode", "chunk", "insert", "decode"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one stepper serves."""

    slots: int
    # Rows of a slot's batch, and positions of a row.
    rows: int
    capacity: int
    # Tokens of a chunk; 0: the model has no such step.
    chunk: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step has ended. Outputs of chunk (one row) and decode: `logits` and `next_tokens`."""

    slot: int
    kind: StepKind
    outputs: Tensors
    seconds: float


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """A device was lost: these slots are closed and their state is gone."""

    slots: tuple[int, ...]
    device: str
    message: str
    # True if no lane avoids the device: nothing can be opened any more.
    is_over: bool


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds of work and bytes moved since the start."""

    busy_s: Mapping[str, float]
    # (source, destination) -> bytes
    moved: Mapping[tuple[str, str], int]


class Stepper(Protocol):
    """Used by one thread, but for `wake`; in a `with` statement, which starts and ends what it needs."""

    shape: Shape
    # Names of the policies, in the order of their numbers.
    policies: tuple[str, ...]

    def open(self, slot: int, policy: int) -> int:
        """Gives a free slot a lane of a policy, with empty state; returns the lane's number.

        Lanes of all policies are numbered one after another. Where a policy has none left, another's is
        taken; with none at all, raises WorkerError.
        """

    def close(self, slot: int) -> None:
        """Frees a slot that runs nothing."""

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Starts a step; its end is told by `take`. Outputs named in `skips` may be left out of it.

        chunk   tokens [1, chunk], positions [1, chunk], last [1]: the index of the last real token
        insert  row [1]
        decode  tokens [rows, 1], positions [rows, 1]; of a row without a request, any position

        Tokens and positions of a chunk after `last` are not looked at.
        """

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """The next thing that happened; None after the timeout or a wake."""

    def wake(self) -> None:
        """Makes `take` return; from any thread."""

    def use(self) -> Use:
        """For the metrics."""
