"""LoRA adapters as peft saves them, and their merged models."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TARGETS = ("q_proj", "v_proj", "down_proj")


def write_adapter(
    folder: Path, model: Any, seed: int, rank: int = 4, targets: tuple[str, ...] = TARGETS, **settings: Any
) -> Any:
    """Writes a random adapter of a model; returns the model with it merged in."""
    random = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(targets),
        "bias": "none",
    }
    config |= settings
    root = math.sqrt(rank) if config.get("use_rslora") else rank
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    tensors = {}
    for path, layer in merged.named_modules():
        if path.rpartition(".")[2] in targets and hasattr(layer, "weight"):
            outputs, inputs = layer.weight.shape
            down = torch.randn(rank, inputs, generator=random) * inputs**-0.5
            up = torch.randn(outputs, rank, generator=random) * 0.5
            tensors[f"base_model.model.{path}.lora_A.weight"] = down
            tensors[f"base_model.model.{path}.lora_B.weight"] = up
            own = (alpha for end, alpha in patterns.items() if path.endswith(end))
            layer.weight.data += (up @ down) * (next(own, config["lora_alpha"]) / root)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
