"""Inner: the plain tensors of a tensor subclass that wraps others, such as torchao's quantised weights.

A wrapper has no memory of its own: its parts are what is stored, sent and priced. Capture names the parts
after the wrapper ("proj.weight.qdata") and leaves operators on wrappers to the wrapper's own code, whose
operators on the parts are then recorded.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(tensor: Any) -> bool:
    """True for a tensor that only wraps others."""
    return is_traceable_wrapper_subclass(tensor)


def has_wrappers(types: Any) -> bool:
    """True if an operator is to be left to a wrapper among its arguments' types."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors behind one, by name; the tensor itself if it is plain."""
    if not is_wrapper(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for key in attributes for part in parts(f"{name}.{key}", getattr(tensor, key))]
