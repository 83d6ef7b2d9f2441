"""Watch: runs along with a call to see what it touches, and saves what it is about to change.

It follows what is computed from the call's inputs too: reading that on the host is refused, and a tensor of
it that the program keeps is no constant of later recordings (see `recorder`).

Which tensors an operator writes is what its schema says (`Tensor(a!)`), as everywhere in capture. The few
operators of torch that write more than they say are refused before they run.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.blocks import raw, storage_key
from tessera.capture.own import OwnLaunch, inside_operator, touched
from tessera.capture.reads import reads_refused
from tessera.capture.recorder import UNRECORDABLE, keep_apart
from tessera.capture.refuse import check_operator, explain, insisting
from tessera.capture.rng import generator_of
from tessera.capture.schema import has_wrappers


class Watch(TorchDispatchMode):
    """Notes which known storages are touched, and saves each before its first write."""

    def __init__(self, known: dict[int, int], saves: bool = True, fixed: Collection[int] = ()) -> None:
        """`known`: number of a storage by its key; `fixed`: numbers of those that no request decides."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._saves = known, saves
        self._varying: dict[int, StorageWeakRef | None] = {
            k: None for k, n in known.items() if n not in fixed
        }
        self._stack = ExitStack()
        self.touched: set[int] = set()
        self.written: set[int] = set()
        self.saved: dict[int, torch.Tensor] = {}
        # Names of the generators that the call draws from.
        self.generators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_wrappers(types):
            return NotImplemented
        check_operator(func, args, kwargs, self.varies)
        generator = generator_of(func, args, kwargs)
        self.generators |= {generator} - {""}
        varies, changed = bool(generator), []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, writes)
                    varies |= self.varies(tensor)
                    changed += [tensor] if writes else []
        try:
            with inside_operator():
                made = func(*args, **kwargs)
        except UNRECORDABLE as error:
            explain(func, error)
        if varies:
            self._follow([*changed, *pytree.tree_leaves(made)])
        return made

    def __enter__(self) -> "Watch":
        self._stack.enter_context(insisting())
        self._stack.enter_context(reads_refused(self.varies))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        keep_apart({key: held for key, held in self._varying.items() if held is not None})
        self._stack.__exit__(*error)

    def varies(self, value: Any) -> bool:
        """True for a tensor or storage that is computed from the call's inputs."""
        if isinstance(value, torch.Tensor):
            return value.layout is torch.strided and storage_key(value) in self._varying
        return isinstance(value, torch.UntypedStorage) and value._cdata in self._varying

    def _follow(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                key = storage_key(tensor)
                held = None if key in self._known else StorageWeakRef(tensor.untyped_storage())
                self._varying.setdefault(key, held)

    def own_launch(self, seen: OwnLaunch) -> None:
        """A kernel that the program launches itself."""
        given = touched(seen)
        for tensor, writes in given:
            self._note(tensor, writes)
        if any(self.varies(tensor) for tensor, _ in given):
            self._follow([tensor for tensor, writes in given if writes])

    def _note(self, tensor: torch.Tensor, writes: bool) -> None:
        block = self._known.get(storage_key(tensor))
        if block is None:
            return
        self.touched.add(block)
        if writes:
            self.written.add(block)
        if writes and self._saves and block not in self.saved:
            self.saved[block] = raw(tensor, 0, tensor.untyped_storage().nbytes()).clone()
