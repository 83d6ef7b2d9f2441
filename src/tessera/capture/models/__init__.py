"""Models of steps: a built-in name, a folder with a config.json, or module:callable.

A name such as org/model is its folder in Hugging Face's local cache.

The callable gets the Step and returns a `Workload`, or an nn.Module with example inputs, a dict or tuple (see
`function`). Its module is imported with the current folder on the path.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessera.capture.function import module_workload
from tessera.capture.models import catalog, checkpoint, denoisers, hf
from tessera.capture.models.hf import another
from tessera.capture.workload import Workload
from tessera.errors import CaptureError, UnknownName, check_known
from tessera.ir import Step

__all__ = ["another", "build", "check_positions", "known_models", "place_of", "steps_of_model"]

Builder = Callable[[Step], Workload]

# Builder, step kinds, step kinds for serving only.
BUILDERS: dict[str, tuple[Builder, tuple[str, ...], tuple[str, ...]]] = {
    **{
        name: (partial(hf.built_in, *model), hf.STEPS.get(model[0], hf.CAUSAL_STEPS), hf.SERVED_STEPS)
        for name, model in catalog.LANGUAGE.items()
    },
    **{
        name: (partial(denoisers.built_in, *model), denoisers.STEPS, ())
        for name, model in catalog.DENOISERS.items()
    },
}


def known_models() -> dict[str, tuple[str, ...]]:
    return {name: steps for name, (_, steps, _) in sorted(BUILDERS.items())}


def steps_of_model(model: str) -> tuple[str, ...]:
    if model in BUILDERS:
        return BUILDERS[model][1]
    folder = Path(place_of(model))
    if denoisers.is_denoiser(folder):
        return ("denoise",)
    return hf.steps_of(hf.config_of(folder)) if (folder / "config.json").exists() else ("decode",)


def positions_of(model: str) -> int | None:
    """None: no limit is known."""
    if model in catalog.LANGUAGE:
        return catalog.LANGUAGE[model][1].get("max_position_embeddings")
    folder = Path(place_of(model))
    if not (folder / "config.json").exists():
        return None
    config = hf.config_of(folder).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def check_positions(model: str, length: int) -> None:
    most = positions_of(model)
    if most is not None and length > most:
        message = f"requests of {length} tokens are beyond the {most} positions of {model}"
        raise CaptureError(message, f"Use at most {most} tokens of prompt and answer.")


def build(step: Step) -> Workload:
    """Equal records give equal weights."""
    if step.model in BUILDERS:
        builder, steps, served = BUILDERS[step.model]
        check_known(f"step of {step.model}", step.kind, (*steps, *served))
        return builder(step)
    step = replace(step, model=place_of(step.model))
    if denoisers.is_denoiser(Path(step.model)):
        return denoisers.from_folder(step)
    if (Path(step.model) / "config.json").exists():
        return hf.from_folder(step)
    if Path(step.model).is_dir():
        raise checkpoint.no_config(Path(step.model))
    if ":" in step.model:
        return from_callable(step)
    if checkpoint.REPOSITORY.fullmatch(step.model):
        remedy = f"Download it: hf download {step.model}"
        raise CaptureError("is neither a folder nor in Hugging Face's local cache", remedy, step.model)
    if "/" in step.model:
        raise CaptureError("there is no such folder", "Correct the path.", step.model)
    raise UnknownName("model", step.model, BUILDERS)


def place_of(model: str) -> str:
    if model in BUILDERS:
        return model
    folder = Path(model) if Path(model).is_dir() else checkpoint.cached(model)
    return str(folder.resolve()) if folder else model


def from_callable(step: Step) -> Workload:
    function = _find(step.model)
    try:
        inspect.signature(function).bind(step)
    except TypeError as error:
        remedy = "It gets the step (batch, context, seed): def make(step): ..."
        raise CaptureError(f"cannot be called with a step: {error}", remedy, step.model) from None
    result = function(step)
    if isinstance(result, Workload):
        return result
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)
    if not is_pair or not isinstance(result[1], Mapping | tuple | list):
        remedy = "Return a tessera.capture.Workload, or a pair of an nn.Module and its example inputs."
        raise CaptureError(f"it returned a {type(result).__name__}", remedy, step.model)
    module, examples = result
    by_name = isinstance(examples, Mapping)
    args, kwargs = ((), dict(examples)) if by_name else (tuple(examples), {})
    module.eval()
    try:
        return module_workload(step, module, args, kwargs)
    except CaptureError:  # a first call may set up
        return module_workload(step, module, args, kwargs)


def _find(name: str) -> Callable[[Step], Any]:
    module_name, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        remedy = "Name a module that Python can import from the current folder."
        raise CaptureError(f"cannot be imported: {error}", remedy, module_name) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        have = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise CaptureError(f"has no callable '{attribute}'", f"It has: {have or 'none'}.", module_name)
    return function  # type: ignore[no-any-return]
