"""Watch: runs along with a call to see what it touches, and saves what it is about to change.

Which tensors an operator writes is what its schema says (`Tensor(a!)`), as everywhere in capture. The few
operators of torch that write more than they say are refused before they run.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.blocks import raw, storage_key
from tessera.capture.own import OwnLaunch, written
from tessera.capture.refuse import check_honest
from tessera.capture.rng import generator_of


class Watch(TorchDispatchMode):
    """Notes which known storages are touched, and saves each before its first write."""

    def __init__(self, known: dict[int, int], saves: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._saves = known, saves
        self.touched: set[int] = set()
        self.written: set[int] = set()
        self.saved: dict[int, torch.Tensor] = {}
        # Names of the generators that the call draws from.
        self.generators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_honest(func, args, kwargs)
        self.generators |= {generator_of(func, args, kwargs)} - {""}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, writes)
        return func(*args, **kwargs)

    def own_launch(self, seen: OwnLaunch) -> None:
        """A kernel that the program launches itself."""
        changed = written(seen)
        for place, value in enumerate(seen.args):
            if isinstance(value, torch.Tensor):
                self._note(value, place in changed)

    def _note(self, tensor: torch.Tensor, writes: bool) -> None:
        block = self._known.get(storage_key(tensor))
        if block is None:
            return
        self.touched.add(block)
        if writes:
            self.written.add(block)
        if writes and self._saves and block not in self.saved:
            self.saved[block] = raw(tensor, 0, tensor.untyped_storage().nbytes()).clone()
