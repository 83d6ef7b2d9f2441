"""Inputs from a file: named tensors in safetensors, npz or json. Nothing that can run code is read."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from tessera.capture.fresh import fresh
from tessera.errors import CaptureError, MissingExtra

MAX_BYTES = 4 * 2**30
REMEDY = "Use safetensors, npz without objects, or json: a name and nested lists of numbers for each input."


def given_inputs(file: str, seed: int) -> dict[str, torch.Tensor]:
    """The file's tensors for seed 0; for others, other values of the same kind (see `fresh`)."""
    tensors = read_inputs(file)
    return {name: t.clone() for name, t in tensors.items()} if seed == 0 else fresh(tensors, seed)


@lru_cache(maxsize=4)
def read_inputs(file: str) -> dict[str, torch.Tensor]:
    """The tensors of a file by name."""
    path = Path(file)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CaptureError(f"is larger than {MAX_BYTES >> 30} GB", REMEDY, file)
        tensors = _read(path)
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        said = str(error).partition("\n")[0]
        raise CaptureError(f"cannot be read: {said}", REMEDY, file) from error
    if not tensors:
        raise CaptureError("holds no tensors", REMEDY, file)
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    match path.suffix:
        case ".safetensors":
            try:
                from safetensors import SafetensorError
                from safetensors.torch import load_file
            except ImportError as error:
                raise MissingExtra("safetensors", "hf") from error
            try:
                return dict(load_file(path))
            except SafetensorError as error:
                raise ValueError(str(error)) from error
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name].copy()) for name in arrays.files}
        case ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
            return {name: torch.tensor(value) for name, value in values.items()}
    raise ValueError(f"a file that ends in {path.suffix or 'nothing'} is not known")
