"""Every tiny family on a GPU: the torch front end and Inductor's, replayed bit for bit."""

from collections.abc import Mapping

import pytest
import torch
from torch.nn.attention import sdpa_kernel

import families
from cuda_replay import CudaReplay
from tessera.capture import Workload, build, record_step
from tessera.capture.inductor import record_inductor
from tessera.capture.record import PORTABLE
from tessera.capture.workload import on_device
from trace_agreement import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(model: str, kind: str) -> Workload:
    """The step with its tensors on the GPU."""
    return on_device(build(families.step(model, kind)), "cuda:0")


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    return [name for name, t in one.items() if not torch.equal(t, other[name])]


def groups_have_float32() -> bool:
    """Whether the shapes of a float32 grouped product can be asked for, as Inductor does."""
    a, b = torch.empty(4, 16, device="meta"), torch.empty(2, 16, 16, device="meta")
    try:
        torch.ops.aten._grouped_mm(a, b, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(("model", "kind"), families.STEPS)
def test_a_gpu_capture_is_the_fake_one(model: str, kind: str) -> None:
    """Launch for launch, without any difference that needs explaining."""
    step = families.step(model, kind)
    found = compare(record_step(step, "cuda:0"), record_step(step, "fake"))

    assert () == found.differences


@pytest.mark.parametrize(("model", "kind"), families.STEPS)
def test_operators_replayed_as_one_graph_have_the_models_bits(model: str, kind: str) -> None:
    """The torch front end's trace, on the GPU it was recorded on."""
    if model == "tiny-gpt-oss" and not groups_have_float32():
        pytest.skip("this torch takes float32 grouped products through the host, which no graph can")
    trace, workload = record_step(families.step(model, kind), "cuda:0"), on_gpu(model, kind)
    wanted_state, state = workload.make_state(0), workload.make_state(0)
    with sdpa_kernel(PORTABLE):
        wanted = workload.run(workload.make_inputs(0), wanted_state)
        found = CudaReplay(trace, {**workload.weights(), **workload.make_inputs(0), **state}).run()
    torch.cuda.synchronize()

    assert "cuda:0" == trace.recorded_on
    assert [] == same(wanted, found) + same(wanted_state, state)


@pytest.mark.parametrize(
    ("model", "kind"), [s for s in families.STEPS if s[1] != "encode" and s[0] != "tiny-llama"]
)
def test_compiled_launches_replayed_have_the_compiled_models_bits(model: str, kind: str) -> None:
    """Inductor's trace of every family; torch 2.11 cannot compile the split scan of Mamba's prefill."""
    if model == "tiny-gpt-oss" and not groups_have_float32():
        pytest.skip("this torch can compile grouped products of bfloat16 only")
    workload = on_gpu(model, kind)
    changes = {"split_reductions": False} if (model, kind) == ("tiny-mamba", "prefill") else {}
    recording = record_inductor(workload, **changes)
    wanted_state, state = workload.make_state(0), workload.make_state(0)
    wanted = recording.code.run(workload.weights(), workload.make_inputs(0), wanted_state)
    given = {**workload.weights(), **workload.make_inputs(0), **state}
    found = CudaReplay(recording.trace, given).run()
    torch.cuda.synchronize()

    assert [] == same(wanted, found) + same(wanted_state, state)
