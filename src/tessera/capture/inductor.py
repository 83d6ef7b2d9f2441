"""record_inductor: Workload -> Trace of the launches of its Inductor-compiled code.

The step is compiled by region, called once to finish autotuning, and observed in a second call. Accesses of
Triton launches are proved from PTX; an unproved one is immovable and may touch all its buffers. Inductor's
allocations appear at their first use. Compiled code has no module calls: a launch's scope (`scoped`) is the
module of a weight of its own, else the previous one's.

Linear layers become one product over all rows: a batched one would read the weight once per row. Attention
becomes the operator that every GPU runs, or torch's choice with `portable=False`.

The graph is cut where blocks of the model begin: repeated ones compile once. A cut moves back behind the last
library call; it is dropped if it divides memory from its last write. Regions share code if operators
(`GraphRegion.key`), argument layouts and aliasing (`alike`) are equal.

The static launcher is off (it drops PTX), caches are off (kernels may come from other settings), and memory
is not reused, which would tie launches.
"""

import contextlib
import functools
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn.functional import linear
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from tessera.capture import fake, operators
from tessera.capture.fake import InPlaceOf, run_fake, target_attention, uncollected
from tessera.capture.offline import CONFIG as OFFLINE_CONFIG
from tessera.capture.offline import PROPERTIES, offline
from tessera.capture.operators import check_operator, check_resolved, fail
from tessera.capture.own import OwnLaunch, inductor_launches
from tessera.capture.recorder import Ledger, OperatorMode, run_operator
from tessera.capture.rng import generator_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Step, Trace, verify

ALLOCATORS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
_LIBRARY = ("mm", "convolution", "attention", "addmv", "linear")
# Set where this torch has them: the static launcher has two names.
CONFIG: dict[str, Any] = {
    "use_static_triton_launcher": False,
    "use_static_cuda_launcher": False,
    "fx_graph_cache": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
    "combo_kernels": True,
}


class StepTracer(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, torch.fx.Node] = {}
        self.graph, self.length = torch.fx.Graph(), 0
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[torch.fx.Node, Any] = {}  # keeps tensors and their ids alive
        self.borders: list[int] = []
        # By name, of weights, inputs and state.
        self.placeholders: list[dict[str, Node]] = []
        self.outputs: dict[str, Node] = {}

    def take(self, name: str, tensor: torch.Tensor) -> torch.fx.Node:
        return self._know(self.graph.placeholder(name.replace(".", "_").replace(":", "_")), tensor)

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            message = "a tensor is neither weight, input nor state of the step"
            fail(message, "Register it on its module with register_buffer.")
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        return self._know(self.graph.create_node("get_attr", name), tensor)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._grouped_mm.default and not _compiles_groups(args[0].dtype):
            kind = str(args[0].dtype).removeprefix("torch.")
            message = f"experts in {kind} cannot be compiled: this torch compiles no grouped products of them"
            fail(message, "Give config.json a dtype of bfloat16, or plan with --launches eager.", "")
        recorded = tree_map_only(torch.Tensor, self.node, (args, kwargs))
        check_operator(func, args, kwargs, _is_unknown)
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.lift_fresh_copy.default
        result = run_operator(run_fake, func, args, kwargs)
        if not isinstance(result, torch.Tensor | tuple | list | NoneType):  # read from a constant
            return result
        node = self._know(self.graph.call_function(func, *recorded), result)
        if isinstance(result, tuple | list):
            for place, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._know(self.graph.call_function(operator.getitem, (node, place)), item)
        return result

    def _know(self, node: torch.fx.Node, value: Any) -> torch.fx.Node:
        self.values[node] = value
        self.length += 1
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
        return node


@functools.cache
def _compiles_groups(dtype: torch.dtype) -> bool:
    """Compiling needs the result's shape, which older versions of torch give for bfloat16 alone."""
    x, weights = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((4, 16), (2, 16, 16)))
    try:
        torch._grouped_mm(x, weights, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


def _is_unknown(value: Any) -> bool:
    """Tensors made from Python numbers have values."""
    return isinstance(value, FakeTensor) and value.constant is None


@dataclass(frozen=True)
class GraphRegion:
    """Values are named by the nodes of the whole step that make them."""

    module: torch.fx.GraphModule
    takes: tuple[Node, ...]
    gives: tuple[Node, ...]
    frees: tuple[Node, ...]
    # (index in gives, index in takes): the result is memory of the argument.
    views: tuple[tuple[int, int], ...]
    # Equal for regions with equal effect on their arguments.
    key: Any


def cut(traced: StepTracer) -> list[GraphRegion]:
    nodes = [n for n in traced.graph.nodes if n.op != "output"]
    places = {node: place for place, node in enumerate(nodes)}
    last = {node: max((places.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    first = sum(n.op == "placeholder" for n in nodes)
    cuts = [first, *_cuts(traced, nodes, first), len(nodes)]
    regions = []
    for start, stop in itertools.pairwise(cuts):
        inside = nodes[start:stop]
        gives = [n for n in inside if last[n] >= stop and isinstance(traced.values[n], torch.Tensor)]
        regions.append(_region(traced, inside, gives, {n for n in nodes[:stop] if last[n] < stop}))
    return regions


def alike(args: Sequence[torch.Tensor]) -> Any:
    storages: dict[int, int] = {}
    return tuple(
        (
            t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset(), t.untyped_storage().nbytes(),
            storages.setdefault(t.untyped_storage()._cdata, place),
        )
        for place, t in enumerate(args)
    )  # fmt: skip


def _cuts(traced: StepTracer, nodes: list[Node], first: int) -> list[int]:
    bound = {p for start, stop in _bound(traced, nodes) for p in range(start + 1, stop + 1)}
    cuts = set()
    libraries = [place + 1 for place, node in enumerate(nodes) if _is_library(node)]
    for border in traced.borders:
        behind = max((p for p in libraries if p <= border), default=first)
        allowed = (p for p in range(behind, border + 1) if p not in bound)
        cuts.add(next(allowed, first))
    return sorted(cuts - {first, len(nodes)})


def _is_library(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return any(word in name for word in _LIBRARY)


def _bound(traced: StepTracer, nodes: list[Node]) -> list[tuple[int, int]]:
    """(index where memory is created, index of its last write)."""
    created: dict[int, int] = {}
    written: dict[int, int] = {}
    for place, node in enumerate(nodes):
        value = traced.values[node]
        if isinstance(value, torch.Tensor):
            created.setdefault(value.untyped_storage()._cdata, -1 if node.op == "placeholder" else place)
        for tensor in _written(traced, node):
            written[tensor.untyped_storage()._cdata] = place
    spans = [(created[s], place) for s, place in written.items() if created[s] >= 0]
    results = [(place, traced.values[node]) for place, node in enumerate(nodes)]
    return spans + [(place, place + len(x)) for place, x in results if isinstance(x, tuple | list)]


def _written(traced: StepTracer, node: Node) -> list[torch.Tensor]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [value for _, value, writes in operators.arguments(schema, node.args, node.kwargs) if writes]
    return [traced.values[item] for item in tree_leaves(written) if isinstance(item, Node)]


def _region(traced: StepTracer, inside: list[Node], gives: list[Node], dead: set[Node]) -> GraphRegion:
    mine = set(inside)
    takes = list(dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in mine))
    graph, held, constants = torch.fx.Graph(), torch.nn.Module(), []
    copies: dict[Node, Node] = {n: graph.placeholder(f"x{i}") for i, n in enumerate(takes)}
    for number, node in enumerate(inside):
        target = node.target
        if node.op == "get_attr":
            constant, target = traced.constants[str(target)], f"constant_{number}"
            setattr(held, target, constant)
            constants.append(_contents(node, constant))
        args, kwargs = map_arg(node.args, copies.__getitem__), map_arg(node.kwargs, copies.__getitem__)
        copies[node] = graph.create_node(node.op, target, args, kwargs, f"n{number}")
    graph.output(tuple(copies[n] for n in gives))
    owners = {traced.values[n].untyped_storage()._cdata: i for i, n in reversed(list(enumerate(takes)))}
    storages = [traced.values[n].untyped_storage()._cdata for n in gives]
    module = torch.fx.GraphModule(held, graph)
    frees = tuple(n for n in takes if n in dead)
    views = tuple((i, owners[s]) for i, s in enumerate(storages) if s in owners)
    return GraphRegion(module, tuple(takes), tuple(gives), frees, views, (module.code, *constants))


def _contents(node: Node, tensor: torch.Tensor) -> Any:
    """By bytes if only copied from, else by identity."""
    is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not is_copied or tensor.numel() > 1024:
        return id(tensor)
    return tensor.dtype, tuple(tensor.shape), str(tensor.tolist())


RegionContext = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]


# Code of a region, and the constants that it reads.
Code = tuple[Callable[..., Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


@dataclass(eq=False)
class CompiledStep:
    _regions: Sequence[GraphRegion]
    _placeholders: Sequence[dict[str, Node]]
    _outputs: dict[str, Node]
    _settings: dict[str, Any]
    _compiled: dict[Any, Code] = field(default_factory=dict)

    def run(
        self, weights: Tensors, inputs: Tensors, state: Tensors, enter: RegionContext = contextlib.nullcontext
    ) -> dict[str, torch.Tensor]:
        groups = zip(self._placeholders, (weights, inputs, state), strict=True)
        values = {node: tensors[name] for named, tensors in groups for name, node in named.items()}
        with torch.no_grad():
            for region in self._regions:
                args = [values[node] for node in region.takes]
                key = region.key, alike(args)
                if key not in self._compiled:
                    self._compiled[key] = _compile(region, args, self._settings)
                call, constants = self._compiled[key]
                with enter(constants):
                    results = call(*args)
                _check_views(region, args, results)
                values.update(zip(region.gives, results, strict=True))
                for node in region.frees:
                    del values[node]
        return {name: values[node] for name, node in self._outputs.items()}


def compile_step(
    workload: Workload,
    groups: tuple[Tensors, Tensors, Tensors],
    mode: FakeTensorMode,
    portable: bool = True,
    **changes: Any,
) -> CompiledStep:
    fakes = [{name: mode.from_tensor(t) for name, t in tensors.items()} for tensors in groups]
    traced = trace_step(workload, fakes, mode, portable)
    return CompiledStep(cut(traced), traced.placeholders, traced.outputs, changes)


def _compile(region: GraphRegion, args: Sequence[torch.Tensor], settings: dict[str, Any]) -> Code:
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    programs: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        programs.append(compile_fx_inner(*args, **kwargs))
        return programs[-1]

    options: Any = config._config  # type: ignore[attr-defined]
    changes = {key: value for key, value in {**CONFIG, **settings}.items() if key in options}
    with config.patch(changes), functorch_config.patch(enable_autograd_cache=False):
        call: Any = compile_fx(region.module, list(args), inner_compile=inner)
    if len(programs) != 1:
        remedy = "Capture it with the torch front end."
        raise CaptureError(f"Inductor made {len(programs)} programs of one", remedy)
    inside = (getattr(programs[0], "constants", None) or {}).values()
    held = [t for t in inside if isinstance(t, torch.Tensor)]
    return call, (*region.module.buffers(), *held)


def _check_views(region: GraphRegion, args: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    for place, source in region.views:
        if results[place].untyped_storage()._cdata != args[source].untyped_storage()._cdata:
            remedy = "Capture it with the torch front end."
            raise CaptureError("compiled code copies what the program only views", remedy)


def trace_step(
    workload: Workload, groups: Sequence[Tensors], mode: FakeTensorMode, portable: bool = True
) -> StepTracer:
    tracer = StepTracer()
    weights, inputs, state = groups
    tracer.placeholders = [{name: tracer.take(name, t) for name, t in tensors.items()} for tensors in groups]
    held = _reparametrize_module(workload.module, _whole(workload.module, weights))
    attention = target_attention() if portable else contextlib.nullcontext()
    seen = _borders(workload.module, tracer)
    with (
        torch.no_grad(),
        uncollected(),
        mode,
        InPlaceOf(linear, _folded_linear),
        attention,
        seen,
        operators.insisting(),
        held,
        tracer,
    ):
        results = workload.call(inputs, state)
    tracer.outputs = {name: tracer.node(tensor) for name, tensor in results.items()}
    tracer.graph.output(tuple(tracer.outputs.values()))
    return tracer


def _whole(module: torch.nn.Module, weights: Tensors) -> dict[str, torch.Tensor]:
    wrappers = {name: tensor for name, tensor in module.named_parameters() if operators.is_wrapper(tensor)}
    inner = {part for name, tensor in wrappers.items() for part, _ in operators.parts(name, tensor)}
    plain = {name: tensor for name, tensor in weights.items() if name not in inner}
    return plain | {name: operators.from_parts(name, tensor, weights) for name, tensor in wrappers.items()}


def _folded_linear(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.dim() < 3:
        return linear(x, *args, **kwargs)
    return linear(x.reshape(-1, x.shape[-1]), *args, **kwargs).view(*x.shape[:-1], -1)


@contextlib.contextmanager
def _borders(module: torch.nn.Module, tracer: StepTracer) -> Iterator[None]:
    def note(*_: Any) -> None:
        tracer.borders.append(tracer.length)

    with contextlib.ExitStack() as stack:
        for block in _blocks(module):
            stack.callback(block.register_forward_pre_hook(note).remove)
            stack.callback(block.register_forward_hook(note).remove)
        yield


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Outermost composite modules listed with others of their class."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


@dataclass(frozen=True)
class Recording:
    trace: Trace
    code: CompiledStep


def record_inductor(workload: Workload, portable: bool = True, **changes: Any) -> Recording:
    """`portable`: attention for every GPU, else torch's choice here."""
    weights, inputs, state = workload.weights(), workload.make_inputs(0), workload.make_state(0)
    if not all(t.is_cuda for t in inputs.values()):
        raise CaptureError("the step is not on a CUDA device", "Move it with on_device(workload, 'cuda:0').")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    code = compile_step(workload, (weights, inputs, state), mode, portable, **changes)
    code.run(weights, inputs, state)
    del state  # memory may hold one state only
    tensors = weights, workload.make_inputs(0), workload.make_state(0)
    return record_code(workload.step, code, tensors, str(next(iter(inputs.values())).device))


def record_inductor_offline(workload: Workload, card: SimpleNamespace = PROPERTIES) -> Trace:
    """Only shapes and types matter."""
    weights = workload.weights()
    with offline(card) as mode, warnings.catch_warnings():
        # Compiled code checks input alignment; fakes are always aligned.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        groups = weights, workload.make_inputs(0), workload.make_state(0)
        w, x, s = (fake.on_device(tensors) for tensors in groups)
        code = compile_step(workload, (w, x, s), mode, **OFFLINE_CONFIG)
        return record_code(workload.step, code, (w, x, s), "fake").trace


def record_code(
    step: Step, code: CompiledStep, tensors: tuple[Tensors, Tensors, Tensors], recorded_on: str = "cpu"
) -> Recording:
    ledger = Ledger(recorded_on)
    for kind, named in zip((BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE), tensors, strict=True):
        ledger.declare(kind, named)

    def see(seen: OwnLaunch) -> None:
        ledger.launch(ledger.kernel_launch(seen))

    @contextlib.contextmanager
    def enter(constants: Sequence[torch.Tensor]) -> Iterator[None]:
        for constant in constants:
            ledger.declare_constant(constant)
        with inductor_launches(see), ExternCalls(ledger):
            yield

    outputs = code.run(*tensors, enter)
    trace = scoped(ledger.trace(step, outputs))
    verify(trace)
    return Recording(trace, code)


class ExternCalls(OperatorMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Hides this mode from Dynamo."""
        return True

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_operator(func, args, kwargs, lambda value: isinstance(value, torch.Tensor))
        for tensor in tree_leaves((args, kwargs)) if not func.is_view else ():
            if isinstance(tensor, torch.Tensor):
                check_resolved(tensor, f"an argument of {func}")
        named = tuple((name, self._ledger.arg(value)) for name, value in kwargs.items())
        recorded = tuple(map(self._ledger.arg, args)), named
        result = func(*args, **kwargs)
        if func._schema.name in ALLOCATORS:  # memory that no launch has written
            self._ledger.view(result)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            generator = generator_of(func, args, kwargs)
            self._ledger.launch(self._ledger.operator(func, recorded, results, generator))
        return result


def scoped(trace: Trace) -> Trace:
    readers = Counter(b for launch in trace.launches for b in {a.buffer for a in launch.accesses})
    scope, launches = "", []
    for launch in trace.launches:
        buffers = [trace.buffers[a.buffer] for a in launch.accesses if readers[a.buffer] == 1]
        names = [b.name for b in buffers if b.kind is BufferKind.WEIGHT and not b.constant_hex]
        scope = names[0].rpartition(".")[0] if names else scope
        launches.append(replace(launch, scope=scope))
    return replace(trace, launches=tuple(launches))
