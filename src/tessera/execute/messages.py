"""Messages between the engine, its workers and worker pairs, and the configuration a worker starts with.

They are MessagePack and decode only into the records below: 64-bit integers, finite numbers, tensors of a
known dtype with the bytes of their shape, no unknown fields. So a remote worker can at worst send wrong
numbers. The receiver checks that a run, microbatch, launch or transfer exists. A docstring in the imperative
is an order of the engine.

`pack` returns a view, to be encoded before the tensor changes.

A local worker inherits its `Setup`, weights in shared memory included. A remote one receives the
`WorkerConfig`, builds the weights from the model, and requests others in pieces (`Want`). Each weight's
dtype, shape and up to 4,096 values must equal the engine's; checkpoints that differ in a few others pass.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Self

import msgspec
import numpy as np
import torch
from msgspec import Meta

from tessera.errors import MismatchError, RuleBroken, TesseraError, WorkerError
from tessera.execute.lanes import Lanes
from tessera.execute.memory import copied, part_of, sharing, whole_of
from tessera.ir import BufferKind, Cluster, Program, Trace, units, verify
from tessera.kernels.tensors import flat_bytes

# Rank of a worker that takes any free device.
ANY_RANK = -1
FINGERPRINT_VALUES = 4096
# A weight's bytes in one message, and a piece of a move: about a millisecond of CPU time.
PIECE_BYTES = 4 << 20

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Beyond this no sum of a clock's seconds keeps microseconds.
Number = Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Index, ...]
    data: memoryview

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.data.nbytes != math.prod(self.shape) * _item_bytes()[self.dtype]:
            message = f"a tensor of {self.data.nbytes} bytes is no {self.dtype} of shape {list(self.shape)}"
            raise ValueError(message)


@cache
def _item_bytes() -> Mapping[str, int]:
    dtypes = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    return {name: x.itemsize for name, x in dtypes.items() if not name.startswith(("q", "bits"))}


def _check_dtype(name: str) -> None:
    if name not in _item_bytes():
        raise ValueError(f"there is no dtype {name[:40]!r}")


def pack(tensor: torch.Tensor) -> PackedTensor:
    is_known = not tensor.is_floating_point() or tensor.element_size() > 2  # to NumPy, in half the time
    values = tensor if is_known else flat_bytes(tensor)
    flat = np.ascontiguousarray(values.numpy(force=True)).reshape(-1).view(np.uint8)
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.data)


def unpack(packed: PackedTensor) -> torch.Tensor:
    tensor = torch.empty(packed.shape, dtype=getattr(torch, packed.dtype))
    if packed.data.nbytes:
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(packed.data, dtype=np.uint8)
    return tensor


PackedTensors = dict[str, PackedTensor]


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """A map with the record's name under `kind`."""


class Begin(_Message, frozen=True):
    """Run one program of one lane for one microbatch."""

    # Counts the runs of all microbatches; equal on all devices.
    run: Whole
    microbatch: Whole
    lane: Whole
    index: Whole
    inputs: PackedTensors
    # State here that no earlier run of the microbatch used.
    state: PackedTensors
    wants_state: bool
    # Report every launch and transfer, not only their sum.
    wants_spans: bool = False
    skips: tuple[str, ...] = ()
    # `LateInputs` follow.
    is_open: bool = False


class LateInputs(_Message, frozen=True):
    """Use these inputs in a run that was ordered without them."""

    run: Whole
    inputs: PackedTensors


class Clear(_Message, frozen=True):
    """Zero a microbatch's own state; pages of a home stay."""

    microbatch: Whole
    lane: Whole


class MovePages(_Message, frozen=True):
    """Copy pages or rows of state to this or another device."""

    run: Index
    device: Index
    # See `memory.StatePlace`.
    place: tuple[Whole, Whole]
    to_place: tuple[Whole, Whole]
    # (state buffer, bytes of a page)
    buffers: list[tuple[str, Index]]
    from_pages: list[Index]
    to_pages: list[Index]


class PageFrame(_Message, frozen=True):
    """Worker to worker: a piece of a move, in a slot of shared memory or a raw frame behind this."""

    run: Index
    piece: Index
    slot: Index
    place: tuple[Whole, Whole]
    # (state buffer, bytes of a page, pages)
    parts: list[tuple[str, Index, list[Index]]]
    total: Index


class PageTaken(_Message, frozen=True):
    """Worker to worker: a piece was copied; its slot is free."""

    piece: Index


class Cancel(_Message, frozen=True):
    """Forget a run or move; its microbatch or pages will be reused."""

    run: Whole


class Cancelled(_Message, frozen=True):
    """Nothing of the cancelled run or move goes on here."""

    run: Whole


class LoadLanes(_Message, frozen=True):
    """Add lanes, with the steps that the worker lacks."""

    # programs[lane][index]
    programs: tuple[tuple[Program, ...], ...]
    traces: tuple[Trace, ...] = ()
    us: tuple[tuple[float, ...], ...] = ()
    microbatches: tuple[tuple[Index, ...], ...] = ()

    def verify(self) -> None:
        for record in (*self.traces, *(program for lane in self.programs for program in lane)):
            verify(record)


class DropLanes(_Message, frozen=True):
    """Free lanes and homes that are never used again."""

    lanes: list[Index]
    homes: list[Index]


class Relink(_Message, frozen=True):
    """Reopen the link to another device."""

    device: Whole
    epoch: Whole
    # Where its links listen; empty: nowhere.
    address: str = ""


class Where(_Message, frozen=True):
    """Report progress at once, even during a launch."""


class Progress(_Message, frozen=True):
    # (microbatch, run, position of the last issued instruction)
    rows: list[tuple[Index, Whole, Whole]]


class Leave(_Message, frozen=True):
    """End the session."""


class Hello(_Message, frozen=True):
    """First message of a remote worker."""

    rank: Whole
    # Digest of its plans; empty: none.
    digest: str
    version: str


class Welcome(_Message, frozen=True):
    config: bytes


class Want(_Message, frozen=True):
    """A worker requests a weight from byte `start` on."""

    name: str
    start: Whole


class WeightBytes(_Message, frozen=True):
    data: memoryview


class Configured(_Message, frozen=True):
    """All weights are here."""


class WorkerReady(_Message, frozen=True):
    """Everything is loaded; `clock_s` serves to compare clocks."""

    clock_s: Number
    pid: Whole
    address: str = ""


class LinkOpen(_Message, frozen=True):
    """Worker to worker: first message of a link."""

    device: Index
    epoch: Index


class LinkClose(_Message, frozen=True):
    """Worker to worker: the link is closed on purpose."""


class LinkFrame(_Message, frozen=True):
    """Worker to worker: a transfer; its bytes follow as a raw frame."""

    run: Index
    transfer: Index
    # By the sender's clock.
    sent_s: Number


class Done(_Message, frozen=True):
    """A worker's share of a run is done, or a move has ended."""

    run: Whole
    outputs: PackedTensors
    state: PackedTensors
    # (launch, start, stop, CPU time) in seconds, by the worker's monotonic clock.
    spans: list[tuple[Index, Number, Number, Number]] = []
    # (transfer, start by the sender's clock, arrival by this worker's).
    transfers: list[tuple[Index, Number, Number]] = []
    busy_s: Number = 0.0
    # Time a GPU was idle between the last run and this.
    idle_s: Number = 0.0
    # Mixture of experts -> rows of each expert, where a part of it ran here.
    experts: dict[str, list[Whole]] = {}


class Failed(_Message, frozen=True):
    """A worker ends with an error, or the engine refuses it."""

    message: str
    remedy: str


class PeerLost(_Message, frozen=True):
    """The link to another worker is closed."""

    device: Whole
    message: str
    epoch: Whole = 0


class StoreGet(_Message, frozen=True):
    """Answered when the value is set."""

    key: str


class StoreValue(_Message, frozen=True):
    """A worker's value for others, and the answer to `StoreGet`; an empty value will never be set."""

    key: str
    value: bytes


Joining = Hello | Welcome | Want | WeightBytes | Configured | Leave
Linking = LinkOpen | LinkClose | LinkFrame | PageFrame | PageTaken | Relink | PeerLost
Storing = WorkerReady | StoreGet | StoreValue
Order = Begin | LateInputs | Clear | Cancel | LoadLanes | DropLanes | MovePages | Where
Message = Joining | Linking | Storing | Order | Cancelled | Done | Progress | Failed
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TesseraError(f"a message between workers cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class WeightRecord:
    name: str
    fingerprint: str
    dtype: str
    shape: tuple[Index, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)


@dataclass(frozen=True)
class WorkerConfig:
    """The part of a worker's configuration that can be sent."""

    device: Index
    cluster: Cluster
    traces: tuple[Trace, ...]
    # programs[lane][index], by lane number over all loads.
    programs: tuple[tuple[Program, ...], ...]
    microbatches: Annotated[int, Meta(ge=1)]
    transport: str = "shm"
    # Restarts of this device, and of every device.
    epoch: int = 0
    epochs: tuple[int, ...] = ()
    scale: float = 1.0
    # True to time every launch even where that costs time.
    is_profiled: bool = False
    # us[step][launch]: modelled time here (`schedule`). Empty rows: unknown.
    us: tuple[tuple[float, ...], ...] = ()
    # Lanes never used again; they still lay out the inboxes of transfers.
    dropped: tuple[int, ...] = ()
    # By lane.
    lane_microbatches: tuple[tuple[Index, ...], ...] = ()
    weight_records: tuple[WeightRecord, ...] = ()

    def extended(self, lanes: LoadLanes) -> Self:
        traces, programs = (*self.traces, *lanes.traces), (*self.programs, *lanes.programs)
        us, numbers = (*self.us, *lanes.us), (*self.lane_microbatches, *lanes.microbatches)
        return replace(self, traces=traces, programs=programs, us=us, lane_microbatches=numbers)

    @property
    def kept_microbatches(self) -> set[int]:
        return {n for lane, own in enumerate(self.lane_microbatches) if lane not in self.dropped for n in own}

    @property
    def homes(self) -> set[int]:
        lanes = (programs for lane, programs in enumerate(self.programs) if lane not in self.dropped)
        return {program.home for programs in lanes for program in programs}


@dataclass(frozen=True, kw_only=True)
class Setup(WorkerConfig):
    # All weights of the model: plans loaded later may read others.
    weights: dict[str, torch.Tensor]
    engine: str = ""
    name: bytes = b""
    secret: bytes = field(default=b"", repr=False)
    # Where links listen: this host's address, or the session's folder if all workers are local.
    host: str = ""
    folder: str = ""
    # progress[microbatch] = (run, position), shared with the engine.
    progress: torch.Tensor | None = None


def make_setups(
    loaded: Lanes,
    programs: Sequence[Sequence[Program]],
    weights: Mapping[str, torch.Tensor],
    microbatches: int,
    transport: str = "shm",
    scale: float = 1.0,
    is_profiled: bool = False,
) -> list[Setup]:
    cluster, traces = loaded.all[0].plan.cluster, tuple(g.trace for g in loaded.graphs)
    names = {t.buffers[b].name for t in traces for b in t.buffers_of(BufferKind.WEIGHT)}
    with sharing(f"weights of {units.size(sum(weight.nbytes for weight in weights.values()))}"):
        shared = {name: weights[name].detach().share_memory_() for name in names if name in weights}
        parts = [name for name in names - shared.keys() if whole_of(name) in weights]
        shared |= {name: copied(part_of(name, weights), is_shared_memory=True) for name in parts}
    sizes = (microbatches, transport, 0, (0,) * len(cluster.devices), scale, is_profiled)
    common = (cluster, traces, tuple(map(tuple, programs)), *sizes)
    numbers = tuple(tuple(lane.microbatches) for lane in loaded.all)
    return [
        Setup(number, *common, modelled_us(loaded, number), lane_microbatches=numbers, weights=shared)
        for number in range(len(cluster.devices))
    ]


def modelled_us(loaded: Lanes, device: int, first: int = 0) -> tuple[tuple[float, ...], ...]:
    tables = (() if costs is None else costs.costs for costs in loaded.costs[first:])
    return tuple(tuple(row[device].us for row in rows) for rows in tables)


def pack_config(setup: Setup) -> bytes:
    records = tuple(weight_of(name, tensor) for name, tensor in sorted(setup.weights.items()))
    sendable = {item.name: getattr(setup, item.name) for item in fields(WorkerConfig)}
    return msgspec.msgpack.encode(WorkerConfig(**sendable | {"weight_records": records}))


def unpack_config(packed: bytes) -> WorkerConfig:
    try:
        config = msgspec.msgpack.decode(packed, type=WorkerConfig)
        for record in (config.cluster, *config.traces, *(p for lane in config.programs for p in lane)):
            verify(record)
        num_devices, num_steps = len(config.cluster.devices), len(config.traces)
        if config.device >= num_devices or len(config.epochs) != num_devices or not num_steps:
            raise ValueError(f"there is no device {config.device} of {num_devices} in {num_steps} steps")
        if any(not 0 <= p.step < num_steps for lane in config.programs for p in lane):
            raise ValueError("a program names a step that does not exist")
    except (RuleBroken, ValueError, RecursionError) as error:
        raise WorkerError(f"the engine's configuration cannot be read: {error}", "Update both.") from error
    return config


def setup_of(config: WorkerConfig, weights: Mapping[str, torch.Tensor], secret: bytes, host: str) -> Setup:
    """Raises MismatchError if a weight differs from the engine's."""
    laid_out = {}
    for record in config.weight_records:
        tensor = weights[record.name]
        if fingerprint(tensor) != record.fingerprint:
            model = config.traces[0].step.model
            remedy = f"Have the same {model} on every machine, or name its folder with --model."
            raise MismatchError(f"weight '{record.name}' here is not the engine's", remedy)
        laid_out[record.name] = _laid_out(tensor.detach(), record.stride)
    return Setup(**vars(config) | {"weight_records": ()}, weights=laid_out, secret=secret, host=host)


def weight_of(name: str, tensor: torch.Tensor) -> WeightRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightRecord(name, fingerprint(tensor), dtype, tuple(tensor.shape), tuple(tensor.stride()))


class Pieces:
    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._name, self._flat = "", torch.empty(0, dtype=torch.uint8)

    def piece(self, name: str, start: int) -> WeightBytes:
        """Raises WorkerError for a weight the worker does not read."""
        if name not in self._weights:
            raise WorkerError(f"it asked for a weight '{name[:80]}' that it does not read")
        if name != self._name:
            self._name, self._flat = name, flat_bytes(self._weights[name].cpu())
        part = self._flat[max(0, start) : max(0, start) + PIECE_BYTES]
        return WeightBytes(part.numpy().data)


def fetch(weight: WeightRecord, ask: Callable[[str, int], memoryview]) -> torch.Tensor:
    tensor = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
    flat, at = tensor.reshape(-1).view(torch.uint8), 0
    while at < flat.numel():
        data = ask(weight.name, at)
        if not 0 < len(data) <= flat.numel() - at:
            raise WorkerError(f"the engine sent {len(data)} bytes of weight '{weight.name}' at {at}")
        flat[at : at + len(data)].numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        at += len(data)
    return tensor


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The programs expect the engine's strides."""
    if tensor.stride() == stride:
        return tensor
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=False))
    if len(stride) != tensor.dim() or min(stride) < 1 or reach != tensor.numel():
        raise MismatchError(f"a weight of shape {list(tensor.shape)} cannot lie with strides {list(stride)}")
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def fingerprint(tensor: torch.Tensor) -> str:
    flat = tensor.detach().flatten()
    every = max(1, flat.numel() // FINGERPRINT_VALUES)
    sample = flat_bytes(flat[::every][:FINGERPRINT_VALUES])
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(kind + sample.cpu().numpy().tobytes()).hexdigest()
