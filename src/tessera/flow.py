"""The stages put together: what several commands share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tessera.analyze import build_graph
from tessera.capture import Workload, build
from tessera.errors import MismatchError, TesseraError
from tessera.ir import Cluster, Costs, Graph, Objective, Plan, Trace, WorkUnit, verify
from tessera.plan import PlanConfig, solve
from tessera.profile import estimate
from tessera.simulate import simulate, throughput_per_s

Tensors = Mapping[str, torch.Tensor]

# Enough requests that the middle of a simulated run is steady, few enough to try many candidates.
SAMPLE_ROUNDS = 5


def make_unit(traces: Sequence[Trace], counts: Sequence[int] | None = None) -> WorkUnit:
    """Joins the traces of one request; see `default_counts` for how often each runs."""
    graphs = tuple(build_graph(trace) for trace in traces)
    unit = WorkUnit(graphs, tuple(counts) if counts else default_counts(graphs))
    if len(unit.counts) != len(graphs):
        raise TesseraError(f"{len(unit.counts)} counts for {len(graphs)} traces", "Give one per trace.")
    check_joined(graphs)
    verify(unit)
    return unit


def default_counts(graphs: Sequence[Graph]) -> tuple[int, ...]:
    """One run a step, except that a decode runs once for each token its prefill reserved."""
    reserve = max((g.trace.step.reserve for g in graphs if g.trace.step.kind == "prefill"), default=0)
    return tuple(max(1, reserve) if g.trace.step.kind == "decode" else 1 for g in graphs)


def check_joined(graphs: Sequence[Graph]) -> None:
    """State of the same name must be the same memory in every step."""
    sizes: dict[str, tuple[int, str]] = {}
    for graph in graphs:
        for name in graph.state_groups:
            size = next(b.size_bytes for b in graph.trace.buffers if b.name == name)
            known, first = sizes.setdefault(name, (size, graph.trace.step.kind))
            if size != known:
                raise MismatchError(
                    f"state '{name}' has {known} bytes in {first} and {size} in {graph.trace.step.kind}",
                    "Capture both with the same batch, and the decode with the prefill's context + reserve.",
                )


def price(unit: WorkUnit, cluster: Cluster) -> tuple[Costs, ...]:
    """Costs of every step from the best source present."""
    return tuple(estimate(graph.trace, cluster.devices) for graph in unit.graphs)


def simulated_throughput(plan: Plan) -> float:
    """Work units per second with the plan's slots in flight; handed to the planner."""
    num_requests = max(4, plan.slots) * SAMPLE_ROUNDS
    return throughput_per_s(simulate(plan, num_requests, is_detailed=False))


def make_plan(
    unit: WorkUnit,
    costs: Sequence[Costs],
    cluster: Cluster,
    objective: Objective,
    slots: int,
    policy: str | None = None,
) -> Plan:
    """A plan for one objective (or by one named policy), its figures checked by simulation."""
    config = PlanConfig(objective=objective, slots=slots, policy=policy)
    return solve(unit, tuple(costs), cluster, config, simulated_throughput)


def workloads_of(unit: WorkUnit) -> list[Workload]:
    """The steps of a unit, built again from their records; steps of one model share its weights."""
    return [build(graph.trace.step) for graph in unit.graphs]


@dataclass(frozen=True)
class UnitRequest:
    """One request of a work unit: its first inputs and how each run's inputs follow from the last outputs."""

    workloads: Sequence[Workload]
    first: Tensors
    seed: int

    def state(self) -> Tensors:
        """The state of all steps; where several name the same, as the first of them starts with it."""
        return {
            name: tensor
            for workload in reversed(self.workloads)
            for name, tensor in workload.make_state(self.seed).items()
        }

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """The first run takes the request's own inputs; the others follow."""
        return self.first if step == run == 0 else self.workloads[step].follow(self.first, run, last)


@dataclass(frozen=True)
class Undivided:
    """What the model itself gives for a request, in one process, with nothing placed anywhere."""

    outputs: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def run_undivided(unit: WorkUnit, request: UnitRequest) -> Undivided:
    """The reference run: the model's own code, one thread, as in the workers."""
    torch.set_num_threads(1)
    state = {name: tensor.clone() for name, tensor in request.state().items()}
    outputs: list[dict[str, torch.Tensor]] = []
    for step, count in enumerate(unit.counts):
        for run in range(count):
            inputs = request.inputs(step, run, outputs[-1] if outputs else {})
            outputs.append(request.workloads[step].run(inputs, state))
    return Undivided(outputs, state)
