"""Inductor capture on one GPU: the launches are exact, and replaying them gives the compiled model's bits."""

import functools
import random

import pytest
import torch

from cuda_replay import CudaReplay
from inductor_factory import random_order
from tessera.analyze import build_graph
from tessera.capture import Workload, build
from tessera.capture.inductor import Recording, record_inductor
from tessera.capture.workload import on_device
from tessera.ir import Hazard, Origin, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@functools.cache
def workload(kind: str) -> Workload:
    """A step of the tiny Llama on the GPU."""
    return on_device(build(Step("tiny-llama", kind, 2, 16)), "cuda:0")


@functools.cache
def recording(kind: str) -> Recording:
    """Its launches."""
    return record_inductor(workload(kind))


@functools.cache
def compiled_result(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and state of the compiled model."""
    state = workload(kind).make_state(0)
    outputs = recording(kind).code.run(workload(kind).weights(), workload(kind).make_inputs(0), state)
    return outputs, state


def replay_equals(kind: str, order: list[int] | None = None) -> bool:
    """Whether a replay as one CUDA graph has the bits of the compiled model."""
    mine = workload(kind)
    state = mine.make_state(0)
    given = {**mine.weights(), **mine.make_inputs(0), **state}
    found = CudaReplay(recording(kind).trace, given, order).run()
    outputs, wanted = compiled_result(kind)
    torch.cuda.synchronize()
    pairs = [(outputs[n], found[n]) for n in outputs] + [(wanted[n], state[n]) for n in wanted]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_replay_has_the_bits_of_the_compiled_model(kind: str) -> None:
    """The captured launches as one CUDA graph give the same outputs and state, bit for bit."""
    assert replay_equals(kind)


def test_every_triton_launch_carries_ptx_and_is_proved() -> None:
    """Nothing in the tiny Llama is beyond the analysis."""
    trace = recording("decode").trace
    triton = [i for i in range(len(trace.launches)) if trace.kernel_of(i).origin is Origin.TRITON]

    assert triton
    assert all(".entry" in trace.kernel_of(i).ptx for i in triton)
    assert [] == [x.immovable for x in trace.launches if x.immovable]


def test_random_orders_have_the_same_bits() -> None:
    """Dependencies proved from PTX are enough: any order that respects them gives the same result."""
    graph = build_graph(recording("decode").trace)
    rng = random.Random(0)

    assert all(replay_equals("decode", random_order(graph, rng)) for _ in range(10))


def test_orders_that_ignore_true_dependencies_differ() -> None:
    """The check can fail: without read-after-write edges the result changes."""
    graph = build_graph(recording("decode").trace)
    rng = random.Random(0)

    assert not all(replay_equals("decode", random_order(graph, rng, Hazard.RAW)) for _ in range(3))
