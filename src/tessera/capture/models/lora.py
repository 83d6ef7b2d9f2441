"""LoRA adapters beside their base model: rows of one step may use different ones, or none.

`add_adapters` reads peft folders. An `AdaptedLinear` holds the matrices of all adapters, padded to the
largest rank.

Refused by name: other kinds of adapters, DoRA, trained biases, modules saved whole, adapted embeddings, heads
and experts.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tessera.kernels.lora  # noqa: F401 - registers the operator
from tessera.capture.models import checkpoint
from tessera.capture.models.joined import JoinedLinear, JoinedPart
from tessera.errors import CaptureError

# Settings of peft, with the values that do not change the product.
PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None),
    "modules_to_save": (None, []), "fan_in_fan_out": (False, None), "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []), "layer_replication": (None, []), "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}  # fmt: skip
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MERGE = "Merge it into its base model (peft: merge_and_unload), and serve that folder."


class AdapterChoice:
    def __init__(self, num: int) -> None:
        self.num = num
        self.rows: torch.Tensor | None = None


class AdaptedLinear(torch.nn.Module):
    def __init__(self, base: Any, choice: AdapterChoice, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self._choice = (choice,)
        self.register_buffer("lora_down", down)
        self.register_buffer("lora_up", up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        rows = self._choice[0].rows
        if rows is None:
            return y
        adapted: torch.Tensor = torch.ops.tessera.lora(y, x, self.lora_down, self.lora_up, rows)
        return adapted

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias  # type: ignore[no-any-return]


def num_adapters(model: Any) -> int:
    choice: AdapterChoice | None = getattr(model, "adapter_choice", None)
    return 0 if choice is None else choice.num


@contextmanager
def using_adapters(model: Any, rows: torch.Tensor | None) -> Iterator[None]:
    """Token t of a call has adapter rows[t]; 0: none."""
    choice = getattr(model, "adapter_choice", None)
    if choice is None:
        yield
        return
    choice.rows = rows
    try:
        yield
    finally:
        choice.rows = None


def add_adapters(model: Any, folders: Sequence[str]) -> None:
    """Adapter i is number i + 1."""
    adapters = [_read(Path(folder)) for folder in folders]
    paths = dict.fromkeys(path for adapter in adapters for path in adapter)
    choice = model.adapter_choice = AdapterChoice(len(adapters))
    for path in paths:
        place = next(folder for folder, adapter in zip(folders, adapters, strict=True) if path in adapter)
        base = _layer(model, path, place)
        outputs, inputs = base.weight.shape
        given = [adapter.get(path) for adapter in adapters]
        rank = max(pair[0].shape[0] for pair in given if pair)
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        down = torch.zeros(len(adapters), rank, inputs, **like)
        up = torch.zeros(len(adapters), outputs, rank, **like)
        for number, (pair, folder) in enumerate(zip(given, folders, strict=True)):
            if pair is None:
                continue
            own = len(pair[0])
            if pair[0].shape != (own, inputs) or pair[1].shape != (outputs, own):
                shapes = f"{tuple(pair[0].shape)} and {tuple(pair[1].shape)}"
                message = (
                    f"its matrices of {path} have the shapes {shapes}; the layer is {outputs} x {inputs}"
                )
                raise CaptureError(message, "Use an adapter of this base model.", folder)
            down[number, :own], up[number, :, :own] = pair
        model.set_submodule(path, AdaptedLinear(base, choice, down, up))


def _layer(model: Any, path: str, folder: str) -> Any:
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        layer = None
    if layer is None:
        raise CaptureError(f"the model has no {path}", "Use an adapter of this base model.", folder)
    is_head = layer is model.get_output_embeddings()
    if is_head or not isinstance(layer, torch.nn.Linear | JoinedLinear | JoinedPart):
        what = "head" if is_head else type(layer).__name__
        raise CaptureError(f"adapters of a {what} ({path}) are not supported", MERGE, folder)
    return layer


Pair = tuple[torch.Tensor, torch.Tensor]


def _read(folder: Path) -> dict[str, Pair]:
    """The second matrix includes the scale."""
    config = checkpoint.read_json(folder / "adapter_config.json")
    for name, values in PLAIN_SETTINGS.items():
        if config.get(name, values[0]) not in values:
            message = f"adapters with {name} = {config[name]!r} are not supported"
            raise CaptureError(message, MERGE, str(folder))
    tensors = checkpoint.read_weights(folder)
    if not tensors:
        message = "holds no adapter_model.safetensors"
        raise CaptureError(message, "Save the adapter in safetensors.", str(folder))
    pairs: dict[str, Pair] = {}
    for name in tensors:
        path = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        if name not in (PREFIX + path + DOWN, PREFIX + path + UP):
            raise CaptureError(f"adapters with {name[:200]} are not supported", MERGE, str(folder))
        if lacking := [kind for kind in (DOWN, UP) if PREFIX + path + kind not in tensors]:
            message = f"its weights lack {PREFIX + path + lacking[0]}"
            raise CaptureError(message, checkpoint.AGAIN, str(folder))
        down, up = (tensors[PREFIX + path + kind][...] for kind in (DOWN, UP))
        pairs[path] = down.float(), up.float() * _scale(config, path, len(down), folder)
    return pairs


def _scale(config: Mapping[str, Any], path: str, rank: int, folder: Path) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
    if not isinstance(alpha, int | float) or rank < 1:
        message = f"no adapter has lora_alpha = {alpha} and rank {rank}"
        raise CaptureError(message, "Correct adapter_config.json.", str(folder))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
