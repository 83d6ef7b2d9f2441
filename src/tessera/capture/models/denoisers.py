"""Denoisers: those of diffusers, from a pipeline's folder or one with a config.json, and the built-in MMDiT.

One step is `denoise`: the model predicts, and the latents, which are the step's state, are moved along that
from one noise level to the next (`sigmas` has the schedule). `context` is the number of patches (or of the
smallest pixels of a UNet) a picture; a video has `FRAMES` of them. What else it is shown is made by the
names of its forward's parameters, at sizes that its configuration gives, and is random. An input that the
model must have and that is not known here is refused by name.

MMDiT: the denoiser of Stable Diffusion 3.5, from its published description; our own code.

An image in latent space is cut into patches and joined by the tokens of a text. Blocks hold one stream for
each; both streams are modulated by the time step and the pooled text (adaptive layer norm: shift, scale,
gate), and attend jointly to the tokens of both. In the medium model the first blocks attend a second time
within the image alone. The last block drops the text, and a final modulation and projection give each patch
its velocity.

Faithful in shapes, parameter counts and launches; parameter names are ours, so it reads no checkpoint.

A step denoises once, as flow matching does: the state is the latents, moved along their velocity. `context`
is the number of image patches a row; the text is as long as the model's encoders make it. Each row runs
twice, with its text and without (classifier-free guidance). `sigmas` are the noise levels before and after
the step, so one trace serves every step of the schedule.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from tessera.capture.models import checkpoint
from tessera.capture.models.vision import grid_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError, UnknownName, extra_module
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
    kind = getattr(extra_module("diffusers", "diffusers"), str(name), None)
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
        width = width[0] if isinstance(width, list | tuple) else width
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

        def is_needed(name: str) -> bool:
            return name in self._takes and self._takes[name].default is inspect.Parameter.empty

        mask = ones(batch, words)
        found: dict[str, Callable[[torch.Generator], torch.Tensor | None]] = {
            "encoder_hidden_states": noise(batch, words, width),
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
        elif config.get("use_additional_conditions") or getattr(
            self._module, "use_additional_conditions", False
        ):  # PixArt's largest size is told which size it is
            found["added_cond_kwargs.resolution"] = noise(batch, 2)
            found["added_cond_kwargs.aspect_ratio"] = noise(batch, 1)
        return found


EPSILON = 1e-6
# Sines and cosines that a time step is turned into.
TIME_CHANNELS = 256


@dataclass(frozen=True)
class MMDiTConfig:
    """Sizes of a denoiser; those of Stable Diffusion 3.5 medium unless said otherwise."""

    depth: int = 24
    heads: int = 24
    head_dim: int = 64
    patch: int = 2
    channels: int = 16
    text_width: int = 4096
    pooled_width: int = 2048
    # Patches a side of the largest image that positions are known for.
    max_side: int = 384
    # The first so many blocks attend a second time within the image.
    num_dual: int = 13

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


class RMSNorm(nn.Module):
    """Scales every vector to length one, then by a learned factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """In single precision, whatever the model's own."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return wide.to(x.dtype) * self.weight


class Modulation(nn.Module):
    """The condition turned into `parts` vectors a row, each to be broadcast over tokens."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(width, parts * width)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Shifts, scales and gates, in the order the caller takes them."""
        return self.linear(silu(condition))[:, None].chunk(self.parts, -1)  # type: ignore[no-any-return]


class Heads(nn.Module):
    """One stream's side of an attention: queries, keys and values in, its share of the result out."""

    def __init__(self, config: MMDiTConfig, has_output: bool = True) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.norm_query, self.norm_key = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        self.out = nn.Linear(config.width, config.width) if has_output else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each as (batch, heads, tokens, head_dim)."""
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.norm_query(query), self.norm_key(key), value


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        return self.down(gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class MMDiTBlock(nn.Module):
    """One block: joint attention of both streams, the image's second attention, two feed-forwards."""

    def __init__(self, config: MMDiTConfig, is_dual: bool, is_last: bool) -> None:
        super().__init__()
        self.image_modulation = Modulation(config.width, 9 if is_dual else 6)
        self.text_modulation = Modulation(config.width, 2 if is_last else 6)
        self.image_heads, self.text_heads = Heads(config), Heads(config, has_output=not is_last)
        self.second_heads = Heads(config) if is_dual else None
        self.image_mlp = MLP(config.width)
        self.text_mlp = None if is_last else MLP(config.width)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams after the block; the last block leaves the text as it was."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *second = self.image_modulation(condition)
        text_parts = self.text_modulation(condition)
        normed = _norm(image)
        seen, said = _joint(
            self.image_heads,
            self.text_heads,
            modulate(normed, shift, scale),
            modulate(_norm(text), text_parts[0], text_parts[1]),
        )
        image = image + gate * seen
        if self.second_heads is not None:
            own = attend(*self.second_heads.project(modulate(normed, second[0], second[1])))
            assert self.second_heads.out is not None
            image = image + second[2] * self.second_heads.out(own)
        image = image + mlp_gate * self.image_mlp(modulate(_norm(image), mlp_shift, mlp_scale))
        if self.text_mlp is not None and said is not None:
            text = text + text_parts[2] * said
            mixed = modulate(_norm(text), text_parts[3], text_parts[4])
            text = text + text_parts[5] * self.text_mlp(mixed)
        return image, text


class MMDiT(nn.Module):
    """latents, time step, text and pooled text -> velocity of the latents."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patchify = nn.Conv2d(config.channels, width, config.patch, config.patch)
        self.time_in, self.time_out = nn.Linear(TIME_CHANNELS, width), nn.Linear(width, width)
        self.pooled_in, self.pooled_out = nn.Linear(config.pooled_width, width), nn.Linear(width, width)
        self.text_in = nn.Linear(config.text_width, width)
        self.register_buffer("positions", _sincos_2d(config.max_side, width), persistent=False)
        self.blocks = nn.ModuleList(
            MMDiTBlock(config, i < config.num_dual, i == config.depth - 1) for i in range(config.depth)
        )
        self.last_modulation = Modulation(width, 2)
        self.unpatchify = nn.Linear(width, config.patch**2 * config.channels)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """`time` is one number a row, 1000 for pure noise."""
        image = self.patchify(latents)
        rows, columns = image.shape[-2:]
        image = image.flatten(2).transpose(1, 2) + self._crop(rows, columns)
        condition = self.time_out(silu(self.time_in(_waves(time).to(text.dtype))))
        condition = condition + self.pooled_out(silu(self.pooled_in(pooled)))
        words = self.text_in(text)
        for block in self.blocks:
            image, words = block(image, words, condition)
        scale, shift = self.last_modulation(condition)
        made: Tensor = self.unpatchify(modulate(_norm(image), shift, scale))
        patch, channels = self.config.patch, self.config.channels
        made = made.view(-1, rows, columns, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
        return made.reshape(-1, channels, rows * patch, columns * patch)

    def _crop(self, rows: int, columns: int) -> Tensor:
        """Positions of the middle of the largest image."""
        side = self.config.max_side
        top, left = (side - rows) // 2, (side - columns) // 2
        table = self.get_buffer("positions").view(side, side, -1)
        return table[top : top + rows, left : left + columns].reshape(1, rows * columns, -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x * (1 + scale) + shift."""
    return x * (1 + scale) + shift


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with the heads put side by side again."""
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _joint(image: Heads, text: Heads, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens of both streams attend to all of them; each stream gets its own back."""
    pairs = zip(image.project(x), text.project(y), strict=True)
    both = attend(*(torch.cat(pair, 2) for pair in pairs))
    seen, said = both.split([x.shape[1], y.shape[1]], 1)
    assert image.out is not None
    return image.out(seen), None if text.out is None else text.out(said)


def _norm(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=EPSILON)


def _waves(time: Tensor) -> Tensor:
    half = TIME_CHANNELS // 2
    rate = torch.exp(torch.arange(half, device=time.device) * (-math.log(10000.0) / half))
    angle = time[:, None].float() * rate
    return torch.cat([angle.cos(), angle.sin()], -1)


def _sincos_2d(side: int, width: int) -> Tensor:
    """Sines and cosines of row and column for every patch of a square, a quarter of the width each."""
    quarter = width // 4
    rate = 10000 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    angle = torch.arange(side)[:, None] * rate
    axis = torch.cat([angle.sin(), angle.cos()], -1).to(torch.get_default_dtype())
    rows = axis[:, None].expand(side, side, -1)
    columns = axis[None].expand(side, side, -1)
    return torch.cat([columns, rows], -1).reshape(side * side, width)


# Of the reference pipeline: steps of the schedule, its shift towards noise, and the guidance.
NUM_STEPS, SHIFT, GUIDANCE = 28, 3.0, 4.5


def denoise_workload(config: MMDiTConfig, num_words: int, dtype: torch.dtype, step: Step) -> Workload:
    """A denoising step of an MMDiT with seeded random weights."""
    rows, columns = grid_of(step.context)
    if max(rows, columns) > config.max_side:
        raise CaptureError(
            f"an image of {rows} x {columns} patches is beyond the {config.max_side} a side of {step.model}",
            "Use a context with divisors nearer to its square root.",
        )
    module = _module(config, dtype, step.seed)
    size = (step.batch, config.channels, rows * config.patch, columns * config.patch)

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        text = torch.randn((2 * step.batch, num_words, config.text_width), generator=random)
        pooled = torch.randn((2 * step.batch, config.pooled_width), generator=random)
        return {"text": text.to(dtype), "pooled": pooled.to(dtype), "sigmas": sigmas(0)}

    def make_state(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed + 1)
        return {"latents": torch.randn(size, generator=random).to(dtype)}

    return Workload(
        step,
        module,
        lambda inputs, state: _call(module, inputs, state),
        make_inputs,
        make_state,
        lambda first, run, last: {**first, "sigmas": sigmas(run)},
    )


def _module(config: MMDiTConfig, dtype: torch.dtype, seed: int) -> MMDiT:
    """Made in its dtype from the start: fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # and no other device\'s
            return MMDiT(config).eval()
    finally:
        torch.set_default_dtype(before)


def _call(module: MMDiT, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    latents, now, after = state["latents"], inputs["sigmas"][0], inputs["sigmas"][1]
    both = torch.cat([latents, latents])
    time = (now * 1000).expand(both.shape[0])
    bare, guided = module(both, time, inputs["text"], inputs["pooled"]).chunk(2)
    velocity = bare + GUIDANCE * (guided - bare)
    latents.add_((after - now) * velocity)
    return {"latents": latents.clone()}


def sigmas(run: int) -> torch.Tensor:
    """Noise before and after the run-th step; a schedule that has ended changes nothing."""
    levels = [1.0 - min(run + i, NUM_STEPS) / NUM_STEPS for i in (0, 1)]
    return torch.tensor([SHIFT * s / (1 + (SHIFT - 1) * s) for s in levels])
