"""Messages between the engine and its workers: MessagePack, decoded into these records and nothing else.

Every field is checked by its type before a record is made, so that a worker on another machine can at worst
send wrong numbers: a whole number has 64 bits, a number is finite, rows have their own width and begin with
an index, a tensor has a dtype that torch knows and as many bytes as its shape says. What is unknown, missing
or left over is refused. Whether a run, microbatch, launch or transfer exists, whoever takes the message
knows. Programs and briefings travel as MessagePack of their records.

The bytes of tensors are not copied but into the message and out of it: `pack` is a view of the tensor until
the message is encoded, what is decoded a view of the message.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from tessera.errors import RuleBroken, TesseraError
from tessera.ir import Program, verify

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
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().data)


def unpack(packed: PackedTensor) -> torch.Tensor:
    made = torch.empty(packed.shape, dtype=getattr(torch, packed.dtype))
    if packed.data.nbytes:
        made.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(packed.data, dtype=np.uint8)
    return made


Tensors = dict[str, PackedTensor]


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What all have in common: a map of fields, and the name of the record under `kind`."""


class Begin(_Message, frozen=True):
    """Engine to worker: run one program of one lane for one microbatch."""

    # Counts the runs of all microbatches; the same on every device.
    run: Whole
    microbatch: Whole
    lane: Whole
    index: Whole
    inputs: Tensors
    # State by name that lives here and that no run of the microbatch has used before.
    state: Tensors
    # True to hand the state back when the run is done.
    wants_state: bool
    # True to report every launch and transfer, False to report the time of all launches only.
    wants_spans: bool = False
    # Outputs that nobody asks for.
    skips: tuple[str, ...] = ()


class Clear(_Message, frozen=True):
    """Engine to worker: all state of a lane that lives here is zeros from now on, for one microbatch."""

    microbatch: Whole
    lane: Whole


class Cancel(_Message, frozen=True):
    """Engine to worker: forget a run; its microbatch will be used by another."""

    run: Whole


class Cancelled(_Message, frozen=True):
    """Worker to engine: nothing of a cancelled run goes on here any more."""

    run: Whole


class LoadLanes(_Message, frozen=True):
    """Engine to worker: more lanes, numbered from `first_lane`; see `pack_programs`."""

    first_lane: Whole
    programs: bytes


class Relink(_Message, frozen=True):
    """Engine to worker: the link to another device is to be opened anew.

    Its worker was started again (then the epoch is a new one), or the link was cut.
    """

    device: Whole
    # How often the other worker has been started before.
    epoch: Whole


class Where(_Message, frozen=True):
    """Engine to worker: what are you at? Answered at once, also in the middle of a launch."""


class Progress(_Message, frozen=True):
    # (microbatch, run, position of the instruction that was issued last) of every run that it is at.
    rows: list[tuple[Index, Whole, Whole]]


class Hello(_Message, frozen=True):
    """Worker to engine, first of all from another machine: who it is."""

    # Which device it is, counted from 0; ANY_RANK: whichever needs a worker.
    rank: Whole
    # Names the plans it has; empty: it has none and is to be told what to do.
    digest: str
    # Of Tessera; both must have the same.
    version: str


ANY_RANK = -1


class Welcome(_Message, frozen=True):
    """Engine to a worker: its briefing; see `briefing`."""

    briefing: bytes


class Refused(_Message, frozen=True):
    """Engine to a worker that called in vain: why, and what to do."""

    message: str
    remedy: str


class Want(_Message, frozen=True):
    """Worker to engine while it is briefed: the bytes of a weight that it cannot make, from here on."""

    name: str
    start: Whole


class WeightBytes(_Message, frozen=True):
    """Engine to worker: as many of these bytes as one message carries."""

    data: memoryview


class Briefed(_Message, frozen=True):
    """Worker to engine: it has all weights; it starts."""


class WorkerReady(_Message, frozen=True):
    """Worker to engine, first of all: everything is loaded. Its clock now, to compare clocks."""

    clock_s: Number
    pid: Whole


class Done(_Message, frozen=True):
    """Worker to engine: its share of a run is done."""

    run: Whole
    outputs: Tensors
    state: Tensors
    # (launch, start, stop, CPU time) in seconds, the first two by the worker's monotonic clock.
    spans: list[tuple[Index, Number, Number, Number]] = []
    # (transfer, start by the sender's clock, arrival by this worker's).
    transfers: list[tuple[Index, Number, Number]] = []
    # Of all launches, whether they are reported one by one or not.
    busy_s: Number = 0.0


class Failed(_Message, frozen=True):
    """Worker to engine: it cannot go on, at this instruction of this microbatch or at none."""

    message: str
    remedy: str
    microbatch: Whole = -1
    run: Whole = -1
    position: Whole = -1


class PeerLost(_Message, frozen=True):
    """Worker to engine: the link to another worker is gone."""

    device: Whole
    message: str
    # Of the other worker, as far as this one knows.
    epoch: Whole = 0


class StoreSet(_Message, frozen=True):
    """Worker to engine: what other workers need to reach this one."""

    key: str
    value: bytes


class StoreGet(_Message, frozen=True):
    """Worker to engine: asks for what another has set, or will; answered when it is there."""

    key: str


class StoreValue(_Message, frozen=True):
    """Engine to worker: the answer."""

    key: str
    value: bytes


Calling = Hello | Welcome | Refused | Want | WeightBytes | Briefed
Meeting = WorkerReady | StoreSet | StoreGet | StoreValue | Relink | PeerLost
Order = Begin | Clear | Cancel | LoadLanes | Where
Message = Calling | Meeting | Order | Cancelled | Done | Progress | Failed
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """The message that was encoded; raises TesseraError on anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TesseraError(f"a message between workers cannot be read: {error}") from error


def post(pipe: Connection, message: Message) -> bool:
    """Sends a message; False if nobody is at the other end."""
    try:
        pipe.send_bytes(encode(message))
    except OSError:
        return False
    return True


def pack_programs(programs: Sequence[Sequence[Program]]) -> bytes:
    """Programs of some lanes, as `LoadLanes` carries them."""
    return msgspec.msgpack.encode(programs)


def unpack_programs(packed: bytes) -> list[tuple[Program, ...]]:
    """What was packed, verified; raises TesseraError on anything else."""
    try:
        lanes = msgspec.msgpack.decode(packed, type=list[tuple[Program, ...]])
        for program in (program for lane in lanes for program in lane):
            verify(program)
    except (RuleBroken, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TesseraError(f"programs cannot be read: {error}") from error
    return lanes
