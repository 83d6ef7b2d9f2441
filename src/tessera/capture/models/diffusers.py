"""Denoisers of diffusers: transformers and UNets, from a pipeline's folder or from one with a config.json.

One step is `denoise`: the model predicts, and the latents, which are the step's state, are moved along that
from one noise level to the next (`mmdit` has the schedule). `context` is the number of patches (or of the
smallest pixels of a UNet) a picture; a video has `FRAMES` of them. What else it is shown is made by the
names of its forward's parameters, at sizes that its configuration gives, and is random. An input that the
model must have and that is not known here is refused by name.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera.capture.models import checkpoint
from tessera.capture.models.mmdit import sigmas
from tessera.capture.models.vision import grid_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError, MissingExtra, UnknownName
from tessera.ir import Step

STEPS = ("denoise",)
PIPELINE = "model_index.json"
# Of a pipeline's parts, the one that is run over and over.
PARTS = ("transformer", "unet")
LATENTS = ("hidden_states", "sample")
WIDTHS = (
    "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim",
    "encoder_hid_dim", "cross_attention_dim",
)  # fmt: skip
WORDS, FRAMES = 77, 5
# These take frames before channels.
FRAMES_FIRST = ("CogVideoX", "ConsisID", "UNetSpatioTemporal")
REMEDY = "Write a module:callable that returns the model and its example inputs."


def is_denoiser(folder: Path) -> bool:
    """True for a folder of diffusers'."""
    if (folder / PIPELINE).is_file():
        return True
    return (folder / "config.json").is_file() and "_class_name" in checkpoint.read_json(
        folder / "config.json"
    )


def from_folder(step: Step) -> Workload:
    """The denoiser of a folder."""
    if step.kind not in STEPS:
        raise UnknownName(f"step of {step.model}", step.kind, STEPS)
    folder = _part(Path(step.model))
    settings = checkpoint.read_settings(folder)
    module = _load(folder, settings, step)
    return Denoiser(module, step).workload()


def _part(folder: Path) -> Path:
    if not (folder / PIPELINE).is_file():
        return folder
    found = next((folder / part for part in PARTS if (folder / part / "config.json").is_file()), None)
    if found is None:
        parts = [
            name for name, value in checkpoint.read_json(folder / PIPELINE).items() if isinstance(value, list)
        ]
        remedy = f"Name the folder of one of its parts: {', '.join(parts)}."
        raise CaptureError(f"this pipeline has no {' or '.join(PARTS)}", remedy, str(folder))
    return found


def _load(folder: Path, settings: dict[str, Any], step: Step) -> Any:
    name = settings.get("_class_name")
    kind = getattr(_diffusers(), str(name), None)
    takes = (
        inspect.signature(kind.forward).parameters
        if isinstance(kind, type) and hasattr(kind, "forward")
        else {}
    )
    if kind is None or not any(latents in takes for latents in LATENTS) or "timestep" not in takes:
        place = str(folder / "config.json")
        raise CaptureError(
            f"diffusers has no denoiser {name!r}", "Name a transformer's or a UNet's folder.", place
        )

    def make() -> Any:
        return kind.from_config(dict(settings))

    def give(tensors: checkpoint.Tensors) -> checkpoint.Filled:
        values = {key: held[...] for key, held in tensors.items()}
        dtype = next((t.dtype for t in values.values() if t.is_floating_point()), torch.float32)
        module = make().to(dtype)
        own = module.state_dict()
        unlike = tuple(k for k, t in values.items() if k in own and own[k].shape != t.shape)
        module.load_state_dict({k: t for k, t in values.items() if k not in unlike}, strict=False)
        return checkpoint.Filled(module, tuple(k for k in own if k not in values), unlike)

    random = step.random_weights
    what = f"a {name} cannot be built from it"
    module = checkpoint.load(folder, make, give, what=what, seed=step.seed, random_weights=random)
    _register(module)
    return module.eval()


def _register(module: torch.nn.Module) -> None:
    """Tables that a model keeps as plain attributes become buffers, so that they are weights."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                delattr(part, name)
                part.register_buffer(name, value, persistent=False)


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers") from error
    return diffusers


class Denoiser:
    """One model with what it is shown."""

    def __init__(self, module: Any, step: Step) -> None:
        self._module, self._step = module, step
        self._config: dict[str, Any] = dict(module.config)
        self._takes = inspect.signature(module.forward).parameters
        self._latents = next(name for name in LATENTS if name in self._takes)
        self._rows, self._columns = grid_of(step.context)
        self._is_packed = any(name in self._takes for name in ("img_ids", "img_shapes", "num_frames"))
        self._is_video = "3D" in type(module).__name__ or type(module).__name__.startswith(FRAMES_FIRST)
        self._fixed = self._plain()
        self._check()

    def workload(self) -> Workload:
        """The step."""
        return Workload(
            self._step,
            self._module,
            self._call,
            self._inputs,
            self._state,
            lambda first, run, last: {**first, "sigmas": sigmas(run)},
        )

    def _call(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        latents, now, after = state["latents"], inputs["sigmas"][0], inputs["sigmas"][1]
        scale = 1.0 if self._is_packed and not self._is_video else 1000.0
        given: dict[str, Any] = {self._latents: latents, "timestep": (now * scale).expand(latents.shape[0])}
        for name, tensor in inputs.items():
            word, _, key = name.partition(".")
            if key:
                given.setdefault(word, {})[key] = tensor
            elif name != "sigmas":
                given[name] = tensor
        made = self._module(**given, **self._fixed, return_dict=False)[0]
        channels = self._channel_dim
        if made.shape[channels] > latents.shape[channels]:  # the rest are variances
            made = made.narrow(channels, 0, latents.shape[channels])
        if made.shape == latents.shape:
            latents.add_(((after - now) * made).to(latents.dtype))
        return {"prediction": made.clone()}

    @property
    def _channel_dim(self) -> int:
        if self._is_packed:
            return 2
        return 2 if type(self._module).__name__.startswith(FRAMES_FIRST) else 1

    def _state(self, seed: int) -> dict[str, torch.Tensor]:
        """Latents as a schedule starts with them: noise."""
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
        return {"latents": torch.randn(size, generator=random).to(self._module.dtype)}

    @property
    def _num_patches(self) -> int:
        return self._step.context * (FRAMES if self._is_video else 1)

    @property
    def _fold(self) -> int:
        """Latent pixels a side of one patch."""
        levels = self._config.get("block_out_channels")
        if levels:
            return int(2 ** (len(levels) - 1))
        size = self._config.get("patch_size", 1)
        return int(size[-1] if isinstance(size, list | tuple) else size)

    def _plain(self) -> dict[str, Any]:
        """Sizes that the model is told as plain numbers."""
        told = {
            "num_frames": FRAMES,
            "height": self._rows,
            "width": self._columns,
            "img_shapes": [[(1, self._rows, self._columns)]] * self._step.batch,
        }
        return {name: value for name, value in told.items() if name in self._takes}

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        made = {"sigmas": sigmas(0)}
        for name, make in self._makers.items():
            if name.partition(".")[0] in self._takes:
                tensor = make(random)
                if tensor is not None:
                    is_real = tensor.is_floating_point()
                    made[name] = tensor.to(self._module.dtype) if is_real else tensor
        return made

    def _check(self) -> None:
        known = {self._latents, "timestep", "return_dict", *self._fixed}
        known |= {name.partition(".")[0] for name in self._inputs(0)}
        for name, parameter in self._takes.items():
            is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if is_named and parameter.default is parameter.empty and name not in known:
                raise CaptureError(f"nothing is known of its input '{name}'", REMEDY, self._step.model)

    @property
    def _makers(self) -> dict[str, Callable[[torch.Generator], torch.Tensor | None]]:
        """What a denoiser may be shown, by the name of its parameter; None: not by this configuration."""
        config, batch = self._config, self._step.batch
        words = config.get("max_text_seq_length") or WORDS
        width = next((config[name] for name in WIDTHS if config.get(name)), None)
        axes = len(config.get("axes_dims_rope") or (0, 0, 0))

        def noise(*size: int | None) -> Callable[[torch.Generator], torch.Tensor | None]:
            whole = [n for n in size if n is not None]
            if len(whole) < len(size):
                return lambda random: None
            return lambda random: torch.randn(whole, generator=random)

        def ones(*size: int) -> Callable[[torch.Generator], torch.Tensor]:
            return lambda random: torch.ones(size, dtype=torch.long)

        def labels(random: torch.Generator) -> torch.Tensor | None:
            count = config.get("num_class_embeds") or config.get("num_embeds_ada_norm")
            return torch.randint(0, count, (batch,), generator=random) if count else None

        def places(random: torch.Generator) -> torch.Tensor:
            grid = torch.zeros((self._num_patches, axes))
            patch = torch.arange(self._num_patches)
            grid[:, 1], grid[:, 2] = patch // self._columns, patch % self._columns
            return grid

        is_needed = self._is_needed
        mask = ones(batch, words)
        found: dict[str, Callable[[torch.Generator], torch.Tensor | None]] = {
            "encoder_hidden_states": noise(batch, words, _first(width)),
            "pooled_projections": noise(batch, config.get("pooled_projection_dim")),
            "class_labels": labels,
            "img_ids": places,
            "txt_ids": lambda random: torch.zeros((words, axes)),
            "guidance": lambda random: torch.full((batch,), 3.5) if config.get("guidance_embeds") else None,
            **{f"{name}": mask for name in ("encoder_attention_mask", "attention_mask") if is_needed(name)},
            "encoder_hidden_states_mask": mask,
            **{name: ones(batch, 2) for name in ("original_size", "target_size", "crop_coords")},
            "added_time_ids": noise(batch, 3),
        }
        if config.get("addition_embed_type") == "text_time":
            times = config["addition_time_embed_dim"] * 6
            pooled = config["projection_class_embeddings_input_dim"] - times
            found["added_cond_kwargs.text_embeds"] = noise(batch, pooled)
            found["added_cond_kwargs.time_ids"] = noise(batch, 6)
        elif config.get("use_additional_conditions") or self._is_needed_by_size:
            found["added_cond_kwargs.resolution"] = noise(batch, 2)
            found["added_cond_kwargs.aspect_ratio"] = noise(batch, 1)
        return found

    def _is_needed(self, name: str) -> bool:
        return name in self._takes and self._takes[name].default is inspect.Parameter.empty

    @property
    def _is_needed_by_size(self) -> bool:
        """PixArt's largest size is told which size it is."""
        return bool(getattr(self._module, "use_additional_conditions", False))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value
