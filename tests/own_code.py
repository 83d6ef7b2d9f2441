"""The model's own code as a stepper: what answers of every placement are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reference_stepper import ReferenceStepper
from tessera.execute.stepper import Tensors
from tessera.ir import (
    Cluster,
    Costs,
    Device,
    DeviceKind,
    Graph,
    Lane,
    Objective,
    Placement,
    Plan,
    Trace,
    WorkUnit,
)
from tessera.serve.steps import ServedModel


@contextmanager
def reference(model: ServedModel, num_threads: int | None = None) -> Iterator[ReferenceStepper]:
    """In this process, by so many threads of torch; None leaves them."""
    workloads = model.workloads
    names = [(set(w.make_inputs(0)), set(w.make_state(0))) for w in workloads]

    def run(step: int, inputs: Tensors, state: dict[str, Any]) -> Tensors:
        wanted, own = names[step]
        given = {name: tensor for name, tensor in inputs.items() if name in wanted}
        return workloads[step].run(given, {name: state[name] for name in own})

    def zeros() -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(t) for name, t in workloads[-1].make_state(0).items()}

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with ReferenceStepper([_plan(model)], run, zeros) as stepper:
        yield stepper


def _plan(model: ServedModel) -> Plan:
    """One lane on one device, of steps that nobody recorded: it says what is run, not how."""
    card = Device("cpu", DeviceKind.CPU, "", 0)
    graphs = tuple(Graph(Trace(w.step, (), (), (), ()), (), (), ()) for w in model.workloads)
    costs = tuple(Costs(graph.trace.digest, (card,), ()) for graph in graphs)
    lane = Lane(Placement(((),) * len(graphs)), 1.0)
    unit, cluster = WorkUnit(graphs, (1,) * len(graphs)), Cluster((card,), ())
    goal, microbatches = Objective.THROUGHPUT, model.shape.microbatches
    return Plan(
        unit, cluster, costs, goal, "single-device", (lane,), microbatches, 1.0, 1.0, 1.0, 0.0, home="cpu"
    )
