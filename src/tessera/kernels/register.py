"""Registration of an operator with torch: CPU, GPU, and shapes alone."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch


def alike(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def register(
    name: str,
    schema: str,
    shaped: Callable[..., Any],
    on_cpu: Callable[[Any], Any],
    on_cuda: str | Callable[..., Any],
) -> None:
    """`on_cpu` gets a record of the arguments, by the schema's names. `on_cuda`: a function of the arguments,
    or a module with one of the operator's name.
    """
    defaults = {a.name: a.default_value for a in torch._C.parse_schema(f"tessera::{name}{schema}").arguments}

    def by_name(*args: Any) -> Any:
        return on_cpu(SimpleNamespace(**defaults | dict(zip(defaults, args, strict=False))))

    def launched(*args: Any) -> Any:
        assert isinstance(on_cuda, str)
        return getattr(import_module(on_cuda), name)(*args)  # Triton is slow to import

    torch.library.define(f"tessera::{name}", schema)
    torch.library.impl(f"tessera::{name}", "cpu")(by_name)
    torch.library.impl(f"tessera::{name}", "cuda")(launched if isinstance(on_cuda, str) else on_cuda)
    torch.library.register_fake(f"tessera::{name}")(shaped)
