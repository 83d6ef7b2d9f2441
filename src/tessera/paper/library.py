"""Recorded steps, kept in files: one of a full-size model takes seconds, and many cases use it.

A file is named by the step and by a digest of the code that records (this package's `capture` and `ir`, and
the versions of torch and transformers), so a trace of older code is never taken for one of this code.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tessera.capture import record_step
from tessera.flow import make_unit
from tessera.ir import Step, Trace, WorkUnit, load, save
from tessera.paper.records import Workload

# Work units that a process keeps at hand; a large one has tens of megabytes.
NUM_KEPT = 3


@dataclass(frozen=True)
class Library:
    """Traces in one folder."""

    folder: Path

    def path(self, step: Step) -> Path:
        """Where the trace of a step is, or will be."""
        words = (step.model, step.kind, step.batch, step.context, step.seed, step.reserve)
        return self.folder / f"{'_'.join(str(w).replace('/', '-') for w in words)}_{code_digest()}.trace"

    def has(self, step: Step) -> bool:
        """Has it been recorded?"""
        return self.path(step).exists()

    def record(self, step: Step) -> None:
        """Records a step without a GPU, unless it is there."""
        if not self.has(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            save(record_step(step, "fake"), self.path(step))

    def unit(self, workload: Workload) -> WorkUnit:
        """The work of one batch; records what is missing."""
        return _unit(self, workload)


@lru_cache(maxsize=NUM_KEPT)
def _unit(library: Library, workload: Workload) -> WorkUnit:
    for step in workload.steps:
        library.record(step)
    traces = [load(Trace, library.path(step)) for step in workload.steps]
    return make_unit(traces, workload.counts)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of everything that decides what a recorded step looks like."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted((*(root / "capture").rglob("*.py"), *(root / "ir").rglob("*.py"))):
        found.update(path.read_bytes())
    for package in ("torch", "transformers", "triton"):
        try:
            found.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            found.update(package.encode())
    return found.hexdigest()[:12]
