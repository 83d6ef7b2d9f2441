"""record_inductor: Workload -> Trace of the launches of its Inductor-compiled code.

The step is compiled, called once to finish autotuning, and observed in a second call. Accesses of Triton
launches are proved from PTX; an unproved launch is immovable, with the reason, and may touch all its buffers.
Inductor's allocations appear at their first use.

Compiled code has no module calls, so a launch's scope (`scoped`) is the module of a weight that only it
reads, else the previous launch's.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture import fake
from tessera.capture.inductor.compile import CompiledStep, compile_step
from tessera.capture.offline import CONFIG as OFFLINE_CONFIG
from tessera.capture.offline import PROPERTIES, offline
from tessera.capture.operators import check_operator
from tessera.capture.own import OwnLaunch, inductor_launches
from tessera.capture.recorder import Ledger
from tessera.capture.rng import generator_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Step, Trace, verify

ALLOCATORS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)


@dataclass(frozen=True)
class Recording:
    trace: Trace
    code: CompiledStep


def record_inductor(workload: Workload, portable: bool = True, **changes: Any) -> Recording:
    """`portable`: attention for every GPU, else torch's choice here."""
    weights, inputs, state = workload.weights(), workload.make_inputs(0), workload.make_state(0)
    if not all(t.is_cuda for t in inputs.values()):
        raise CaptureError("the step is not on a CUDA device", "Move it with on_device(workload, 'cuda:0').")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    code = compile_step(workload, (weights, inputs, state), mode, portable, **changes)
    code.run(weights, inputs, state)
    del state  # memory may hold one state only
    tensors = weights, workload.make_inputs(0), workload.make_state(0)
    return record_code(workload.step, code, tensors, str(next(iter(inputs.values())).device))


def record_inductor_offline(workload: Workload, card: SimpleNamespace = PROPERTIES) -> Trace:
    """Only shapes and types matter."""
    weights = workload.weights()
    with offline(card) as mode, warnings.catch_warnings():
        # Compiled code checks input alignment; fakes are always aligned.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        groups = weights, workload.make_inputs(0), workload.make_state(0)
        w, x, s = (fake.on_device(tensors) for tensors in groups)
        code = compile_step(workload, (w, x, s), mode, **OFFLINE_CONFIG)
        return record_code(workload.step, code, (w, x, s), "fake").trace


def record_code(
    step: Step, code: CompiledStep, tensors: tuple[Tensors, Tensors, Tensors], recorded_on: str = "cpu"
) -> Recording:
    weights, inputs, state = tensors
    ledger = Ledger(recorded_on)
    ledger.declare(BufferKind.WEIGHT, weights)
    ledger.declare(BufferKind.INPUT, inputs)
    ledger.declare(BufferKind.STATE, state)

    def see(seen: OwnLaunch) -> None:
        ledger.launch(ledger.kernel_launch(seen))

    @contextlib.contextmanager
    def enter(constants: Sequence[torch.Tensor]) -> Iterator[None]:
        for constant in constants:
            ledger.declare_constant(constant)
        with inductor_launches(see), ExternCalls(ledger):
            yield

    outputs = code.run(weights, inputs, state, enter)
    trace = scoped(ledger.trace(step, outputs))
    verify(trace)
    return Recording(trace, code)


class ExternCalls(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Hides this mode from Dynamo."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        check_operator(func, args, kwargs, lambda value: isinstance(value, torch.Tensor))
        named = tuple((name, self._ledger.arg(value)) for name, value in kwargs.items())
        recorded = tuple(map(self._ledger.arg, args)), named
        result = func(*args, **kwargs)
        if func._schema.name in ALLOCATORS:  # memory that no launch has written
            self._ledger.view(result)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            generator = generator_of(func, args, kwargs)
            self._ledger.launch(self._ledger.operator(func, recorded, results, generator))
        return result


def scoped(trace: Trace) -> Trace:
    readers = Counter(b for launch in trace.launches for b in {a.buffer for a in launch.accesses})
    scope, launches = "", []
    for launch in trace.launches:
        buffers = [trace.buffers[a.buffer] for a in launch.accesses if readers[a.buffer] == 1]
        names = [b.name for b in buffers if b.kind is BufferKind.WEIGHT and not b.constant_hex]
        scope = names[0].rpartition(".")[0] if names else scope
        launches.append(replace(launch, scope=scope))
    return replace(trace, launches=tuple(launches))
