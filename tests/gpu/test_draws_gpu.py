"""Random numbers on a GPU: the generator is state of the step, for CUDA graphs and compiled code too."""

import functools

import pytest
import torch

from cuda_replay import CudaReplay
from drawing_model import Sampler
from tessera.capture import Workload, build, record, rng
from tessera.capture.inductor import record_inductor
from tessera.capture.workload import on_device
from tessera.ir import Step, Trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEP = Step("drawing_model:step", "decode", 32, 4)
GENERATOR = "rng:cuda:0"


@functools.cache
def trace() -> Trace:
    """Four draws among other launches."""
    return record(on_device(build(STEP), "cuda:0"))


@functools.cache
def workload() -> Workload:
    """The step on the GPU, with its generator among the state."""
    return on_device(build(STEP), "cuda:0").drawing(trace())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(t.cpu(), other[name].cpu()) for name, t in one.items())


def test_draws_name_the_gpus_generator() -> None:
    """Sixteen bytes: a seed and an offset."""
    assert [(GENERATOR, 16)] == [(b.name, b.size_bytes) for b in trace().buffers if b.is_generator]


def test_a_cuda_graph_draws_the_models_numbers_run_after_run() -> None:
    """Three runs of graph and model from the same state: outputs, counts and generator are equal."""
    mine, theirs = workload().make_state(0), workload().make_state(0)
    inputs = workload().make_inputs(0)
    replay = CudaReplay(trace(), {**workload().weights(), **inputs, **mine})
    for _ in range(3):
        found = replay.run()
        torch.cuda.synchronize()
        wanted = workload().run(inputs, theirs)
        assert same(wanted, found)
        assert same(theirs, mine)


def test_the_programs_generator_is_left_alone() -> None:
    """Neither capture nor replay draws from it."""
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state(0)
    record(on_device(build(STEP), "cuda:0"))
    CudaReplay(
        trace(), {**workload().weights(), **workload().make_inputs(0), **workload().make_state(0)}
    ).run()

    assert torch.equal(before, torch.cuda.get_rng_state(0))


def test_compiled_code_draws_from_the_same_generator() -> None:
    """Inductor draws seeds by an operator and numbers in its kernels: a replay gives the same bits."""
    model = Sampler().cuda().eval()
    compiled = Workload(
        Step("dropout", "call", 4, 1),
        model,
        lambda i, s: {"y": torch.nn.functional.dropout(model.first(i["x"]), 0.5, True)},
        lambda seed: {"x": torch.ones(4, 16, device="cuda")},
        lambda seed: {},
        lambda first, run, last: dict(first),
    )
    recording = record_inductor(compiled)
    start = rng.seeded_state(GENERATOR, 3)
    wanted_state, state = {GENERATOR: start.clone()}, {GENERATOR: start.clone()}
    with rng.entered(wanted_state):
        wanted = recording.code.run(compiled.weights(), compiled.make_inputs(0), {})
    given = {**compiled.weights(), **compiled.make_inputs(0), **state}
    found = CudaReplay(recording.trace, given).run()
    torch.cuda.synchronize()

    assert same(wanted, found)
    assert same(wanted_state, state)
