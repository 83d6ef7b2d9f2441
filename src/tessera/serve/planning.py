"""prepare: plans for serving a model on devices: captured, priced, planned and checked, not started.

Capture and plan are imported late: a start from kept plans needs neither.

Plans are kept under `$XDG_CACHE_HOME/tessera/plans`, in a file named by a hash of everything they depend on
(`key_of`). A file with a changed byte is replaced. A small model's weights are kept too: it starts without
the libraries that build it.
"""

import contextlib
import hashlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch

import tessera
from tessera import ir
from tessera.capture import place_of, record, record_sizes
from tessera.capture.models.checkpoint import blamed_for_run
from tessera.errors import (
    CaptureError,
    DeviceMemoryError,
    MismatchError,
    PlanInfeasible,
    TesseraError,
    version_of,
)
from tessera.execute.lanes import num_microbatches
from tessera.execute.processes import FORKSERVER, warm_up
from tessera.execute.worker_stepper import MakeHub, WorkerStepper
from tessera.ir import units
from tessera.ir.files import cache_folder, chunks_of, parse, write_whole
from tessera.ir.host import memory_bytes
from tessera.serve.groups import plans_of
from tessera.serve.pages import modest_bytes, steady
from tessera.serve.records import AUTO, ServeSpec, Shape, step_name

if TYPE_CHECKING:
    from tessera.serve.gpu import GpuBackend
    from tessera.serve.policies import ServicePlanner
    from tessera.serve.steps import ServedModel

Listener = Callable[[str], None]
# Weights of a model computed on this CPU.
MAX_BYTES = 4 << 30
# A step that takes longer counts as hung.
STEP_TIMEOUT_S = 60.0
MAX_KEPT = 32
# Beside a host: pages' share of a GPU.
PAGES_SHARE, HOST_BATCH_TOKENS = 0.2, 512
# Steps on GPUs of other machines.
AWAY_BATCH_TOKENS, AWAY_MIN_SIZE = 2048, 64
MAX_WEIGHT_BYTES = 64 << 20
PACKAGES = ("torch", "transformers", "triton", "aiconfigurator-core", "pillow", "torchvision")
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, pickle.UnpicklingError, TesseraError,
    msgspec.MsgspecError,
)  # fmt: skip


@dataclass(frozen=True)
class KeptModel:
    """A small model of an earlier start, in place of `ServedModel`."""

    shape: Shape
    tensors: Mapping[str, torch.Tensor]
    # A model that takes pictures is not kept.
    picture_inputs: ClassVar[None] = None
    picture_reader: ClassVar[None] = None

    @classmethod
    def of(cls, model: "ServedModel | KeptModel") -> "KeptModel | None":
        weights = model.weights()
        if sum(tensor.nbytes for tensor in weights.values()) > MAX_WEIGHT_BYTES or model.picture_inputs:
            return None
        return cls(model.shape, weights)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)


@dataclass(frozen=True)
class Prepared:
    model: "ServedModel | KeptModel"
    policies: tuple[ir.ServicePlan, ...]
    # None: plans stay.
    planner: "ServicePlanner | None" = None
    # Measured time = modelled time x scale; 1 where no device is dilated.
    scale: float = 1.0
    capture_s: float = 0.0

    @property
    def plans(self) -> tuple[ir.Plan, ...]:
        return plans_of(self.policies)

    def workers(self, transport: str = "auto", hub: MakeHub | None = None) -> WorkerStepper:
        return WorkerStepper(
            self.plans,
            self.model.weights(),
            # Groups of two policies are open during a switch.
            microbatches=num_microbatches(self.plans),
            transport=transport,
            timeout_s=STEP_TIMEOUT_S,
            method=FORKSERVER,
            hub=hub,
            scale=self.scale,
        )


@dataclass(frozen=True)
class CpuBackend:
    cluster: ir.Cluster
    spec: ServeSpec
    # Longest measurement of a launch.
    launch_s = 0.25

    @cached_property
    def memory_bytes(self) -> Sequence[float]:
        return (min([modest_bytes(self.spec.microbatches), *self._page_bytes]),)

    @property
    def _page_bytes(self) -> list[float]:
        """Beside a host, pages have a share of each GPU, so that attention runs there."""
        cards = [d.memory_bytes for d in self.cluster.devices if not d.is_cpu]
        is_alone = len(cards) == len(self.cluster.devices)
        return [] if is_alone else [steady(PAGES_SHARE * size / self.spec.microbatches) for size in cards]

    def build(self, model: str) -> "ServedModel":
        from tessera.serve.steps import for_cpu, served

        room_bytes = [self.spec.memory_share * device.memory_bytes for device in self.cluster.devices]
        (pool_bytes,) = self.memory_bytes
        with blamed_for_run(model):
            plain = served(
                model, self.spec, max_bytes=MAX_BYTES, room_bytes=room_bytes, pool_bytes=pool_bytes
            )
            return for_cpu(plain)

    def placed(self, model: "ServedModel") -> "ServedModel":
        return model

    def begin(self, model: str, is_early: bool) -> None:
        """Starts what `capture` can do before the model is built; `is_early`: its own steps too."""

    def scale(self, plan: ir.Plan, model: "ServedModel") -> float:
        return 1.0

    def capture(self, model: "ServedModel", advance: Listener) -> list[ir.Trace]:
        from tessera.capture.divide import divided

        with blamed_for_run(model.model):
            traces = [record(workload) for workload in model.workloads]
        return divided(self.cluster, traces, dict(self.spec.expert_frequencies))

    def price(self, unit: ir.WorkUnit, model: "ServedModel", advance: Listener) -> tuple[ir.Costs, ...]:
        from tessera import flow
        from tessera.profile.measured import combine, measure, needs_measuring
        from tessera.profile.store import Store, default_store, until

        @cache
        def warn(what: str) -> None:
            print(f"warning: {what}; measurements are not kept for the next start", file=sys.stderr)

        store = partial(Store, default_store(), any_clock=True, warn=warn)

        def price(trace: ir.Trace) -> ir.Costs:
            measured = {}
            for device in self.cluster.devices:
                if needs_measuring(device):
                    advance(f"measuring {step_name(trace.step)} on {device.name}")
                    timer = flow.make_timer(trace, device)
                    enough, only = until(self.launch_s), self._only(trace, device)
                    measured[device.name] = measure(trace, device, timer, store, enough=enough, only=only)
            return combine(trace, self.cluster.devices, measured)[0]

        return tuple(price(graph.trace) for graph in unit.graphs)

    def _only(self, trace: ir.Trace, device: ir.Device) -> frozenset[int] | None:
        """Launches that a host may run for a GPU: those that read weights, and joins. None: all."""
        from tessera.capture.divide import JOINS, division_for

        if not device.is_cpu or division_for(self.cluster, [trace]) is None:
            return None
        weights = set(trace.buffers_of(ir.BufferKind.WEIGHT))
        return frozenset(
            number
            for number, launch in enumerate(trace.launches)
            if trace.kernel_of(number).name in JOINS or any(a.buffer in weights for a in launch.accesses)
        )


@dataclass(frozen=True)
class HostBackend(CpuBackend):
    """GPUs beside their CPU: the model is built and captured in the host's memory."""

    # Shorter: every launch is measured on two devices.
    launch_s = 0.05

    @cached_property
    def memory_bytes(self) -> Sequence[float]:
        return (min(self._page_bytes),)

    def build(self, model: str) -> "ServedModel":
        from tessera.capture.workload import on_device
        from tessera.serve.gpu import built_on
        from tessera.serve.steps import for_host, served

        card = next(d for d in self.cluster.devices if d.kind is ir.DeviceKind.CUDA)
        (pool_bytes,) = self.memory_bytes
        with built_on(f"cuda:{card.ordinal}", model, self.spec.seed):
            spec = self.spec.sized(HOST_BATCH_TOKENS)
            plain = for_host(served(model, spec, min_size=1, pool_bytes=pool_bytes))
        return replace(plain, workloads=tuple(on_device(w, "cpu") for w in plain.workloads))


@dataclass(frozen=True)
class AwayBackend(CpuBackend):
    """GPUs of other machines: steps are recorded without computing; each worker has its own weights.

    The engine has the weights to compare them, and to send what a worker lacks.
    """

    @cached_property
    def memory_bytes(self) -> Sequence[float]:
        return [steady(self.spec.memory_share * device.memory_bytes) for device in self.cluster.devices]

    def build(self, model: str) -> "ServedModel":
        from tessera.serve.steps import served, weight_bytes

        size, memory = weight_bytes(place_of(model)), memory_bytes()
        if size > memory:
            message = (
                f"{model} has {units.size(size)} of weights; this machine has {units.size(memory)} of memory"
            )
            raise TesseraError(message, "Run the service on a machine that holds the weights.", "--devices")
        spec = self.spec.sized(AWAY_BATCH_TOKENS)
        with blamed_for_run(model):
            return served(
                model, spec, min_size=AWAY_MIN_SIZE, room_bytes=self.memory_bytes, pool_bytes=float("inf")
            )

    def capture(self, model: "ServedModel", advance: Listener) -> list[ir.Trace]:
        return record_sizes([workload.step for workload in model.workloads])


def _check_host(cluster: ir.Cluster) -> None:
    for device in cluster.devices:
        is_real = device.kind in (ir.DeviceKind.CUDA, ir.DeviceKind.CPU)
        if not is_real or device.is_dilated or device.num_sms or device.ordinal == ir.AWAY:
            message = f"{device.name} cannot serve beside a GPU of this machine and its CPU"
            raise TesseraError(message, "Name whole GPUs and cpu: --devices cuda:0,cpu.", "--devices")


def prepare(
    model: str,
    cluster: ir.Cluster,
    spec: ServeSpec,
    *,
    plan: ir.ServicePlan | None = None,
    kept: Path | None = None,
    is_compiled: bool = True,
    advance: Listener = lambda what: None,
) -> Prepared:
    """`kept` is the folder of kept plans; None: always plan."""
    from tessera.serve.policies import SPLITS

    if plan is not None:
        check_plan(plan, model, cluster)
    has_card = any(device.kind is ir.DeviceKind.CUDA for device in cluster.devices)
    if plan is not None or has_card or {*spec.policies} & {*SPLITS}:
        spec = replace(spec, text_only="pictures need cpu or emu: devices, and no --plan or split of roles")
    backend = _backend(cluster, spec, is_compiled)

    def build() -> "ServedModel":
        advance(f"building {model}")
        built = backend.build(model)
        if built.reason:
            advance(f"{model} reads one token of each sequence a step, in prompts too: {built.reason}")
        if built.text_only:
            advance(f"{model} serves text only: {built.text_only}")
        return built

    # The argument `plan` stays while its devices do.
    following = spec if plan is None else replace(spec, policies=())

    def make() -> Prepared:
        backend.begin(model, is_early=plan is None)
        planned = plan or _for_load(model, cluster, spec, advance)
        built = build()
        if planned is not None and built.encode is None:
            return _follow(built, planned, backend, following, advance)
        return _plan(built, backend, advance)

    if kept is None:
        return make()
    digest = "" if plan is None else hashlib.sha256(b"".join(chunks_of(plan))).hexdigest()
    places = (place_of(model), *(folder for _, folder in spec.adapters))
    key = key_of(places, spec, cluster, tuple(backend.memory_bytes), is_compiled, digest)
    prepared = find(key, kept, build, following)
    if prepared is None:
        prepared = make()
        keep(key, prepared, kept)
    return prepared


def _backend(cluster: ir.Cluster, spec: ServeSpec, is_compiled: bool) -> "CpuBackend | GpuBackend":
    if not any(d.kind is ir.DeviceKind.CUDA and d.ordinal != ir.AWAY for d in cluster.devices):
        warm_up()  # in parallel with capture and planning
        is_away = all(device.ordinal == ir.AWAY for device in cluster.devices)
        return AwayBackend(cluster, spec) if is_away else CpuBackend(cluster, spec)
    if any(d.kind is not ir.DeviceKind.CUDA for d in cluster.devices):
        _check_host(cluster)
        return HostBackend(cluster, spec)
    from tessera.serve.gpu import GpuBackend

    return GpuBackend(cluster, spec, is_compiled)


def check_plan(plan: ir.ServicePlan, model: str, cluster: ir.Cluster) -> None:
    if place_of(plan.model) != place_of(model):
        raise MismatchError(f"the plan is for {plan.model}, not {model}", f"Serve {plan.model}.", "--plan")
    theirs, ours = ([d.gpu or d.name for d in c.devices] for c in (plan.cluster, cluster))
    if theirs != ours:
        message = f"the plan is for {', '.join(theirs)}; these devices are {', '.join(ours)}"
        raise MismatchError(message, "Name the plan's devices in its order, or plan for these.", "--plan")


def _for_load(model: str, cluster: ir.Cluster, spec: ServeSpec, advance: Listener) -> ir.ServicePlan | None:
    """None: the spec has sizes, a device has no cost model, or steps cannot have any size."""
    from tessera.plan import search_config
    from tessera.profile.measured import needs_measuring

    if not spec.is_for_load or any(needs_measuring(device) for device in cluster.devices):
        return None
    from tessera.flow import choose_launches
    from tessera.plan.fluid import POLICIES
    from tessera.planning import ServedSteps, make_service_plan
    from tessera.serve.rehearse import rehearse

    often = dict(spec.expert_frequencies)
    steps = ServedSteps(model, cluster, spec.random_weights, advance=advance, frequencies=often)
    try:
        steps.is_compiled, _ = choose_launches(steps.anchors, "")
        _ = steps.family
    except (CaptureError, MismatchError):  # steps have one size, or the build says why again
        return None
    (name,) = spec.policies
    if name not in (AUTO, *POLICIES):
        return None
    policies = POLICIES if name == AUTO else (name,)
    search, share = search_config(spec.effort), spec.memory_share
    return make_service_plan(steps, spec.load, rehearse, search, memory_share=share, policies=policies)


def _captured(
    model: "ServedModel",
    counts: Sequence[int],
    load: ir.Load,
    backend: "CpuBackend | GpuBackend",
    advance: Listener,
) -> "tuple[ServicePlanner, float]":
    """A planner over the model's steps, and seconds of their capture."""
    from tessera import flow
    from tessera.serve.policies import ServicePlanner

    advance(f"capturing steps of {', '.join(str(size) for size in model.shape.sizes)} tokens")
    begun_s = time.perf_counter()
    traces = backend.capture(model, advance)
    capture_s = time.perf_counter() - begun_s
    unit = flow.make_unit(traces, tuple(counts))
    advance("pricing its launches")
    costs, spec = backend.price(unit, model, advance), backend.spec
    problem = (model.model, model.shape, unit, costs, backend.cluster, load)
    return ServicePlanner(*problem, spec.effort, spec.policies), capture_s


def _follow(
    model: "ServedModel",
    plan: ir.ServicePlan,
    backend: "CpuBackend | GpuBackend",
    spec: ServeSpec,
    advance: Listener,
) -> Prepared:
    from tessera.serve.policies import ServicePlanner, check_groups
    from tessera.serve.rehearse import rehearse

    scale = 1.0
    captured: dict[tuple[object, ...], tuple[ServicePlanner, float]] = {}
    groups = []
    for group in plan.groups:
        key = (group.sequences, group.sizes, group.pool_tokens)
        sized = backend.placed(model.resized(group))
        if key not in captured:
            captured[key] = _captured(sized, group.plan.unit.counts, plan.load, backend, advance)
        planner, _ = captured[key]
        groups.append(planner.follow(group, plan.policy))
        scale = max(scale, backend.scale(groups[-1].plan, sized))
    check_groups(groups)
    advance("rehearsing")
    followed = replace(plan, groups=tuple(groups))
    expected = rehearse(followed, plan.load, shape=model.shape)
    policies = (replace(followed, expected=expected),)
    capture_s = sum(seconds for _, seconds in captured.values())
    return Prepared(model, policies, planner_of(model, policies, spec), scale, capture_s)


def _plan(model: "ServedModel", backend: "CpuBackend | GpuBackend", advance: Listener) -> Prepared:
    counts, shape = (1,) * len(model.workloads), model.shape
    planner, capture_s = _captured(model, counts, backend.spec.load, backend, advance)
    advance("planning and rehearsing")
    try:
        policies = planner.plans(planner.names)
    except (PlanInfeasible, DeviceMemoryError) as error:
        now = f"now {shape.microbatches}, {shape.rows}, {shape.capacity} and {shape.sizes[-1]}"
        remedy = (
            f"Lower --microbatches, --seqs, --max-model-len or --max-batch-tokens ({now}), or --memory-share "
            "for fewer pages, or add a device."
        )
        weights = sum(tensor.nbytes for tensor in model.weights().values())
        if weights > sum(device.memory_bytes for device in backend.cluster.devices):
            remedy = f"The weights take {units.size(weights)} alone: add a device, or use packed weights."
        is_size = isinstance(error, DeviceMemoryError) or not error.remedy
        raise type(error)(error.message, remedy if is_size else error.remedy, error.place) from error
    return Prepared(model, policies, planner, backend.scale(policies[0].plans[0], model), capture_s)


def default_folder() -> Path:
    return cache_folder("plans")


def key_of(places: Sequence[str], *parts: object) -> str:
    """Hash of this code, library versions, the files in `places`, and `parts`."""
    digest = hashlib.sha256(repr((_code(), [version_of(name) for name in PACKAGES], places, parts)).encode())
    for folder in filter(Path.is_dir, map(Path, places)):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                stamp = path.stat()
                digest.update(repr((path.name, stamp.st_size, stamp.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


class _Kept(msgspec.Struct):
    policies: list[bytes]
    scale: float
    shape: Shape | None = None
    weights: bytes = b""


def find(key: str, folder: Path, build: Callable[[], "ServedModel"], spec: ServeSpec) -> Prepared | None:
    path = folder / key
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if digest.decode() != _digest(key, body):
            return None
        kept = msgspec.msgpack.decode(body, type=_Kept)
        policies = tuple(parse(ir.ServicePlan, raw, str(path)) for raw in kept.policies)
        model: ServedModel | KeptModel | None = None
        if kept.shape is not None:
            weights = torch.load(io.BytesIO(kept.weights), weights_only=True)
            model = KeptModel(kept.shape, weights)
        os.utime(path)
    except _UNREADABLE:
        return None
    model = model or build()
    return Prepared(model, policies, planner_of(model, policies, spec), kept.scale)


def planner_of(
    model: "ServedModel | KeptModel", policies: Sequence[ir.ServicePlan], spec: ServeSpec
) -> "ServicePlanner":
    """A planner over the captured steps of the group that can serve alone."""
    from tessera.serve.policies import ServicePlanner

    group = max(policies[0].groups, key=lambda g: (g.role is not ir.Role.PROMPTS, len(g.sizes)))
    plan, shape = group.plan, model.shape
    if shape.of_group(group) != replace(shape, microbatches=group.microbatches):
        total = sum(group.microbatches for group in policies[0].groups)
        shape = replace(shape.of_group(group), microbatches=total)
    problem = (policies[0].model, shape, plan.unit, plan.costs, plan.cluster, policies[0].load)
    return ServicePlanner(*problem, spec.effort, spec.policies)


def keep(key: str, prepared: Prepared, folder: Path) -> None:
    kept = _Kept([b"".join(chunks_of(x)) for x in prepared.policies], prepared.scale)
    if (model := KeptModel.of(prepared.model)) is not None:
        weights = io.BytesIO()
        torch.save(dict(model.tensors), weights)
        kept.shape, kept.weights = model.shape, weights.getvalue()
    body = msgspec.msgpack.encode(kept)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / key, [_digest(key, body).encode(), b"\n", body])
        paths = [path for path in folder.iterdir() if path.is_file()]
        for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True)[MAX_KEPT:]:
            path.unlink()
    except (OSError, TesseraError) as error:
        why = getattr(error, "message", None) or getattr(error, "strerror", None) or error
        print(f"warning: {folder}: {why}; plans are not kept for the next start", file=sys.stderr)


def _digest(key: str, body: bytes) -> str:
    return hashlib.sha256(key.encode() + body).hexdigest()


@cache
def _code() -> str:
    root = Path(tessera.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
