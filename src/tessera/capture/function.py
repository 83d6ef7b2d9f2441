"""Capture of any callable over tensors: `tessera.capture(fn, *args, **kwargs)`.

  inputs   tensors in arguments and objects among them, named by parameter and path ("cache.0.keys"),
           else `arg0`, `arg1`, ...
  weights  tensors that the callable holds (see `holders`)
  state    those of both that the call changes in place
  outputs  returned tensors and those in returned objects, but for memory that was passed in

A first call finds what changes; every storage is saved before its first write and restored. Other values are
fixed in the trace. Calls run under `no_grad` unless they reach an optimiser or differentiate.

The program sees class, attributes and flag of gradients of what it gave.

Refused by name: replacing or adding held tensors (as the first step of most optimisers does), changing plain
values in arguments, tensors that a closure alone holds, or an optimiser's settings on the host, and resizing
arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from tessera.capture import blocks, rng
from tessera.capture.blocks import BlockPart, MemoryBlock
from tessera.capture.fxgraph import GraphStep
from tessera.capture.holders import Before, Finder, Held, PyState, PyValue, line_that_changes, root, seen
from tessera.capture.operators import check_resolved, check_tensor, is_lazy
from tessera.capture.own import standing_for
from tessera.capture.reads import recording, traced
from tessera.capture.recorder import Watch
from tessera.capture.workload import Tensors, Workload, fresh_tensor
from tessera.errors import CaptureError, MismatchError
from tessera.ir import Region, Step
from tessera.kernels.tensors import flat_bytes

# Tensors that a thread's recording put in place of a module's.
exchanged_for = WeakTensorKeyDictionary()
NO_GRAD = "does not require grad"
KIND = "call"
# Far from the seeds that programs set themselves.
FRESH_SEED = 7_093_127


@dataclass(frozen=True)
class Arguments:
    """A call's tensors by number, and the step's by name."""

    tensors: list[torch.Tensor]
    inputs: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class NewResult:
    name: str
    storage: int
    size_bytes: int
    part: BlockPart


@dataclass(frozen=True, slots=True)
class Alias:
    """A result in the memory of tensor `number` of the call."""

    number: int
    part: BlockPart


class FunctionCall:
    """Binds other calls to the same step."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        named, self._spec = blocks.flatten(fn, args, kwargs)
        self._places = [i for i, (_, leaf) in enumerate(named) if isinstance(leaf, torch.Tensor)]
        self._fixed = [leaf for _, leaf in named]
        finder = Finder(fn, named)
        self._held, self._given = finder.tensors, finder.given
        self.module = root(finder.modules)
        self._num_args = len(self._places)
        self._all = tensors = self._tensors([leaf for _, leaf in named])
        names = blocks.unique([*(named[i][0] for i in self._places), *(h.name for h in self._held)])
        for name, tensor in zip(names, tensors, strict=True):
            check_tensor(tensor, f"'{name}'")
            check_resolved(tensor, f"'{name}'")
        # By the name of their first tensor.
        self.blocks = {names[block.first]: block for block in blocks.blocks_of(tensors)}
        self._examples = {name: tensors[block.first] for name, block in self.blocks.items()}
        # Tensors to differentiate by: they change memory, not identity.
        self._leaves = {i: t for i, t in enumerate(tensors) if t.is_leaf and t.requires_grad}
        self.trains = torch.is_grad_enabled() and bool(finder.optimizers)
        try:
            self._learn(named, tensors)
        except RuntimeError as error:
            if NO_GRAD not in str(error) or self.trains or not torch.is_grad_enabled():
                raise
            self.trains = True
            self._learn(named, tensors)

    def _learn(self, named: list[tuple[str, Any]], tensors: list[torch.Tensor]) -> None:
        keys = {name: blocks.storage_key(tensor) for name, tensor in self._examples.items()}
        args, kwargs = pytree.tree_unflatten([leaf for _, leaf in named], self._spec)
        watch = Watch(self._examples, [n for n, block in self.blocks.items() if not self._is_argument(block)])
        try:
            with traced(), self.mode(), rng.forked():
                with watch:
                    result = self.fn(*args, **kwargs)
                self._check_held(named, (args, kwargs), {keys[name] for name in watch.touched}, watch.varies)
                self._check_memory(tensors, keys)
        finally:
            for held in self._held:
                held.put_back()
            for name, saved in watch.saved.items():
                blocks.raw(self._examples[name], 0, saved.numel()).copy_(saved)
        self.generators = sorted(watch.generators)
        # Dynamo guards its own graphs.
        values = [] if isinstance(self.fn, GraphStep) else PyState(*self.roots).values
        self._kept = Before([v for v in values if not isinstance(v.read(), torch.Tensor)])
        self._sort(watch)
        self._shape_results(result, keys)

    def _check_held(self, named: Any, arguments: Any, touched: set[int], varies: Callable[..., bool]) -> None:
        """Gradients that the call has not read may be replaced, and constants added."""
        unread = {h.name for h in self._held if h.is_grad and blocks.storage_key(h.tensor) not in touched}
        before = {h.name: h.tensor for h in self._held} | _seen(named)
        given = _seen(blocks.flatten(self.fn, *arguments)[0])
        after = {h.name: h.tensor for h in Finder(self.fn, named).tensors} | given
        for name in [*before, *after]:
            if name not in before and self.trains:
                remedy = "Run one training step before the capture, and give the step zero_grad()."
                raise CaptureError(f"the call creates '{name}'", remedy)
            old, new = before.get(name), after.get(name)
            is_added = name not in before and name not in given
            is_constant = is_added and isinstance(new, torch.Tensor) and not varies(new)
            is_other = old is not new if _is_tensor(old, new) else bool(old != new)
            if is_other and name not in unread and not is_constant:
                raise self._replaced(name, _is_tensor(old, new), arguments)

    def _replaced(self, name: str, is_tensor: bool, arguments: Any) -> CaptureError:
        remedy = "Keep it in a tensor that is changed in place (copy_, index_copy_) by every call."
        message = f"the call replaces {'the tensor ' if is_tensor else ''}'{name}'"
        return CaptureError(message, remedy, self._line_that_replaces(name, arguments))

    def _check_memory(self, tensors: list[torch.Tensor], keys: Mapping[str, int]) -> None:
        for name, block in self.blocks.items():
            for number, part in block.parts:
                tensor = tensors[number]
                if blocks.part_of(tensor) != part or blocks.storage_key(tensor) != keys[name]:
                    message = f"the call changes the shape or memory of '{name}'"
                    raise CaptureError(message, "Work on a view of it.")

    def _line_that_replaces(self, name: str, given: Any) -> str:
        held = next((h for h in self._held if h.name == name and h.holder is not None), None)
        if held is None:
            return ""
        held.put_back()
        return line_that_changes(PyValue(name, lambda: held.current), lambda: self.fn(*given[0], **given[1]))

    def _sort(self, watch: Watch) -> None:
        self._inputs, self.changed, self._weights = (dict[str, MemoryBlock]() for _ in range(3))
        touched = watch.touched
        for name, block in self.blocks.items():
            is_changed, is_argument = name in watch.saved, self._is_argument(block)
            if is_changed or (is_argument and name in touched):
                self._check_exchangeable(block)
            if is_changed or is_argument:
                self._check_inside(name, block, touched.get(name, ()))
            if is_changed:
                self.changed[name] = block
            elif is_argument:
                self._inputs[name] = block
            elif name in touched:
                self._weights[name] = block

    def _check_inside(self, name: str, block: MemoryBlock, touched: Iterable[Region]) -> None:
        if any(region.start < block.start or region.stop > block.stop for region in touched):
            raise CaptureError(f"the call uses memory beside '{name}'", "Pass the larger tensor as well.")

    def _check_exchangeable(self, block: MemoryBlock) -> None:
        """Each request has another tensor in its place."""
        held = [self._holder(n) for n, _ in block.parts if n not in self._leaves]
        fixed = next((h for h in held if h is not None and h.holder is None), None)
        if fixed is not None:
            message = f"'{fixed.name}' is changed or an argument, but only a closure or tuple holds it"
            remedy = "Pass it as an argument, or register it on its module with register_buffer."
            raise CaptureError(message, remedy)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Sets the call's gradient mode; drops gradients that it leaves."""
        before = [(leaf, leaf.grad) for leaf in self._leaves.values()]
        try:
            with torch.set_grad_enabled(self.trains):
                yield
        finally:
            for leaf, grad in before:
                leaf.grad = grad

    def _is_argument(self, block: MemoryBlock) -> bool:
        return block.first < self._num_args or block.first - self._num_args in self._given

    def _holder(self, number: int) -> Held | None:
        return self._held[number - self._num_args] if number >= self._num_args else None

    def _shape_results(self, result: Any, keys: Mapping[str, int]) -> None:
        numbers = {keys[name]: block.first for name, block in self.blocks.items()}
        results = _results(result)
        self._result_spec = pytree.tree_structure(result)
        # A value that is no tensor stands for itself.
        self._results: list[Any] = []
        storages: dict[int, int] = {}
        names = blocks.unique([name for name, _ in results])
        for name, (_, leaf) in zip(names, results, strict=True):
            if not isinstance(leaf, torch.Tensor):
                self._results.append(leaf)
                continue
            check_tensor(leaf, f"the result '{name}'")
            check_resolved(leaf, f"the result '{name}'")
            if blocks.storage_key(leaf) in numbers:
                self._results.append(Alias(numbers[blocks.storage_key(leaf)], blocks.part_of(leaf)))
            else:
                storage = storages.setdefault(blocks.storage_key(leaf), len(storages))
                size = leaf.untyped_storage().nbytes()
                self._results.append(NewResult(name, storage, size, blocks.part_of(leaf)))

    def weights(self) -> dict[str, torch.Tensor]:
        held = {name: self._holder(block.first) for name, block in self._weights.items()}
        return {name: h.current.detach() for name, h in held.items() if h is not None}

    @property
    def roots(self) -> tuple[object, ...]:
        return (self.fn, *(leaf for leaf in self._fixed if not isinstance(leaf, torch.Tensor)))

    def changing(self) -> dict[str, torch.Tensor]:
        return {name: self._examples[name] for name in (*self._inputs, *self.changed)}

    def fresh(self, tensors: Tensors, seed: int, is_mild: bool) -> dict[str, torch.Tensor]:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in copies.keys() & self.changing().keys():
            for number, view in blocks.spread(self.blocks[name], copies[name]):
                blocks.fill(view, fresh_tensor(view, seed * 1_000 + number, is_mild))
        return copies | {n: rng.seeded_state(n, FRESH_SEED + seed) for n in self.generators if n in copies}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """MismatchError if the arguments' structure differs."""
        return self.at_its_turn(self.arguments(args, kwargs))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """As `bind`, without the state of generators."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        same = spec == self._spec and all(map(_alike, leaves, self._fixed))
        tensors = self._tensors(leaves) if same else []
        is_laid_alike = blocks.blocks_of(tensors) == tuple(self.blocks.values())
        if not same or any(map(is_lazy, tensors)) or not is_laid_alike:
            message = "these arguments are laid out differently from those of the capture"
            raise MismatchError(message, "Capture again.")
        changed = self._kept.changed()
        if changed is not None:
            raise MismatchError(f"{changed.name} is not what it was at the capture", "Capture again.")
        inputs, state = (
            {name: blocks.handed(block, tensors) for name, block in kind.items()}
            for kind in (self._inputs, self.changed)
        )
        return Arguments(tensors, inputs, state)

    def at_its_turn(self, arguments: Arguments) -> Arguments:
        drawn = {name: rng.state_now(name) for name in self.generators}
        return replace(arguments, state=arguments.state | drawn)

    def _tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        return [*(leaves[i] for i in self._places), *(held.current for held in self._held)]

    def call(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        tensors = {**inputs, **state}
        numbered: dict[int, torch.Tensor] = {}
        for name, block in (self._inputs | self.changed).items():
            alike: dict[int, torch.Tensor] = {}
            for number, tensor in blocks.spread(block, tensors[name]):
                example = self._all[number]
                numbered[number] = alike.setdefault(id(example), blocks.like(tensor, example))
        leaves = list(self._fixed)
        for number, place in enumerate(self._places):
            is_same = self.trains and number in self._leaves
            leaves[place] = self._leaves[number] if is_same else numbered[number]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        with self.mode(), traced(), self._exchanged(numbered):
            result = self.fn(*args, **kwargs)
        return self._outputs([value for _, value in _results(result)], state)

    def _outputs(self, leaves: list[Any], state: Tensors) -> dict[str, torch.Tensor]:
        pairs = zip(self._results, leaves, strict=True)
        outputs = {kind.name: leaf for kind, leaf in pairs if isinstance(kind, NewResult)}
        if not outputs and state:  # a step needs an output: the smallest state
            name = min(state, key=lambda n: state[n].numel())
            return {f"{name}.after": state[name]}
        return outputs

    @contextmanager
    def _exchanged(self, numbered: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """In training, a parameter keeps its identity, for the optimiser, in the step's memory."""
        pairs = []
        with ExitStack() as stack:
            for number, tensor in numbered.items():
                held = self._holder(number)
                if self.trains and number in self._leaves:
                    leaf = self._leaves[number]
                    with no_dispatch():
                        stack.callback(setattr, leaf, "data", leaf.data)
                    leaf.data = tensor
                elif held is not None:
                    pairs.append((held.current, tensor))
                    exchanged_for[tensor] = held.current
                    stack.callback(held.holder.__setitem__, held.key, held.current)
                    held.holder[held.key] = tensor
            with standing_for(pairs):
                yield

    def finish(self, arguments: Arguments, outputs: Tensors, state: Tensors) -> Any:
        """Writes state back to its tensors."""
        for name in self.generators:
            rng.set_state(name, state[name])
        with torch.no_grad():
            for name, block in self.changed.items():
                bytes_after = flat_bytes(state[name])
                blocks.raw(arguments.tensors[block.first], block.start, block.stop).copy_(bytes_after)
                for number, _ in block.parts:
                    if not arguments.tensors[number].is_inference():
                        torch.autograd.graph.increment_version(arguments.tensors[number])
            leaves = self._build(arguments, outputs)
        return pytree.tree_unflatten(leaves[: self._result_spec.num_leaves], self._result_spec)

    def _build(self, arguments: Arguments, outputs: Tensors) -> list[Any]:
        storages: dict[int, torch.Tensor] = {}
        leaves: list[Any] = []
        for kind in self._results:
            if isinstance(kind, Alias):
                leaves.append(blocks.view_of(arguments.tensors[kind.number], kind.part))
            elif not isinstance(kind, NewResult):
                leaves.append(kind)
            else:
                memory = storages.setdefault(kind.storage, torch.empty(kind.size_bytes, dtype=torch.uint8))
                leaf = blocks.view_of(memory, kind.part)
                blocks.fill(leaf, outputs[kind.name])
                leaves.append(leaf)
        return leaves


def _alike(leaf: Any, fixed: Any) -> bool:
    """Another tensor of its class, or an equal value, may replace it."""
    kinds = torch.Tensor | bool | int | float | complex | str | bytes | torch.dtype | torch.device
    is_open = type(leaf) is type(fixed) and isinstance(fixed, kinds)
    return leaf is fixed or (is_open and (isinstance(fixed, torch.Tensor) or bool(leaf == fixed)))


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def _seen(named: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: leaf if isinstance(leaf, torch.Tensor) else seen(leaf) for name, leaf in named}


def _results(result: Any) -> list[tuple[str, Any]]:
    """Returned values by name, then tensors in returned objects."""
    named = [(blocks.path(keys), leaf) for keys, leaf in pytree.tree_flatten_with_path(result)[0]]
    named += [(held.name, held.tensor) for held in Finder(None, named).tensors]
    return [(_output_name(name), value) for name, value in named]


def _output_name(name: str) -> str:
    return name if name and not name[0].isdigit() else ".".join(filter(None, ["output", name]))


@dataclass(frozen=True, kw_only=True)
class FunctionWorkload(Workload):
    """A captured call; every seed gives its values."""

    function: "FunctionCall"

    @property
    def roots(self) -> tuple[object, ...]:
        return self.function.roots

    def changing(self) -> dict[str, torch.Tensor]:
        return self.function.changing()

    def fresh(self, tensors: Tensors, seed: int, is_mild: bool) -> dict[str, torch.Tensor]:
        return self.function.fresh(tensors, seed, is_mild)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.function.weights()


def workload(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FunctionWorkload:
    with recording:
        function = FunctionCall(fn, args, kwargs)
        return _as_step(function, function.bind(args, kwargs))


def module_workload(
    step: Step, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FunctionWorkload:
    """Each request has a generator of its own."""
    function = FunctionCall(module, args, kwargs)
    return replace(_as_step(function, function.arguments(args, kwargs)), step=step)


def _as_step(function: FunctionCall, arguments: Arguments) -> FunctionWorkload:
    example = {name: tensor.clone() for name, tensor in (arguments.inputs | arguments.state).items()}

    def copies(names: Sequence[str]) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda seed: {name: example[name].clone() for name in names}

    def follow(first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
        is_own = first.keys() == arguments.inputs.keys()
        return dict(first) if is_own else {name: example[name].clone() for name in arguments.inputs}

    batch = next((int(t.shape[0]) for t in arguments.tensors if t.dim() and t.shape[0]), 1)
    step = Step(_name_of(function.fn), KIND, batch, 1)
    makers = copies(list(arguments.inputs)), copies(list(arguments.state))
    return FunctionWorkload(step, function.module, function.call, *makers, follow, function=function)


def _name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    owner = getattr(fn, "__self__", None)
    prefix = f"{type(owner).__name__}." if isinstance(owner, torch.nn.Module) else ""
    return prefix + getattr(fn, "__name__", type(fn).__name__)
