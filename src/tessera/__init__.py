"""Tessera makes heterogeneous GPUs work as one.

    plan = tessera.plan("llama-3-8b", devices="emu:h20,emu:l40s")       # what two cards give
    llm = tessera.LLM("tiny-llama", devices="emu:a100,emu:l40s")        # a batch of prompts in this process
    server = tessera.serve("tiny-llama", devices="cuda:0,cuda:1")       # OpenAI's API over HTTP
    trace = tessera.capture(fn, *args, **kwargs)                        # what a call launches
    model = torch.compile(model, backend="tessera", options={...})      # see tessera.compile
    scale = tessera.CudaKernel(source, "scale")                         # a CUDA kernel of one's own

`tessera.capture`, `tessera.plan` and `tessera.serve` are packages that can be called. Torch is loaded on
first use.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.api import LLM as LLM
    from tessera.api import Completion as Completion
    from tessera.api import ModelPlan as ModelPlan
    from tessera.api import SamplingParams as SamplingParams
    from tessera.api import Server as Server
    from tessera.api import plan as plan
    from tessera.api import serve as serve
    from tessera.capture.own import CudaKernel as CudaKernel
    from tessera.capture.record import capture as capture
    from tessera.ir import Load as Load

__version__ = "0.1.0"

PUBLIC = {
    "CudaKernel": "tessera.capture.own",
    "Load": "tessera.ir",
    "capture": "tessera.capture.record",
    **dict.fromkeys(
        ("LLM", "Completion", "ModelPlan", "SamplingParams", "Server", "plan", "serve"), "tessera.api"
    ),
}
PACKAGES = ("capture", "plan", "serve")


class CallablePackage(types.ModuleType):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(PUBLIC[name]), name)(*args, **kwargs)


def make_callable(package: str) -> None:
    sys.modules[package].__class__ = CallablePackage


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"tessera.{name}")
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'tessera' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
