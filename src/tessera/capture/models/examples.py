"""Example inputs of a model, random or read from `--inputs`: named tensors in safetensors, npz or json. No
format that can run code is read.
"""

import inspect
import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.capture.workload import fresh
from tessera.errors import CaptureError, extra_module, first_line
from tessera.ir import Step

PIXELS = "pixel_values"
# Settings that name the token for a picture.
PICTURE_WORDS = ("image_token_id", "image_token_index")
SHOWN = ("input_ids", PIXELS, "input_features", "input_values")
# Parts of a configuration with an input's sizes.
PARTS = ("vision_config", "encoder", "backbone_config", "audio_config")
# Side of a picture where any size is allowed.
ANY_SIZE = 224
REMEDY = "Give the inputs in a file: --inputs FILE (safetensors, npz or json)."
MAX_BYTES = 4 * 2**30
FILE_REMEDY = (
    "Use safetensors, npz without objects, or json: a name and nested lists of numbers for each input."
)


def tokens(config: Any, size: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    text = config.get_text_config(decoder=True)
    count = getattr(text, "vocab_size", None) or 256  # CANINE reads characters
    named = [*vars(config).items(), *vars(text).items()]
    special = [v for k, v in named if k.endswith(("_token_id", "_token_index")) and type(v) is int]
    first, stop = _widest(sorted(v for v in special if 0 <= v < count), count)
    return torch.randint(first, stop, size, generator=random)


def _widest(special: list[int], count: int) -> tuple[int, int]:
    edges = [-1, *special, count]
    first, stop = max(pairwise(edges), key=lambda pair: pair[1] - pair[0])
    return (first + 1, stop) if stop > first + 1 else (0, count)


def example_inputs(model: Any, step: Step, seed: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = {}
    for name in names:
        if name not in MAKERS:
            raise CaptureError(f"nothing is known of its input '{name}'", REMEDY, step.model)
        tensor = MAKERS[name](model.config, step, random)
        inputs[name] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
    return inputs


def call_names(model: Any) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in named if p.default is inspect.Parameter.empty]
    main = [model.main_input_name] if model.main_input_name in parameters else []
    has_text = getattr(model.config, "text_config", None) is not None
    both = has_text and "logit_scale" in dict(model.named_parameters())
    shown = [name for name in SHOWN if name in parameters] if both else []
    decoder = ["decoder_input_ids"] if model.config.is_encoder_decoder else []
    return list(dict.fromkeys([*main, *needed, *shown, *(n for n in decoder if n in parameters)]))


def _ids(config: Any, step: Step, random: torch.Generator) -> torch.Tensor:
    length = step.context + step.reserve
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return tokens(config, (step.batch, min(length, most) if most > 0 else length), random)


def _pixels(config: Any, step: Step, random: torch.Generator) -> torch.Tensor:
    channels = setting(config, ("num_channels", "in_channels", "in_chans"), 3)
    height, width = _sides(setting(config, ("image_size", "input_size"), ANY_SIZE))
    return torch.randn((step.batch, channels, height, width), generator=random)


def _features(config: Any, step: Step, random: torch.Generator) -> torch.Tensor:
    bins = setting(config, ("num_mel_bins", "input_feat_per_channel", "feature_size"), 80)
    frames = getattr(config, "max_source_positions", None)
    if config.model_type == "whisper" or (getattr(config, "num_mel_bins", None) and frames):
        return torch.randn((step.batch, bins, 2 * (frames or step.context + step.reserve)), generator=random)
    return torch.randn((step.batch, step.context + step.reserve, bins), generator=random)


def _samples(config: Any, step: Step, random: torch.Generator) -> torch.Tensor:
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins and length and not hasattr(config, "conv_stride"):
        return torch.randn((step.batch, length, bins), generator=random)
    stride = prod(getattr(config, "conv_stride", None) or getattr(config, "upsampling_ratios", None) or [320])
    return torch.randn((step.batch, stride * (step.context + step.reserve + 1)), generator=random)


def _boxes(config: Any, step: Step, random: torch.Generator) -> torch.Tensor:
    size = (step.batch, min(step.context, config.max_position_embeddings), 4)
    return torch.randint(0, 500, size, generator=random).sort(-1).values


def setting(config: Any, names: Iterable[str], default: Any = None) -> Any:
    parts = [config, *(getattr(config, name, None) for name in PARTS)]
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value is not None), default)


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict):
        return size["height"], size["width"]
    return tuple(size[-2:]) if len(size) > 1 else (size[0], size[0])


MAKERS: dict[str, Callable[[Any, Step, torch.Generator], torch.Tensor]] = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    PIXELS: _pixels,
    "input_features": _features,
    "input_values": _samples,
    "bbox": _boxes,
}


class GivenInputs:
    """Those in `takes` may have any shape; `tokens` is another name of the tokens."""

    def __init__(self, step: Step, takes: Iterable[str] = (), tokens: str = "tokens") -> None:
        held = _read_inputs(step.inputs) if step.inputs else {}
        self._tensors = {"tokens" if name == tokens else name: tensor for name, tensor in held.items()}
        self._file, self._takes = step.inputs, tuple(takes)

    def over(self, made: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        """`made`, with the file's tensors for seed 0 and `fresh` ones for others."""
        for name, tensor in self._tensors.items():
            if name not in self._takes and (name not in made or made[name].shape != tensor.shape):
                known = ", ".join(self._takes or (f"{n} {tuple(t.shape)}" for n, t in made.items()))
                message = f"'{name}' of shape {tuple(tensor.shape)} is no input of this step"
                raise CaptureError(message, f"It takes: {known}.", self._file)
        given = fresh(self._tensors, seed) if seed else {n: t.clone() for n, t in self._tensors.items()}
        return made | {name: t.to(made[name].dtype) if name in made else t for name, t in given.items()}


def _read_inputs(file: str) -> dict[str, torch.Tensor]:
    path = Path(file)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CaptureError(f"is larger than {MAX_BYTES >> 30} GB", FILE_REMEDY, file)
        tensors = _read(path)
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise CaptureError(f"cannot be read: {first_line(error)}", FILE_REMEDY, file) from error
    if not tensors:
        raise CaptureError("holds no tensors", FILE_REMEDY, file)
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    match path.suffix:
        case ".safetensors":
            try:
                return dict(extra_module("safetensors.torch", "hf", "safetensors").load_file(path))
            except extra_module("safetensors", "hf").SafetensorError as error:
                raise ValueError(str(error)) from error
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name].copy()) for name in arrays.files}
        case ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
            return {name: torch.tensor(value) for name, value in values.items()}
    raise ValueError(f"a file that ends in {path.suffix or 'nothing'} is not known")
