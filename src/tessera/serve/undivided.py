"""UndividedStepper: the model itself, in this process, as a stepper: nothing is placed anywhere.

What every divided stepper's answers are compared with, and the least that serves: no worker, no plan. A step
runs while `take` is called, one at a time in the order of `run`, so slots do not run beside one another. No
device can be lost.
"""

import queue
import time
from collections import deque
from types import TracebackType

import torch

from tessera.errors import TesseraError
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Tensors, Use
from tessera.serve.steps import Served

DEVICE = "cpu"


class UndividedStepper:
    """A stepper without devices of its own; `num_threads` is for the whole process, None leaves it."""

    policies: tuple[str, ...] = ("undivided",)

    def __init__(self, model: Served, num_threads: int | None = None) -> None:
        self.shape: Shape = model.shape
        self._model, self._num_threads = model, num_threads
        self._names = {kind: set(w.make_inputs(0)) for kind, w in model.workloads.items()}
        self._states: dict[int, dict[StepKind, Tensors]] = {}
        self._due: deque[tuple[int, StepKind, Tensors]] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy_s = 0.0

    def __enter__(self) -> "UndividedStepper":
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._states = {}

    def open(self, slot: int, policy: int) -> int:
        """A slot starts with empty state."""
        if slot in self._states or not 0 <= slot < self.shape.slots or policy != 0:
            raise TesseraError(f"slot {slot} cannot be opened under policy {policy}")
        state = self._model.state()
        # Each step is handed its own state and nothing else.
        self._states[slot] = {
            kind: {name: state[name] for name in workload.make_state(0)}
            for kind, workload in self._model.workloads.items()
        }
        return 0

    def close(self, slot: int) -> None:
        """Its state is gone."""
        del self._states[slot]

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Runs when `take` is called next."""
        self._due.append((slot, kind, inputs))

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """Runs a step to its end; without one, None after the timeout or a wake."""
        if self._due:
            return self._step(*self._due.popleft())
        try:
            return self._wakes.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _step(self, slot: int, kind: StepKind, inputs: Tensors) -> StepDone:
        begun = time.monotonic()
        given = {name: tensor for name, tensor in inputs.items() if name in self._names[kind]}
        outputs = self._model.workloads[kind].run(given, self._states[slot][kind])
        seconds = time.monotonic() - begun
        self._busy_s += seconds
        return StepDone(slot, kind, outputs, seconds)

    def wake(self) -> None:
        """Makes `take` return; from any thread."""
        self._wakes.put(None)

    def use(self) -> Use:
        """Seconds of all steps; nothing moves."""
        return Use({DEVICE: self._busy_s}, {})
