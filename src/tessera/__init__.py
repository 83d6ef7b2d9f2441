"""Tessera makes unlike GPUs work as one.

    trace = tessera.capture(fn, *args, **kwargs)                        # what a call launches
    model = torch.compile(model, backend="tessera", options={...})      # see tessera.compile

`tessera.capture` is a package that can be called; it is loaded, and torch with it, when first asked for.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.capture.function import CallablePackage

    capture: CallablePackage

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    if name == "capture":
        return importlib.import_module("tessera.capture")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
