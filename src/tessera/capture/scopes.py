"""Scopes: which module is running, by its path in the model ("model.layers.0.mlp")."""

from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Scopes:
    """While entered, follows the calls of one module's submodules."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(m): name for name, m in module.named_modules()}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        """Path of the innermost running submodule; empty outside of all."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> "Scopes":
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), self.current))

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._stack.pop()
