"""Recorder: PyTorch's dispatched operators as a Trace.

An operator is a launch iff it writes an argument (by schema) or returns new storage; otherwise it is a view.
Aliasing is by storage identity: some operators alias undeclared, and the trace lists those. A tensor made
from Python values is a constant; moving it to the step's device is no launch.

A buffer varies if a request decides its contents: inputs, state, random numbers, and results of these. Its
host reads are refused (see `operators` and `reads`).

A launch belongs to the running module's path, a backward one to its forward's, by torch's sequence numbers.
"""

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch._subclasses import fake_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tessera.capture import operators
from tessera.capture.blocks import raw
from tessera.capture.fake import run_fake
from tessera.capture.operators import Recorded, Results, fail
from tessera.capture.own import OwnLaunch, own_launches, tensors_in, unchanged
from tessera.capture.reads import calls_allowed, reads_allowed, reads_refused
from tessera.capture.rng import Draws, forked, generator_of, size_of
from tessera.errors import CaptureError
from tessera.ir import Access, Arg, Buffer, BufferKind, Kernel, Launch, Origin, Region, Step, Trace, View
from tessera.kernels.ptx import triton_accesses

# Operators whose result from a constant is the same constant, elsewhere.
CARRIERS = frozenset({"aten::lift_fresh", "aten::_to_copy"})
AS_LIST = "Pass a list of the tensors as the table."


class Ledger:
    def __init__(self, recorded_on: str = "cpu") -> None:
        self._recorded_on = recorded_on
        # A weak reference keeps a storage's id, not its memory.
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kernels: dict[Kernel, int] = {}
        self._operators: dict[Any, int] = {}
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []
        # Buffers given, or written by a launch.
        self._filled: set[int] = set()

    def find(self, tensor: torch.Tensor) -> int | None:
        entry = self.storages.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def index(self, tensor: torch.Tensor) -> int:
        return self.storages[tensor.untyped_storage()._cdata][1]

    def know(self, tensor: torch.Tensor, buffer: int) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = (StorageWeakRef(storage), buffer)

    def declare(self, kind: BufferKind, tensors: Mapping[str, torch.Tensor]) -> range:
        first = len(self.buffers)
        for name, tensor in tensors.items():
            if self.find(tensor) is not None:
                message = f"{kind} '{name}' shares its memory with another tensor passed to the step"
                raise CaptureError(message, "Give each its own memory with .clone().")
            self._fill(self._add(tensor, Buffer(name, kind, tensor.untyped_storage().nbytes())))
        return range(first, len(self.buffers))

    def declare_constant(self, tensor: torch.Tensor) -> None:
        """The trace carries the bytes of a tensor outside weights, inputs and state."""
        if self.find(tensor) is not None:
            return
        size = tensor.untyped_storage().nbytes()
        if size > operators.MAX_CONSTANT_BYTES:
            message = f"a tensor of {size} bytes is neither weight, input nor state"
            fail(message, "Register it on its module with register_buffer.")
        name = f"constant.{len(self.buffers)}"
        self._fill(self._add(tensor, Buffer(name, BufferKind.WEIGHT, size, operators.contents(tensor))))

    def copy(self, buffer: int, tensor: torch.Tensor) -> Launch:
        """Copies a buffer to a new one, which becomes the tensor's."""
        size, clone = self.buffers[buffer].size_bytes, torch.ops.aten.clone.default
        to = self._add(tensor, Buffer(f"t{len(self.buffers)}", BufferKind.TEMPORARY, size))
        source, copy = (View(index, "uint8", (size,), (1,)) for index in (buffer, to))
        accesses = Access(buffer, Region(0, size), read=True), Access(to, Region(0, size), write=True)
        kernel = self.kernel(Kernel(str(clone), Origin.ATEN, str(clone._schema)))
        return Launch(kernel, (source,), (), (copy,), accesses)

    def generator(self, name: str) -> int:
        for index, buffer in enumerate(self.buffers):
            if buffer.name == name:
                return index
        self.buffers.append(Buffer(name, BufferKind.STATE, size_of(name)))
        return self._fill(len(self.buffers) - 1)

    @property
    def empty(self) -> Set[int]:
        return set(range(len(self.buffers))) - self._filled

    def view(self, tensor: torch.Tensor) -> View:
        buffer = self.find(tensor)
        if buffer is None:
            size = tensor.untyped_storage().nbytes()
            buffer = self._add(tensor, Buffer(f"t{len(self.buffers)}", BufferKind.TEMPORARY, size))
        elif tensor.untyped_storage().nbytes() > self.buffers[buffer].size_bytes:
            fail("a tensor's memory grows (resize_, or out= of another shape)", "Make a new tensor instead.")
        return operators.view_of(tensor, buffer)

    def _add(self, tensor: torch.Tensor, buffer: Buffer) -> int:
        operators.check_tensor(tensor)
        self.know(tensor, len(self.buffers))
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _fill(self, buffer: int) -> int:
        self._filled.add(buffer)
        return buffer

    def arg(self, value: Any, view: Callable[[torch.Tensor], View] | None = None) -> Arg:
        if isinstance(value, torch.Tensor):
            return (view or self.view)(value)
        if isinstance(value, float) and math.isnan(value):
            return math.nan  # one object, which equals itself in a comparison of launches
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return cast(Arg, tuple(self.arg(item, view) for item in value))
        symbol = operators.symbol_of(value)
        if symbol is not None:
            return symbol
        remedy = "Pass it as a tensor; for packed weights of torch.ao quantise with torchao."
        fail(f"an argument of type {type(value).__name__} cannot be recorded", remedy)

    def kernel(self, kernel: Kernel) -> int:
        return self._kernels.setdefault(kernel, len(self._kernels))

    def operator(
        self, func: Any, recorded: Recorded, results: Results, generator: str = "", scope: str = ""
    ) -> Launch:
        """`generator`: name of the one that the operator drew from."""
        args, kwargs = recorded
        fresh = {id(t) for t in results if isinstance(t, torch.Tensor) and self.find(t) is None}
        outputs = tuple(self.view(t) if isinstance(t, torch.Tensor) else None for t in results)
        accesses = operators.argument_accesses(func._schema, args, dict(kwargs))
        for tensor, view in zip(results, outputs, strict=True):
            touched = operators.byte_region(view) if view is not None and id(tensor) in fresh else None
            if view is not None and touched is not None:
                accesses.append(Access(view.buffer, touched, write=True))
        if generator:
            state = Region(0, size_of(generator))
            accesses.append(Access(self.generator(generator), state, read=True, write=True))
        if func not in self._operators:
            self._operators[func] = self.kernel(Kernel(str(func), Origin.ATEN, str(func._schema)))
        return Launch(self._operators[func], args, kwargs, outputs, tuple(accesses), scope)

    def kernel_launch(
        self, seen: OwnLaunch, view: Callable[[torch.Tensor], View] | None = None, scope: str = ""
    ) -> Launch:
        """Without a proof the kernel may touch all its buffers."""
        args = tuple(self.arg(a, view) for a in seen.args)
        kernel = self.kernel(seen.kernel)
        launch = Launch(kernel, args, (), (), (), scope, grid=seen.grid, block=seen.block)
        accesses, why = triton_accesses(seen.kernel, launch, self.buffers, self.empty)
        if why:
            why = "; ".join(filter(None, (why, seen.unread)))
            accesses = operators.whole_buffers(launch, self.buffers, seen.mutated)
        return replace(launch, accesses=accesses, immovable=why)

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        self._filled.update(a.buffer for a in launch.accesses if a.write or a.atomic)

    def trace(
        self,
        step: Step,
        outputs: Mapping[str, torch.Tensor],
        num_views: int = 0,
        aliases: tuple[tuple[str, int], ...] = (),
    ) -> Trace:
        for name, tensor in outputs.items():
            if self.find(tensor) is None:
                fail(f"the step returns '{name}', which no launch made", "Return a result of the step.")
            operators.check_resolved(tensor, f"the result '{name}'")
        views = tuple((name, self.view(tensor)) for name, tensor in outputs.items())
        returned = {view.buffer for _, view in views}
        buffers = tuple(
            replace(b, kind=BufferKind.OUTPUT) if i in returned and b.kind is BufferKind.TEMPORARY else b
            for i, b in enumerate(self.buffers)
        )
        kernels, launches = tuple(self._kernels), tuple(self.launches)
        return Trace(step, kernels, buffers, launches, views, num_views, aliases, self._recorded_on)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[str] = []


class Scopes:
    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(m): name for name, m in module.named_modules()}
        self._entered = _Entered()
        self._by_number: dict[int, str] = {}

    @property
    def current(self) -> str:
        return self._entered.scopes[-1] if self._entered.scopes else ""

    def of_launch(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._by_number.get(node._sequence_nr(), "")
        if torch.is_grad_enabled():
            self._by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.current)
        return self.current

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        self._entered.scopes.append(self._names.get(id(module), self.current))

    def leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._entered.scopes:  # a module of another thread may have begun before
            self._entered.scopes.pop()


# Storages with values of an earlier call; ids of expired ones are not used again.
_earlier: dict[int, StorageWeakRef] = {}


def keep_apart(storages: Mapping[int, StorageWeakRef]) -> None:
    """Later recordings must not treat these storages as constants."""
    for key in [key for key, held in _earlier.items() if held.expired()]:
        del _earlier[key]
    _earlier.update((key, held) for key, held in storages.items() if not held.expired())


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class HostRead(ValueError):
    pass


class OperatorMode(TorchDispatchMode):
    """`operate` gets every operator that may compute, on the parts of wrapped tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # fake tensor metadata; very frequent
            return args[0].fake_device
        if func.namespace in ("prim", "profiler"):  # an optimiser marks its steps
            return func(*args, **kwargs or {})
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        with calls_allowed():
            return self.operate(func, args, kwargs or {})

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class NoReads(OperatorMode):
    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostRead(f"{operators.program_line()} reads a tensor's value on the host")
        is_fake = any(isinstance(a, fake_tensor.FakeTensor) or getattr(a, "is_meta", False) for a in args)
        return (run_fake if is_fake else call_operator)(func, args, kwargs)


def run_operator(run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with reads_allowed():
            return run(func, args, kwargs)
    except RuntimeError as error:
        operators.explain(func, error)


class Recorder(OperatorMode):
    """While entered, operators, kernels and host reads of this thread belong to the step."""

    # Storages that the first call was given; later calls have others in their place.
    examples: Set[int] = frozenset()

    def __init__(
        self, module: torch.nn.Module, recorded_on: str, varying: frozenset[BufferKind] = frozenset()
    ) -> None:
        """`module`: its parts name scopes; `varying`: kinds of buffer whose values differ between calls."""
        super().__init__()
        self._scopes, self._ledger = Scopes(module), Ledger(recorded_on)
        self._run = run_fake if recorded_on == "fake" else call_operator
        self._draws = Draws(recorded_on == "fake")
        self._num_views = 0
        self._aliases: Counter[str] = Counter()
        self._varying_kinds, self._varying = varying, set[int]()
        self._contexts = ExitStack()
        # Constants that the call makes of Python values.
        self._made = set[int]()
        self.places: list[str] = []

    def __enter__(self) -> Self:
        self._contexts.enter_context(operators.insisting())
        self._contexts.enter_context(own_launches())
        self._contexts.enter_context(reads_refused(self.varies))
        self._contexts.enter_context(register_module_forward_pre_hook(self._scopes.enter))
        self._contexts.enter_context(register_module_forward_hook(self._scopes.leave, always_call=True))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        kinds = {BufferKind.TEMPORARY, *self._varying_kinds} - {BufferKind.WEIGHT}
        own = {b for b in self._varying if self._ledger.buffers[b].kind in kinds}
        keep_apart({key: held for key, (held, b) in self._ledger.storages.items() if b in own})
        self._contexts.__exit__(*error)

    def name_buffers(self, kind: BufferKind, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            operators.check_resolved(tensor, f"{kind} '{name}'")
            size = tensor.untyped_storage().nbytes()
            is_whole = tensor.is_contiguous() and size == tensor.numel() * tensor.itemsize
            if kind is not BufferKind.WEIGHT and not is_whole:
                raise CaptureError(f"{kind} '{name}' is part of a larger tensor", "Pass it .contiguous().")
        declared = self._ledger.declare(kind, tensors)
        if kind in self._varying_kinds:
            self._varying.update(declared)

    def varies(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(value):
                value = torch._C._functorch.get_unwrapped(value)
            return value.layout is torch.strided and self._ledger.find(value) in self._varying
        if isinstance(value, torch.UntypedStorage):
            return self._ledger.storages.get(value._cdata, (None, -1))[1] in self._varying
        return False

    def trace(self, step: Step, outputs: Mapping[str, torch.Tensor]) -> Trace:
        self._draws.check()
        return self._ledger.trace(step, outputs, self._num_views, tuple(sorted(self._aliases.items())))

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _tensors((args, kwargs))
        operators.check_operator(func, args, kwargs, self.varies)
        for _, value, is_write in operators.arguments(func._schema, args, kwargs) if self._made else ():
            for tensor in _tensors(value) if is_write else ():
                self._unshare(tensor)
        is_made = func is torch.ops.aten.lift_fresh.default and self._ledger.find(args[0]) is None
        generator = generator_of(func, args, kwargs)
        named = tuple((k, self._ledger.arg(v, self._argument)) for k, v in kwargs.items())
        recorded = tuple(self._ledger.arg(a, self._argument) for a in args), named
        if is_made:
            self._made.add(self._ledger.index(args[0]))
        if generator:
            self._draws.before(generator)
        result = self._execute(func, args, kwargs, recorded)
        if generator:
            self._draws.after(generator)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = _tensors(results)
        if self._carries_constant(func, inputs, tensors):
            self._ledger.know(tensors[0], self._ledger.index(inputs[0]))
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            for part, outputs in operators.split(func, recorded, results):
                self._launch(func, part, outputs, generator)
        else:
            self._num_views += 1
            pairs = zip(results, func._schema.returns, strict=False)
            if any(isinstance(r, torch.Tensor) and d.alias_info is None for r, d in pairs):
                self._aliases[str(func)] += 1
        return result

    def _unshare(self, tensor: torch.Tensor) -> None:
        """A constant that the call made and then writes becomes a copy."""
        buffer = self._ledger.find(tensor)
        if buffer in self._made and buffer is not None and self._ledger.buffers[buffer].constant_hex:
            self._add_launch(self._ledger.copy(buffer, tensor))

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Recorded) -> Any:
        if func.namespace in operators.TESTED or self._run is run_fake:
            return run_operator(self._run, func, args, kwargs)
        with reads_allowed():  # copies share memory where the arguments do
            tried = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
        with forked():
            first = run_operator(self._run, func, *tried)
        operators.check_declared(func, (args, kwargs), tried)
        result = run_operator(self._run, func, args, kwargs)
        if not func.is_view:
            operators.check_repeatable(func, first, result)
        return result

    def _carries_constant(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        if func._schema.name not in CARRIERS or len(inputs) != 1 or self._ledger.find(outputs[0]) is not None:
            return False
        source = self._ledger.buffers[self._ledger.index(inputs[0])]
        size = outputs[0].untyped_storage().nbytes()
        return bool(source.constant_hex) and size == source.size_bytes and outputs[0].dtype is inputs[0].dtype

    def own_launch(self, seen: OwnLaunch) -> Callable[[], None] | None:
        self._check_tables(seen)
        launch = self._ledger.kernel_launch(seen, self._argument, self._scopes.current)
        self._add_launch(launch)
        weights = [t for t in _tensors(seen.args) if self._is_weight(t)] if launch.immovable else []
        return unchanged(seen.kernel.name, weights) if weights else None

    def _check_tables(self, seen: OwnLaunch) -> None:
        for place, table in seen.tables:
            if not isinstance(seen.args[place], tuple):
                continue  # unreadable
            what = f"the table of addresses in argument {place} of kernel {seen.kernel.name}"
            if self.varies(table):
                fail(f"{what} depends on the request", AS_LIST)
            for tensor in tensors_in(seen.args[place]):
                buffer = self._ledger.find(tensor)
                kind = BufferKind.WEIGHT if buffer is None else self._ledger.buffers[buffer].kind
                if kind not in (BufferKind.WEIGHT, BufferKind.STATE):
                    fail(f"{what} leads to a tensor of one request", AS_LIST)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self._ledger.buffers[self._ledger.index(tensor)].kind is BufferKind.WEIGHT

    def _launch(self, func: Any, recorded: Recorded, results: Results, generator: str) -> None:
        num = len(self._ledger.buffers)
        launch = self._ledger.operator(func, recorded, results, generator, self._scopes.of_launch())
        if generator and self._ledger.generator(generator) >= num:  # not passed to the step
            self._varying.add(self._ledger.generator(generator))
        self._add_launch(launch)

    def _add_launch(self, launch: Launch) -> None:
        if any(a.write and self._ledger.buffers[a.buffer].constant_hex for a in launch.accesses):
            remedy = "Pass it as an argument, or register it on its module with register_buffer."
            fail("the call changes a tensor that is neither an argument nor found in what it holds", remedy)
        if any(a.read and a.buffer in self._varying for a in launch.accesses):
            self._varying.update(a.buffer for a in launch.accesses if a.write or a.atomic)
        self._ledger.launch(launch)
        self.places.append(operators.program_line())

    def _argument(self, tensor: torch.Tensor) -> View:
        key = tensor.untyped_storage()._cdata
        if self._ledger.find(tensor) is None and (key in self.examples or key in _earlier):
            message = "the step uses a tensor left by an earlier call"
            fail(message, "Pass it as an argument, or keep it in a buffer that is changed in place.")
        self._ledger.declare_constant(tensor)
        return self._ledger.view(tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        operators.check_tensor(tensor)
    return tensors


class Watch(Recorder):
    """Notes storages that a call touches, and saves each before its first write."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fixed: Collection[str]) -> None:
        """`tensors`: one of each storage; `fixed`: those that no request decides."""
        is_fake = any(isinstance(t, fake_tensor.FakeTensor) for t in tensors.values())
        super().__init__(torch.nn.Module(), "fake" if is_fake else "cpu")
        self._tensors = tensors
        # By buffer.
        self._names = dict(zip(self._ledger.declare(BufferKind.STATE, tensors), tensors, strict=True))
        self._varying = {number for number, name in self._names.items() if name not in fixed}
        self.saved: dict[str, torch.Tensor] = {}

    @property
    def touched(self) -> dict[str, list[Region]]:
        found: dict[str, list[Region]] = {}
        for access in (a for launch in self._ledger.launches for a in launch.accesses):
            if access.buffer in self._names:
                found.setdefault(self._names[access.buffer], []).append(access.region)
        return found

    @property
    def generators(self) -> list[str]:
        return self._draws.names

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Recorded) -> Any:
        self._save(operators.argument_accesses(func._schema, recorded[0], dict(recorded[1])))
        return super()._execute(func, args, kwargs, recorded)

    def _add_launch(self, launch: Launch) -> None:
        self._save(launch.accesses)  # a kernel of the program runs after this
        super()._add_launch(launch)

    def _save(self, accesses: Sequence[Access]) -> None:
        for access in accesses:
            name = self._names.get(access.buffer)
            if (access.write or access.atomic) and name is not None and name not in self.saved:
                self.saved[name] = _copy(self._tensors[name])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, fake_tensor.FakeTensor):
        return torch.empty(0, dtype=torch.uint8)
    with no_dispatch():
        return raw(tensor, 0, tensor.untyped_storage().nbytes()).clone()
