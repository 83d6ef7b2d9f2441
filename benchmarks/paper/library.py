"""Recorded steps and outcomes of cases, kept in files: both take long, and a run goes on where one ended.

A recorded step is named by itself and by a digest of the code that records it (`capture` and `ir` and the
versions of torch and transformers), an outcome by its task and a digest of all code that it comes from: what
older code made is never taken for what this code makes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.paper.records import Load, Shape

import tessera
from tessera.capture import place_of, record_sizes, record_step
from tessera.errors import CaptureError
from tessera.flow import ANCHORS, LoadSteps, at_anchors, choose_launches
from tessera.ir import Step, Trace, WorkUnit, load, save
from tessera.kernels import PAGE
from tessera.planning import served_step

# Loads whose steps a process keeps at hand: at all batches, some hundred megabytes of a large model.
NUM_KEPT = 13


@dataclass(frozen=True)
class Library:
    """Traces and outcomes in one folder."""

    folder: Path

    def path(self, step: Step) -> Path:
        """Where the trace of a step is, or will be."""
        words = (step.model, step.kind, step.batch, step.context, step.seed, step.reserve)
        name = "_".join(str(w).replace("/", "-") for w in words)
        return self.folder / f"{name}_{recording_digest()}.trace"

    def has(self, step: Step) -> bool:
        """Has it been recorded?"""
        return self.path(step).exists()

    def record(self, step: Step) -> Trace:
        """A step without a GPU, recorded unless it is there."""
        if not self.has(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            save(record_step(step, "fake"), self.path(step))
        return load(Trace, self.path(step))

    def unit(self, shape: Shape) -> WorkUnit:
        """The work of one batch."""
        return self.steps(shape.load).at(shape.batch)

    def steps(self, asked: Load) -> LoadSteps:
        """A request's steps at every batch, as people serve them where that is known."""
        return _steps(self, asked.steps, asked.counts)

    def is_compiled(self, asked: Load) -> bool:
        """Are its launches those of compiled steps? They are where the package has them."""
        return choose_launches(at_anchors(asked.steps), "")[0]

    def is_served(self, asked: Load) -> bool:
        """Whether its requests are planned as a service."""
        return asked.kind == "request" and _is_served(asked.model)

    def recorded_for(self, asked: Load) -> list[Step]:
        """What has to be recorded before a load can be planned for; a service records its own steps."""
        if self.is_compiled(asked) or self.is_served(asked):
            return []
        return [replace(step, batch=batch) for step in asked.steps for batch in ANCHORS[:2]]

    def kept(self, key: str, kind: Any) -> Any:
        """What came out of a task when this code did it before; None if it has not."""
        try:
            return msgspec.json.decode(self._outcome(key).read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None

    def keep(self, key: str, found: Any) -> None:
        """Keeps it for the next run."""
        path = self._outcome(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(msgspec.json.encode(found, enc_hook=_plain))
        path.with_suffix(".part").replace(path)

    def _outcome(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        return self.folder / f"outcomes-{working_digest()}" / f"{name}.json"


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    return value.item()


@lru_cache(maxsize=NUM_KEPT)
def _is_served(model: str) -> bool:
    try:
        record_sizes([served_step(place_of(model), 8, 2, 4 * PAGE, PAGE, is_random=False)])
    except CaptureError:  # state by row
        return False
    return True


@lru_cache(maxsize=NUM_KEPT)
def _steps(library: Library, steps: tuple[Step, ...], counts: tuple[int, ...]) -> LoadSteps:
    is_compiled, _ = choose_launches(at_anchors(steps), "")
    return LoadSteps(steps, counts, is_compiled=is_compiled, record=library.record)


@lru_cache(maxsize=1)
def recording_digest() -> str:
    """Digest of everything that decides what a recorded step looks like."""
    root = Path(tessera.__file__).parent
    return _digest(path for part in ("capture", "ir") for path in (root / part).rglob("*.py"))


@lru_cache(maxsize=1)
def working_digest() -> str:
    """Digest of everything that decides what comes out of a case."""
    roots = (Path(tessera.__file__).parent, Path(__file__).parent)
    suffixes = (".py", ".json", ".gz")
    return _digest(path for root in roots for path in root.rglob("*") if path.suffix in suffixes)


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes())
    for package in ("torch", "transformers", "triton"):
        try:
            found.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            found.update(package.encode())
    return found.hexdigest()[:12]
