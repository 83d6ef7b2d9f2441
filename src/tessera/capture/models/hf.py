"""Models of Hugging Face's transformers: from a configuration, or from a checkpoint folder.

Weights are random from the step's seed, or those of a folder (see `checkpoint`). Which steps a model has is
decided by its model_type: mamba2 and qwen2_5_vl have workloads of their own, every other causal language
model is one with a key/value cache.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessera.capture.models import checkpoint
from tessera.capture.workload import Workload
from tessera.errors import CaptureError, MissingExtra, UnknownName
from tessera.ir import Step

CAUSAL_STEPS = ("prefill", "decode")
STEPS = {"qwen2_5_vl": ("encode", "prefill", "decode")}
# What a model has besides when it is served; see `serving`.
SERVED_STEPS = {"mamba2": ("insert",)}
CAUSAL_SERVED = ("chunk", "insert")


def built_in(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> Callable[[Step], Workload]:
    """A builder of one model family at one size."""

    def builder(step: Step) -> Workload:
        config = _transformers().AutoConfig.for_model(family, **sizes)
        return _workload(config, step, dtype, None)

    return builder


def from_folder(step: Step) -> Workload:
    """The model of a folder that holds config.json, with the folder's weights."""
    folder = Path(step.model)
    config = config_of(folder)
    steps = (*STEPS.get(config.model_type, CAUSAL_STEPS), *served_steps(config.model_type))
    if step.kind not in steps:
        raise UnknownName(f"step of {step.model}", step.kind, steps)
    dtype = getattr(config, "dtype", None) or torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CaptureError(f"no model has dtype = {dtype}", "Use bfloat16.", str(folder / "config.json"))
    return _workload(config, step, dtype, folder)


def config_of(folder: Path) -> Any:
    """The configuration of a folder; no code that it names is run."""
    settings = checkpoint.read_settings(folder)
    known = _transformers().CONFIG_MAPPING
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in known:
        remedy = "Use a configuration of a model type that transformers knows."
        raise CaptureError(
            f"transformers knows no model_type {family!r}", remedy, str(folder / "config.json")
        )
    with checkpoint.blamed(folder):
        return known[family].from_dict(settings)


def served_steps(family: str) -> tuple[str, ...]:
    """The steps that only serving needs, of a model family."""
    return SERVED_STEPS.get(family, CAUSAL_SERVED)


def another(workload: Workload, step: Step) -> Workload:
    """Another step of a workload's model, over the same weights."""
    return _maker(workload.module.config, step)(workload.module, step)


_ADVISERS = ("transformers.integrations.hub_kernels", "transformers.models.mamba2.modeling_mamba2")
_ADVICE = ("falling back to its reference PyTorch implementation", "The fast path is not available")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf") from error
    for name in _ADVISERS:
        logging.getLogger(name).addFilter(_is_about_the_model)
    return transformers


def _is_about_the_model(record: logging.LogRecord) -> bool:
    """False for advice to install faster kernels: a capture wants the operators of the reference."""
    return not any(words in record.getMessage() for words in _ADVICE)


def _workload(config: Any, step: Step, dtype: torch.dtype, folder: Path | None) -> Workload:
    return _maker(config, step)(_model(config, step, dtype, folder), step)


def _maker(config: Any, step: Step) -> Callable[[Any, Step], Workload]:
    from tessera.capture.models.causal import causal_workload
    from tessera.capture.models.mamba import mamba_workload
    from tessera.capture.models.seeing import seeing_chunk, seeing_insert
    from tessera.capture.models.serving import causal_insert, chunk_workload, mamba_insert
    from tessera.capture.models.vision import vision_workload

    if step.kind == "chunk":
        return seeing_chunk if config.model_type in STEPS else chunk_workload
    if step.kind == "insert":
        inserts = {"mamba2": mamba_insert, "qwen2_5_vl": seeing_insert}
        return inserts.get(config.model_type, causal_insert)
    makers = {"mamba2": mamba_workload, "qwen2_5_vl": vision_workload}
    return makers.get(config.model_type, causal_workload)


def _model(config: Any, step: Step, dtype: torch.dtype, folder: Path | None) -> Any:
    from tessera.capture.models.grouped import ATTENTION, register_attention

    library = _transformers()
    register_attention()
    is_vision = config.model_type in STEPS
    auto = library.AutoModelForImageTextToText if is_vision else library.AutoModelForCausalLM
    options = {"attn_implementation": ATTENTION, "dtype": dtype}
    if config.model_type == "mamba2":
        del options["attn_implementation"]
    make = partial(auto.from_config, config, **options)
    if folder is None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step.seed)  # and no other device's
            model = make()
    else:
        if type(config) not in auto._model_mapping:
            remedy = "Use a causal language model, or write a module:callable that returns a Workload."
            raise CaptureError(f"a {config.model_type} is none", remedy, str(folder))
        kind = auto._model_mapping[type(config)]
        give = partial(checkpoint.give_transformers, partial(kind.from_pretrained, config=config, **options))
        model = checkpoint.load(
            folder,
            make,
            give,
            what=f"a {config.model_type} cannot be built from it",
            seed=step.seed,
            random_weights=step.random_weights,
        )
    if model._can_set_experts_implementation():
        # Experts as grouped matrix products: the eager path reads the routing on the host.
        model.set_experts_implementation("grouped_mm")
    return model.eval()
