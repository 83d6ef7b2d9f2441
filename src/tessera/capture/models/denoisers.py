"""Denoisers of diffusers: a pipeline's folder, a folder with a config.json, or a built-in size.

The step `denoise` predicts once and moves the latents (state) to the next noise level; `sigmas` holds both
levels, so one trace serves the whole schedule. `context` is the number of patches per picture (smallest
pixels for a UNet). Other inputs are random, sized by the configuration, or read from `--inputs`; unknown
required ones are refused. Built-in models have classifier-free guidance: rows run twice.
"""

import inspect
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from tessera.capture.models import checkpoint
from tessera.capture.models.examples import REMEDY, GivenInputs
from tessera.capture.models.vision import grid_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError, check_known, extra_module
from tessera.ir import Step

STEPS = ("denoise",)
PIPELINE = "model_index.json"
# Parts of a pipeline that run per noise level.
PARTS = ("transformer", "unet")
LATENTS = ("hidden_states", "sample")
WIDTHS = (
    "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim",
    "encoder_hid_dim", "cross_attention_dim",
)  # fmt: skip
WORDS, FRAMES = 77, 5
FRAMES_FIRST = ("CogVideoX", "ConsisID", "UNetSpatioTemporal")
# Stable Diffusion 3.5: schedule steps, shift towards noise, guidance scale.
NUM_STEPS, SHIFT, GUIDANCE = 28, 3.0, 4.5


def built_in(name: str, sizes: dict[str, Any], num_words: int, dtype: torch.dtype, step: Step) -> Workload:
    kind = getattr(extra_module("diffusers", "diffusers"), name)
    with checkpoint.seeded(step.seed):
        module = _make(kind, sizes, dtype).eval()
    _register(module)
    return Denoiser(module, step, num_words, GUIDANCE).workload()


def _make(kind: Any, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)  # fake parameters cannot be converted later
        module = kind.from_config(sizes)
    for part in module.modules():
        for key, buffer in part._buffers.items():
            part._buffers[key] = buffer.to(dtype) if buffer.is_floating_point() else buffer
    return checkpoint.widened(module, (rf"\b{name}\b" for name in kind._keep_in_fp32_modules or ()))


def is_denoiser(folder: Path) -> bool:
    config = folder / "config.json"
    is_pipeline = (folder / PIPELINE).is_file()
    return is_pipeline or (config.is_file() and "_class_name" in checkpoint.read_json(config))


def from_folder(step: Step) -> Workload:
    check_known(f"step of {step.model}", step.kind, STEPS)
    folder = _part(Path(step.model))
    return Denoiser(_load(folder, checkpoint.read_settings(folder), step), step).workload()


def _part(folder: Path) -> Path:
    if not (folder / PIPELINE).is_file():
        return folder
    part = next((folder / part for part in PARTS if (folder / part / "config.json").is_file()), None)
    if part is None:
        pipeline = checkpoint.read_json(folder / PIPELINE)
        parts = ", ".join(name for name, value in pipeline.items() if isinstance(value, list))
        remedy = f"Name the folder of one of its parts: {parts}."
        raise CaptureError(f"this pipeline has no {' or '.join(PARTS)}", remedy, str(folder))
    return part


def _load(folder: Path, settings: dict[str, Any], step: Step) -> Any:
    name = settings.get("_class_name")
    kind: Any = getattr(extra_module("diffusers", "diffusers"), str(name), None)
    is_model = isinstance(kind, type) and hasattr(kind, "forward")
    takes = inspect.signature(kind.forward).parameters if is_model else {}
    if not any(latents in takes for latents in LATENTS) or "timestep" not in takes:
        remedy = f"Name a transformer or UNet of {' or '.join(LATENTS)} and timestep, or a module:callable."
        raise CaptureError(f"diffusers has no denoiser {name!r}", remedy, str(folder / "config.json"))

    dtype = torch.float32
    with suppress(CaptureError):  # without values no files are needed
        dtype = checkpoint.dtype_of(folder)

    def make() -> Any:
        return _make(kind, dict(settings), dtype)

    def give(tensors: checkpoint.Tensors) -> checkpoint.Filled:
        values = {key: held[...] for key, held in tensors.items()}
        module = make()
        parameters = module.state_dict()
        unlike = tuple(k for k, t in values.items() if k in parameters and parameters[k].shape != t.shape)
        module.load_state_dict({k: t for k, t in values.items() if k not in unlike}, strict=False)
        return checkpoint.Filled(module, tuple(k for k in parameters if k not in values), unlike)

    module = checkpoint.load(folder, step, make, give)
    _register(module)
    return module.eval()


def _register(module: torch.nn.Module) -> None:
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                delattr(part, name)
                part.register_buffer(name, value, persistent=False)


class Denoiser:
    def __init__(self, module: Any, step: Step, num_words: int = 0, guidance: float = 0.0) -> None:
        self._module, self._step, self._guidance = module, step, guidance
        self._num_rows = 2 * step.batch if guidance else step.batch
        self._config: dict[str, Any] = dict(module.config)
        self._takes = inspect.signature(module.forward).parameters
        self._latents = next(name for name in LATENTS if name in self._takes)
        self._rows, self._columns = grid_of(step.context)
        self._is_packed = any(name in self._takes for name in ("img_ids", "img_shapes", "num_frames"))
        self._is_video = "3D" in type(module).__name__ or type(module).__name__.startswith(FRAMES_FIRST)
        self._num_words = num_words or self._config.get("max_text_seq_length") or WORDS
        sizes: dict[str, Any] = {"num_frames": FRAMES, "height": self._rows, "width": self._columns}
        sizes["img_shapes"] = [[(1, self._rows, self._columns)]] * self._num_rows
        self._fixed = {name: value for name, value in sizes.items() if name in self._takes}
        self._driven = ("timestep", "return_dict", *self._fixed)
        self._given = GivenInputs(step, [name for name in self._takes if name not in self._driven])
        self._check()

    def workload(self) -> Workload:
        def follow(first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
            return {**first, "sigmas": sigmas(run)}

        return Workload(self._step, self._module, self._call, self._inputs, self._state, follow)

    def _call(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        latents, now, after = state["latents"], inputs["sigmas"][0], inputs["sigmas"][1]
        scale = 1.0 if self._is_packed and not self._is_video else 1000.0
        arguments: dict[str, Any] = {
            self._latents: torch.cat([latents, latents]) if self._guidance else latents,
            "timestep": (now * scale).expand(self._num_rows),
        }
        for name, tensor in inputs.items():
            word, _, key = name.partition(".")
            if key:
                arguments.setdefault(word, {})[key] = tensor
            elif name != "sigmas":
                arguments[name] = tensor
        predicted = self._module(**arguments, **self._fixed, return_dict=False)[0]
        channels = self._channel_dim
        if predicted.shape[channels] > latents.shape[channels]:  # the rest are variances
            predicted = predicted.narrow(channels, 0, latents.shape[channels])
        if self._guidance:
            bare, guided = predicted.chunk(2)
            predicted = bare + self._guidance * (guided - bare)
        if predicted.shape == latents.shape:
            latents.add_(((after - now) * predicted).to(latents.dtype))
        return {"prediction": predicted.clone()}

    @property
    def _channel_dim(self) -> int:
        return 2 if self._is_packed or type(self._module).__name__.startswith(FRAMES_FIRST) else 1

    def _state(self, seed: int) -> dict[str, torch.Tensor]:
        given = self._given.over({}, seed)
        if self._latents in given:
            return {"latents": self._typed(given[self._latents])}
        batch, channels = self._step.batch, self._config["in_channels"]
        tall, wide = self._rows * self._fold, self._columns * self._fold
        if self._is_packed:
            size: tuple[int, ...] = (batch, self._num_patches, channels)
        elif not self._is_video:
            size = (batch, channels, tall, wide)
        elif self._channel_dim == 2:
            size = (batch, FRAMES, channels, tall, wide)
        else:
            size = (batch, channels, FRAMES, tall, wide)
        random = torch.Generator().manual_seed(seed + 1)
        return {"latents": self._typed(torch.randn(size, generator=random, device=random.device))}

    @property
    def _num_patches(self) -> int:
        return self._step.context * (FRAMES if self._is_video else 1)

    @property
    def _fold(self) -> int:
        levels = self._config.get("block_out_channels")
        if levels:
            return int(2 ** (len(levels) - 1))
        size = self._config.get("patch_size", 1)
        return int(size[-1] if isinstance(size, list | tuple) else size)

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        inputs: dict[str, torch.Tensor] = {}
        for name, size in self._noise_sizes.items():
            if name.partition(".")[0] in self._takes and None not in size:
                inputs[name] = torch.randn(size, generator=random, device=random.device)
        num_classes = self._config.get("num_class_embeds") or self._config.get("num_embeds_ada_norm")
        if "class_labels" in self._takes and num_classes:
            labels = torch.randint(0, num_classes, (self._num_rows,), generator=random, device=random.device)
            inputs["class_labels"] = labels
        inputs |= {name: tensor for name, tensor in self._constants().items() if name in self._takes}
        given = self._given.over(inputs, seed).items()
        inputs = {n: self._typed(tensor) for n, tensor in given if n != self._latents}
        return {"sigmas": sigmas(0), **inputs}

    def _typed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._module.dtype) if tensor.is_floating_point() else tensor

    def _check(self) -> None:
        side = self._config.get("pos_embed_max_size")
        if side and max(self._rows, self._columns) > side:
            raise CaptureError(
                f"an image of {self._rows} x {self._columns} patches exceeds the model's {side} x {side}",
                "Use a --context with divisors nearer to its square root.",
                self._step.model,
            )
        provided = {self._latents, *self._driven, *(name.partition(".")[0] for name in self._inputs(0))}
        for name, parameter in self._takes.items():
            is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if is_named and parameter.default is parameter.empty and name not in provided:
                raise CaptureError(f"nothing is known of its input '{name}'", REMEDY, self._step.model)

    @property
    def _noise_sizes(self) -> dict[str, tuple[Any, ...]]:
        config, batch = self._config, self._num_rows
        width = next((config[name] for name in WIDTHS if config.get(name)), None)
        width = width[0] if isinstance(width, list | tuple) else width
        sizes: dict[str, tuple[Any, ...]] = {
            "encoder_hidden_states": (batch, self._num_words, width),
            "pooled_projections": (batch, config.get("pooled_projection_dim")),
            "added_time_ids": (batch, 3),
        }
        pixart = getattr(self._module, "use_additional_conditions", False)  # its largest size
        if config.get("addition_embed_type") == "text_time":
            times = config["addition_time_embed_dim"] * 6
            pooled = config["projection_class_embeddings_input_dim"] - times
            sizes["added_cond_kwargs.text_embeds"] = (batch, pooled)
            sizes["added_cond_kwargs.time_ids"] = (batch, 6)
        elif config.get("use_additional_conditions") or pixart:
            sizes["added_cond_kwargs.resolution"] = (batch, 2)
            sizes["added_cond_kwargs.aspect_ratio"] = (batch, 1)
        return sizes

    def _constants(self) -> dict[str, torch.Tensor]:
        batch, words = self._num_rows, self._num_words
        axes = len(self._config.get("axes_dims_rope") or (0, 0, 0))
        patch = torch.arange(self._num_patches)
        place = [torch.zeros_like(patch), patch // self._columns, patch % self._columns]
        masks = ["encoder_hidden_states_mask"]
        for name in ("encoder_attention_mask", "attention_mask"):
            if name in self._takes and self._takes[name].default is inspect.Parameter.empty:
                masks.append(name)
        constants = {name: torch.ones((batch, words), dtype=torch.long) for name in masks}
        for name in ("original_size", "target_size", "crop_coords"):
            constants[name] = torch.ones((batch, 2), dtype=torch.long)
        constants["img_ids"] = torch.stack((place + place[:1] * axes)[:axes], 1).float()
        constants["txt_ids"] = torch.zeros((words, axes))
        if self._config.get("guidance_embeds"):
            constants["guidance"] = torch.full((batch,), 3.5)
        return constants


def sigmas(run: int) -> torch.Tensor:
    """Noise levels before and after a run; zeros after the schedule's end."""
    levels = [1.0 - min(run + i, NUM_STEPS) / NUM_STEPS for i in (0, 1)]
    return torch.tensor([SHIFT * s / (1 + (SHIFT - 1) * s) for s in levels])
