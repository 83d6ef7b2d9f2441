"""prepare: plans for serving a model on devices: captured, priced, planned and checked, not started.

Imports that capture and plan are local: a start from kept plans needs none of them. A `StepBackend` builds,
captures and prices steps: on this machine's CPU here, on GPUs in `gpu`.

The work unit of serving is what a microbatch does for `rows` average requests: the largest step as often as
their prompts need it, the step of one token per row as often as an answer has tokens, every other size once.
Vision models get one picture per request. Every state has one home in all steps (`WorkUnit.is_served`). There
is one plan per policy over the same unit and costs; one device gets only the first.

Plans are kept under `$XDG_CACHE_HOME/tessera/plans`, in a folder named by a hash of everything they depend
on: this package's code, library versions, the model's files, sizes, devices and page memory. Unreadable
folders are replaced; unwritable ones are not used; the newest `MAX_KEPT` stay. A small model's weights are
kept too, so that it starts without the libraries that build it.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

import tessera
from tessera.adapt.replan import Replanner
from tessera.capture import place_of, record
from tessera.capture.models.checkpoint import blamed_for_run
from tessera.errors import DeviceMemoryError, PlanInfeasible, TesseraError, UnknownName
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.execute.processes import FORKSERVER, warm_up
from tessera.execute.worker_stepper import MakeHub, WorkerStepper
from tessera.ir import AWAY, Cluster, Costs, DeviceKind, Objective, Plan, Trace, WorkUnit, load, save
from tessera.ir.files import cache_folder
from tessera.serve.pages import modest_bytes
from tessera.serve.records import POLICIES, Average, ServeSpec, Shape, step_name

if TYPE_CHECKING:
    from tessera.plan import SearchConfig
    from tessera.serve.sight import Eyes, Sight
    from tessera.serve.steps import ServedModel

Listener = Callable[[str], None]
# Maximum weights of a model computed on this CPU.
MAX_BYTES = 4 << 30
# A step that takes longer than this is taken for hung.
STEP_TIMEOUT_S = 60.0
# Service policy -> objectives to plan for; with "auto" the monitor switches between both.
OBJECTIVES = {"auto": POLICIES, "throughput": POLICIES[:1], "latency": POLICIES[1:]}
# Simpler policies that the throughput plan is rehearsed against.
RIVALS = ("single-placement", "data-parallel", "layer-pipeline")
MAX_KEPT = 32
# Maximum bytes of kept weights.
MAX_WEIGHT_BYTES = 64 << 20
# Libraries that captured steps and costs depend on.
PACKAGES = ("torch", "transformers", "triton", "aiconfigurator-core")
_MORE, _WEIGHTS = "more.json", "weights.pt"
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, pickle.UnpicklingError, TesseraError,
    msgspec.MsgspecError,
)  # fmt: skip


def objectives_of(policy: str) -> tuple[Objective, ...]:
    if policy not in OBJECTIVES:
        raise UnknownName("policy", policy, OBJECTIVES)
    return OBJECTIVES[policy]


@dataclass(frozen=True)
class KeptModel:
    """What a service needs of a small model, kept from an earlier start in place of `ServedModel`."""

    shape: Shape
    state_bytes: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: "ServedModel | KeptModel") -> "KeptModel | None":
        weights = model.weights()
        if sum(tensor.nbytes for tensor in weights.values()) > MAX_WEIGHT_BYTES or model.senses():
            return None
        return cls(model.shape, model.state_bytes, weights)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def senses(self) -> "tuple[Sight, Eyes] | None":
        return None


@dataclass(frozen=True)
class Prepared:
    """A model and its plans, which share one cluster, unit and costs."""

    model: "ServedModel | KeptModel"
    plans: tuple[Plan, ...]
    # Measured time = modelled time x scale; 1 where no device is dilated.
    scale: float = 1.0
    # Policy -> modelled tokens/s when served, where rehearsed.
    rehearsed: Mapping[str, float] = field(default_factory=dict)
    # Capture time.
    capture_s: float = 0.0

    def workers(self, transport: str = "auto", hub: MakeHub | None = None) -> WorkerStepper:
        return WorkerStepper(
            self.plans,
            self.model.weights(),
            microbatches=self.model.shape.microbatches,
            transport=transport,
            timeout_s=STEP_TIMEOUT_S,
            method=FORKSERVER,
            hub=hub,
            scale=self.scale,
        )

    def replanner(self, effort: str = "full") -> Replanner:
        """Replans with the same settings; compares plans by rehearsal (latency: one client)."""
        from tessera.serve.rehearse import rehearse

        shape, half = self.model.shape, self.model.shape.capacity // 2
        average = Average(min(Average().prompt, half), min(Average().output, half))

        def make(plan: Plan, cluster: Cluster, costs: tuple[Costs, ...]) -> Plan:
            from tessera.plan import search_config

            return plan_policies(shape, cluster, plan.unit, costs, (plan.objective,), search_config(effort))[
                0
            ]

        def gain(old: Plan, new: Plan) -> float:
            clients = 1 if old.objective is Objective.LATENCY else None
            before, after = rehearse([old, new], shape, average, clients)
            return after / before

        return Replanner(make, gain)


class StepBackend(Protocol):
    # True if the throughput plan is rehearsed against `RIVALS`.
    rehearses: bool

    @property
    def memory_bytes(self) -> Sequence[float]:
        """Memory given to weights and pages; kept plans depend on it."""

    def build(self, model: str, spec: ServeSpec) -> "ServedModel": ...

    def capture(self, model: "ServedModel") -> list[Trace]: ...

    def price(self, unit: WorkUnit, model: "ServedModel", advance: Listener) -> tuple[Costs, ...]: ...

    def scale(self, plan: Plan, model: "ServedModel") -> float:
        """Measured time over modelled time."""


@dataclass(frozen=True)
class CpuBackend:
    cluster: Cluster
    microbatches: int
    store: Path | None = None
    rehearses = False

    @cached_property
    def memory_bytes(self) -> Sequence[float]:
        return (modest_bytes(self.microbatches),)

    def build(self, model: str, spec: ServeSpec) -> "ServedModel":
        from tessera.serve.steps import for_cpu, served

        room_bytes = [spec.memory_share * device.memory_bytes for device in self.cluster.devices]
        (pool_bytes,) = self.memory_bytes
        with blamed_for_run(model):
            return for_cpu(
                served(model, spec, max_bytes=MAX_BYTES, room_bytes=room_bytes, pool_bytes=pool_bytes)
            )

    def capture(self, model: "ServedModel") -> list[Trace]:
        with blamed_for_run(model.model):
            return [record(workload) for workload in model.workloads]

    def price(self, unit: WorkUnit, model: "ServedModel", advance: Listener) -> tuple[Costs, ...]:
        from tessera import flow
        from tessera.profile.measured import combine, measure, needs_measuring
        from tessera.profile.store import Clocks, Store, default_store

        @cache
        def warn(what: str) -> None:
            print(f"warning: {what}; measurements are not kept for the next start", file=sys.stderr)

        store = partial(Store, self.store or default_store(), clocks=Clocks.ANY, spare=warn)

        def price(trace: Trace) -> Costs:
            measured = {}
            for device in self.cluster.devices:
                if needs_measuring(device):
                    advance(f"measuring {step_name(trace.step)} on {device.name}")
                    timer = flow.make_timer(trace, device)
                    measured[device.name] = measure(trace, device, timer, store, lambda what: None)
            return combine(trace, self.cluster.devices, measured)[0]

        return tuple(price(graph.trace) for graph in unit.graphs)

    def scale(self, plan: Plan, model: "ServedModel") -> float:
        return 1.0


def prepare(
    model: str,
    cluster: Cluster,
    spec: ServeSpec,
    *,
    store: Path | None = None,
    kept: Path | None = None,
    coarse: Sequence[str] = (),
    is_compiled: bool = True,
    advance: Listener = lambda what: None,
) -> Prepared:
    """Plan a service.

    store        measurement store
    kept         folder of kept plans; None: always plan
    coarse       simpler policies to plan as well, such as data-parallel
    is_compiled  capture GPU steps from compiled code, else operator by operator
    advance      progress callback, one line per stage
    """
    backend: StepBackend
    if any(d.kind is DeviceKind.CUDA and d.ordinal != AWAY for d in cluster.devices):
        from tessera.serve.gpu import GpuBackend

        backend = GpuBackend(cluster, spec, is_compiled)
    else:
        warm_up()  # in parallel with capture and planning
        backend = CpuBackend(cluster, spec.microbatches, store)

    def build() -> "ServedModel":
        advance(f"building {model}")
        return backend.build(model, spec)

    def plan() -> Prepared:
        return _plan(build(), cluster, spec, backend, coarse, advance)

    if kept is None:
        return plan()
    key = key_of(place_of(model), spec, cluster, tuple(backend.memory_bytes), tuple(coarse), is_compiled)
    prepared = find(key, kept, build)
    if prepared is None:
        prepared = plan()
        keep(key, prepared, kept)
    return prepared


def _plan(
    model: "ServedModel",
    cluster: Cluster,
    spec: ServeSpec,
    backend: StepBackend,
    coarse: Sequence[str],
    advance: Listener,
) -> Prepared:
    from tessera import flow
    from tessera.plan import search_config
    from tessera.serve.rehearse import best_served

    search = search_config(spec.effort)
    advance(f"capturing {len(model.workloads)} steps")
    begun_s = time.perf_counter()
    traces = backend.capture(model)
    capture_s = time.perf_counter() - begun_s
    unit = flow.make_unit(traces, counts_of(model.shape, spec.average, model.encode is not None))
    advance("pricing its launches")
    costs = backend.price(unit, model, advance)
    advance("planning")
    is_single = len(cluster.devices) == 1
    plans = plan_policies(
        model.shape, cluster, unit, costs, spec.policies[:1] if is_single else spec.policies, search
    )

    def others(names: Sequence[str]) -> Iterator[Plan]:
        for name in names:
            with contextlib.suppress(PlanInfeasible):
                yield flow.make_plan(
                    unit, costs, cluster, Objective.THROUGHPUT, spec.microbatches, name, search=search
                )

    rehearsed: dict[str, float] = {}
    if backend.rehearses and not is_single and plans[0].objective is Objective.THROUGHPUT:
        advance("rehearsing")
        best, rehearsed = best_served((plans[0], *others(RIVALS)), model.shape, spec.average)
        plans = (best, *plans[1:])
    plans += tuple(others([name for name in coarse if name != plans[0].policy]))
    return Prepared(model, plans, backend.scale(plans[0], model), rehearsed, capture_s)


def counts_of(shape: Shape, average: Average, sees: bool = False) -> tuple[int, ...]:
    """How often each step runs for `rows` average requests."""
    counts = dict.fromkeys(shape.sizes, 1)
    answers = next(size for size in shape.sizes if size >= shape.rows)
    counts[answers] = max(1, average.output - 1)
    prompt = min(average.prompt, shape.capacity)
    if shape.is_flat:
        counts[shape.sizes[-1]] = -(-shape.rows * prompt // shape.sizes[-1])
    else:
        for size in reversed(shape.part_sizes):
            num = min(1, prompt // size) if shape.is_first_only else prompt // size
            counts[size] = max(1, shape.rows * num)
            prompt -= num * size
            if num and shape.is_first_only:
                break
        counts[answers] += prompt
    return (*([shape.rows] if sees else []), *counts.values())


def plan_policies(
    shape: Shape,
    cluster: Cluster,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    policies: tuple[Objective, ...],
    search: "SearchConfig",
) -> tuple[Plan, ...]:
    from tessera import flow

    try:
        plans = tuple(
            flow.make_plan(unit, costs, cluster, x, shape.microbatches, search=search) for x in policies
        )
        check_fits(plans, footprints(plans, [ready_programs(plan) for plan in plans]))
    except (PlanInfeasible, DeviceMemoryError) as error:
        now = f"now {shape.microbatches}, {shape.rows}, {shape.capacity} and {shape.sizes[-1]}"
        remedy = (
            f"Lower --microbatches, --seqs, --max-model-len or --max-batch-tokens ({now}), or add a device."
        )
        raise type(error)(error.message, remedy, error.place) from error
    return plans


def default_folder() -> Path:
    return cache_folder("plans")


def key_of(place: str, *given: object) -> str:
    """Name of kept plans: a hash of the model (a built-in name or a folder) and `repr` of the settings."""
    digest = hashlib.sha256(repr((_code(), _versions(), place, given)).encode())
    folder = Path(place)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):  # deleted meanwhile
                stamp = path.stat()
                digest.update(repr((path.name, stamp.st_size, stamp.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


class _More(msgspec.Struct):
    num_plans: int
    scale: float
    rehearsed: dict[str, float]
    # Only for a kept model.
    shape: Shape | None
    state_bytes: int


def find(key: str, folder: Path, build: Callable[[], "ServedModel"]) -> Prepared | None:
    own = folder / key
    try:
        more = msgspec.json.decode((own / _MORE).read_bytes(), type=_More)
        plans = tuple(load(Plan, own / f"{n}.plan") for n in range(more.num_plans))
        model = None
        if more.shape is not None:
            weights = torch.load(own / _WEIGHTS, weights_only=True)
            model = KeptModel(more.shape, more.state_bytes, weights)
        os.utime(own)
    except _UNREADABLE:
        return None
    return Prepared(model or build(), plans, more.scale, more.rehearsed)


def keep(key: str, found: Prepared, folder: Path) -> None:
    """Keep plans under this name atomically; failures are reported on standard error."""
    model = KeptModel.of(found.model)
    kept = (None, 0) if model is None else (model.shape, model.state_bytes)
    more = _More(len(found.plans), found.scale, dict(found.rehearsed), *kept)
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        for number, plan in enumerate(found.plans):
            save(plan, part / f"{number}.plan")
        if model is not None:
            torch.save(dict(model.tensors), part / _WEIGHTS)
        (part / _MORE).write_bytes(msgspec.json.encode(more))
        shutil.rmtree(folder / key, ignore_errors=True)
        part.rename(folder / key)
    except (OSError, RuntimeError, TesseraError) as error:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        why = getattr(error, "message", None) or getattr(error, "strerror", None) or error
        print(f"warning: {folder}: {why}; plans are not kept for the next start", file=sys.stderr)
        return
    _drop_old(folder)


def _drop_old(folder: Path) -> None:
    with contextlib.suppress(OSError):
        own = [path for path in folder.iterdir() if not path.name.startswith(".")]
        for path in sorted(own, key=lambda p: p.stat().st_mtime, reverse=True)[MAX_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


@cache
def _code() -> str:
    root = Path(tessera.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> Sequence[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(name)
    return found
