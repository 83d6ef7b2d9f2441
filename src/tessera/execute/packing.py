"""Tensors as plain bytes, for the pipes between processes."""

from collections.abc import Mapping

import torch

# dtype, shape, contents
Packed = tuple[str, tuple[int, ...], bytes]


def pack(tensor: torch.Tensor) -> Packed:
    """A tensor's values, row-major."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor that was packed, in fresh memory."""
    dtype, shape, data = packed
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(kind).reshape(shape)


def pack_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, Packed]:
    """Packs every tensor of a mapping."""
    return {name: pack(tensor) for name, tensor in tensors.items()}


def unpack_all(packed: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
    """Unpacks every tensor of a mapping."""
    return {name: unpack(item) for name, item in packed.items()}
