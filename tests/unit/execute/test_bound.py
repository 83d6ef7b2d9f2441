"""Launches tied to their places: the same bits as the long way, and no result of another shape."""

from typing import Any

import pytest
import torch

import steps_factory as factory
from tessera.errors import WorkerError
from tessera.execute.bound import bind, out_variant
from tessera.execute.footprint import ready_programs
from tessera.execute.launcher import Launcher
from tessera.execute.memory import constant
from tessera.execute.packing import pack, unpack
from tessera.execute.stand import Ground, Stand
from tessera.ir import BufferKind, Run, View

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
    place, view = torch.zeros(1, 5), View(0, "float32", (1, 5), (5, 1))
    call = bind(operator, args, {}, [(0, view)], lambda _: place, "launch 7")
    with pytest.raises(WorkerError, match="launch 7 gave a result of shape"):
        call()


def stand_of(step: str) -> tuple[Stand, Launcher]:
    """One step of the tiny model alone on a device, and what runs its launches."""
    made = factory.prepared()
    plan = factory.plan_by("single")
    program = next(p for p in ready_programs(plan)[0] if plan.unit.graphs[p.step].trace.step.kind == step)
    traces, device = [g.trace for g in plan.unit.graphs], plan.used[0]
    trace = traces[program.step]
    weights = made.model.weights()
    held = {
        b: constant(trace.buffers[b])
        if trace.buffers[b].constant_hex
        else weights[trace.buffers[b].name].untyped_storage()
        for b in trace.buffers_of(BufferKind.WEIGHT)
    }
    stand = Ground(traces, device, [held] * len(traces)).stand(0, program, ())
    return stand, Launcher(trace, torch.device("cpu"))


def test_a_bound_launch_gives_the_same_bits() -> None:
    """Nearly all launches of a decode are bound after their first run, and the second run agrees with it."""
    stand, launcher = stand_of("decode")
    workload = factory.prepared().model.workloads["decode"]
    given = {**workload.make_inputs(0), **workload.make_state(0)}
    device = factory.plan_by("single").used[0]
    launches = [x.launch for x in stand.program.instructions[device] if isinstance(x, Run)]
    results = []
    for _ in range(2):
        for name, tensor in given.items():
            stand.memory.put(stand.given[name], unpack(pack(tensor)).untyped_storage())
        for launch in launches:
            launcher.run(launch, stand.memory)
        view = stand.outputs["logits"]
        storage = stand.memory.get(view.buffer)
        results.append(torch.empty(0).set_(storage, view.offset, view.shape, view.stride).clone())
        assert len(stand.memory.calls) >= 0.9 * len(launches)
    assert torch.equal(*results)
    assert torch.equal(results[0], workload.run(workload.make_inputs(0), workload.make_state(0))["logits"])
