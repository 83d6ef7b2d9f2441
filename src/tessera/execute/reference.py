"""One device, launches in order: the definition of correct.

`InOrder` runs the steps of a work unit in program order. `Replay` runs the launches of one trace in any order
and compares the results bit by bit (`tessera verify`):
  shared   one storage per buffer. An order is correct iff it keeps every RAW, WAR and WAW edge: this proves
           `Graph.edges`.
  renamed  one storage per version of a buffer, as when versions are sent between devices. An order is correct
           iff every version is made before it is read: this proves `Graph.values`.

Unwritten memory, also that of `empty`, holds a fixed pattern, so a launch that runs too early gives a wrong
result or raises. Not handled: launches that are not operators.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tessera.errors import TesseraError, WorkerError, first_line
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, Storage, bind_storages, bytes_of, fresh, is_allocation, tensor_of
from tessera.execute.stepper import Tensors
from tessera.ir import BufferKind, Trace, Value
from tessera.kernels.tensors import same_bits

CPU = torch.device("cpu")
# 3.4e38 as a float or bfloat16, NaN as a half, 9.2e18 as a long.
POISON = 0x7F
# What operators raise on garbage; anything else is a bug.
GARBAGE_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError, MemoryError, TesseraError)


class TraceRunner:
    """Runs the launches of one trace on one device, in any order."""

    def __init__(self, trace: Trace, weights: Tensors, device: torch.device = CPU) -> None:
        self.trace, self.device = trace, device
        self.launcher = Launcher(trace, device)
        self.weights = bind_storages(trace, (BufferKind.WEIGHT,), weights, device)
        # The last launch that was begun.
        self.launch = 0

    def storages(self, inputs: Tensors, state: Tensors) -> dict[int, Storage]:
        return {
            **bind_storages(self.trace, (BufferKind.INPUT,), inputs, self.device),
            **bind_storages(self.trace, (BufferKind.STATE,), state, self.device),
        }

    def run(self, memory: "_SharedMemory", order: Iterable[int] | None = None) -> None:
        with torch.no_grad():
            for launch in range(len(self.trace.launches)) if order is None else order:
                self.launch = launch
                memory.before(launch)
                self.launcher.run(launch, memory)
                memory.after(launch)

    def outputs(self, memory: Memory) -> dict[str, torch.Tensor]:
        return {n: tensor_of(memory.get(v.buffer), v).clone() for n, v in self.trace.outputs}


class InOrder:
    """What every divided run on the same architecture must equal bit for bit. Too slow to time."""

    def __init__(
        self, traces: Sequence[Trace], weights: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        placed = {name: tensor.to(device) for name, tensor in weights.items()}
        self._device, self._runners = device, [TraceRunner(trace, placed, device) for trace in traces]

    def __call__(self, step: int, inputs: Tensors, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in state.items():
            state[name] = tensor.to(self._device)
        copies = {name: tensor.to(self._device, copy=True) for name, tensor in inputs.items()}
        runner = self._runners[step]
        memory = _SharedMemory(runner, runner.storages(copies, state))
        runner.run(memory)
        return runner.outputs(memory)


@dataclass(frozen=True)
class Replayed:
    outputs: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    # Final bytes of temporaries and outputs; empty with renamed memory.
    memory: dict[int, torch.Tensor]


class Replay:
    def __init__(self, trace: Trace, weights: Tensors, inputs: Tensors, state: Tensors) -> None:
        self._trace, self._runner = trace, TraceRunner(trace, weights)
        self._initial = self._runner.storages(inputs, state)

    def run(self, order: Iterable[int] | None = None) -> Replayed:
        shared = _SharedMemory(self._runner, {b: s.clone() for b, s in self._initial.items()})
        self._runner.run(shared, order)
        kinds = (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        left = {b: _flat(shared.get(b)).clone() for kind in kinds for b in self._trace.buffers_of(kind)}
        return Replayed(self._runner.outputs(shared), self._state(shared), left)

    def run_in_program_order(self) -> Replayed:
        """An error names the launch that this machine cannot run."""
        try:
            return self.run()
        except RuntimeError as error:
            launch = self._runner.launch
            name = self._trace.kernel_of(launch).name
            message = f"launch {launch} ({name}) cannot be run on this machine's CPU: {first_line(error)}"
            raise WorkerError(message, "Capture the model with --device cpu.") from error

    def run_renamed(self, order: Sequence[int], values: Sequence[Value]) -> Replayed:
        memory = _RenamedMemory(self._runner, self._initial, values)
        self._runner.run(memory, order)
        memory.settle()
        return Replayed(self._runner.outputs(memory), self._state(memory), {})

    def _state(self, memory: Memory) -> dict[str, torch.Tensor]:
        buffers = self._trace.buffers_of(BufferKind.STATE)
        return {self._trace.buffers[b].name: _flat(memory.get(b)).clone() for b in buffers}


def differing(reference: Replayed, other: Replayed) -> list[str]:
    pairs = [(name, t, other.outputs[name]) for name, t in reference.outputs.items()]
    pairs += [(name, t, other.state[name]) for name, t in reference.state.items()]
    return [name for name, a, b in pairs if not same_bits(a, b)]


def differing_buffers(reference: Replayed, other: Replayed) -> set[int]:
    return {b for b, t in reference.memory.items() if not torch.equal(t, other.memory[b])}


class _SharedMemory(Memory):
    """One storage per buffer, poison at first."""

    def __init__(self, runner: TraceRunner, initial: Mapping[int, Storage]) -> None:
        make = fresh(runner.trace, runner.device, lambda num, **how: torch.full((num,), POISON, **how))
        super().__init__(runner.weights, make)
        self._trace = runner.trace
        self._storages.update(initial)

    def before(self, launch: int) -> None:
        """Called before each launch."""

    def after(self, launch: int) -> None:
        if is_allocation(self._trace, launch):
            for view in self._trace.launches[launch].outputs:
                if view is not None:
                    _flat(self.get(view.buffer)).fill_(POISON)


class _RenamedMemory(_SharedMemory):
    """One storage per version: a launch that changes a buffer works on a copy."""

    def __init__(self, runner: TraceRunner, initial: Mapping[int, Storage], values: Sequence[Value]) -> None:
        super().__init__(runner, {})
        self._initial, self._values = initial, values
        # (launch, buffer) -> number of the version that it reads, and that it makes.
        self._reads = {(reader, v.buffer): n for n, v in enumerate(values) for reader in v.readers}
        self._makes = {(v.producer, v.buffer): n for n, v in enumerate(values) if v.producer is not None}
        self._versions = {
            n: initial[v.buffer] for n, v in enumerate(values) if v.producer is None and v.buffer in initial
        }

    def before(self, launch: int) -> None:
        """Poison where there is no version."""
        self._storages = {}
        for buffer in self._named(launch):
            version = self._versions.get(self._reads.get((launch, buffer), -1))
            if version is not None:
                self.put(buffer, version.clone() if (launch, buffer) in self._makes else version)

    def after(self, launch: int) -> None:
        super().after(launch)
        for buffer in self._named(launch):
            if (launch, buffer) in self._makes:
                self._versions[self._makes[launch, buffer]] = self.get(buffer)

    def settle(self) -> None:
        self._storages = dict(self._initial)
        for number, value in enumerate(self._values):  # versions of a buffer are in order
            if number in self._versions:
                self.put(value.buffer, self._versions[number])

    def _named(self, launch: int) -> set[int]:
        return self._trace.launches[launch].buffers - self._weights.keys()


def _flat(storage: Storage) -> torch.Tensor:
    return bytes_of(storage, 0, storage.nbytes())
