"""CudaStepper: the steps of a served model on GPUs of this process; keeps `serving.Stepper`.

Every slot has one CUDA graph for each step of each lane. To run a step is to copy its inputs in, launch the
graph, and copy out what is asked for, all on the slot's stream: the CPU waits for nothing, and slots run
beside one another. Inputs and outputs pass through pinned memory, but for logits: those are copied on the
GPU and stay there. Outputs that nobody wants are not copied.

A GPU that fails takes this process's hold on all GPUs with it, so every slot is lost at once and nothing can
be opened any more; likewise when a step takes longer than it may. A service that is to survive this must be
started again in a new process.

How long a device was at work is measured where there is one. Several are at work inside one graph: each is
counted with what the plan's costs say of its launches, which is modelled for stretched devices.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import Any

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.cuda.captured import Captured, Kernels
from tessera.execute.cuda.graph import ProgramGraph
from tessera.execute.cuda.launches import bytes_of
from tessera.execute.cuda.requests import first_line
from tessera.execute.cuda.slot import Slot
from tessera.execute.flight import Routes
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Tensors, Use
from tessera.execute.stepper import check_homes
from tessera.ir import Plan, Program, Run

# How long the CPU looks away between two looks at steps that run.
POLL_S = 20e-6
RESTART = "Start the service again in a new process."


@dataclass(frozen=True)
class _Input:
    """Where one input of a step goes, and the pinned memory it passes through."""

    name: str
    storage: torch.UntypedStorage
    staged: torch.Tensor

    def load(self, given: Tensors) -> None:
        """Copies it in on the current stream; the slot's step before has ended, so nobody reads `staged`."""
        if self.name not in given:
            raise WorkerError(f"input '{self.name}' was not given", "Give every input of the step.")
        flat = given[self.name].detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() != self.storage.nbytes():
            message = f"input '{self.name}' has {flat.numel()} bytes, the step {self.storage.nbytes()}"
            raise WorkerError(message, "Give tensors of the stepper's shape.")
        into = bytes_of(self.storage, 0, self.storage.nbytes())
        into.copy_(flat if flat.is_cuda else self.staged.copy_(flat), non_blocking=True)


@dataclass(frozen=True)
class _Ready:
    """A step of one lane in one slot, with everything that a run needs at hand."""

    graph: ProgramGraph
    inputs: list[_Input]
    # By device: seconds of its launches, as the plan's costs have it.
    costs_s: tuple[float, ...]


@dataclass(frozen=True)
class _Running:
    """One step of one slot that was launched."""

    slot: int
    kind: StepKind
    ready: _Ready
    began_s: float
    # Around the graph, and behind the copies of its outputs.
    start: Any
    stop: Any
    done: Any
    outputs: dict[str, torch.Tensor]


class CudaStepper:
    """A stepper over CUDA graphs, for one or more plans of one served unit."""

    def __init__(
        self,
        plans: Sequence[Plan],
        weights: Tensors,
        shape: Shape,
        *,
        kernels: Kernels | None = None,
        scale: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        """`kernels` and `scale`: see `Captured`. `timeout_s`: a step that takes longer ends everything."""
        self._captured = Captured(plans, weights, kernels, scale)
        if self._captured.num_slots < shape.slots:
            raise MismatchError(f"the plans have {self._captured.num_slots} slots, not {shape.slots}")
        self._plans, self.shape, self._timeout_s, self._scale = tuple(plans), shape, timeout_s, scale
        self.policies = tuple(plan.policy for plan in plans)
        self._names = plans[0].cluster.names
        self._routes = Routes(self._plans, self._captured.programs)
        for route in self._routes.all:
            check_homes(self._plans[0], route)
        self._index = {trace.step.kind: step for step, trace in enumerate(self._captured.traces)}
        self._stack = ExitStack()
        # (slot, route, step) -> its graph; looked up once, for a program is slow to hash.
        self._ready: dict[tuple[int, int, int], _Ready] = {}
        # Slot -> its route.
        self._open: dict[int, int] = {}
        self._running: dict[int, _Running] = {}
        self._is_over = False
        self._lost: deque[SlotsLost] = deque()
        self._woken = Event()
        self._busy_s = dict.fromkeys(self._names, 0.0)
        self._last_stop: Any = None
        self._moved: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> "CudaStepper":
        self._stack.enter_context(self._captured)
        for slot in self._captured.slots[: self.shape.slots]:
            inputs = {step: _inputs_of(slot, step) for step in self._index.values()}
            for number, route in enumerate(self._routes.all):
                for program in route.programs:
                    graph = self._captured.graph(slot.number, program)
                    costs_s = self._costs_s(self._plans[route.policy], program)
                    self._ready[slot.number, number, program.step] = _Ready(
                        graph, inputs[program.step], costs_s
                    )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ready, self._running, self._open = {}, {}, {}
        self._stack.close()

    # Slots --------------------------------------------------------------------------------------------

    def open(self, slot: int, policy: int) -> int:
        """Gives a free slot a lane of a policy, with empty state."""
        if slot in self._open or not 0 <= slot < self.shape.slots:
            raise TesseraError(f"slot {slot} is open already, or not one of {self.shape.slots}")
        number = None if self._is_over else self._routes.take(policy)
        if number is None:
            raise WorkerError("no GPU of this process can be used any more", RESTART, ", ".join(self._names))
        self._open[slot] = number
        place = self._captured.slots[slot]
        homes = {
            (device, self._captured.traces[program.step].buffers[buffer].name)
            for program in self._routes.all[number].programs
            for buffer, device in program.homes
        }
        with self._faults(), torch.cuda.stream(place.origin):
            for home in sorted(homes):
                bytes_of(place.state[home], 0, place.state[home].nbytes()).zero_()
        return number

    def close(self, slot: int) -> None:
        """Frees a slot that runs nothing."""
        if slot in self._running:
            raise TesseraError(f"slot {slot} is at work")
        if slot in self._open or not self._is_over:
            self._routes.give_back(self._open.pop(slot))

    # Steps --------------------------------------------------------------------------------------------

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Launches a step and returns at once."""
        if self._is_over:  # which `take` is about to tell
            return
        ready, began_s = self._ready[slot, self._open[slot], self._index[kind]], time.monotonic()
        start, stop, done = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
        with self._faults(), torch.no_grad(), torch.cuda.stream(self._captured.slots[slot].origin):
            for given in ready.inputs:
                given.load(inputs)
            start.record()
            made = ready.graph.replay()
            stop.record()
            outputs = {name: _handed_out(name, tensor) for name, tensor in made.items() if name not in skips}
            done.record()
            self._running[slot] = _Running(slot, kind, ready, began_s, start, stop, done, outputs)

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """The next thing that happened; None after the timeout or a wake."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lost:
            if self._woken.is_set():
                self._woken.clear()
                return None
            with self._faults():
                if (ended := self._first_done()) is not None:
                    return self._finish(ended)
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                return None
            if self._running:
                time.sleep(POLL_S)
            elif not self._lost:
                self._woken.wait(left)
        return self._lost.popleft()

    def wake(self) -> None:
        """Makes `take` return; from any thread."""
        self._woken.set()

    def use(self) -> Use:
        """Seconds of work on each device, and bytes between devices, since the start."""
        return Use(dict(self._busy_s), dict(self._moved))

    def _first_done(self) -> _Running | None:
        """A step that has ended; raises TimeoutError of one that does not."""
        for running in self._running.values():
            if running.done.query():
                return running
            late_s = time.monotonic() - running.began_s
            if self._timeout_s is not None and late_s > self._timeout_s:
                raise TimeoutError(f"a {running.kind} in slot {running.slot} took more than {late_s:.0f} s")
        return None

    def _finish(self, running: _Running) -> StepDone:
        del self._running[running.slot]
        if len(self._names) == 1:
            self._busy_s[self._names[0]] += self._alone_s(running)
        else:
            for name, busy_s in zip(self._names, running.ready.costs_s, strict=True):
                self._busy_s[name] += busy_s
        for transfer in running.ready.graph.program.transfers:
            self._moved[self._names[transfer.src], self._names[transfer.dst]] += transfer.num_bytes
        seconds = time.monotonic() - running.began_s
        return StepDone(running.slot, running.kind, running.outputs, seconds)

    def _alone_s(self, running: _Running) -> float:
        """How much longer this step's graph kept the GPU at work than those that ended before it."""
        ran_ms = float(running.start.elapsed_time(running.stop))
        if self._last_stop is not None:
            ran_ms = min(ran_ms, self._last_stop.elapsed_time(running.stop))
        if ran_ms > 0.0:
            self._last_stop = running.stop
        return max(0.0, ran_ms) * 1e-3

    def _costs_s(self, plan: Plan, program: Program) -> tuple[float, ...]:
        """What the plan's costs say of the launches of a step, by device."""
        if not plan.costs:
            return (0.0,) * len(self._names)
        costs = plan.costs[program.step]
        sums_us = [
            sum(costs.us(i.launch, device) for i in column if isinstance(i, Run))
            for device, column in enumerate(program.instructions)
        ]
        return tuple(us * self._scale * 1e-6 for us in sums_us)

    # Faults -------------------------------------------------------------------------------------------

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A GPU's error, or a step that does not end, is the end of all slots."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            slots, self._open, self._running = tuple(sorted(self._open)), {}, {}
            self._is_over = True
            fault = WorkerError(first_line(error), RESTART)
            self._lost.append(SlotsLost(slots, ", ".join(self._names), str(fault), is_over=True))


def _inputs_of(slot: Slot, step: int) -> list[_Input]:
    """Inputs of a step with their memory on each card; devices of one card may share it."""
    found: dict[int, _Input] = {}
    for (_, of_step, name), storage in slot.inputs.items():
        if of_step == step and storage.nbytes() and storage.data_ptr() not in found:
            pinned = storage.device.type == "cuda"
            staged = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            found[storage.data_ptr()] = _Input(name, storage, staged)
    return list(found.values())


def _handed_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, on the current stream; the CPU does not wait for it.

    Logits stay on the GPU: who wants them draws tokens there, and a vocabulary a row is much to copy.
    """
    if name == "logits":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
