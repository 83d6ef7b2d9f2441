"""prepare_on_gpus: `planning.prepare` for GPUs of this machine, each with a worker process of its own.

Steps are captured from compiled code, so that they run at its speed. Launches are measured on real cards and
parts of one; on dilated devices they are priced by the cost model, and the run has a time scale (see
`execute.cuda.pace`): what is measured there is modelled time, dilated by that scale. The plan for
throughput is rehearsed against simpler ones, and the best of them is served by; see `replan`.

A large built-in model's random weights are made on the GPU, and are other numbers than the CPU would make;
workers of the same card are handed that very memory. Not handled: GPUs beside CPUs, and real cards beside
dilated ones.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from tessera import flow
from tessera.capture import Workload, known_models, place_of, record
from tessera.capture.inductor import record_inductor
from tessera.capture.record import PORTABLE
from tessera.capture.workload import on_device
from tessera.errors import PlanInfeasible, TesseraError
from tessera.execute import driver
from tessera.execute.cuda.graphs import Kernels
from tessera.execute.cuda.measure import measure, scale_of
from tessera.execute.stepper import Tensors
from tessera.ir import AWAY, Cluster, Costs, DeviceKind, Objective, Plan, Trace, WorkUnit
from tessera.profile.measured import combine
from tessera.serve.pages import steady
from tessera.serve.planning import Prepared, counts_of, kept_or_planned, key_of
from tessera.serve.records import ServeSpec
from tessera.serve.replan import best_served
from tessera.serve.steps import ServedModel, served, weight_bytes

# Plans that are rehearsed against the plan for throughput.
RIVALS = ("single-placement", "data-parallel", "layer-pipeline")
# Tokens of the largest step, and of the smallest: fewer cost as much, the reading of the weights.
MAX_BATCH_TOKENS, MIN_SIZE = 2048, 64
# Random weights of more than this are made on the GPU.
LARGE_BYTES = 2 << 30
PLACE = "--devices"


@dataclass(frozen=True)
class Still:
    """A request for measuring: every run of a step has the same inputs, and whatever state there is."""

    workloads: Sequence[Workload]

    def state(self) -> Tensors:
        return {}

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """Those of the step's example."""
        return self.workloads[step].make_inputs(0)


def check_gpus(cluster: Cluster) -> None:
    """Raises unless all devices are GPUs of this machine that keep one clock."""
    here = [d.name for d in cluster.devices if d.kind is DeviceKind.CUDA and d.ordinal != AWAY]
    if len(here) < len(cluster.devices):
        message = f"{', '.join(here)} cannot serve beside other devices"
        raise TesseraError(message, "Name GPUs of this machine only, or none of them.", PLACE)
    dilated = [d.name for d in cluster.devices if d.is_dilated]
    if dilated and len(dilated) < len(cluster.devices):
        remedy = "Dilate all devices or none."
        raise TesseraError(f"{', '.join(dilated)} keep other times than the rest", remedy, PLACE)


def prepare_on_gpus(
    model: str,
    cluster: Cluster,
    spec: ServeSpec,
    *,
    coarse: Sequence[str] = (),
    is_compiled: bool = True,
    kept: Path | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Prepared:
    """Plans a service on GPUs. `coarse`: coarser policies to plan for as well, such as data-parallel.

    `is_compiled`: steps that compute are captured from compiled code, else operator by operator.
    `kept`: where plans are kept between starts.
    """
    check_gpus(cluster)
    card = str(driver.card(cluster.devices[0].ordinal))
    room_bytes = [steady(spec.memory_share * room) for room in _room_bytes(cluster)]
    key = key_of(place_of(model), spec, cluster, room_bytes, tuple(coarse), is_compiled)

    def build() -> ServedModel:
        advance(f"building {model}")
        return _built(model, spec, card, room_bytes)

    def plan(made: ServedModel) -> Prepared:
        return _planned(made, cluster, spec, coarse, is_compiled, advance)

    return kept_or_planned(key, kept, build, plan)


def _planned(
    made: ServedModel,
    cluster: Cluster,
    spec: ServeSpec,
    coarse: Sequence[str],
    is_compiled: bool,
    advance: Callable[[str], None],
) -> Prepared:
    advance(f"capturing {len(made.workloads)} steps")
    begun_s = time.perf_counter()
    traces, kernels = _captured(made, is_compiled, len(cluster.devices) > 1)
    capture_s = time.perf_counter() - begun_s
    unit = flow.make_unit(traces, counts_of(made.shape, spec.average))
    still = Still(made.workloads)
    advance("pricing its launches")
    costs = _prices(unit, cluster, made.weights(), still, kernels)
    advance("planning")

    def planned(objective: Objective, policy: str | None = None) -> Plan:
        return flow.make_plan(unit, costs, cluster, objective, spec.microbatches, policy)

    def others(names: Sequence[str]) -> Iterator[Plan]:
        """Plans by name, of those that there are for this work."""
        for name in names:
            with suppress(PlanInfeasible):
                yield planned(Objective.THROUGHPUT, name)

    is_single = len(cluster.devices) == 1
    plans = tuple(planned(x) for x in (spec.policies[:1] if is_single else spec.policies))
    rehearsed: dict[str, float] = {}
    if not is_single and plans[0].objective is Objective.THROUGHPUT:
        advance("rehearsing")
        best, rehearsed = best_served((plans[0], *others(RIVALS)), made.shape, spec.average)
        plans = (best, *plans[1:])
    plans += tuple(others([name for name in coarse if name != plans[0].policy]))
    scale = scale_of(plans[0], made.weights(), still, kernels).factor
    torch.cuda.empty_cache()  # what was needed for capture and measurement is the workers'
    return Prepared(made, plans, scale, rehearsed, capture_s)


def _built(model: str, spec: ServeSpec, card: str, room_bytes: Sequence[float]) -> ServedModel:
    """The model on a card, with pages for what the devices have room for."""
    with _made_on(card, model, spec.seed):
        sizes = replace(spec, max_batch_tokens=spec.max_batch_tokens or MAX_BATCH_TOKENS)
        plain = served(model, sizes, min_size=MIN_SIZE, room_bytes=room_bytes, pool_bytes=float("inf"))
    if plain.encode is not None:
        raise TesseraError(
            "models that see are served on worker processes", "Name cpu or emu: devices.", PLACE
        )
    return replace(plain, workloads=tuple(blank(on_device(w, card)) for w in plain.workloads))


def _room_bytes(cluster: Cluster) -> list[float]:
    """Memory of each device; parts of a card share what is free of it."""
    found = []
    for device in cluster.devices:
        free = torch.cuda.mem_get_info(device.ordinal)[0]
        parts = sum(other.ordinal == device.ordinal for other in cluster.devices)
        found.append(float(min(device.memory_bytes, free / parts)))
    return found


def blank(workload: Workload) -> Workload:
    """The same step, whose state is zeros where its inputs are: nothing is made on the CPU and moved."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = next(iter(workload.make_inputs(0).values())).device
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes alone: what a state begins with may be real
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in workload.make_state(0).items()}

    def state(seed: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(s, dtype=d, device=device) for name, (s, d) in shapes.items()}

    return replace(workload, make_state=state)


def _captured(model: ServedModel, is_compiled: bool, portable: bool) -> tuple[list[Trace], Kernels]:
    """The steps' traces, and the compiled objects of those that were compiled."""
    traces: list[Trace] = []
    kernels: dict[int, Mapping[int, Any]] = {}
    for step, workload in enumerate(model.workloads):
        if not is_compiled:
            with sdpa_kernel(PORTABLE):
                traces.append(record(workload))
            continue
        recording = record_inductor(workload, portable)
        traces.append(recording.trace)
        kernels[step] = recording.relaunch
        torch.cuda.empty_cache()  # the next one has pages of its own, while it is captured
    return traces, kernels


def _prices(
    unit: WorkUnit, cluster: Cluster, weights: Tensors, still: Still, kernels: Kernels
) -> tuple[Costs, ...]:
    if any(device.is_dilated for device in cluster.devices):
        return tuple(combine(graph.trace, cluster.devices, {})[0] for graph in unit.graphs)
    return measure(unit, cluster, weights, still, kernels)[0]


@contextmanager
def _made_on(card: str, model: str, seed: int) -> Iterator[None]:
    """While entered, a large built-in model is made on the GPU; the GPU's own random numbers go on after."""
    if model not in known_models() or weight_bytes(model) <= LARGE_BYTES:
        yield
        return
    with torch.random.fork_rng(devices=[torch.device(card)]), torch.device(card):
        torch.cuda.manual_seed(seed)
        yield
