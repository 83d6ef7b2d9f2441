"""Graphs of torch.fx as steps: the model's names come back, refusals name the model's line."""

from typing import Any

import pytest
import torch

from tessera.capture import record
from tessera.capture.function import workload
from tessera.capture.fxgraph import GraphStep
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Trace


class Block(torch.nn.Module):
    """A layer with a buffer that it changes."""

    calls: torch.Tensor

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.norm = torch.nn.BatchNorm1d(4)
        self.is_training = is_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = torch.relu(self.fc(x))
        return self.norm(x) if self.is_training else x  # line of the running statistics


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self, is_training: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(is_training), Block(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def dynamo_trace(model: torch.nn.Module, *args: torch.Tensor) -> Trace:
    """The trace of the graph that Dynamo makes of a model."""
    found: list[Trace] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        step = GraphStep(graph, examples)

        def run(*given: Any) -> Any:
            with step.holding(given) as inputs:
                found.append(record(workload(step, **inputs)))
            return graph(*given)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found[0]


def test_weights_state_and_scopes_have_the_models_names() -> None:
    """Dynamo hands over a flat graph; its trace reads as one of the model."""
    trace = dynamo_trace(Model(), torch.ones(2, 4))
    names = {kind: {trace.buffers[b].name for b in trace.buffers_of(kind)} for kind in BufferKind}

    assert {f"layers.{i}.fc.{p}" for i in (0, 1) for p in ("weight", "bias")} == names[BufferKind.WEIGHT]
    assert {"layers.0.calls", "layers.1.calls"} == names[BufferKind.STATE]
    assert {"x"} == names[BufferKind.INPUT]
    assert {f"layers.{i}{part}" for i in (0, 1) for part in ("", ".fc")} == {x.scope for x in trace.launches}


def test_the_graphs_trace_is_the_models_trace() -> None:
    """Kernel by kernel, what the graph launches is what the model launches."""
    model = Model()
    graph, eager = dynamo_trace(model, torch.ones(2, 4)), record(workload(model, torch.ones(2, 4)))
    kernels = [[t.kernel_of(i).name for i in range(len(t.launches))] for t in (graph, eager)]

    assert kernels[0] == kernels[1]


def test_a_graph_that_holds_its_modules_is_captured_too() -> None:
    """Parameters may be the graph's own attributes instead of its arguments."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    step = GraphStep(torch.fx.symbolic_trace(model), [torch.ones(2, 4)])
    with step.holding([torch.ones(2, 4)]) as inputs:
        trace = record(workload(step, **inputs))

    assert ["graph.0.weight", "graph.0.bias"] == [
        trace.buffers[b].name for b in trace.buffers_of(BufferKind.WEIGHT)
    ]
    assert ["graph.0", "graph.1"] == [launch.scope for launch in trace.launches]


def test_a_refusal_names_the_models_line() -> None:
    """Frames of the generated graph say nothing; the line that Dynamo traced does."""
    with open(__file__, encoding="utf-8") as file:
        line = next(
            i for i, text in enumerate(file, 1) if text.rstrip().endswith("# line of the running statistics")
        )

    with pytest.raises(CaptureError, match=rf"test_function_graph\.py:{line}: .*running statistics"):
        dynamo_trace(Model(is_training=True), torch.ones(2, 4))


def test_weights_are_held_only_while_they_are_used() -> None:
    """A graph that outlives its model does not keep its weights."""
    step = GraphStep(torch.fx.symbolic_trace(lambda x: x + 1), [torch.nn.Parameter(torch.ones(2))])
    with step.holding([torch.ones(2)]):
        assert 1 == len(list(step.buffers()))
    assert 0 == len(list(step.buffers()))
