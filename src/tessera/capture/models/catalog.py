"""Built-in models: published configurations in bfloat16, and tiny ones in float32 for laptops.

Tiny vocabularies are the bytes plus a begin and an end token.
"""

from typing import Any

import torch

from tessera.ir.files import packaged

_DOCUMENT = packaged("capture.models", "catalog.json", dict[str, Any])

LANGUAGE: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    name: (model["family"], model["sizes"], getattr(torch, model["dtype"]))
    for name, model in _DOCUMENT["language"].items()
}
DENOISERS: dict[str, tuple[str, dict[str, Any], int, torch.dtype]] = {
    name: (model["class"], model["sizes"], model["text_tokens"], getattr(torch, model["dtype"]))
    for name, model in _DOCUMENT["denoisers"].items()
}
