"""Outlines: compiled steps without PTX, source and grids, for planning.

Compiling takes tens of seconds. Outlines are cached per user; those of common built-in models ship with the
package (scripts/make_outlines.py).
"""

import gzip
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tessera.errors import ArtifactError, TesseraError
from tessera.ir import Step, Trace
from tessera.ir.files import cache_folder, chunks_of, parse, write_whole

# Raise when compilation of a step changes; invalidates older outlines.
VERSION = 3


def outlined(trace: Trace) -> Trace:
    empty: dict[str, Any] = {"ptx": "", "source": "", "constants": (), "num_warps": 0, "shared_bytes": 0}
    launches = tuple(replace(x, grid=(), block=()) for x in trace.launches)
    return replace(trace, kernels=tuple(replace(k, **empty) for k in trace.kernels), launches=launches)


def name_of(step: Step) -> str:
    plain = Step(step.model, step.kind, step.batch, step.context, windows=step.windows)
    said = [(f.name, getattr(step, f.name)) for f in fields(step)]
    others = [(name, value) for name, value in said if value != getattr(plain, name)]
    words = hashlib.sha256(repr((step.model, others, VERSION)).encode()).hexdigest()[:8]
    return f"{Path(step.model).name}-{step.kind}-{step.batch}x{step.context}-{words}.trace.gz"


def find(step: Step) -> Trace | None:
    for folder in (files(__name__), cache_folder("outlines")):
        path = folder / name_of(step)
        if path.is_file():
            return _read(path)
    return None


def find_or_make(step: Step, compiled: Callable[[Step], Trace]) -> Trace:
    outline = find(step)
    if outline is None:
        outline = outlined(compiled(step))
        with suppress(OSError, ArtifactError):  # an unwritable cache is skipped
            write(outline, cache_folder("outlines") / name_of(step))
    return outline


def can_compile() -> bool:
    return find_spec("triton") is not None


def write(trace: Trace, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [gzip.compress(b"".join(chunks_of(trace)), mtime=0)])


def _read(path: Traversable) -> Trace | None:
    """None for another version or a broken file."""
    try:
        return parse(Trace, gzip.decompress(path.read_bytes()), str(path))
    except (OSError, EOFError, TesseraError):
        return None
