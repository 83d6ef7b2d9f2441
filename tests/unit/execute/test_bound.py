"""Launches tied to their places: the same bits as the long way, and no result of another shape."""

import pytest
import torch

import engine_factory as made
from tessera.errors import WorkerError
from tessera.execute.launcher import Launcher, find_operator
from tessera.execute.memory import ProgramMemory, WorkerMemory, constant, ready_programs, tensor_of
from tessera.execute.messages import pack, unpack
from tessera.ir import BufferKind, Program, Run, Trace


def bound_step() -> tuple[Program, Trace, Launcher, ProgramMemory]:
    """The second step on one CPU device."""
    plan = made.plan_of([[[0] * len(g.trace.launches) for g in made.unit().graphs]], 1)
    program, trace = ready_programs(plan)[0][1], plan.graphs[1].trace
    weights = made.workloads()[1].weights()
    held = {
        b: constant(trace.buffers[b])
        if trace.buffers[b].constant_hex
        else weights[trace.buffers[b].name].untyped_storage()
        for b in trace.buffers_of(BufferKind.WEIGHT)
    }
    memory = WorkerMemory(0)
    for graph, storages in zip(plan.graphs, ({}, held), strict=True):
        memory.add_step(graph.trace, storages)
    stand = memory.program_memory(0, program, ())
    return program, trace, Launcher(trace, torch.device("cpu")), stand


def put(stand: ProgramMemory) -> None:
    """The inputs and state of request 0."""
    workload = made.workloads()[1]
    for name, tensor in {**workload.make_inputs(0), **workload.make_state(0)}.items():
        stand.memory.put(stand.buffers[name], unpack(pack(tensor)).untyped_storage())


def test_a_result_of_another_shape_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is what must come, from the first run and from those that are bound."""
    program, trace, launcher, stand = bound_step()
    launch = next(
        x.launch
        for x in program.instructions[0]
        if isinstance(x, Run) and trace.kernel_of(x.launch).name.startswith("aten.add")
    )
    is_wrong = False
    monkeypatch.setattr(
        "tessera.execute.launcher.find_operator",
        lambda name: lambda *args, **kwargs: find_operator(name)(*args, **kwargs)[None if is_wrong else ...],
    )
    put(stand)
    for x in range(launch + 1):
        launcher.run(x, stand.memory)
    assert launch in stand.memory.calls
    is_wrong = True
    with pytest.raises(WorkerError, match=f"launch {launch} .* laid out its result as"):
        launcher.run(launch, stand.memory)


def test_a_bound_launch_gives_the_same_bits() -> None:
    """Nearly all launches of a step are bound after their first run, and the second run agrees with it."""
    (program, _, launcher, stand), workload = bound_step(), made.workloads()[1]
    launches = [x.launch for x in program.instructions[0] if isinstance(x, Run)]
    results = []
    for _ in range(2):
        put(stand)
        for launch in launches:
            launcher.run(launch, stand.memory)
        view = stand.outputs["y"]
        results.append(tensor_of(stand.memory.get(view.buffer), view).clone())
        assert len(stand.memory.calls) >= 0.9 * len(launches)
    assert torch.equal(*results)
    assert torch.equal(results[0], workload.run(workload.make_inputs(0), workload.make_state(0))["y"])
