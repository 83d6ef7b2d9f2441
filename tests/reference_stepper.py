"""ReferenceStepper: steps on one device, one after the other: the definition of correct for steppers.

A step is a function `run(step, inputs, state) -> outputs` that changes the state in place: the model's own
code, or a trace's launches (`InOrder`). Placements are not followed.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.errors import TesseraError
from tessera.execute.lanes import Lanes, LoadedLane
from tessera.execute.stepper import (
    DeviceStatus,
    DeviceUse,
    Event,
    Moved,
    PageMove,
    StepCall,
    StepDone,
    Tensors,
    routes_of,
)
from tessera.ir import Plan
from tessera.kernels import BY_ROW, is_paged
from tessera.kernels.tensors import flat_bytes

# (step, inputs, the state that it changes) -> outputs.
Run = Callable[[int, Tensors, dict[str, Any]], Tensors]


class ReferenceStepper:
    """`make_state`: initial state of a microbatch opened without one; a page is a row of a tensor."""

    def __init__(self, plans: Sequence[Plan], run: Run, make_state: Callable[[], Mapping[str, Any]]) -> None:
        self.plans: tuple[Plan, ...] = tuple(plans)
        self.lanes = Lanes(self.plans)
        self._run, self._make_state = run, make_state
        self._device = plans[0].cluster.names[0]
        self._lanes: dict[int, LoadedLane] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._homes: dict[int, dict[str, Any]] = {}
        self._due: deque[StepCall | PageMove] = deque()
        self._moved_bytes = 0
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy_s = 0.0

    def __enter__(self) -> "ReferenceStepper":
        return self

    def __exit__(self, *exc: object) -> None:
        self._states, self._homes = {}, {}

    def load(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.lanes.load(plans, self._states)

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        if microbatch in self._states:
            raise TesseraError(f"microbatch {microbatch} is open already")
        given = self._make_state() if state is None else state
        found = self.lanes.all[lane]
        self._lanes[microbatch] = found
        own = {name: tensor.clone() for name, tensor in given.items()}
        if found.home is not None:
            pages = {name: own.pop(name) for name in list(own) if is_paged(name)}
            home = self._homes.setdefault(found.home, pages)
            if state is not None:
                home |= pages
        self._states[microbatch] = own

    def close(self, microbatch: int) -> None:
        del self._states[microbatch], self._lanes[microbatch]

    def can_queue(self, microbatch: int) -> bool:
        return False

    def start(self, call: StepCall) -> None:
        self._due.append(call)

    def give(self, microbatch: int, inputs: Tensors) -> None:
        """No step is queued."""

    def move(self, move: PageMove) -> None:
        routes_of(move, self.lanes, self._lanes.get(move.source), self._lanes.get(move.destination))
        self._due.append(move)

    def take(self, timeout_s: float | None) -> Event | None:
        """Runs the next step or move; without one, None after the timeout or a wake."""
        if self._due:
            due = self._due.popleft()
            return self._step(due) if isinstance(due, StepCall) else self._move(due)
        try:
            return self._wakes.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _step(self, call: StepCall) -> StepDone:
        begun_s, own, lane = time.monotonic(), self._states[call.microbatch], self._lanes[call.microbatch]
        home = self._homes[lane.home] if lane.home is not None else {}
        state = {**home, **own}
        outputs = self._run(lane.steps[call.step], call.inputs, state)
        home.update((name, state[name]) for name in home)  # it may have gone to a GPU
        own.update((name, state[name]) for name in own)
        seconds = time.monotonic() - begun_s
        self._busy_s += seconds
        final = (
            {name: flat_bytes(tensor).clone() for name, tensor in state.items()} if call.wants_state else {}
        )
        return StepDone(call.microbatch, call.step, outputs, seconds, final, {self._device: seconds})

    def _move(self, move: PageMove) -> Moved:
        lanes = [self._lanes.get(number) for number in (move.source, move.destination)]
        if lanes[0] is None or lanes[1] is None:
            return Moved(move.number, "one of its microbatches was closed")
        begun_s, num_bytes = time.monotonic(), 0
        copies: list[tuple[Tensors, Tensors, Sequence[int], Sequence[int]]] = []
        if lanes[0].home != lanes[1].home:
            source, destination = (self._homes[lane.home or 0] for lane in lanes if lane is not None)
            copies.append((source, destination, move.from_pages, move.to_pages))
        if move.rows is not None:
            source, destination = (self._states[number] for number in (move.source, move.destination))
            kept = {name: tensor for name, tensor in source.items() if name.startswith(BY_ROW)}
            copies.append((kept, destination, move.rows[:1], move.rows[1:]))
        for held, target, pages, places in copies:
            for name, tensor in held.items():
                contents = tensor[list(pages)]
                target[name][list(places)] = contents
                num_bytes += contents.nbytes
        self._moved_bytes += num_bytes
        return Moved(move.number, "", time.monotonic() - begun_s, num_bytes)

    def wake(self) -> None:
        self._wakes.put(None)

    def use(self) -> DeviceUse:
        moved = {(self._device, self._device): self._moved_bytes} if self._moved_bytes else {}
        return DeviceUse({self._device: self._busy_s}, moved, {self._device: DeviceStatus("ready")})

    def now_s(self) -> float:
        return time.monotonic()
