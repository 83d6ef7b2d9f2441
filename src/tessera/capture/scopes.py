"""Scopes: which module is running, by its path in the model ("model.layers.0.mlp").

What runs backward through an operator belongs to the module that called it: torch numbers the operators that
it may have to differentiate, and tells while it does so which number it is at.
"""

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
        self._by_number: dict[int, str] = {}

    @property
    def current(self) -> str:
        """Path of the innermost running submodule; empty outside of all."""
        return self._stack[-1] if self._stack else ""

    def of_launch(self) -> str:
        """The scope of an operator that runs now, forward or backward."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._by_number.get(node._sequence_nr(), "")
        if torch.is_grad_enabled():
            self._by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.current)
        return self.current

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
