"""GpuBackend: builds, captures and prices steps on GPUs of this machine, one worker process each.

Steps are captured from compiled code, without weights where that is possible (`compiling`). Launches are
measured on real cards and parts of one; on dilated devices they are modelled, and measured times longer by a
scale (`execute.cuda.pace`).

Random weights of large built-in models come from the GPU and differ from those of a CPU. Not handled: real
cards beside dilated ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch.nn.attention import sdpa_kernel

from tessera.capture import Workload, known_models, place_of, record
from tessera.capture.inductor import record_inductor
from tessera.capture.offline import properties_of
from tessera.capture.record import PORTABLE
from tessera.capture.workload import on_device
from tessera.errors import CaptureError, TesseraError
from tessera.execute import driver
from tessera.execute.cuda.measure import measure, scale_of
from tessera.execute.stepper import Tensors
from tessera.ir import AWAY, Cluster, Costs, Plan, Trace, WorkUnit
from tessera.profile.measured import combine
from tessera.serve.compiling import CompileProcess
from tessera.serve.pages import steady
from tessera.serve.records import ServeSpec
from tessera.serve.steps import ServedModel, served, weight_bytes

# Smaller steps would cost the same: the weight reads.
MAX_BATCH_TOKENS, MIN_SIZE = 2048, 64
LARGE_BYTES = 2 << 30
PLACE = "--devices"


@dataclass(frozen=True)
class ExampleRequest:
    """A request for measuring: every step gets the example inputs."""

    workloads: Sequence[Workload]

    def state(self) -> Tensors:
        return {}

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        return self.workloads[step].make_inputs(0)


def check_gpus(cluster: Cluster) -> None:
    away = [d.name for d in cluster.devices if d.ordinal == AWAY]
    if away:
        message = f"{', '.join(away)} cannot serve beside GPUs of this machine"
        raise TesseraError(message, "Name GPUs of this machine only, or none of them.", PLACE)
    dilated = [d.name for d in cluster.devices if d.is_dilated]
    if dilated and len(dilated) < len(cluster.devices):
        remedy = "Dilate all devices or none."
        raise TesseraError(
            f"dilated devices ({', '.join(dilated)}) cannot serve beside others", remedy, PLACE
        )


@dataclass(frozen=True)
class GpuBackend:
    cluster: Cluster
    spec: ServeSpec
    is_compiled: bool = True
    # Captures beside `build`; one at most.
    processes: list[CompileProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_gpus(self.cluster)

    @cached_property
    def memory_bytes(self) -> Sequence[float]:
        return [steady(self.spec.memory_share * room) for room in _room_bytes(self.cluster)]

    def build(self, model: str) -> ServedModel:
        card = str(driver.card(self.cluster.devices[0].ordinal))
        with built_on(card, model, self.spec.seed, Path(place_of(model)).is_dir()):
            plain = self._served(model)()
        placed = self.placed(plain)
        torch.cuda.empty_cache()  # for the workers
        return placed

    def _served(self, model: str) -> Callable[[], ServedModel]:
        spec, room_bytes = self.spec.sized(MAX_BATCH_TOKENS), tuple(self.memory_bytes)
        return partial(served, model, spec, min_size=MIN_SIZE, room_bytes=room_bytes, pool_bytes=float("inf"))

    def placed(self, model: ServedModel) -> ServedModel:
        card = str(driver.card(self.cluster.devices[0].ordinal))
        return replace(model, workloads=tuple(with_zero_state(on_device(w, card)) for w in model.workloads))

    def begin(self, model: str, is_early: bool) -> None:
        if self.is_compiled:
            card = properties_of(driver.card(self.cluster.devices[0].ordinal).index)
            self.processes.append(CompileProcess(self._served(model), card, is_early))

    def capture(self, model: ServedModel, advance: Callable[[str], None]) -> list[Trace]:
        steps = [workload.step for workload in model.workloads]
        while self.processes:
            with closing(self.processes.pop()) as process:
                try:
                    if model.shape.is_flat:
                        process.begin(steps)
                        _initialise(model)
                        return process.traces(steps, model.weights(), advance)
                except CaptureError as error:
                    advance(f"capturing steps on the GPU ({error.message})")
        traces = []
        for workload in model.workloads:
            if self.is_compiled:
                traces.append(record_inductor(workload, len(self.cluster.devices) > 1).trace)
                torch.cuda.empty_cache()
            else:
                with sdpa_kernel(PORTABLE):
                    traces.append(record(workload))
        return traces

    def price(self, unit: WorkUnit, model: ServedModel, advance: object) -> tuple[Costs, ...]:
        if any(device.is_dilated for device in self.cluster.devices):
            return tuple(combine(graph.trace, self.cluster.devices, {})[0] for graph in unit.graphs)
        return measure(unit, self.cluster, model.weights(), ExampleRequest(model.workloads))[0]

    def scale(self, plan: Plan, model: ServedModel) -> float:
        factor = scale_of(plan, model.weights(), ExampleRequest(model.workloads)).factor
        torch.cuda.empty_cache()  # for the workers
        return factor


def _room_bytes(cluster: Cluster) -> list[float]:
    """Free memory by device; parts of a card share it."""
    room_bytes = []
    for device in cluster.devices:
        free = torch.cuda.mem_get_info(device.ordinal)[0]
        parts = sum(other.ordinal == device.ordinal for other in cluster.devices)
        room_bytes.append(float(min(device.memory_bytes, free / parts)))
    return room_bytes


def _initialise(model: ServedModel) -> None:
    """Runs the steps once, to start libraries and compile kernels of operators."""
    for workload in model.workloads:
        with suppress(RuntimeError):  # of memory: they start when the steps are priced
            workload.run(workload.make_inputs(0), workload.make_state(0))
        torch.cuda.empty_cache()


def with_zero_state(workload: Workload) -> Workload:
    """Zero state on the inputs' device, to avoid CPU copies."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = next(iter(workload.make_inputs(0).values())).device
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes only: the initial state may be real
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in workload.make_state(0).items()}

    def state(seed: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(s, dtype=d, device=device) for name, (s, d) in shapes.items()}

    return replace(workload, make_state=state)


@contextmanager
def built_on(card: str, model: str, seed: int, always: bool = False) -> Iterator[None]:
    """Large built-in models (`always`: any) are built on the GPU; its random state is restored after."""
    if not always and (model not in known_models() or weight_bytes(model) <= LARGE_BYTES):
        yield
        return
    with torch.random.fork_rng(devices=[torch.device(card)]), torch.device(card):
        torch.cuda.manual_seed(seed)
        yield
