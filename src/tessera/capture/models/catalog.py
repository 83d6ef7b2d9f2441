"""Built-in models: published configurations in bfloat16, and tiny ones in float32 for laptops.

Tiny vocabularies are the bytes plus a begin and an end token.
"""

import json
from importlib.resources import files
from typing import Any

import torch

_DOCUMENT = json.loads(files("tessera.capture.models").joinpath("catalog.json").read_bytes())

LANGUAGE: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    name: (model["family"], model["sizes"], getattr(torch, model["dtype"]))
    for name, model in _DOCUMENT["language"].items()
}
DENOISERS: dict[str, tuple[str, dict[str, Any], int, torch.dtype]] = {
    name: (model["class"], model["sizes"], model["text_tokens"], getattr(torch, model["dtype"]))
    for name, model in _DOCUMENT["denoisers"].items()
}
