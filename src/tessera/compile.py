"""Tessera as a backend of torch.compile.

    model = torch.compile(model, backend="tessera", options={"devices": "emu:a100,emu:l40s"})
    with torch.no_grad():
        y = model(x)          # the first call captures, plans and starts one worker per device

Options (defaults in parentheses):
  devices       comma-separated or a list; required
  link          between the devices ("pcie4")
  objective     "latency" or "throughput" ("latency")
  microbatches  calls in flight of a throughput plan (1); calls of several threads share them
  policy        a coarser policy such as "layer-pipeline" (None)
  effort        "full" or "quick" ("full")
  verify        run every call on one device too, and raise unless both agree bit for bit (False)

Results equal those of the model on one CPU thread bit for bit. Changes in place (caches, buffers) reach the
caller. Weights move to shared memory, so workers see in-place changes. A graph with dynamic shapes is
captured once per set of shapes. A graph that cannot be captured or needs gradients runs eagerly, with one
warning that says why. Workers end with the model, with `torch._dynamo.reset()`, or with the program.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from tessera import flow
from tessera.capture import record
from tessera.capture.blocks import storage_key
from tessera.capture.function import Arguments, FunctionWorkload, exchanged_for, workload
from tessera.capture.fxgraph import GraphStep
from tessera.capture.reads import is_traced, recording
from tessera.capture.record import VARYING
from tessera.errors import CaptureError, MismatchError, RuleBroken, TesseraError, UnknownName, check_known
from tessera.execute.memory import is_allocation
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.timing import threads
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import BufferKind, Cluster, Objective, Origin, Plan, Trace
from tessera.kernels.tensors import same_bits
from tessera.plan import PLANNERS, PlanConfig, search_config
from tessera.profile import parse_devices, wire

# Graphs that keep their workers; others restart them on use.
MAX_ENGINES = 8
# Consecutive failures of a worker before its device is given up.
MAX_FAILURES = 3
Tensors = Mapping[str, torch.Tensor]
# Workers do not import the code that registers others.
TORCH_OPERATORS = ("aten.", "prims.")
# Calls that draw random numbers take turns: each continues the generator.
_TURN = threading.Lock()


@dataclass(frozen=True, slots=True)
class Options:
    devices: str
    link: str = "pcie4"
    objective: str = Objective.LATENCY.value
    microbatches: int = 1
    policy: str | None = None
    verify: bool = False
    effort: str = "full"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Options":
        names = [f.name for f in fields(cls)]
        for name in values:
            check_known("option", name, names)
        devices = values.get("devices", "")
        listed = devices if isinstance(devices, str) else ",".join(devices)
        options = cls(**{**values, "devices": listed})
        check_known("objective", options.objective, tuple(Objective))
        if options.policy is not None and options.policy not in PLANNERS:
            raise UnknownName("policy", str(options.policy), PLANNERS)
        search_config(str(options.effort))
        if type(options.microbatches) is not int or options.microbatches < 1:
            message = f"microbatches must be an integer of at least 1, got {options.microbatches!r}"
            raise TesseraError(message, "Use 1 or more.", "options['microbatches']")
        return options

    def cluster(self) -> Cluster:
        try:
            return wire(parse_devices(self.devices), [self.link])
        except TesseraError as error:
            if isinstance(error, UnknownName):
                raise
            raise TesseraError(error.message, error.remedy, "options['devices']") from error


@dataclass(frozen=True)
class Call:
    call_inputs: Tensors
    initial_state: Tensors

    def state(self) -> Tensors:
        return self.initial_state

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        return self.call_inputs


Waiting = tuple[Call, Future[RunResult]]


class Session:
    """A step bound to one set of weights, and its workers.

    Calls that arrive from several threads while others run are run together.
    """

    # The least recently used first.
    live: ClassVar["weakref.WeakValueDictionary[int, Session]"] = weakref.WeakValueDictionary()
    live_lock = threading.RLock()

    def __init__(self, step: FunctionWorkload, plan: Plan) -> None:
        self.step, self.function, self.plan = step, step.function, plan
        self._weights = step.weights()
        self._undefined = _undefined(plan.unit.graphs[0].trace)
        self._stepper: WorkerStepper | None = None
        self._end: Callable[[], Any] | None = None
        self._turn = threading.RLock()
        self._waiting: list[Waiting] = []
        self._waiting_lock = threading.Lock()

    def bind(self, inputs: Mapping[str, Any]) -> Arguments | None:
        """None if the call has other weights, or arguments that are laid out differently."""
        weights = self.function.weights()
        if any(storage_key(weights[name]) != storage_key(held) for name, held in self._weights.items()):
            return None
        try:
            return self.function.arguments((), dict(inputs))
        except MismatchError:
            return None

    def check(self, arguments: Arguments, result: RunResult) -> None:
        state = {name: tensor.clone() for name, tensor in arguments.state.items()}
        with threads(1):
            outputs = self.step.run(arguments.inputs, state)
        for ours, theirs in ((outputs, result.outputs[-1]), (state, result.state)):
            for name, tensor in ours.items():
                if name not in self._undefined and not same_bits(tensor, theirs[name]):
                    message = f"the divided run differs from the reference run in '{name}'"
                    raise TesseraError(message, "Please report this model and these options.")

    def run(self, request: Call) -> RunResult:
        mine: Future[RunResult] = Future()
        with self._waiting_lock:
            self._waiting.append((request, mine))
        with self._turn:
            if not mine.done():
                self._run_waiting(mine)
        return mine.result()

    def close(self) -> None:
        with self._turn:
            self.live.pop(id(self), None)
            if self._end is not None:
                self._end()
            self._stepper, self._end = None, None

    def _run_waiting(self, mine: Future[RunResult]) -> None:
        with self._waiting_lock:
            batch, self._waiting = self._waiting, []
        is_sound = False
        try:
            run = run_offline(self._started(), [request for request, _ in batch])
            run.raise_failures()
            for (_, waiting), result in zip(batch, run.results, strict=True):
                waiting.set_result(result)
            is_sound = True
        except TesseraError as error:
            for _, waiting in batch:
                waiting.set_exception(error)
        finally:
            if not is_sound:  # work may be left in the queues
                self.close()
            with self._waiting_lock:  # after an interruption the others still need their results
                left = [x for x in batch if not x[1].done() and x[1] is not mine]
                self._waiting = left + self._waiting

    def _started(self) -> WorkerStepper:
        with self.live_lock:
            self.live.pop(id(self), None)
            if self._stepper is None:
                for other in list(self.live.values())[: max(0, len(self.live) - MAX_ENGINES + 1)]:
                    if other._turn.acquire(blocking=False):
                        other.close()
                        other._turn.release()
                stepper = WorkerStepper([self.plan], self._weights, max_failures=MAX_FAILURES)
                self._stepper = stepper.__enter__()
                self._end = weakref.finalize(self, stepper.__exit__, None, None, None)
            self.live[id(self)] = self
            return self._stepper


def close_all() -> None:
    for session in list(Session.live.values()):
        session.close()


__all__ = ["MAX_ENGINES", "Compiled", "Options", "backend", "close_all"]


def backend(
    graph: torch.fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The work is done on the graph's first call."""
    return Compiled(graph, examples, options or {})


backend.reset = close_all  # type: ignore[attr-defined]  # torch._dynamo.reset() calls this


class Compiled:
    """A graph of Dynamo; the arguments of a call select its session."""

    def __init__(
        self, graph: torch.fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self._graph, self._given_options = graph, options
        self._step = GraphStep(graph, examples)
        self.sessions: list[Session] = []
        # The step holds the weights of one call at a time.
        self._lock = threading.Lock()
        self._makes_grads = _makes_grads(graph)
        self._is_eager = _returns_grads(graph, examples)
        if self._is_eager:
            self._warn("it must compute gradients. Call it under torch.no_grad() or torch.inference_mode()")

    def __call__(self, *given: Any) -> Any:
        # Read here, because Dynamo would wrap errors of `backend`.
        options = Options.read(self._given_options)
        cluster = options.cluster()
        bound = None
        with recording:  # another thread's may have exchanged what a module holds
            found = {} if is_traced() else exchanged_for
            args = [found.get(a, a) if isinstance(a, torch.Tensor) else a for a in given]
            if not self._is_eager:
                with self._lock, self._step.holding(args) as inputs:
                    bound = self._bind(args, inputs, options, cluster)
        if bound is None:
            return self._graph(*args)
        session, arguments = bound
        with _TURN if session.function.generators and not is_traced() else nullcontext():
            arguments = session.function.at_its_turn(arguments)
            result = session.run(Call(arguments.inputs, arguments.state))
            with recording:
                if options.verify:
                    with self._lock, self._step.holding(args):
                        session.check(arguments, result)
                return session.function.finish(arguments, result.outputs[-1], result.state)

    def _bind(
        self, args: Sequence[Any], inputs: Mapping[str, Any], options: Options, cluster: Cluster
    ) -> tuple[Session, Arguments] | None:
        """None if the graph must run eagerly."""
        for session in self.sessions:
            arguments = session.bind(inputs)
            if arguments is not None:
                return session, arguments
        try:
            step, trace = self._capture(args, inputs)
        except (CaptureError, RuleBroken, RuntimeError) as error:
            self._is_eager = True
            self._warn(str(error))
            return None
        if trace is None:
            return None
        session = Session(step, make_plan(trace, cluster, options))
        self.sessions.append(session)
        weight = next((a for a in args if isinstance(a, torch.nn.Parameter)), None)
        if weight is not None:  # the workers end when it is freed: Dynamo may keep the graph for longer
            weakref.finalize(weight, _drop, weakref.ref(self), weakref.ref(session))
        return session, step.function.arguments((), dict(inputs))

    def _capture(
        self, args: Sequence[Any], inputs: Mapping[str, Any]
    ) -> tuple[FunctionWorkload, Trace | None]:
        foreign = {a.device.type for a in args if isinstance(a, torch.Tensor)} - {"cpu"}
        if foreign:
            where = ", ".join(sorted(foreign))
            message = f"it has tensors on {where}, and emulated devices compute on the CPU"
            raise CaptureError(message, "Move the model and its inputs to the CPU.")
        step = workload(self._step, **inputs)
        if self._makes_grads and step.function.changed:
            raise CaptureError("it writes gradients' history into its arguments", "Use torch.no_grad().")
        # The program may change weights in place between calls, so reading them is refused too.
        trace = record(step, VARYING | {BufferKind.WEIGHT})
        for kernel in trace.kernels:
            if kernel.origin is Origin.ATEN and not kernel.name.startswith(TORCH_OPERATORS):
                raise CaptureError(f"{kernel.name} is registered by code that workers do not import")
        computes = any(not is_allocation(trace, index) for index in range(len(trace.launches)))
        return step, trace if computes and trace.outputs else None

    def _warn(self, reason: str) -> None:
        warnings.warn(f"tessera runs this graph on one device: {reason}", UserWarning, stacklevel=3)


def _drop(compiled: "weakref.ref[Compiled]", session: "weakref.ref[Session]") -> None:
    graph, bound = compiled(), session()
    if graph is not None and bound is not None:
        graph.sessions.remove(bound)
        bound.close()


def make_plan(trace: Trace, cluster: Cluster, options: Options) -> Plan:
    unit = flow.make_unit([trace], [1])
    costs = flow.price(unit, cluster)
    search = search_config(options.effort)
    config = PlanConfig(Objective(options.objective), options.microbatches, options.policy, search=search)
    return flow.make_plan(unit, costs, cluster, config)


def _undefined(trace: Trace) -> set[str]:
    """Outputs that no launch writes: results of `empty` that pass between two graphs of a model."""
    written = {
        access.buffer
        for index, launch in enumerate(trace.launches)
        if not is_allocation(trace, index)
        for access in launch.accesses
        if access.write or access.atomic
    }
    unwritten = set(trace.buffers_of(BufferKind.OUTPUT)) - written
    return {name for name, view in trace.outputs if view.buffer in unwritten}


def _is_differentiated(node: torch.fx.Node) -> bool:
    """False for a parameter that an operator gives back as it is."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def _returns_grads(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> bool:
    """Dynamo recompiles when the answer changes."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    computed = [node for node in output.all_input_nodes if node.op != "placeholder"]
    if all("example_value" in node.meta for node in computed):
        return any(map(_is_differentiated, computed))
    # Not from Dynamo: assume everything that could be is differentiable.
    given = (*examples, *graph.parameters())
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in given)


def _makes_grads(graph: torch.fx.GraphModule) -> bool:
    return any(map(_is_differentiated, (node for node in graph.graph.nodes if node.op.startswith("call"))))
