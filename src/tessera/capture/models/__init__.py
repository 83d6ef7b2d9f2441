"""What a step's model can be: a built-in name, a folder with a Hugging Face config.json, or module:callable.

A name such as org/model means its folder in Hugging Face's local cache.

`build` needs nothing but the step, so a plan can be run from its file. To add a built-in model of a known
family, add its sizes to `catalog`; for another family, register a function from Step to Workload here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tessera.capture.models import catalog, checkpoint, diffusers
from tessera.capture.models.custom import from_callable
from tessera.capture.models.hf import (
    CAUSAL_STEPS,
    SERVED_STEPS,
    STEPS,
    another,
    built_in,
    config_of,
    from_folder,
    steps_of,
)
from tessera.capture.workload import Workload
from tessera.errors import CaptureError, UnknownName
from tessera.ir import Step

__all__ = ["another", "build", "known_models", "place_of", "register", "steps_of_model"]

Builder = Callable[[Step], Workload]

# Name -> (builder, kinds of step, kinds of step that only serving needs).
_BUILDERS: dict[str, tuple[Builder, tuple[str, ...], tuple[str, ...]]] = {}


def register(name: str, steps: tuple[str, ...], served: tuple[str, ...] = ()) -> Callable[[Builder], Builder]:
    """Adds a model; `steps` are the kinds of step it has, `served` those that only serving needs."""

    def add(builder: Builder) -> Builder:
        if name in _BUILDERS:
            raise ValueError(f"model {name!r} is registered twice")
        _BUILDERS[name] = (builder, steps, served)
        return builder

    return add


def known_models() -> dict[str, tuple[str, ...]]:
    """Model name -> kinds of step it has."""
    return {name: steps for name, (_, steps, _) in sorted(_BUILDERS.items())}


def steps_of_model(model: str) -> tuple[str, ...]:
    """The kinds of step that a model has; of a function of the user's own, what is asked for."""
    if model in _BUILDERS:
        return _BUILDERS[model][1]
    folder = Path(place_of(model))
    if diffusers.is_denoiser(folder):
        return ("denoise",)
    return steps_of(config_of(folder)) if (folder / "config.json").exists() else ("decode",)


def build(step: Step) -> Workload:
    """The workload that a step record describes. The same record gives the same weights."""
    if step.batch < 1 or step.context < 1 or step.reserve < 0:
        raise CaptureError(
            f"batch {step.batch}, context {step.context} and reserve {step.reserve} make no step",
            "Use a batch and a context of at least 1.",
        )
    if step.model in _BUILDERS:
        builder, steps, served = _BUILDERS[step.model]
        if step.kind not in (*steps, *served):
            raise UnknownName(f"step of {step.model}", step.kind, (*steps, *served))
        return builder(step)
    step = replace(step, model=place_of(step.model))
    if diffusers.is_denoiser(Path(step.model)):
        return diffusers.from_folder(step)
    if (Path(step.model) / "config.json").exists():
        return from_folder(step)
    if Path(step.model).is_dir():
        raise CaptureError(
            "this folder holds no config.json", "Name a Hugging Face model's folder.", step.model
        )
    if ":" in step.model:
        return from_callable(step)
    if checkpoint.REPOSITORY.fullmatch(step.model):
        remedy = f"Download it: hf download {step.model}"
        raise CaptureError("is no folder, and not in Hugging Face's local cache", remedy, step.model)
    raise UnknownName("model", step.model, _BUILDERS)


def place_of(model: str) -> str:
    """A folder by its full path, so that a step can be built again from elsewhere; others as they are."""
    if model in _BUILDERS:
        return model
    folder = Path(model) if Path(model).is_dir() else checkpoint.cached(model)
    return str(folder.resolve()) if folder else model


def _denoiser(name: str, step: Step) -> Workload:
    from tessera.capture.models.mmdit import MMDiTConfig, denoise_workload

    sizes, num_words, dtype = catalog.DENOISERS[name]
    return denoise_workload(MMDiTConfig(**sizes), num_words, dtype, step)


for _name, (_family, _sizes, _dtype) in catalog.LANGUAGE.items():
    register(_name, STEPS.get(_family, CAUSAL_STEPS), SERVED_STEPS)(built_in(_family, _sizes, _dtype))
for _name in catalog.DENOISERS:
    register(_name, ("denoise",))(partial(_denoiser, _name))
