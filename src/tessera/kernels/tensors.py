"""Bits of tensors, and torch's default generators."""

import torch

from tessera.errors import WorkerError
from tessera.ir import GENERATOR


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major; shares memory if contiguous. Contiguous tensors of one element may have any stride."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN equals itself."""
    one, other = flat_bytes(a), flat_bytes(b)
    return one.numel() == other.numel() and bool(torch.equal(one, other))


def default_generator(name: str) -> torch.Generator:
    """The one whose state is the buffer of this name: "rng:cpu", "rng:cuda:0"."""
    device = torch.device(name.removeprefix(GENERATOR))
    if device.type == "cpu":
        return torch.default_generator
    if not torch.cuda.is_available():
        message = f"the step draws from {name}, but this machine has no CUDA device"
        raise WorkerError(message, "Capture it with --device cpu.")
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]
