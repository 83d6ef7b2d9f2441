"""Artifact files.

The first line is a JSON header (kind, format version, length and SHA-256 of the body); the body is
MessagePack. Loaded records are verified.
"""

import hashlib
import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tessera.errors import ArtifactError, RuleBroken
from tessera.ir.cluster import Costs
from tessera.ir.graph import Graph
from tessera.ir.plan import Plan, Program
from tessera.ir.service import ServicePlan
from tessera.ir.timeline import Timeline
from tessera.ir.trace import Trace
from tessera.ir.verify import verify

# Increase when a field is added, removed or changes meaning.
FORMAT_VERSION = 2
MAX_HEADER_BYTES = 4096
MAX_CHARS = 500

KINDS: dict[str, tuple[type, str]] = {
    "trace": (Trace, "tessera capture"),
    "graph": (Graph, "tessera analyze"),
    "costs": (Costs, "tessera profile"),
    "plan": (Plan, "tessera plan TRACE"),
    "service-plan": (ServicePlan, "tessera plan MODEL"),
    "program": (Program, "tessera.execute.lower"),
    "timeline": (Timeline, "tessera simulate"),
}

T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tessera: str
    version: int
    bytes: int
    sha256: str


def save(record: Any, path: str | Path) -> None:
    write_whole(path, chunks_of(record), "Choose a place that can be written with -o.")


def chunks_of(record: Any) -> list[bytes]:
    body = msgspec.msgpack.encode(record, enc_hook=_scalar)
    header = Header(_kind(type(record)), FORMAT_VERSION, len(body), hashlib.sha256(body).hexdigest())
    return [msgspec.json.encode(header), b"\n", body]


def _scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form in an artifact")


def write_whole(
    path: str | Path, chunks: Iterable[bytes], remedy: str = "Choose a place that can be written."
) -> None:
    """Renames a temporary file. Follows symlinks; writes special files (/dev/null, a pipe) in place."""
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


def cache_folder(name: str = "") -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / name


def read_file(path: str | Path, remedy: str = "") -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read: {error.strerror}", remedy, str(path)) from error


def read_text(path: str | Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"cannot read: {error}", "Write it in UTF-8.", str(path)) from error


def packaged(package: str, name: str, kind: type[T]) -> T:
    """A JSON document that is part of Tessera."""
    return msgspec.json.decode(files(f"tessera.{package}").joinpath(name).read_bytes(), type=kind)


def load(cls: type[T], path: str | Path) -> T:
    return parse(cls, read_file(path, _again(_kind(cls))), str(path))


def parse(cls: type[T], raw: bytes, place: str) -> T:
    kind = _kind(cls)
    head, _, body = raw.partition(b"\n")
    if problem := _header_problem(header := _header(head), body, kind):
        is_service = header is not None and (header.tessera, kind) == ("service-plan", "plan")
        remedy = "Serve it: tessera serve MODEL --plan FILE." if is_service else _again(kind)
        raise ArtifactError(problem, remedy, place)
    try:
        record = msgspec.msgpack.decode(body, type=cls)
        verify(record)
    except (ValueError, RuleBroken, RecursionError, LookupError, ArithmeticError, TypeError) as error:
        what = "not valid costs" if kind == "costs" else f"not a valid {kind}"
        text = str(error) if len(str(error)) < MAX_CHARS else f"{str(error)[:MAX_CHARS]}..."
        raise ArtifactError(f"{what}: {text}", _again(kind), place) from error
    return record


def kind_of(path: str | Path) -> str | None:
    try:
        with open(path, "rb") as file:
            header = _header(file.readline(MAX_HEADER_BYTES))
    except OSError:
        return None
    return header.tessera if header else None


def _kind(cls: type) -> str:
    return next(kind for kind, (record, _) in KINDS.items() if record is cls)


def _again(kind: str) -> str:
    return f"Make it again with `{KINDS[kind][1]}`."


def _header(line: bytes) -> Header | None:
    try:
        return msgspec.json.decode(line, type=Header)
    except (ValueError, RecursionError):
        return None


def _header_problem(header: Header | None, body: bytes, kind: str) -> str:
    expected = "costs are expected" if kind == "costs" else f"a {kind} is expected"
    if header is None:
        return f"not a Tessera file; {expected}"
    if header.tessera != kind:
        return f"this is a {header.tessera} file; {expected}"
    if header.version != FORMAT_VERSION:
        return f"written in format {header.version}; this Tessera reads format {FORMAT_VERSION}"
    if len(body) < header.bytes:
        return f"truncated: {len(body)} of {header.bytes} bytes"
    if len(body) > header.bytes:
        return f"bytes were added: {len(body)} in place of {header.bytes}"
    if header.sha256 != hashlib.sha256(body).hexdigest():
        return "corrupted: its contents do not match its checksum"
    return ""
