"""Registration of an operator with torch: CPU, GPU, and shapes alone."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def alike(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def register(
    name: str,
    schema: str,
    shaped: Callable[..., Any],
    on_cpu: Callable[..., Any],
    on_cuda: str | Callable[..., Any],
) -> None:
    """`on_cuda`: a function, or a module that has one of the operator's name."""

    def launched(*args: Any) -> Any:
        assert isinstance(on_cuda, str)
        return getattr(import_module(on_cuda), name)(*args)  # Triton is slow to import

    torch.library.define(f"tessera::{name}", schema)
    torch.library.impl(f"tessera::{name}", "cpu")(on_cpu)
    torch.library.impl(f"tessera::{name}", "cuda")(launched if isinstance(on_cuda, str) else on_cuda)
    torch.library.register_fake(f"tessera::{name}")(shaped)
