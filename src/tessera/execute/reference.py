"""ReferenceStepper: one device, in program order: the definition of correct.

What a step does is a function `run(step, inputs, state) -> outputs` that changes the state in place: the
model's own code, or a trace's launches one after another. A step runs while `take` is called, one at a time
in the order of `start`, so microbatches do not run beside one another. No device is lost.

It follows one lane of a plan on one device; nothing of it is looked at but how many microbatches it has.

`Replay` runs the launches of one trace in any order and compares the results bit by bit (`tessera verify`).
Two kinds of memory, because the product relies on two promises of the graph:
  shared   one storage for each buffer, as on one device. An order is correct here iff it keeps every RAW, WAR
           and WAW edge: this proves `Graph.edges`.
  renamed  one storage for each version of a buffer; a launch that changes a buffer works on a copy of the
           version it reads, as when versions are sent between devices. An order is correct here iff every
           version is made before it is read: this proves `Graph.values`, and that WAR and WAW need no edge.

Memory that nobody has written holds a fixed pattern: huge as a float, out of range as an index. So a launch
that runs too early gives a wrong result every time and not by luck; one that raises on it counts as wrong.
The same pattern stands for what `empty` returns.

Not handled: launches that are no operators, or that this machine's CPU cannot run.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.lanes import Lanes
from tessera.execute.launcher import Launcher
from tessera.execute.memory import (
    Memory,
    Storage,
    allocate,
    bytes_of,
    constant,
    flat_bytes,
    fresh,
    given_storage,
    is_allocation,
    tensor_of,
)
from tessera.execute.stepper import DeviceStatus, DeviceUse, Event, StepCall, StepDone, Tensors
from tessera.ir import (
    BufferKind,
    Plan,
    Trace,
    Value,
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


# (launch, buffer) -> number of a version.
Versions = Mapping[tuple[int, int], int]
# 3.4e38 as a float or bfloat16, NaN as a half, 9.2e18 as a long.
POISON = 0x7F
# What operators raise when their arguments are garbage; anything else is a bug and keeps its traceback.
GARBAGE_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError, MemoryError, TesseraError)


@dataclass(frozen=True)
class Replayed:
    outputs: dict[str, torch.Tensor]
    # As flat bytes by name.
    state: dict[str, torch.Tensor]
    # Final bytes of every temporary and output buffer; empty with renamed memory.
    memory: dict[int, torch.Tensor]


class Replay:
    """One trace with its weights and the inputs and state of one request; runs any number of orders."""

    def __init__(self, trace: Trace, weights: Tensors, inputs: Tensors, state: Tensors) -> None:
        self._trace = trace
        self._launcher = Launcher(trace, torch.device("cpu"))
        self._weights = {b: self._weight(b, weights) for b in trace.buffers_of(BufferKind.WEIGHT)}
        self._given = {
            buffer: self._find(buffer, tensors)
            for kind, tensors in ((BufferKind.INPUT, inputs), (BufferKind.STATE, state))
            for buffer in trace.buffers_of(kind)
        }
        self._is_empty = [is_allocation(trace, launch) for launch in range(len(trace.launches))]
        own = [b for b in range(len(trace.buffers)) if b not in self._weights]
        self._shared = _SharedMemory(self._weights, {b: trace.buffers[b].size_bytes for b in own})

    def run(self, order: Iterable[int]) -> Replayed:
        self._shared.reset(self._given)
        for launch in order:
            self._issue(launch)
        return self._shared_result()

    def run_in_program_order(self) -> Replayed:
        """The order of the trace; what cannot be run here is named."""
        self._shared.reset(self._given)
        for launch in range(len(self._trace.launches)):
            try:
                self._issue(launch)
            except RuntimeError as error:
                raise self._cannot(launch, error) from error
        return self._shared_result()

    def run_renamed(self, order: Sequence[int], values: Sequence[Value]) -> Replayed:
        """Runs the launches in this order, every version of a buffer in memory of its own."""
        reads = {(reader, v.buffer): n for n, v in enumerate(values) for reader in v.readers}
        makes = {(v.producer, v.buffer): n for n, v in enumerate(values) if v.producer is not None}
        given = [(n, v) for n, v in enumerate(values) if v.producer is None and v.buffer in self._given]
        held = {number: self._given[value.buffer] for number, value in given}
        for launch in order:
            self._issue_on_versions(launch, reads, makes, held)
        final = Memory(self._weights)
        for buffer in range(len(self._trace.buffers)):
            if buffer not in self._weights:
                final.put(buffer, self._given[buffer] if buffer in self._given else self._fresh(buffer))
        for number, value in enumerate(values):  # versions of a buffer are in order: the last one stays
            if number in held:
                final.put(value.buffer, held[number])
        return self._result(final, {})

    def _issue(self, launch: int) -> None:
        self._shared.is_uninitialised = self._is_empty[launch]
        with torch.no_grad():
            self._launcher.run(launch, self._shared)

    def _issue_on_versions(
        self, launch: int, reads: Versions, makes: Versions, held: dict[int, Storage]
    ) -> None:
        """On the versions that a launch reads, as copies where it changes them; poison where none is."""
        memory = Memory(self._weights)
        row = self._trace.launches[launch]
        named = {view.buffer for view in row.views} | {access.buffer for access in row.accesses}
        for buffer in named - self._weights.keys():
            known = held.get(reads.get((launch, buffer), -1))
            if known is None:
                known = self._fresh(buffer)
            elif (launch, buffer) in makes:
                known = known.clone()
            memory.put(buffer, known)
        with torch.no_grad():
            self._launcher.run(launch, memory)
        for buffer in (b for b in named if (launch, b) in makes):
            made = held[makes[launch, buffer]] = memory.get(buffer)
            if self._is_empty[launch]:
                _flat(made).fill_(POISON)

    def _fresh(self, buffer: int) -> Storage:
        storage = allocate(self._trace.buffers[buffer].size_bytes)
        _flat(storage).fill_(POISON)
        return storage

    def _shared_result(self) -> Replayed:
        kinds = (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        left = [b for kind in kinds for b in self._trace.buffers_of(kind)]
        return self._result(self._shared, {b: _flat(self._shared.get(b)).clone() for b in left})

    def _result(self, memory: Memory, left: dict[int, torch.Tensor]) -> Replayed:
        outputs = {n: tensor_of(memory.get(v.buffer), v).clone() for n, v in self._trace.outputs}
        state = {
            self._trace.buffers[b].name: _flat(memory.get(b)).clone()
            for b in self._trace.buffers_of(BufferKind.STATE)
        }
        return Replayed(outputs, state, left)

    def _weight(self, index: int, weights: Tensors) -> Storage:
        buffer = self._trace.buffers[index]
        return constant(buffer) if buffer.constant_hex else self._find(index, weights)

    def _find(self, index: int, tensors: Tensors) -> Storage:
        """The storage of a buffer that exists before the step, by its name."""
        buffer = self._trace.buffers[index]
        remedy = "Capture the trace again with --device cpu and this version of the program."
        if buffer.name not in tensors:
            raise MismatchError(f"the model has no {buffer.kind} '{buffer.name}'", remedy)
        storage: Storage = tensors[buffer.name].detach().untyped_storage()
        if storage.nbytes() != buffer.size_bytes:
            sizes = f"{storage.nbytes()} bytes in the model and {buffer.size_bytes} in the trace"
            raise MismatchError(f"{buffer.kind} '{buffer.name}' has {sizes}", remedy)
        return storage

    def _cannot(self, launch: int, error: Exception) -> WorkerError:
        name = self._trace.kernel_of(launch).name
        lines = str(error).splitlines() or [type(error).__name__]
        return WorkerError(
            f"launch {launch} ({name}) cannot be run on this machine's CPU: {lines[0]}",
            "Capture the model with --device cpu.",
        )


def differing(reference: Replayed, other: Replayed) -> list[str]:
    """Names of the outputs and state that are not equal bit by bit."""
    pairs = [(name, t, other.outputs[name]) for name, t in reference.outputs.items()]
    pairs += [(name, t, other.state[name]) for name, t in reference.state.items()]
    return [name for name, a, b in pairs if not same_bits(a, b)]


def differing_buffers(reference: Replayed, other: Replayed) -> set[int]:
    """Temporary and output buffers whose final bytes are not the same."""
    return {b for b, t in reference.memory.items() if not torch.equal(t, other.memory[b])}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True iff both hold the same bytes; a NaN equals itself here."""
    one, other = flat_bytes(a), flat_bytes(b)
    return one.numel() == other.numel() and bool(torch.equal(one, other))


class _SharedMemory(Memory):
    """One storage for each buffer, the same for every order; results are copied to where they belong."""

    def __init__(self, weights: dict[int, Storage], sizes: Mapping[int, int]) -> None:
        super().__init__(weights)
        self._places = {buffer: allocate(size) for buffer, size in sizes.items()}
        # Set before each launch.
        self.is_uninitialised = False
        for buffer, storage in self._places.items():
            super().put(buffer, storage)

    def reset(self, given: Mapping[int, Storage]) -> None:
        for buffer, storage in self._places.items():
            if buffer in given:
                storage.copy_(given[buffer])
            else:
                _flat(storage).fill_(POISON)

    def put(self, buffer: int, storage: Storage) -> None:
        place = self._places[buffer]
        if self.is_uninitialised:
            _flat(place).fill_(POISON)
        elif storage.data_ptr() != place.data_ptr():
            place.copy_(storage)


def _flat(storage: Storage) -> torch.Tensor:
    return bytes_of(storage, 0, storage.nbytes())
