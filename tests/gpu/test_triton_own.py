"""Kernels a model launches itself, on a GPU: one trace with its operators, proved, replayed bit for bit."""

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import tessera
from cuda_replay import CudaReplay
from own_kernels_model import AXPY
from tessera.capture import Workload, build, record, record_step
from tessera.capture.workload import on_device
from tessera.errors import CaptureError
from tessera.ir import Origin, Step, Trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEP = Step("own_kernels_model:step", "decode", 64, 4)
SOURCE = """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""


@functools.cache
def workload() -> Workload:
    """The step on the GPU."""
    return on_device(build(STEP), "cuda:0")


@functools.cache
def trace() -> Trace:
    """Its launches."""
    return record(workload())


def test_own_kernels_are_seen_with_their_code_and_numbers() -> None:
    """A Triton kernel with what was compiled in, and a CUDA kernel, both with PTX and grid."""
    own = [i for i in range(len(trace().launches)) if trace().kernel_of(i).origin is not Origin.ATEN]

    assert ["gate", "axpy"] == [trace().kernel_of(i).name for i in own]
    assert all(".entry" in trace().kernel_of(i).ptx for i in own)
    assert [(32, 1, 1), (16, 1, 1)] == [trace().launches[i].grid for i in own]
    assert 32 == dict(trace().kernel_of(own[0]).constants)["BLOCK"]


def test_their_accesses_are_proved_and_those_of_a_fake_capture() -> None:
    """PTX for this GPU and PTX compiled without one touch the same bytes."""
    fake = record_step(STEP, "fake")

    assert not any(x.immovable for x in trace().launches)
    assert [x.accesses for x in fake.launches] == [x.accesses for x in trace().launches]


def test_a_replay_from_ptx_has_the_models_bits() -> None:
    """Operators dispatched again and PTX loaded by the driver, as one CUDA graph."""
    wanted_state, state = workload().make_state(0), workload().make_state(0)
    wanted = workload().run(workload().make_inputs(0), wanted_state)
    given = {**workload().weights(), **workload().make_inputs(0), **state}
    found = CudaReplay(trace(), given).run()
    torch.cuda.synchronize()

    assert torch.equal(wanted["output"], found["output"])
    assert torch.equal(wanted_state["kept"], state["kept"])


@pytest.mark.parametrize("code", [AXPY, SOURCE], ids=["ptx", "source"])
def test_a_cuda_kernel_runs_by_the_driver(code: str) -> None:
    """PTX, and CUDA C++ compiled by NVRTC."""
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    wanted = y + 2 * x
    tessera.CudaKernel(code, "axpy")[8, 128](y, x, 2.0, 1000)

    assert torch.allclose(wanted, y)


def test_the_gpu_and_the_interpreter_agree() -> None:
    """One multiply-add an element: the same bits on both."""
    kernel, x, y = tessera.CudaKernel(AXPY, "axpy"), torch.randn(1000), torch.randn(1000)
    there = y.cuda()
    kernel[8, 128](there, x.cuda(), 2.5, 1000)
    kernel[8, 128](y, x, 2.5, 1000)

    assert torch.equal(y, there.cpu())


def test_a_kernel_whose_code_is_not_kept_is_refused() -> None:
    """`torch.cuda._compile_kernel` gives a function and forgets the PTX."""
    make: Any = getattr(torch.cuda, "_compile_kernel", None)
    if make is None:
        pytest.skip("this torch has no _compile_kernel")
    kernel = make(SOURCE, "axpy")

    def call(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kernel((1, 1, 1), (32, 1, 1), (y, x, 1.0, 32))
        return y * 2

    with pytest.raises(CaptureError, match=r"test_triton_own\.py:\d+: .*code is not kept"):
        tessera.capture(call, torch.zeros(32, device="cuda"), torch.ones(32, device="cuda"))
