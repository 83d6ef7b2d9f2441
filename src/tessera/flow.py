"""Combinations of stages that several commands share."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from tessera import ir
from tessera.analyze import build_graph
from tessera.capture import Workload, build, outlines, record_step
from tessera.capture.function import KIND
from tessera.errors import MismatchError, TesseraError, UnknownName, first_line, install_line
from tessera.execute.timing import CpuTimer, threads
from tessera.ir import units
from tessera.ir.graph import StepFamily, check_counts, check_steps
from tessera.plan import Comparison, PlanConfig, solve
from tessera.plan.batches import BATCHES, BatchSearch, PricedUnit
from tessera.profile.measured import Timer, combine, needs_measuring
from tessera.simulate import SteadyRates

if TYPE_CHECKING:
    from tessera.execute.link_times import TransferTimes

Tensors = Mapping[str, torch.Tensor]
# (step, inputs, the state that it changes) -> outputs.
RunStep = Callable[[int, Tensors, dict[str, torch.Tensor]], dict[str, torch.Tensor]]

# Batches at which a step is recorded. Sizes far apart may compile to other launches: where the first two
# differ, the next two are taken.
ANCHORS = (16, 48, 64, 128)
MAX_BUILT_BYTES = 4 << 30


def make_unit(traces: Sequence[ir.Trace], counts: Sequence[int] | None = None) -> ir.WorkUnit:
    check_steps(traces)
    counts = tuple(counts or default_counts(traces))
    check_counts(counts, len(traces))
    unit = ir.WorkUnit(tuple(build_graph(trace) for trace in traces), counts)
    check_joined(unit.graphs)
    ir.verify(unit)
    return unit


def default_counts(traces: Sequence[ir.Trace]) -> tuple[int, ...]:
    """A decode runs once per token that its prefill reserved."""
    reserve = max((trace.step.reserve for trace in traces if trace.step.kind == "prefill"), default=0)
    return tuple(max(1, reserve) if trace.step.kind == "decode" else 1 for trace in traces)


def check_joined(graphs: Sequence[ir.Graph]) -> None:
    """State of the same name, and what an encode returns and another step reads, has one size."""
    sizes: dict[str, tuple[int, str]] = {}
    for graph in graphs:
        kind, trace = graph.trace.step.kind, graph.trace
        # A served step has parts of pictures, of many sequences.
        read = () if kind == "tokens" else sizes.keys()
        for buffer in (b for b in trace.buffers if b.name in read or b.name in graph.states):
            size, first_kind = sizes.setdefault(buffer.name, (buffer.size_bytes, kind))
            if size != buffer.size_bytes:
                raise MismatchError(
                    f"'{buffer.name}' has {size} bytes in {first_kind} and {buffer.size_bytes} in {kind}",
                    "Capture all with one batch, encode and decode with the prefill's context + reserve.",
                )
        for name, view in trace.outputs if kind == "encode" else ():
            sizes[name] = (view.num_elements * ir.trace.item_bytes(view.dtype), kind)


def price(unit: ir.WorkUnit, cluster: ir.Cluster) -> tuple[ir.Costs, ...]:
    check_modelled(cluster)
    return tuple(combine(graph.trace, cluster.devices, {})[0] for graph in unit.graphs)


def check_modelled(cluster: ir.Cluster) -> None:
    for device in cluster.devices:
        if needs_measuring(device):
            remedy = "Measure it with `tessera profile TRACE --devices ...`, and plan with --costs."
            raise TesseraError(f"{device.name} has no cost model and must be measured", remedy, "--devices")


def make_plan(
    unit: ir.WorkUnit, costs: Sequence[ir.Costs], cluster: ir.Cluster, config: PlanConfig
) -> ir.Plan:
    """Candidates are judged by simulated rates."""
    return solve(unit, tuple(costs), cluster, config, SteadyRates(config.search.long_window))


def record_compiled(step: ir.Step, make: Callable[[ir.Step], Workload] = build) -> ir.Trace:
    from tessera.capture.inductor import record_inductor_offline

    with torch.device("meta"):  # no memory for weights
        workload = make(step)
    return record_inductor_offline(workload)


def choose_launches(steps: Sequence[ir.Step], launches: str) -> tuple[bool, str]:
    """(whether launches are compiled, one line why not). Only "compiled" compiles: it takes a minute."""
    if launches == "eager":
        return False, ""
    if all(outlines.find(step) for step in steps):
        return True, ""
    if not outlines.can_compile():
        return (
            False,
            f"Triton is not installed, so launches are eager ones. Install it: {install_line('gpu')}",
        )
    if launches == "compiled":
        return True, ""
    return False, "Launches are eager ones; --launches compiled makes compiled ones, and keeps them."


@dataclass(eq=False)
class LoadSteps:
    """Steps of a load, recorded at the batches of `anchors` and interpolated at others."""

    steps: Sequence[ir.Step]
    counts: Sequence[int]
    anchors: Sequence[int] = ANCHORS
    advance: Callable[[str], None] = lambda text: None
    is_compiled: bool = False
    # None: without a GPU.
    record: Callable[[ir.Step], ir.Trace] | None = None

    def __post_init__(self) -> None:
        # [number of the step, batch]
        self._recordings: dict[tuple[int, int], ir.Graph] = {}
        self._interpolated: dict[tuple[int, int], ir.Graph] = {}
        self.families = [self._family(n) for n in range(len(self.steps))]
        make_unit([graph.trace for graph in self.at(self.anchors[0]).graphs], self.counts)  # checks

    def _family(self, number: int) -> StepFamily:
        step = self.steps[number]
        first = anchors_of(step, self.anchors)[0] if self.is_compiled else 0
        for pair in pairwise(batch for batch in self.anchors if batch >= first):
            family = StepFamily(tuple(self._recorded(number, batch) for batch in pair))
            with suppress(MismatchError):  # else the next
                family.at(replace(step, batch=sum(pair)))
                break
        return family

    def _recorded(self, number: int, batch: int) -> ir.Graph:
        if (number, batch) not in self._recordings:
            self.advance(f"{'compiling' if self.is_compiled else 'recording'} batch {batch}")
            self._recordings[number, batch] = build_graph(self._trace(self.steps[number], batch))
        return self._recordings[number, batch]

    def _trace(self, step: ir.Step, batch: int) -> ir.Trace:
        sized = replace(step, batch=batch)
        if self.is_compiled:
            return outlines.find_or_make(sized, record_compiled)
        if self.record is not None:
            return self.record(sized)
        return record_step(sized, "fake", is_compared=batch != self.anchors[0])  # with the first

    def at(self, batch: int) -> ir.WorkUnit:
        return ir.WorkUnit(tuple(self._graph(n, batch) for n in range(len(self.steps))), tuple(self.counts))

    def _graph(self, number: int, batch: int) -> ir.Graph:
        key = number, batch
        if key in self._recordings:
            return self._recordings[key]
        if key not in self._interpolated:
            self._interpolated[key] = self.families[number].at(replace(self.steps[number], batch=batch))
        return self._interpolated[key]

    def matches_recording(self, unit: ir.WorkUnit) -> bool:
        """A recording that differs is used from now on. Compiled launches are not compared."""
        if self.is_compiled:
            return True
        recorded = (self._recorded(n, graph.trace.step.batch) for n, graph in enumerate(unit.graphs))
        return unit.graphs == tuple(recorded)


def at_anchors(steps: Sequence[ir.Step]) -> list[ir.Step]:
    return [replace(step, batch=batch) for step in steps for batch in anchors_of(step)]


def anchors_of(step: ir.Step, anchors: Sequence[int] = ANCHORS) -> tuple[int, int]:
    pairs = list(pairwise(anchors))
    kept = (pair for pair in pairs if all(outlines.find(replace(step, batch=batch)) for batch in pair))
    return next(kept, pairs[0])


def batch_search(
    recorded: LoadSteps,
    cluster: ir.Cluster,
    load: ir.Load,
    config: PlanConfig,
    advance: Callable[[str], None] = lambda text: None,
) -> BatchSearch:
    @cache
    def unit_at(batch: int) -> PricedUnit:
        unit = recorded.at(batch)
        return unit, price(unit, cluster)

    simulate = partial(SteadyRates, config.search.long_window)
    return BatchSearch(unit_at, cluster, load, config, simulate, advance)


def plan_steps(
    recorded: LoadSteps,
    cluster: ir.Cluster,
    load: ir.Load,
    config: PlanConfig,
    batches: Sequence[int] = BATCHES,
    depths: Sequence[int] = (),
    advance: Callable[[str], None] = lambda text: None,
) -> tuple[ir.Plan, Comparison]:
    while True:
        plan, comparison = batch_search(recorded, cluster, load, config, advance).best(batches, depths)
        if recorded.matches_recording(plan.unit):
            return plan, comparison


def workload_of(trace: ir.Trace) -> Workload:
    try:
        return build(trace.step).drawing(trace)
    except UnknownName as error:
        if trace.step.kind != KIND:
            raise
        raise MismatchError(
            f"'{trace.step.model}' was captured in a program, so the model itself cannot be called from here",
            "Capture it with `tessera capture module:callable`, or use torch.compile(backend='tessera').",
        ) from error


@dataclass(frozen=True)
class UnitRequest:
    workloads: Sequence[Workload]
    first: Tensors
    seed: int

    def state(self) -> Tensors:
        """The first step's value where several share a name."""
        return {
            name: tensor
            for workload in reversed(self.workloads)
            for name, tensor in workload.make_state(self.seed).items()
        }

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        return self.first if step == run == 0 else self.workloads[step].follow(self.first, run, last)

    def run(self, step: int, inputs: Tensors, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.workloads[step].run(inputs, state)


@dataclass(frozen=True)
class Requests:
    weights: Tensors
    work: Sequence[UnitRequest]
    inputs: str


def requests_of(plan: ir.Plan, num: int, is_fresh: bool = False) -> Requests:
    """`is_fresh`: requests after the first get random values even if the model has an example."""
    steps = [workload_of(graph.trace) for graph in plan.unit.graphs]  # one model: they share weights
    weights, inputs = steps[0].weights(), "as the model makes them"
    if is_fresh:
        varied = [workload.varied() for workload in steps]
        steps, inputs = [workload for workload, _ in varied], varied[0][1]
    work = [UnitRequest(steps, steps[0].make_inputs(seed), seed) for seed in range(num)]
    return Requests(weights, work, inputs)


@dataclass(frozen=True)
class ReferenceRun:
    outputs: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


@threads(1)
def run_reference(unit: ir.WorkUnit, request: UnitRequest, run: RunStep | None = None) -> ReferenceRun:
    """On one thread, as in workers; by default the model's own code. State is that of the last step."""
    state = {name: tensor.clone() for name, tensor in request.state().items()}
    outputs: list[dict[str, torch.Tensor]] = []
    for step, count in enumerate(unit.counts):
        for number in range(count):
            inputs = request.inputs(step, number, outputs[-1] if outputs else {})
            outputs.append((run or request.run)(step, inputs, state))
    last = [buffer for graph in unit.graphs[-1:] for buffer in graph.trace.buffers]
    kept = {buffer.name for buffer in last if buffer.kind is ir.BufferKind.STATE}
    return ReferenceRun(outputs, {name: tensor for name, tensor in state.items() if name in kept})


def make_timer(trace: ir.Trace, device: ir.Device, stream: Any = None) -> Timer:
    tensors = partial(_tensors_of, trace, device)
    if device.kind is ir.DeviceKind.CPU:
        return CpuTimer(trace, tensors, max(1, device.num_cores))
    from tessera.execute.cuda.timing import CudaTimer

    return CudaTimer(trace, device.ordinal, tensors, stream, device.num_sms)


def _tensors_of(trace: ir.Trace, device: ir.Device) -> tuple[Tensors | None, tuple[str, ...]]:
    """None and the reason if the model cannot be built there."""
    size = trace.bytes_of(ir.BufferKind.WEIGHT, ir.BufferKind.STATE)
    where = "cpu" if device.kind is ir.DeviceKind.CPU else f"cuda:{device.ordinal}"
    limit = min(device.memory_bytes, MAX_BUILT_BYTES) if where == "cpu" else device.memory_bytes
    try:
        if size > limit:
            raise TesseraError(f"the model has {units.size(size)}")
        with torch.device(where), torch.no_grad():
            workload = build(trace.step).drawing(trace)
        workload.module.to(where)
        tensors = {**workload.weights(), **workload.make_inputs(0), **workload.make_state(0)}
        generators = {b.name for b in trace.buffers if b.is_generator}  # their state is the host's
        return {name: t if name in generators else t.to(where) for name, t in tensors.items()}, ()
    except (TesseraError, torch.OutOfMemoryError) as error:
        why = first_line(error)
        return None, (f"{device.name}: random tensors were timed, the model cannot be built: {why}",)


def partition_streams(devices: Sequence[ir.Device]) -> dict[str, Any]:
    """Streams live as long as the process."""
    streams: dict[str, Any] = {}
    for ordinal in sorted({d.ordinal for d in devices if d.num_sms}):
        from tessera.execute.cuda.device import cut

        partitions = [d for d in devices if d.num_sms and d.ordinal == ordinal]
        parts = cut(ordinal, [d.num_sms for d in partitions])
        streams |= {d.name: part.stream() for d, part in zip(partitions, parts, strict=True)}
    return streams


def time_fetches(src: ir.Device, dst: ir.Device) -> tuple[float, float]:
    """GB/s and slowdown (see `Link`) where a GPU fetches from a CPU's memory."""
    from tessera.execute import link_times

    if (src.kind, dst.kind) != (ir.DeviceKind.CPU, ir.DeviceKind.CUDA):
        return 0.0, 1.0
    return link_times.time_fetches(dst.ordinal, max(1, src.num_cores))


def time_link(
    a: ir.Device, b: ir.Device, sizes: Sequence[int], transport: str
) -> tuple[str, "TransferTimes"]:
    from tessera.execute.link_times import time_transfers
    from tessera.execute.transport import resolve

    name = resolve(transport, (a, b), is_local=True)
    return name, time_transfers(a, b, name, sizes, build_graph)
