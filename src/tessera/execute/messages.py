"""Messages between the engine, its workers and worker pairs, and the configuration a worker starts with.

Messages are MessagePack, decoded into the records below and nothing else: integers have 64 bits, numbers are
finite, a tensor has a dtype torch knows and as many bytes as its shape says; unknown, missing and surplus
fields are refused. So a remote worker can at worst send wrong numbers. The receiver checks whether a run,
microbatch, launch or transfer exists.

Tensor bytes are copied into a message and out of it, no more: `pack` is a view of the tensor until the
message is encoded, a decoded tensor is a view of the message.

A local worker inherits its `Setup`, weights in shared memory included. A remote worker receives the
`WorkerConfig` and builds the weights from the model the traces name; it requests weights it cannot build in
pieces (`Want`). Either way it compares a fingerprint of each weight with the engine's: dtype, shape and up to
4,096 values, which tells checkpoints apart, not two that differ in a few values.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import torch
from msgspec import Meta

from tessera.errors import MismatchError, RuleBroken, TesseraError, WorkerError
from tessera.execute.lanes import Lanes
from tessera.execute.memory import copied, flat_bytes, part_of, whole_of
from tessera.ir import BufferKind, Cluster, Program, Trace, verify

# Rank of a worker that takes any free device.
ANY_RANK = -1
FINGERPRINT_VALUES = 4096
# Bytes of a weight in one message, and of a piece of a move: about a millisecond of a process's time.
PIECE_BYTES = 4 << 20

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Beyond this no sum of a clock's seconds keeps microseconds.
Number = Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's values, row-major."""

    dtype: str
    shape: tuple[Index, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in _item_bytes():
            raise ValueError(f"there is no dtype {self.dtype[:40]!r}")
        if self.data.nbytes != math.prod(self.shape) * _item_bytes()[self.dtype]:
            raise ValueError(
                f"a tensor of {self.data.nbytes} bytes is no {self.dtype} of shape {list(self.shape)}"
            )


@cache
def _item_bytes() -> Mapping[str, int]:
    """The dtypes whose values are plain bytes."""
    found = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    return {name: x.itemsize for name, x in found.items() if not name.startswith(("q", "bits"))}


def pack(tensor: torch.Tensor) -> PackedTensor:
    """A tensor for a message, which is to be encoded before the tensor changes."""
    is_known = not tensor.is_floating_point() or tensor.element_size() > 2  # to NumPy, in half the time
    values = tensor if is_known else tensor.detach().reshape(-1).view(torch.uint8)
    flat = values.numpy(force=True).reshape(-1).view(np.uint8)
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.data)


def unpack(packed: PackedTensor) -> torch.Tensor:
    made = torch.empty(packed.shape, dtype=getattr(torch, packed.dtype))
    if packed.data.nbytes:
        made.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(packed.data, dtype=np.uint8)
    return made


PackedTensors = dict[str, PackedTensor]


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What all have in common: a map of fields, and the name of the record under `kind`."""


class Begin(_Message, frozen=True):
    """Engine to worker: run one program of one lane for one microbatch."""

    # Counts the runs of all microbatches; the same on every device.
    run: Whole
    microbatch: Whole
    lane: Whole
    index: Whole
    inputs: PackedTensors
    # State by name that lives here and that no run of the microbatch has used before.
    state: PackedTensors
    # True to hand the state back when the run is done.
    wants_state: bool
    # True to report every launch and transfer, False to report the time of all launches only.
    wants_spans: bool = False
    # Outputs that nobody asks for.
    skips: tuple[str, ...] = ()
    # True if `LateInputs` follow.
    is_open: bool = False


class LateInputs(_Message, frozen=True):
    """Engine to worker: inputs of a run that was ordered without them."""

    run: Whole
    inputs: PackedTensors


class Clear(_Message, frozen=True):
    """Engine to worker: a microbatch's own state on a lane becomes zeros here; pages of a home stay."""

    microbatch: Whole
    lane: Whole


class MovePages(_Message, frozen=True):
    """Engine to worker: send pages or rows of state to another place, on a device or this one."""

    # Counted with the runs of programs.
    run: Index
    # Destination.
    device: Index
    # (home, -1), or (lane, microbatch) for a microbatch's own state.
    place: tuple[Whole, Whole]
    to_place: tuple[Whole, Whole]
    # (state buffer, bytes of a page)
    buffers: list[tuple[str, Index]]
    from_pages: list[Index]
    to_pages: list[Index]


class PageFrame(_Message, frozen=True):
    """Worker to worker: a piece of a move, in a slot of shared memory or in a raw frame behind this."""

    run: Index
    # Counts the sender's pieces.
    piece: Index
    slot: Index
    place: tuple[Whole, Whole]
    # (state buffer, bytes of a page, pages), in the order of the bytes
    parts: list[tuple[str, Index, list[Index]]]
    # Pieces of the move.
    total: Index


class PageTaken(_Message, frozen=True):
    """Worker to worker: a piece was put down; its slot is free."""

    piece: Index


class Cancel(_Message, frozen=True):
    """Engine to worker: forget a run or a move; its microbatch or pages will be used by another."""

    run: Whole


class Cancelled(_Message, frozen=True):
    """Worker to engine: nothing of a cancelled run or move goes on here any more."""

    run: Whole


class LoadLanes(_Message, frozen=True):
    """Engine to worker: more lanes, and their steps that it does not have."""

    # programs[lane][index]
    programs: tuple[tuple[Program, ...], ...]
    traces: tuple[Trace, ...] = ()
    # Configuration of the new steps; see `WorkerConfig`.
    us: tuple[tuple[float, ...], ...] = ()

    def verify(self) -> None:
        for record in (*self.traces, *(program for lane in self.programs for program in lane)):
            verify(record)


class DropLanes(_Message, frozen=True):
    """Engine to worker: lanes and homes that are never used again."""

    lanes: list[Index]
    homes: list[Index]


class Relink(_Message, frozen=True):
    """Engine to worker: reopen the link to another device, whose worker is new or whose link was cut."""

    device: Whole
    # Number of restarts of the other worker.
    epoch: Whole
    # Where its links listen; empty: nowhere.
    address: str = ""


class Where(_Message, frozen=True):
    """Engine to worker: report progress. Answered at once, even in the middle of a launch."""


class Progress(_Message, frozen=True):
    # (microbatch, run, position of the last issued instruction) of every active run.
    rows: list[tuple[Index, Whole, Whole]]


class Leave(_Message, frozen=True):
    """Engine to worker: end the session."""


class Hello(_Message, frozen=True):
    """Remote worker to engine, first message."""

    # Device index, or ANY_RANK.
    rank: Whole
    # Digest of its plans; empty: it has none.
    digest: str
    # Tessera version; must equal the engine's.
    version: str


class Welcome(_Message, frozen=True):
    """Engine to remote worker: its configuration; see `pack_config`."""

    config: bytes


class Refused(_Message, frozen=True):
    """Engine to a worker it cannot use."""

    message: str
    remedy: str


class Want(_Message, frozen=True):
    """Worker to engine: send a weight that cannot be built here, from byte `start` on."""

    name: str
    start: Whole


class WeightBytes(_Message, frozen=True):
    """Engine to worker: the next bytes of the weight."""

    data: memoryview


class Configured(_Message, frozen=True):
    """Worker to engine: all weights are here; it starts."""


class WorkerReady(_Message, frozen=True):
    """Worker to engine: everything is loaded. Its clock now, to compare clocks."""

    clock_s: Number
    pid: Whole
    # Where its links listen; empty: nowhere.
    address: str = ""


class LinkOpen(_Message, frozen=True):
    """Worker to worker, first message of a link: who sends."""

    device: Index
    epoch: Index


class LinkClose(_Message, frozen=True):
    """Worker to worker: the sender closes this link on purpose."""


class LinkFrame(_Message, frozen=True):
    """Worker to worker: a transfer; its bytes, if any, follow as a raw frame."""

    run: Index
    transfer: Index
    # By the sender's clock.
    sent_s: Number


class Done(_Message, frozen=True):
    """Worker to engine: its share of a run is done, or a move has ended here."""

    run: Whole
    outputs: PackedTensors
    state: PackedTensors
    # (launch, start, stop, CPU time) in seconds, the first two by the worker's monotonic clock.
    spans: list[tuple[Index, Number, Number, Number]] = []
    # (transfer, start by the sender's clock, arrival by this worker's).
    transfers: list[tuple[Index, Number, Number]] = []
    # Busy time of all launches, reported one by one or not.
    busy_s: Number = 0.0
    # Time that a GPU was idle before the run, since the last run here had ended.
    idle_s: Number = 0.0
    # Mixture of experts -> rows of each expert in this run, where a part of it ran here.
    experts: dict[str, list[Whole]] = {}


class Failed(_Message, frozen=True):
    """Worker to engine: it cannot go on."""

    message: str
    remedy: str


class PeerLost(_Message, frozen=True):
    """Worker to engine: the link to another worker is closed."""

    device: Whole
    message: str
    # Epoch of the other worker as this one knows it.
    epoch: Whole = 0


class StoreSet(_Message, frozen=True):
    """Worker to engine: a value for other workers."""

    key: str
    value: bytes


class StoreGet(_Message, frozen=True):
    """Worker to engine: request a value; answered when it is set."""

    key: str


class StoreValue(_Message, frozen=True):
    """Engine to worker: the answer; an empty value will never be set."""

    key: str
    value: bytes


Joining = Hello | Welcome | Refused | Want | WeightBytes | Configured | Leave
Linking = LinkOpen | LinkClose | LinkFrame | PageFrame | PageTaken | Relink | PeerLost
Storing = WorkerReady | StoreSet | StoreGet | StoreValue
Order = Begin | LateInputs | Clear | Cancel | LoadLanes | DropLanes | MovePages | Where
Message = Joining | Linking | Storing | Order | Cancelled | Done | Progress | Failed
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The message that was encoded; raises TesseraError on anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TesseraError(f"a message between workers cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """A weight without its values."""

    name: str
    fingerprint: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class WorkerConfig:
    """Initial configuration of a worker: the part that can be sent."""

    device: int
    cluster: Cluster
    traces: tuple[Trace, ...]
    # programs[lane][index], by lane number over all loads.
    programs: tuple[tuple[Program, ...], ...]
    microbatches: int
    transport: str = "shm"
    # Number of restarts of this device, and of every device.
    epoch: int = 0
    epochs: tuple[int, ...] = ()
    # Dilation of a device that keeps another's times.
    scale: float = 1.0
    # True to report the time of every launch even where that costs time.
    is_profiled: bool = False
    # us[step][launch]: modelled time on this device, for priorities; see `schedule`. Empty rows: unknown.
    us: tuple[tuple[float, ...], ...] = ()
    # Lanes that are never used again. They have no memory, but all lanes lay out the inboxes of transfers.
    dropped: tuple[int, ...] = ()
    # Remote workers: the weights that the device reads.
    weight_records: tuple[WeightRecord, ...] = ()

    def extended(self, lanes: LoadLanes) -> Self:
        traces, programs = (*self.traces, *lanes.traces), (*self.programs, *lanes.programs)
        return replace(self, traces=traces, programs=programs, us=(*self.us, *lanes.us))

    @property
    def homes(self) -> set[int]:
        """Homes of lanes that were not dropped."""
        lanes = (programs for lane, programs in enumerate(self.programs) if lane not in self.dropped)
        return {program.home for programs in lanes for program in programs}

    @property
    def sendable(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(WorkerConfig)}


@dataclass(frozen=True, kw_only=True)
class Setup(WorkerConfig):
    """A worker's configuration with what its machine provides."""

    # All weights of the model by name, shared: plans loaded later may read others.
    weights: dict[str, torch.Tensor]
    # Address of the engine, this worker's name there, and the secret of both (tcp only).
    engine: str = ""
    name: bytes = b""
    secret: bytes = field(default=b"", repr=False)
    # Links listen at this host's address, or in the session's folder if all workers are local.
    host: str = ""
    folder: str = ""
    # progress[microbatch] = (run, position), in memory shared with the engine.
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
    """One per device; `programs` by lane number."""
    cluster, traces = loaded.all[0].plan.cluster, tuple(g.trace for g in loaded.graphs)
    names = {t.buffers[b].name for t in traces for b in t.buffers_of(BufferKind.WEIGHT)}
    shared = {name: weights[name].detach().share_memory_() for name in names if name in weights}
    for name in names - shared.keys():
        if whole_of(name) in weights:
            shared[name] = copied(part_of(name, weights), is_shared_memory=True)
    lanes, devices = tuple(map(tuple, programs)), cluster.devices
    first = Setup(0, cluster, traces, lanes, microbatches, transport, weights=shared)
    first = replace(first, epochs=(0,) * len(devices), scale=scale, is_profiled=is_profiled)
    setups = []
    for number in range(len(devices)):
        setups.append(replace(first, device=number, us=modelled_us(loaded, number)))
    return setups


def modelled_us(loaded: Lanes, device: int, first: int = 0) -> tuple[tuple[float, ...], ...]:
    """us[step][launch] on a device, of steps from number `first` on."""
    found = (() if costs is None else costs.costs for costs in loaded.costs[first:])
    return tuple(tuple(row[device].us for row in rows) for rows in found)


def pack_config(setup: Setup) -> bytes:
    """The configuration of a remote worker, with fingerprints in place of weights."""
    records = tuple(weight_of(name, tensor) for name, tensor in sorted(setup.weights.items()))
    return msgspec.msgpack.encode(WorkerConfig(**setup.sendable | {"weight_records": records}))


def unpack_config(packed: bytes) -> WorkerConfig:
    """What was packed, verified; raises WorkerError on anything else."""
    try:
        config = msgspec.msgpack.decode(packed, type=WorkerConfig)
        for record in (config.cluster, *config.traces, *(p for lane in config.programs for p in lane)):
            verify(record)
        _check_sizes(config)
    except (RuleBroken, ValueError, RecursionError) as error:
        raise WorkerError(f"the engine's configuration cannot be read: {error}", "Update both.") from error
    return config


def _check_sizes(config: WorkerConfig) -> None:
    steps, world = len(config.traces), len(config.cluster.devices)
    if not 0 <= config.device < world or steps == 0 or len(config.epochs) != world:
        raise ValueError(f"there is no device {config.device} of {world} in {steps} steps")
    if config.microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {config.microbatches}")
    if any(not 0 <= p.step < steps for lane in config.programs for p in lane):
        raise ValueError("a program names a step that does not exist")
    for weight in config.weight_records:
        is_dtype = isinstance(getattr(torch, weight.dtype, None), torch.dtype)
        if not is_dtype or min(weight.shape, default=0) < 0:
            raise ValueError(f"weight '{weight.name}' is no tensor")


def setup_of(config: WorkerConfig, weights: Mapping[str, torch.Tensor], secret: bytes, host: str) -> Setup:
    """The received configuration with local weights; raises MismatchError if they are not the engine's.

    host  address under which other workers reach this machine
    """
    own = {}
    for record in config.weight_records:
        tensor = weights[record.name]
        if fingerprint(tensor) != record.fingerprint:
            model = config.traces[0].step.model
            remedy = f"Have the same {model} on every machine, or name its folder with --model."
            raise MismatchError(f"weight '{record.name}' here is not the engine's", remedy)
        own[record.name] = _laid_out(tensor.detach(), record.stride)
    return Setup(**replace(config, weight_records=()).sendable, weights=own, secret=secret, host=host)


def weight_of(name: str, tensor: torch.Tensor) -> WeightRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightRecord(name, fingerprint(tensor), dtype, tuple(tensor.shape), tuple(tensor.stride()))


class Pieces:
    """Serves weights to one worker, piece by piece."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        # A worker requests one weight after another.
        self._name, self._flat = "", torch.empty(0, dtype=torch.uint8)

    def piece(self, name: str, start: int) -> WeightBytes:
        """The next bytes of a weight; raises WorkerError for a weight the worker does not read."""
        if name not in self._weights:
            raise WorkerError(f"it asked for a weight '{name[:80]}' that it does not read")
        if name != self._name:
            self._name, self._flat = name, flat_bytes(self._weights[name].cpu())
        part = self._flat[max(0, start) : max(0, start) + PIECE_BYTES]
        return WeightBytes(part.numpy().data)


def fetch(weight: WeightRecord, ask: Callable[[str, int], memoryview]) -> torch.Tensor:
    """One weight from pieces; `ask` requests by name and first byte."""
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
    """The weight with the strides of the engine's, which the programs expect."""
    if tensor.stride() == stride:
        return tensor
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=False))
    if len(stride) != tensor.dim() or min(stride) < 1 or reach != tensor.numel():
        raise MismatchError(f"a weight of shape {list(tensor.shape)} cannot lie with strides {list(stride)}")
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def fingerprint(tensor: torch.Tensor) -> str:
    """Hash of dtype, shape and a sample of the values."""
    flat = tensor.detach().contiguous().reshape(-1)
    every = max(1, flat.numel() // FINGERPRINT_VALUES)
    sample = flat[::every][:FINGERPRINT_VALUES].contiguous().view(torch.uint8)
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(kind + sample.cpu().numpy().tobytes()).hexdigest()
