"""Watch: runs along with a call to see what it touches, and saves what it is about to change.

Which tensors an operator writes is what its schema says (`Tensor(a!)`), as everywhere in capture. The few
operators of torch that write more than they say are refused before they run.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.blocks import raw, storage_key
from tessera.capture.refuse import check_honest


class Watch(TorchDispatchMode):
    """Notes which known storages are touched, and saves each before its first write."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self.touched: set[int] = set()
        self.saved: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_honest(func, args, kwargs)
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, writes)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, writes: bool) -> None:
        block = self._known.get(storage_key(tensor))
        if block is None:
            return
        self.touched.add(block)
        if writes and block not in self.saved:
            self.saved[block] = raw(tensor, 0, tensor.untyped_storage().nbytes()).clone()
