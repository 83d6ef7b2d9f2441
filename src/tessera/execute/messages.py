"""Messages between the engine and its workers: plain JSON and bytes, never pickle.

A message is a length, a JSON header and the contents of its tensors one after another. What is read builds
nothing but these records, so that a worker on another machine can at worst send wrong numbers.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import Any

from tessera.errors import TesseraError
from tessera.execute.packing import Packed

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Begin:
    """Engine to worker: run one program of one lane in one slot."""

    ticket: int
    slot: int
    lane: int
    index: int
    inputs: Mapping[str, Packed]
    # State by name that lives here and that no run of the request has used before.
    state: Mapping[str, Packed]
    # True to hand the state back when the run is done.
    wants_state: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Engine to worker: forget a run; its slot will be used by another."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker to engine, from another machine: which device it is, and the digest of its plans."""

    rank: int
    digest: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to engine, first of all: everything is loaded. Its clock now, to compare clocks."""

    clock_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to engine: its share of a run is done."""

    ticket: int
    outputs: Mapping[str, Packed]
    state: Mapping[str, Packed]
    # (launch, start, stop, CPU time) in seconds, the first two by the worker's monotonic clock.
    spans: list[list[float]] = field(default_factory=list)
    # (transfer, start by the sender's clock, arrival by this worker's).
    transfers: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to engine: it cannot go on, at this instruction of this slot or at none."""

    message: str
    remedy: str
    slot: int = -1
    ticket: int = -1
    position: int = -1


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Worker to engine: another worker cannot be reached."""

    device: int
    message: str


@dataclass(frozen=True, slots=True)
class StoreSet:
    """Worker to engine while starting: what other workers need to reach this one."""

    key: str
    value_hex: str


@dataclass(frozen=True, slots=True)
class StoreGet:
    """Worker to engine while starting: asks for what another has set; answered when it is there."""

    key: str


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Engine to worker: the answer."""

    value_hex: str


Message = Begin | Cancel | Hello | Ready | Done | Failed | PeerLost | StoreSet | StoreGet | StoreValue
KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (Begin, Cancel, Hello, Ready, Done, Failed, PeerLost, StoreSet, StoreGet, StoreValue)
}
# Fields that hold tensors, by name.
TENSORS = ("inputs", "state", "outputs")


def post(pipe: Connection, message: Message) -> bool:
    """Sends a message; False if nobody is at the other end."""
    try:
        pipe.send_bytes(encode(message))
    except OSError:
        return False
    return True


def encode(message: Message) -> bytes:
    """A message as bytes."""
    head: dict[str, Any] = {"kind": type(message).__name__}
    parts: list[bytes] = []
    for item in fields(message):
        value = getattr(message, item.name)
        if item.name in TENSORS:
            head[item.name] = [
                [n, dtype, list(shape), len(data)] for n, (dtype, shape, data) in value.items()
            ]
            parts += [data for _, _, data in value.values()]
        else:
            head[item.name] = value
    text = json.dumps(head).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode(data: bytes) -> Message:
    """The message that was encoded; raises TesseraError on anything else."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        head = json.loads(data[_LENGTH.size : at])
        if not isinstance(head, dict):
            raise ValueError("its header is no object")
        kind = KINDS[head.pop("kind")]
        for item in fields(kind):
            if item.name in TENSORS:
                head[item.name], at = _tensors(head[item.name], data, at)
        made: Message = kind(**head)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TesseraError(f"a message between workers cannot be read: {error}") from error
    return made


def _tensors(rows: list[Any], data: bytes, at: int) -> tuple[dict[str, Packed], int]:
    found: dict[str, Packed] = {}
    for name, dtype, shape, size in rows:
        if size < 0 or at + size > len(data):
            raise ValueError("truncated")
        found[name] = (dtype, tuple(shape), data[at : at + size])
        at += size
    return found, at
