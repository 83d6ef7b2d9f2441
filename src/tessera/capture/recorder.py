"""Recorder: turns what PyTorch dispatches into a Trace.

Every operator that reaches the dispatcher is looked at once. It is a launch iff it writes an argument (by
its schema) or returns storage nobody has seen; otherwise it is a view and costs nothing. Which tensors
alias is decided by storage identity, never by the schema, because some operators (`_unsafe_view`, a
`contiguous` that had nothing to do) alias without saying so; those are listed in the trace.

The same code records real tensors and fake ones (`tessera.capture.fake`). A tensor made from Python values
is a constant and travels with the trace; moving it to the step's device is no launch, since it can be put
there beforehand. A fake constant whose value is unknown is kept by name and size alone.

A buffer varies if a request decides what it holds: inputs, state, what is drawn, and all that is computed
from these. What varies must not be read on the host; the rest is the same in every call.

Refused, with the line of the program: see `tessera.capture.refuse` and `tessera.capture.reads`.

A launch belongs to the module that runs, by its path in the model ("model.layers.0.mlp"). What runs backward
through an operator belongs to the module that called it: torch numbers the operators that it may have to
differentiate, and tells while it does so which number it is at.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.own import OwnLaunch, inside_operator, prove, tensors_in, unchanged
from tessera.capture.refuse import check_operator, check_tensor, explain, fail, program_line
from tessera.capture.rng import Draws, generator_of, size_of
from tessera.capture.schema import (
    MAX_CONSTANT_BYTES,
    Recorded,
    Results,
    argument_accesses,
    byte_region,
    contents,
    has_wrappers,
    split,
    symbol_of,
    view_of,
    whole_buffers,
)
from tessera.capture.shapes import Run
from tessera.errors import CaptureError
from tessera.ir import (
    Access,
    Arg,
    Buffer,
    BufferKind,
    Kernel,
    Launch,
    Origin,
    Region,
    Step,
    Trace,
    View,
)


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


# What these return of a constant is that constant, on the device where it is wanted.
CARRIERS = frozenset({"aten::lift_fresh", "aten::_to_copy"})

UNRECORDABLE = (
    RuntimeError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


# Storages that hold values of a request of an earlier call, for as long as somebody keeps them.
_earlier: dict[int, StorageWeakRef] = {}


def keep_apart(storages: Mapping[int, StorageWeakRef]) -> None:
    """A later recording must not take these for constants."""
    for key in [key for key, held in _earlier.items() if held.expired()]:
        del _earlier[key]
    _earlier.update((key, held) for key, held in storages.items() if not held.expired())


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As torch would have run it."""
    return func(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Records while active; `trace` then holds what happened."""

    def __init__(
        self,
        scopes: Scopes,
        run: Run = call_operator,
        recorded_on: str = "cpu",
        varying: frozenset[BufferKind] = frozenset({BufferKind.INPUT, BufferKind.STATE}),
    ) -> None:
        """`run` runs one operator on the tensors of the step; `recorded_on` is cpu, cuda:N or fake.

        `varying`: kinds of buffer that may hold other values in another call.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._scopes, self._run, self._recorded_on = scopes, run, recorded_on
        self._draws = Draws(recorded_on == "fake")
        # A weak reference keeps the storage's identity from being handed out again, not its memory.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._buffers: list[Buffer] = []
        self._kernels: dict[Kernel, int] = {}
        self._operators: dict[Any, int] = {}
        self._launches: list[Launch] = []
        self._num_views = 0
        self._aliases: Counter[str] = Counter()
        self._varying_kinds, self._varying = varying, set[int]()
        # The line of the program that made each launch.
        self.places: list[str] = []

    def name_buffers(self, kind: BufferKind, tensors: Mapping[str, torch.Tensor]) -> None:
        """Declares storages that exist before the step, by name."""
        for name, tensor in tensors.items():
            if self._find(tensor) is not None:
                raise CaptureError(
                    f"{kind} '{name}' shares its memory with another tensor handed to the step",
                    "Give each its own memory with .clone().",
                )
            size = tensor.untyped_storage().nbytes()
            is_whole = tensor.is_contiguous() and size == tensor.numel() * tensor.itemsize
            if kind is not BufferKind.WEIGHT and not is_whole:
                raise CaptureError(f"{kind} '{name}' is a part of a larger tensor", "Pass it .contiguous().")
            if kind in self._varying_kinds:
                self._varying.add(len(self._buffers))
            self._add(tensor, Buffer(name, kind, size))

    def varies(self, value: Any) -> bool:
        """True for a tensor or storage whose values depend on the request."""
        if isinstance(value, torch.Tensor):
            return value.layout is torch.strided and self._find(value) in self._varying
        if isinstance(value, torch.UntypedStorage):
            return self._storages.get(value._cdata, (None, -1))[1] in self._varying
        return False

    def trace(self, step: Step, outputs: Mapping[str, torch.Tensor]) -> Trace:
        """The finished trace; `outputs` are what the step returned."""
        self._draws.check()
        keep_apart({key: held for key, (held, buffer) in self._storages.items() if self._is_made(buffer)})
        views = tuple((name, self._view(tensor)) for name, tensor in outputs.items())
        returned = {view.buffer for _, view in views}
        buffers = tuple(
            Buffer(b.name, BufferKind.OUTPUT, b.size_bytes)
            if i in returned and b.kind is BufferKind.TEMPORARY
            else b
            for i, b in enumerate(self._buffers)
        )
        aliases = tuple(sorted(self._aliases.items()))
        return Trace(
            step,
            tuple(self._kernels),
            buffers,
            tuple(self._launches),
            views,
            self._num_views,
            aliases,
            self._recorded_on,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # of a fake tensor; asked very often
            return args[0].fake_device
        if func.namespace == "profiler":  # marks of an optimiser's step; they compute nothing
            return func(*args, **kwargs)
        if has_wrappers(types):  # their own code runs, and is seen here
            return NotImplemented
        given = _tensors((args, kwargs))
        check_operator(func, args, kwargs, self.varies)
        recorded = tuple(self._arg(a) for a in args), tuple((k, self._arg(v)) for k, v in kwargs.items())
        generator = generator_of(func, args, kwargs)
        if generator:
            self._draws.before(generator)
        try:
            with inside_operator():
                result = self._run(func, args, kwargs)
        except UNRECORDABLE as error:
            explain(func, error)
        if generator:
            self._draws.after(generator)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = _tensors(results)
        if self._carries_constant(func, given, tensors):
            self._know(tensors[0], self._index(given[0]))
        if func._schema.is_mutable or any(self._find(t) is None for t in tensors):
            for one, made in split(func, recorded, results):
                self._launch(func, one, made, generator)
        else:
            self._num_views += 1
            self._note_alias(func, results)
        return result

    def _carries_constant(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """True if a constant has only changed its device, or has become fake."""
        if func._schema.name not in CARRIERS or len(given) != 1 or self._find(made[0]) is not None:
            return False
        source = self._buffers[self._index(given[0])]
        size = made[0].untyped_storage().nbytes()
        return bool(source.constant_hex) and size == source.size_bytes and made[0].dtype is given[0].dtype

    def _is_made(self, buffer: int) -> bool:
        """True for what the step computes from a request."""
        return buffer in self._varying and self._buffers[buffer].kind is BufferKind.TEMPORARY

    def _note_alias(self, func: Any, results: Results) -> None:
        """Counts an operator that returned old memory without its schema saying so."""
        for result, declared in zip(results, func._schema.returns, strict=False):
            if isinstance(result, torch.Tensor) and declared.alias_info is None:
                self._aliases[str(func)] += 1
                return

    def own_launch(self, seen: OwnLaunch) -> Callable[[], None] | None:
        """A kernel that the program launches itself; gives what to check once it has run."""
        number = self._kernel(seen.kernel)
        self._check_tables(seen)
        args = tuple(self._arg(a) for a in seen.args)
        launch = Launch(number, args, (), (), (), self._scopes.current, grid=seen.grid, block=seen.block)
        accesses, why = prove(seen.kernel, launch, self._buffers)
        if why:
            why = "; ".join(filter(None, (why, seen.unread)))
            accesses = whole_buffers(launch, self._buffers, frozenset())
        self._add_launch(replace(launch, accesses=accesses, immovable=why))
        weights = [t for t in _tensors(seen.args) if self._is_weight(t)] if why else []
        return unchanged(seen.kernel.name, weights) if weights else None

    def _check_tables(self, seen: OwnLaunch) -> None:
        """What a table of addresses holds must be the same for every request."""
        for place, table in seen.tables:
            if not isinstance(seen.args[place], tuple):
                continue  # it could not be read
            what = f"the table of addresses in argument {place} of kernel {seen.kernel.name}"
            if self.varies(table):
                fail(f"{what} depends on the request", "Pass a list of the tensors as the table.")
            for tensor in tensors_in(seen.args[place]):
                found = self._find(tensor)
                kind = BufferKind.WEIGHT if found is None else self._buffers[found].kind
                if kind not in (BufferKind.WEIGHT, BufferKind.STATE):
                    fail(
                        f"{what} leads to a tensor of one request", "Pass a list of the tensors as the table."
                    )

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self._buffers[self._index(tensor)].kind is BufferKind.WEIGHT

    def _launch(
        self,
        func: Any,
        recorded: Recorded,
        results: Results,
        generator: str,
    ) -> None:
        args, kwargs = recorded
        fresh = {id(t) for t in results if isinstance(t, torch.Tensor) and self._find(t) is None}
        outputs = tuple(self._output(t) if isinstance(t, torch.Tensor) else None for t in results)
        accesses = argument_accesses(func._schema, args, dict(kwargs))
        for tensor, view in zip(results, outputs, strict=True):
            touched = byte_region(view) if view is not None and id(tensor) in fresh else None
            if view is not None and touched is not None:
                accesses.append(Access(view.buffer, touched, write=True))
        if generator:
            state = Region(0, size_of(generator))
            accesses.append(Access(self._generator(generator), state, read=True, write=True))
        self._add_launch(
            Launch(self._operator(func), args, kwargs, outputs, tuple(accesses), self._scopes.of_launch())
        )

    def _add_launch(self, launch: Launch) -> None:
        """What is computed from a buffer that varies, varies."""
        if any(a.read and a.buffer in self._varying for a in launch.accesses):
            self._varying.update(a.buffer for a in launch.accesses if a.write or a.atomic)
        self._launches.append(launch)
        self.places.append(program_line())

    def _generator(self, name: str) -> int:
        """The buffer of a generator's state; one that the step was not given is declared now."""
        for index, buffer in enumerate(self._buffers):
            if buffer.name == name:
                return index
        self._buffers.append(Buffer(name, BufferKind.STATE, size_of(name)))
        self._varying.add(len(self._buffers) - 1)
        return len(self._buffers) - 1

    def _output(self, tensor: torch.Tensor) -> View:
        if self._find(tensor) is None:
            size = tensor.untyped_storage().nbytes()
            self._add(tensor, Buffer(f"t{len(self._buffers)}", BufferKind.TEMPORARY, size))
        return self._view(tensor)

    def _operator(self, func: Any) -> int:
        if func not in self._operators:
            self._operators[func] = self._kernel(Kernel(str(func), Origin.ATEN, str(func._schema)))
        return self._operators[func]

    def _kernel(self, kernel: Kernel) -> int:
        return self._kernels.setdefault(kernel, len(self._kernels))

    def _arg(self, value: Any) -> Arg:
        if isinstance(value, torch.Tensor):
            if self._find(value) is None:
                self._add_constant(value)
            return self._view(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple(self._arg(item) for item in value)
        symbol = symbol_of(value)
        if symbol is not None:
            return symbol
        fail(f"an argument of type {type(value).__name__} cannot be recorded", "Pass it as a tensor.")

    def _add_constant(self, tensor: torch.Tensor) -> None:
        """A tensor nobody declared: made by the program from Python values, or held outside any module."""
        storage = tensor.untyped_storage()
        if storage._cdata in _earlier and not _earlier[storage._cdata].expired():
            fail(
                "a tensor is used that an earlier call has left behind",
                "Hand it over as an argument, or keep it in a buffer that is changed in place.",
            )
        if storage.nbytes() > MAX_CONSTANT_BYTES:
            fail(
                f"a tensor of {storage.nbytes()} bytes is neither weight, input nor state",
                "Register it on its module with register_buffer.",
            )
        name = f"constant.{len(self._buffers)}"
        self._add(tensor, Buffer(name, BufferKind.WEIGHT, storage.nbytes(), contents(tensor)))

    def _find(self, tensor: torch.Tensor) -> int | None:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def _index(self, tensor: torch.Tensor) -> int:
        """The buffer of a tensor that is known to have one."""
        return self._storages[tensor.untyped_storage()._cdata][1]

    def _add(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        check_tensor(tensor)
        self._know(tensor, len(self._buffers))
        self._buffers.append(buffer)

    def _know(self, tensor: torch.Tensor, buffer: int) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = (StorageWeakRef(storage), buffer)

    def _view(self, tensor: torch.Tensor) -> View:
        buffer = self._find(tensor)
        if buffer is None:
            fail("the step returns a tensor that no launch made", "Return a result of the step.")
        return view_of(tensor, buffer)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        check_tensor(value)
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    return []
