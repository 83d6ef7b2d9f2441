"""Messages between the engine and its workers: plain JSON and bytes, never pickle.

A message is a length, a JSON header and the contents of its tensors one after another. What is read builds
nothing but these records, and every field is checked first (`message_fields`), so that a worker on another
machine can at worst send wrong numbers.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, get_args, get_type_hints

from tessera.errors import RuleBroken, TesseraError
from tessera.execute import message_fields as must
from tessera.execute.packing import Packed
from tessera.ir import Program, codec, verify

_LENGTH = struct.Struct("<I")
PROGRAMS = "programs"


@dataclass(frozen=True, slots=True)
class Begin:
    """Engine to worker: run one program of one lane for one microbatch."""

    # Counts the runs of all microbatches; the same on every device.
    run: int
    microbatch: int
    lane: int
    index: int
    inputs: Mapping[str, Packed]
    # State by name that lives here and that no run of the microbatch has used before.
    state: Mapping[str, Packed]
    # True to hand the state back when the run is done.
    wants_state: bool
    # True to report every launch and transfer, False to report the time of all launches only.
    wants_spans: bool = False
    # Names of outputs that nobody asks for, separated by commas.
    skips: str = ""


@dataclass(frozen=True, slots=True)
class Clear:
    """Engine to worker: all state of a lane that lives here is zeros from now on, for one microbatch."""

    microbatch: int
    lane: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Engine to worker: forget a run; its microbatch will be used by another."""

    run: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Worker to engine: nothing of a cancelled run goes on here any more."""

    run: int


@dataclass(frozen=True, slots=True)
class Load:
    """Engine to worker: more lanes, numbered from `first_lane`; see `pack_programs`."""

    first_lane: int
    programs: Mapping[str, Packed]


@dataclass(frozen=True, slots=True)
class Relink:
    """Engine to worker: the link to another device is to be opened anew.

    Its worker was started again (then the epoch is a new one), or the link was cut.
    """

    device: int
    # How often the other worker has been started before.
    epoch: int


@dataclass(frozen=True, slots=True)
class Where:
    """Engine to worker: what are you at? Answered at once, also in the middle of a launch."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker to engine: where it is."""

    # (microbatch, run, position of the instruction that was issued last) of every run that it is at.
    rows: list[list[float]]


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker to engine, first of all from another machine: who it is."""

    # Which device it is, counted from 0; ANY_RANK: whichever needs a worker.
    rank: int
    # Names the plans it has; empty: it has none and is to be told what to do.
    digest: str
    # Of Tessera; both must have the same.
    version: str


ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class Welcome:
    """Engine to a worker: its briefing, as bytes; see `briefing`."""

    briefing: Mapping[str, Packed]


@dataclass(frozen=True, slots=True)
class Refused:
    """Engine to a worker that called in vain: why, and what to do."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Want:
    """Worker to engine while it is briefed: the bytes of a weight that it cannot make, from here on."""

    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Engine to worker: as many of these bytes as one message carries."""

    piece: Mapping[str, Packed]


@dataclass(frozen=True, slots=True)
class Briefed:
    """Worker to engine: it has all weights; it starts."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to engine, first of all: everything is loaded. Its clock now, to compare clocks."""

    clock_s: float
    pid: int


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to engine: its share of a run is done."""

    run: int
    outputs: Mapping[str, Packed]
    state: Mapping[str, Packed]
    # (launch, start, stop, CPU time) in seconds, the first two by the worker's monotonic clock.
    spans: list[list[float]] = field(default_factory=list)
    # (transfer, start by the sender's clock, arrival by this worker's).
    transfers: list[list[float]] = field(default_factory=list)
    # Of all launches, whether they are reported one by one or not.
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to engine: it cannot go on, at this instruction of this microbatch or at none."""

    message: str
    remedy: str
    microbatch: int = -1
    run: int = -1
    position: int = -1


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Worker to engine: the link to another worker is gone."""

    device: int
    message: str
    # Of the other worker, as far as this one knows.
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoreSet:
    """Worker to engine: what other workers need to reach this one."""

    key: str
    value_hex: str


@dataclass(frozen=True, slots=True)
class StoreGet:
    """Worker to engine: asks for what another has set, or will; answered when it is there."""

    key: str


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Engine to worker: the answer."""

    key: str
    value_hex: str


Calling = Hello | Welcome | Refused | Want | Piece | Briefed
Meeting = Ready | StoreSet | StoreGet | StoreValue | Relink | PeerLost
Order = Begin | Clear | Cancel | Load | Where
Message = Calling | Meeting | Order | Cancelled | Done | Progress | Failed
KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Message)}
# Fields that hold tensors, by name.
TENSORS = ("inputs", "state", "outputs", "briefing", "programs", "piece")
# What the others must be: by name, or else by their type.
NAMED = {
    "spans": must.table(4),
    "transfers": must.table(3),
    "rows": must.table(3),
    "value_hex": must.hexadecimal,
}
TYPED: dict[Any, must.Check] = {int: must.whole, float: must.number, str: must.text, bool: must.truth}


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
        head = _HEADER.decode(data[_LENGTH.size : at].decode())
        if not isinstance(head, dict):
            raise ValueError("its header is no object")
        kind = KINDS[must.text(head.pop("kind"))]
        checks = _checks(kind)
        for name in head:
            if checks[name] is None:
                head[name], at = must.tensors(head[name], data, at)
            else:
                head[name] = checks[name](head[name])
        if at != len(data):
            raise ValueError("its length is wrong")
        made: Message = kind(**head)
    except KeyError as error:
        raise TesseraError(f"a message between workers cannot be read: unknown {error}") from error
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise TesseraError(f"a message between workers cannot be read: {error}") from error
    return made


def pack_programs(programs: Sequence[Sequence[Program]]) -> dict[str, Packed]:
    """Programs of some lanes, as `Load` carries them."""
    plain = [[codec.encode(program) for program in lane] for lane in programs]
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    return {PROGRAMS: ("uint8", (len(text),), text)}


def unpack_programs(packed: Mapping[str, Packed]) -> list[tuple[Program, ...]]:
    """What was packed, verified; raises TesseraError on anything else."""
    try:
        lanes = codec.decode(tuple[tuple[Program, ...], ...], json.loads(packed[PROGRAMS][2]))
        for program in (program for lane in lanes for program in lane):
            verify(program)
    except (codec.Undecodable, RuleBroken, KeyError, ValueError, RecursionError) as error:
        raise TesseraError(f"programs cannot be read: {error}") from error
    return list(lanes)


@cache
def _checks(kind: type) -> dict[str, Any]:
    """Field -> what it must be; None for tensors."""
    hints = get_type_hints(kind)
    return {
        item.name: None if item.name in TENSORS else NAMED.get(item.name) or TYPED[hints[item.name]]
        for item in fields(kind)
    }


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_HEADER = json.JSONDecoder(parse_constant=_refuse_constant)
