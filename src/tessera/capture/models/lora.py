"""LoRA adapters beside their base model: rows of one step may use different ones, or none.

An `AdaptedLinear` holds the matrices of all adapters, padded to the largest rank.

Refused by name: other kinds of adapters, DoRA, trained biases, modules saved whole, changed bases (PiSSA),
unknown settings, adapted embeddings, heads, experts and layers that the model does not call.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tessera.kernels.lora  # noqa: F401 - registers the operator
from tessera.capture.models import checkpoint
from tessera.capture.models.joined import JoinedLinear, JoinedPart
from tessera.errors import CaptureError
from tessera.ir.files import packaged

# Settings of peft, with values that do not change the product; others must be off. Other ways to begin
# (PiSSA, OLoRA, LoftQ, CorDA) change the base.
PLAIN_SETTINGS = packaged("capture.models", "adapter.json", dict[str, tuple[Any, ...]])
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MERGE = "Merge it into its base model (peft: merge_and_unload), and serve that folder."


@dataclass
class AdapterChoice:
    num: int
    # Layers that no call has used.
    idle: set[str]
    rows: torch.Tensor | None = None


class AdaptedLinear(torch.nn.Module):
    def __init__(
        self, path: str, base: Any, choice: AdapterChoice, down: torch.Tensor, up: torch.Tensor
    ) -> None:
        super().__init__()
        self.path, self.base = path, base
        self._choice = (choice,)
        self.register_buffer("lora_down", down)
        self.register_buffer("lora_up", up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        (choice,) = self._choice
        if choice.rows is None:
            return y
        choice.idle.discard(self.path)
        adapted: torch.Tensor = torch.ops.tessera.lora(y, x, self.lora_down, self.lora_up, choice.rows)
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
    """Token t has adapter rows[t]; 0: none. A model that reads a layer's weight itself leaves its adapter
    out.
    """
    choice = getattr(model, "adapter_choice", None)
    if choice is None:
        yield
        return
    with patch.object(choice, "rows", rows):
        yield
    if rows is not None and choice.idle:
        layer = min(choice.idle)
        raise CaptureError(f"adapters of {layer} are not supported: the model does not call it", MERGE)


def add_adapters(model: Any, folders: Sequence[str]) -> None:
    """Folder i is adapter i + 1."""
    adapters = [_read(Path(folder)) for folder in folders]
    paths = dict.fromkeys(path for adapter in adapters for path in adapter)
    choice = model.adapter_choice = AdapterChoice(len(adapters), set(paths))
    for path in paths:
        place = next(folder for folder, adapter in zip(folders, adapters, strict=True) if path in adapter)
        base = _layer(model, path, place)
        outputs, inputs = base.weight.shape
        pairs = [adapter.get(path) for adapter in adapters]
        max_rank = max(pair[0].shape[0] for pair in pairs if pair)
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        down = torch.zeros(len(adapters), max_rank, inputs, **like)
        up = torch.zeros(len(adapters), outputs, max_rank, **like)
        for number, (pair, folder) in enumerate(zip(pairs, folders, strict=True)):
            if pair is None:
                continue
            rank = len(pair[0])
            if pair[0].shape != (rank, inputs) or pair[1].shape != (outputs, rank):
                shapes = f"{tuple(pair[0].shape)} and {tuple(pair[1].shape)}"
                layer = f"the layer is {outputs} x {inputs}"
                message = f"its matrices of {path} have the shapes {shapes}; {layer}"
                raise CaptureError(message, "Use an adapter of this base model.", folder)
            down[number, :rank], up[number, :, :rank] = pair
        model.set_submodule(path, AdaptedLinear(path, base, choice, down, up))


def _layer(model: Any, path: str, folder: str) -> Any:
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        layer = None
    if layer is None and ".experts." not in path:
        raise CaptureError(f"the model has no {path}", "Use an adapter of this base model.", folder)
    is_head = layer is model.get_output_embeddings()
    if is_head or not isinstance(layer, torch.nn.Linear | JoinedLinear | JoinedPart):
        what = "head" if is_head else type(layer).__name__ if layer is not None else "single expert"
        raise CaptureError(f"adapters of a {what} ({path}) are not supported", MERGE, folder)
    return layer


Pair = tuple[torch.Tensor, torch.Tensor]


def _read(folder: Path) -> dict[str, Pair]:
    """The second matrix includes the scale."""
    config = checkpoint.read_json(folder / "adapter_config.json")
    for name in config.keys() - checkpoint.SETTINGS["adapter"]:
        if config[name] not in PLAIN_SETTINGS.get(name, (None, False, [], {})):
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
    patterns = config.get("alpha_pattern") or {}
    alpha = None
    with suppress(re.error, AttributeError):
        alphas = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path))
        alpha = next(alphas, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or rank < 1:
        message = f"{path} has no scale by lora_alpha, alpha_pattern = {patterns} and rank {rank}"
        raise CaptureError(message, "Correct adapter_config.json.", str(folder))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
