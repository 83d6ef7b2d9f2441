"""ReferenceStepper: one device, in program order: the definition of correct.

What a step does is a function `run(step, inputs, state) -> outputs` that changes the state in place: the
model's own code, or a trace's launches one after another. A step runs while `take` is called, one at a time
in the order of `start`, so microbatches do not run beside one another. No device is lost.

It follows one lane of a plan on one device; nothing of it is looked at but how many microbatches it has.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tessera.errors import TesseraError
from tessera.execute.lanes import Lanes
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, Storage, constant, flat_bytes, fresh, given_storage, tensor_of
from tessera.execute.stepper import DeviceStatus, DeviceUse, Event, StepCall, StepDone, Tensors
from tessera.ir import (
    BufferKind,
    Plan,
    Trace,
)

# A step's outputs, given its inputs and the microbatch's state, which it changes.
Run = Callable[[int, Tensors, dict[str, Any]], Tensors]


class ReferenceStepper:
    """A stepper without workers.

    run         what a step does
    make_state  the state of a microbatch that is opened without one
    """

    def __init__(
        self,
        plan: Plan,
        run: Run,
        make_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.plans: tuple[Plan, ...] = (plan,)
        self.lanes = Lanes(self.plans)
        self._run, self._make_state = run, make_state
        self._device = plan.cluster.names[0]
        self._states: dict[int, dict[str, Any]] = {}
        self._due: deque[StepCall] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy_s = 0.0

    def __enter__(self) -> "ReferenceStepper":
        return self

    def __exit__(self, *exc: object) -> None:
        self._states = {}

    def load(self, plans: Sequence[Plan]) -> None:
        """Other plans place launches elsewhere; here there is nowhere else."""
        self.plans = tuple(plans)
        self.lanes.load(plans)

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        if microbatch in self._states:
            raise TesseraError(f"microbatch {microbatch} is open already")
        given = self._make_state() if state is None else state
        self._states[microbatch] = {name: tensor.clone() for name, tensor in given.items()}

    def close(self, microbatch: int) -> None:
        del self._states[microbatch]

    def can_queue(self, microbatch: int) -> bool:
        return False

    def start(self, call: StepCall) -> None:
        self._due.append(call)

    def take(self, timeout_s: float | None) -> Event | None:
        """Runs a step to its end; without one, None after the timeout or a wake."""
        if self._due:
            return self._step(self._due.popleft())
        try:
            return self._wakes.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _step(self, call: StepCall) -> StepDone:
        begun_s, state = time.monotonic(), self._states[call.microbatch]
        outputs = self._run(call.step, call.inputs, state)
        seconds = time.monotonic() - begun_s
        self._busy_s += seconds
        final = (
            {name: flat_bytes(tensor).clone() for name, tensor in state.items()} if call.wants_state else {}
        )
        return StepDone(call.microbatch, call.step, outputs, seconds, final, {self._device: seconds})

    def wake(self) -> None:
        self._wakes.put(None)

    def use(self) -> DeviceUse:
        return DeviceUse({self._device: self._busy_s}, {}, {self._device: DeviceStatus("ready")})

    def now_s(self) -> float:
        return time.monotonic()


class InOrder:
    """The launches of a work unit in program order on one device, one by one: no graph, no placement.

    What every divided run on the same architecture must equal, bit by bit. It is slow, and meant to be
    compared with, not timed. Called with a step, its inputs, and the state, which it changes.
    """

    def __init__(
        self, traces: Sequence[Trace], weights: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self._traces, self._device = traces, device
        placed = {name: tensor.to(device) for name, tensor in weights.items()}
        self._weights = [self._bind(trace, placed) for trace in traces]
        self._launchers = [Launcher(trace, device) for trace in traces]

    def __call__(self, step: int, inputs: Tensors, state: dict[str, Any]) -> Tensors:
        trace = self._traces[step]
        memory = Memory(self._weights[step], fresh(trace, self._device))
        for name, tensor in state.items():
            state[name] = tensor.to(self._device)
        given = {name: tensor.to(self._device, copy=True) for name, tensor in inputs.items()}
        for kind, found in ((BufferKind.INPUT, given), (BufferKind.STATE, state)):
            for index in trace.buffers_of(kind):
                memory.put(index, given_storage(trace.buffers[index], found))
        with torch.no_grad():
            for index in range(len(trace.launches)):
                self._launchers[step].run(index, memory)
            outputs = {n: tensor_of(memory.get(v.buffer), v).clone() for n, v in trace.outputs}
        return outputs

    def _bind(self, trace: Trace, weights: Mapping[str, torch.Tensor]) -> dict[int, Storage]:
        held = [(index, trace.buffers[index]) for index in trace.buffers_of(BufferKind.WEIGHT)]
        return {
            n: constant(x, self._device) if x.constant_hex else given_storage(x, weights) for n, x in held
        }
