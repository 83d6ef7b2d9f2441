"""Launches tied to their places: the same bits as the long way, and no result of another shape."""

from typing import Any

import pytest
import torch

import engine_factory as made
from tessera.errors import WorkerError
from tessera.execute.launcher import Launcher, bind, out_variant
from tessera.execute.memory import WorkerMemory, constant, ready_programs, tensor_of
from tessera.execute.messages import pack, unpack
from tessera.ir import BufferKind, Run

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "wanted"),
    [
        (aten.mm.default, aten.mm.out),
        (aten.mul.Tensor, aten.mul.out),
        (aten.index_put_.default, None),
        (aten.view.default, None),
        (aten.topk.default, None),
    ],
)
def test_an_out_variant_has_the_same_arguments(operator: Any, wanted: Any) -> None:
    """Operators with one new result may write it in place; those that change or return several may not."""
    assert out_variant(operator) is wanted


@pytest.mark.parametrize(
    ("operator", "args"),
    [(aten.mm.default, (torch.ones(3, 2), torch.ones(2, 4))), (aten.topk.default, (torch.ones(3, 2), 1))],
)
def test_a_result_of_another_shape_is_an_error(operator: Any, args: tuple[Any, ...]) -> None:
    """What is recorded is what must come, whether it is written in place or copied."""
    call = bind(operator, args, {}, [(0, torch.zeros(1, 5))], "launch 7")
    with pytest.raises(WorkerError, match="launch 7 gave a result of shape"):
        call()


def test_a_result_whose_elements_share_memory_is_copied_once() -> None:
    """A stride of 0, which torch does not write."""
    held = torch.zeros(3).as_strided((3, 4), (1, 0))
    bind(aten.expand.default, (torch.arange(3.0)[:, None], (3, 4)), {}, [(0, held)], "launch 7")()

    assert torch.equal(torch.arange(3.0)[:, None].expand(3, 4), held)


def test_a_bound_launch_gives_the_same_bits() -> None:
    """Nearly all launches of a step are bound after their first run, and the second run agrees with it."""
    plan = made.plan_of([[[0] * len(g.trace.launches) for g in made.unit().graphs]], 1)
    program, trace, workload = ready_programs(plan)[0][1], plan.graphs[1].trace, made.workloads()[1]
    weights = workload.weights()
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
    launcher = Launcher(trace, torch.device("cpu"))
    launches = [x.launch for x in program.instructions[0] if isinstance(x, Run)]
    results = []
    for _ in range(2):
        for name, tensor in {**workload.make_inputs(0), **workload.make_state(0)}.items():
            stand.memory.put(stand.buffers[name], unpack(pack(tensor)).untyped_storage())
        for launch in launches:
            launcher.run(launch, stand.memory)
        view = stand.outputs["y"]
        results.append(tensor_of(stand.memory.get(view.buffer), view).clone())
        assert len(stand.memory.calls) >= 0.9 * len(launches)
    assert torch.equal(*results)
    assert torch.equal(results[0], workload.run(workload.make_inputs(0), workload.make_state(0))["y"])
