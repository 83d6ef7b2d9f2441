"""Steps of built-in models and of folders without weights, recorded once for tests that do not judge them.

They are found again by the next run, if the sources and libraries are the same.
"""

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import torch

import kept_models
import sampling
from tessera.capture import Workload, record, record_sizes, record_step
from tessera.capture.models import catalog
from tessera.ir import Step, Trace, load, save

# What recording imports (a contract of `make check`), what serving asks of it, and what tests do instead.
# Sizes of models, which tests change too, are in the name of each file.
PARTS = (
    *(f"src/tessera/{part}" for part in ("capture", "kernels", "ir", "errors.py", "serve/steps.py")),
    "src/tessera_ptx",
    *(f"tests/{name}.py" for name in ("kept_models", "kept_traces")),
)
LIBRARIES = ("torch", "transformers", "diffusers", "numpy")
KEPT = Path(os.environ["XDG_CACHE_HOME"]) / "traces"
# Traces of other sources are removed.
KEPT_S = 86400.0


@cache
def recorded(step: Step, device: str = "cpu", is_compared: bool = False) -> Trace:
    """`record_step`, whose traces are files that all processes of the tests share."""
    path = _path(step, device)
    if path is None:
        return record_step(step, device, is_compared)
    if not path.exists():
        save(record_step(step, device, is_compared), path)
    return replace(_load(path), step=step)


def recorded_sizes(steps: Sequence[Step], advance: Callable[[int], None] = lambda num: None) -> list[Trace]:
    """`record_sizes`, with the same files."""
    paths = [_path(step, "fake") for step in steps]
    if None in paths:
        return record_sizes(steps, advance)
    if not all(path is not None and path.exists() for path in paths):
        for trace, path in zip(record_sizes(steps, advance), paths, strict=True):
            assert path is not None
            save(trace, path)
    else:
        advance(0)
    return [recorded(step, "fake", True) for step in steps]


def recorded_workload(workload: Workload) -> Trace:
    """`record` of a served step, with the same files; steps that differ in their tensors are told apart."""
    tensors = {**workload.make_inputs(0), **workload.make_state(0), **workload.weights()}
    forms = sorted((name, str(t.device), str(t.dtype), *t.shape) for name, t in tensors.items())
    path = _path(workload.step, repr(forms)) if {"cpu"} == {form[1] for form in forms} else None
    if path is None:
        return record(workload)
    if not path.exists():
        save(record(workload), path)
    return replace(_load(path), step=workload.step)


_load = cache(partial(load, Trace))


def _path(step: Step, form: str) -> Path | None:
    """A file for all folders of one configuration. None: the step is recorded anew."""
    if sampling.is_whole() or form.startswith("cuda") or step.adapters:
        return None
    made = repr((catalog.LANGUAGE | catalog.DENOISERS).get(step.model))
    if made == "None":
        config = Path(step.model) / "config.json"
        if not config.exists() or kept_models.holds(config.parent):
            return None
        made, step = config.read_text(), replace(step, model="a folder")
    digest = hashlib.sha256(repr((step, form, made)).encode()).hexdigest()[:16]
    return _between_runs() / f"{digest}.trace"


@cache
def _between_runs() -> Path:
    """A folder by all that traces are made of."""
    root = Path(__file__).resolve().parents[1]
    sources = [path for part in PARTS for path in [root / part, *(root / part).rglob("*")]]
    found = [version(library) for library in LIBRARIES]
    of = hashlib.sha256(repr((found, platform.machine(), torch.backends.cpu.get_cpu_capability())).encode())
    for path in sorted(path for path in sources if path.suffix in (".py", ".json", ".ptx")):
        of.update(path.read_bytes())
    folder = KEPT / of.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for other in KEPT.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
    return folder
