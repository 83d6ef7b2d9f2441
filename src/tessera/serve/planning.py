"""prepare: a model and devices in, plans for serving out: captured, priced, planned and checked, not started.

Only the process that workers are forked from is started, so that it has imported torch when they are wanted.
What captures and plans is imported where it is needed: a start by plans that were kept needs none of it.

The work unit of serving is what a microbatch does for `rows` average requests: the largest step as often as
their prompts need it, and the step that holds one token of each as often as an answer has tokens; every other
size once. To a model that sees, every request brings a picture. The unit is a served one
(`WorkUnit.is_served`), so every state has one home in all steps.

There is a plan for every policy wanted, over the same unit and costs; on one device, where nothing is to be
decided, there is the first one's only. Devices that keep their own time are measured, from the store where
they were measured before; a store that cannot be used is done without. Devices that compute on this
machine's CPU need the model to fit in it.

What was planned lies under `$XDG_CACHE_HOME/tessera/plans` for the next start of the same model on the same
devices, in a folder named by a hash of everything that it depends on: this package's own code, the versions
of torch, transformers and Triton, the model's files, the sizes, the devices and the memory that pages are
given. So nothing in it can be out of date; what cannot be read is made again, and a folder that cannot be
written is done without. The newest `MAX_KEPT` are kept. A small model's weights lie beside them, as its steps
read them, so that it is served without being built: to import what builds it takes longer than everything
else. Larger ones are built at every start.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

import tessera
from tessera.capture import place_of, record
from tessera.capture.models.checkpoint import blamed_for_run
from tessera.errors import DeviceMemoryError, PlanInfeasible, TesseraError, UnknownName
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.execute.pipes import FORKSERVER, warm_up
from tessera.execute.worker_stepper import MakeHub, WorkerStepper
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, WorkUnit, load, save
from tessera.serve.pages import modest_bytes
from tessera.serve.records import POLICIES, Average, ServeSpec, Shape, step_name

if TYPE_CHECKING:
    from tessera.serve.sight import Eyes, Sight
    from tessera.serve.steps import ServedModel

# Hears one line.
Told = Callable[[str], None]
# Weights of a model that is computed on this machine's CPU.
MAX_BYTES = 4 << 30
# A step that takes longer than this will never end.
STEP_TIMEOUT_S = 60.0
# Policy that a service can be told to follow -> what it is planned for; auto has both, the monitor decides.
OBJECTIVES = {"auto": POLICIES, "throughput": POLICIES[:1], "latency": POLICIES[1:]}
MAX_KEPT = 32
# Of weights that are kept.
MAX_WEIGHT_BYTES = 64 << 20
# What captured steps and their costs come from, besides this package.
PACKAGES = ("torch", "transformers", "triton", "aiconfigurator-core")
_MORE, _WEIGHTS = "more.json", "weights.pt"
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, pickle.UnpicklingError, TesseraError,
    msgspec.MsgspecError,
)  # fmt: skip


def objectives_of(policy: str) -> tuple[Objective, ...]:
    """What a service that follows this policy is planned for."""
    if policy not in OBJECTIVES:
        raise UnknownName("policy", policy, OBJECTIVES)
    return OBJECTIVES[policy]


class ServableModel(Protocol):
    """What a service needs to know of a model: built (`steps.ServedModel`), or kept from an earlier start."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""

    @property
    def state_bytes(self) -> int:
        """Of one microbatch."""

    def weights(self) -> "dict[str, torch.Tensor]":
        """By name."""

    def senses(self) -> "tuple[Sight, Eyes] | None":
        """How it sees; None for one that does not."""


@dataclass(frozen=True)
class KeptModel:
    shape: Shape
    state_bytes: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: ServableModel) -> "KeptModel | None":
        """What is worth keeping; None for large ones, and for those that see: their eyes are not kept."""
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
    """A model with the plans to serve it by; all are of one cluster, unit and costs."""

    model: ServableModel
    plans: tuple[Plan, ...]
    # Measured time = modelled time x scale; 1 where no device is dilated.
    scale: float = 1.0
    # Policy -> tokens a second when served, modelled, where that was looked at.
    rehearsed: Mapping[str, float] = field(default_factory=dict)
    # What it took to capture the steps.
    capture_s: float = 0.0

    def workers(self, transport: str = "auto", hub: MakeHub | None = None) -> WorkerStepper:
        """A worker for every device, of this machine or as `hub` has them; not started yet."""
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


def prepare(
    model: str,
    cluster: Cluster,
    spec: ServeSpec,
    *,
    store: Path | None = None,
    kept: Path | None = None,
    advance: Told = lambda what: None,
) -> Prepared:
    """Plans a service; `advance` hears what is done next, `store` keeps measurements, `kept` plans."""
    warm_up()  # beside the capture and the planning
    pool_bytes = modest_bytes(spec.microbatches)

    def build() -> "ServedModel":
        from tessera.serve.steps import for_cpu, served

        advance(f"building {model}")
        room_bytes = [spec.memory_share * device.memory_bytes for device in cluster.devices]
        with blamed_for_run(model):
            return for_cpu(
                served(model, spec, max_bytes=MAX_BYTES, room_bytes=room_bytes, pool_bytes=pool_bytes)
            )

    def plan(made: "ServedModel") -> Prepared:
        from tessera import flow
        from tessera.profile.store import default_store

        advance(f"capturing {len(made.workloads)} steps")
        begun_s = time.perf_counter()
        with blamed_for_run(model):
            traces = [record(workload) for workload in made.workloads]
        capture_s = time.perf_counter() - begun_s
        unit = flow.make_unit(traces, counts_of(made.shape, spec.average, made.encode is not None))
        advance("pricing its launches")

        @cache
        def warn(what: str) -> None:
            print(f"warning: {what}; measurements are not kept for the next start", file=sys.stderr)

        costs = tuple(_price(trace, cluster, store or default_store(), advance, warn) for trace in traces)
        advance("planning")
        plans = plan_policies(made.shape, cluster, unit, costs, spec.policies)
        return Prepared(made, plans, capture_s=capture_s)

    return kept_or_planned(key_of(place_of(model), spec, cluster, pool_bytes), kept, build, plan)


def kept_or_planned(
    key: str, kept: Path | None, build: "Callable[[], ServedModel]", plan: "Callable[[ServedModel], Prepared]"
) -> Prepared:
    """What was kept under this name, or else planned, and kept for the next start."""
    if kept is None:
        return plan(build())
    found = find(key, kept, build)
    if found is None:
        found = plan(build())
        keep(key, found, kept)
    return found


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


def _price(trace: Trace, cluster: Cluster, store: Path, advance: Told, warn: Told) -> Costs:
    from tessera import flow
    from tessera.profile.measured import combine, measure, needs_measuring
    from tessera.profile.store import Clocks, Store

    found = {}
    for device in cluster.devices:
        if needs_measuring(device):
            advance(f"measuring {step_name(trace.step)} on {device.name}")
            timer = flow.make_timer(trace, device)
            kept = partial(Store, store, clocks=Clocks.ANY, spare=warn)
            found[device.name] = measure(trace, device, timer, kept, lambda what: None)
    return combine(trace, cluster.devices, found)[0]


def plan_policies(
    shape: Shape, cluster: Cluster, unit: WorkUnit, costs: tuple[Costs, ...], policies: tuple[Objective, ...]
) -> tuple[Plan, ...]:
    from tessera import flow

    policies = policies if len(cluster.devices) > 1 else policies[:1]
    try:
        plans = tuple(flow.make_plan(unit, costs, cluster, x, shape.microbatches) for x in policies)
        check_fits(plans, footprints(plans, [ready_programs(plan) for plan in plans]))
    except (PlanInfeasible, DeviceMemoryError) as error:
        now = f"now {shape.microbatches}, {shape.rows}, {shape.capacity} and {shape.sizes[-1]}"
        remedy = (
            f"Lower --microbatches, --seqs, --max-model-len or --max-batch-tokens ({now}), or add a device."
        )
        raise type(error)(error.message, remedy, error.place) from error
    return plans


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / "plans"


def key_of(place: str, *given: object) -> str:
    """Names the plans of a model (a built-in name or a folder) for what is given, by its `repr`."""
    digest = hashlib.sha256(repr((_code(), _versions(), place, given)).encode())
    folder = Path(place)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):  # gone meanwhile
                stamp = path.stat()
                digest.update(repr((path.name, stamp.st_size, stamp.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


class _More(msgspec.Struct):
    """What is kept beside the plans."""

    num_plans: int
    scale: float
    rehearsed: dict[str, float]
    # Of a model that is kept.
    shape: Shape | None
    state_bytes: int


def find(key: str, folder: Path, build: Callable[[], ServableModel]) -> Prepared | None:
    """What was kept under this name, with its model, which is built where it was not kept."""
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
    """Keeps plans under this name, whole or not at all; standard error hears why not."""
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
    """Of this package's own source."""
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
