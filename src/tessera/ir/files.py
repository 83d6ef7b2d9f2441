"""Save and load: every artifact is one text file.

The first line is a header (kind, format version, length and SHA-256 of the body); the rest is the body,
one JSON document. A file is written beside its place and moved there, so that a reader never sees half
of one. What is loaded is verified before it is handed out.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from tessera.errors import ArtifactError, RuleBroken
from tessera.ir.cluster import Costs
from tessera.ir.codec import body_of, decode
from tessera.ir.graph import Graph
from tessera.ir.plan import Plan, Program
from tessera.ir.timeline import Timeline
from tessera.ir.trace import Trace
from tessera.ir.verify import verify

# Raised whenever a field is added, removed or changes its meaning.
FORMAT_VERSION = 8
# Records that hold nothing newer are written as they always were.
FIRST = 2
# Format 5: steps may ask for random weights.
RANDOM_WEIGHTS = 5
# Format 6: steps of tokens, and joined products.
TOKENS = 6
# Format 7: `is_dilated` of a device has this name.
DILATED = 7
# Format 8: so have the microbatches of a plan and of a timeline.
MICROBATCHES = 8
# Format 4: programs carry no memory any more.
OLDEST = {"program": 4}
# Of what is said about a broken file.
MAX_CHARS = 500

KINDS: dict[str, type] = {
    "trace": Trace,
    "graph": Graph,
    "costs": Costs,
    "plan": Plan,
    "program": Program,
    "timeline": Timeline,
}
MADE_BY = {
    "trace": "tessera capture",
    "graph": "tessera analyze",
    "costs": "tessera profile",
    "plan": "tessera plan",
    "program": "tessera.execute.lower",
    "timeline": "tessera simulate",
}

T = TypeVar("T")


def save(record: Any, path: str | Path) -> None:
    """Writes one artifact, whole or not at all."""
    write_whole(path, chunks_of(record), "Choose a place that can be written with -o.")


def chunks_of(record: Any) -> list[bytes]:
    """What the file of an artifact holds."""
    kind = next(k for k, cls in KINDS.items() if isinstance(record, cls))
    body = body_of(record)
    checksum = hashlib.sha256(body).hexdigest()
    header = {"tessera": kind, "version": _version(record), "bytes": len(body), "sha256": checksum}
    return [json.dumps(header).encode(), b"\n", body]


def write_whole(
    path: str | Path, chunks: Iterable[bytes], remedy: str = "Choose a place that can be written."
) -> None:
    """Writes the chunks beside `path`, then moves the file there, so that no reader sees half of it.

    A link is followed. What is there and no file (/dev/null, a pipe) is written to and stays what it is.
    """
    is_file = Path(path).is_file() or not Path(path).exists()
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(part if is_file else path, "wb") as file:
            file.writelines(chunks)
        if is_file:
            os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ArtifactError(f"cannot write: {error.strerror}", remedy, str(path)) from error


def load(cls: type[T], path: str | Path) -> T:
    """Reads one artifact of the wanted kind, checked and verified."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read: {error.strerror}", _again(_kind(cls)), str(path)) from error
    return parse(cls, raw, str(path))


def parse(cls: type[T], raw: bytes, place: str) -> T:
    """The artifact that a file holds, checked and verified."""
    wanted = _kind(cls)
    head, body = _split(raw, wanted, place)
    _check_header(head, body, wanted, place)
    try:
        record = decode(cls, json.loads(body))
        verify(record)
    except (ValueError, RuleBroken, RecursionError, LookupError, ArithmeticError) as error:
        what = "not valid costs" if wanted == "costs" else f"not a valid {wanted}"
        said = str(error) if len(str(error)) < MAX_CHARS else f"{str(error)[:MAX_CHARS]}..."
        raise ArtifactError(f"{what}: {said}", _again(wanted), place) from error
    return record


def kind_of(path: str | Path) -> str | None:
    """The kind of artifact in a file, or None if it is not one."""
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline(4096))
    except (OSError, ValueError, RecursionError):
        return None
    return head.get("tessera") if isinstance(head, dict) else None


def _version(record: Any) -> int:
    """The oldest format that has all that the record holds."""
    if isinstance(record, Program):
        return OLDEST["program"]
    if isinstance(record, Plan | Timeline):
        return MICROBATCHES
    if isinstance(record, Costs) and any(device.is_dilated for device in record.devices):
        return DILATED
    steps = [trace.step for trace in (record, getattr(record, "trace", None)) if isinstance(trace, Trace)]
    if any(step.kind == "tokens" or step.joined_products for step in steps):
        return TOKENS
    return RANDOM_WEIGHTS if any(step.random_weights for step in steps) else FIRST


def _expected(kind: str) -> str:
    return "costs are expected" if kind == "costs" else f"a {kind} is expected"


def _again(kind: str) -> str:
    return f"Make it again with `{MADE_BY[kind]}`."


def _kind(cls: type) -> str:
    return next(kind for kind, known in KINDS.items() if known is cls)


def _split(raw: bytes, wanted: str, place: str) -> tuple[Any, bytes]:
    first, _, body = raw.partition(b"\n")
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or "tessera" not in head:
        raise ArtifactError(f"not a Tessera file; {_expected(wanted)}", _again(wanted), place)
    return head, body


def _check_header(head: dict[str, Any], body: bytes, wanted: str, place: str) -> None:
    kind, version = head["tessera"], head.get("version")
    if kind != wanted:
        raise ArtifactError(f"this is a {kind} file; {_expected(wanted)}", _again(wanted), place)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        message = f"written in format {version}; this Tessera reads up to {FORMAT_VERSION}"
        raise ArtifactError(message, "Upgrade Tessera, or make the file again with this one.", place)
    if version < OLDEST.get(wanted, FIRST):
        raise ArtifactError(f"written in the old format {version}", _again(wanted), place)
    if head.get("bytes") != len(body):
        raise ArtifactError(f"truncated: {len(body)} of {head.get('bytes')} bytes", _again(wanted), place)
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ArtifactError("corrupted: its contents do not match its checksum", _again(wanted), place)
