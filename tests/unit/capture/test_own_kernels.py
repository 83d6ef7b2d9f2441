"""Kernels a model launches itself, Triton and CUDA, in one trace with its operators; run without a GPU."""

import functools
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import tessera
from factories import make_cluster, make_plan
from own_kernels_model import AXPY, Mixed, double, gate
from tessera.analyze import build_graph
from tessera.capture import Workload, build, record_step
from tessera.capture.own import unchanged
from tessera.cli import _main
from tessera.errors import CaptureError
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_unit, run_reference
from tessera.ir import Origin, Step, Trace, save
from tessera.kernels.tensors import same_bits

STEP = Step("own_kernels_model:step", "decode", 4, 4)
SOURCE = """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""


@functools.cache
def trace() -> Trace:
    """Three operators, a Triton kernel, a CUDA kernel, an operator."""
    return record_step(STEP)


def workload() -> Workload:
    """The step."""
    return build(STEP)


def touched(index: int) -> list[tuple[str, int, int, bool, bool]]:
    """The accesses of a launch, by buffer name."""
    found = trace()
    return [
        (found.buffers[a.buffer].name, a.region.start, a.region.stop, a.read, a.write)
        for a in found.launches[index].accesses
    ]


def test_own_kernels_stand_among_the_operators() -> None:
    """In program order, with their PTX, grid and block."""
    names = [trace().kernel_of(i).name for i in range(len(trace().launches))]
    origins = [trace().kernel_of(i).origin for i in (3, 4)]

    assert ["gate", "axpy"] == names[3:5]
    assert [Origin.TRITON, Origin.PTX] == origins
    assert all(".entry" in trace().kernel_of(i).ptx for i in (3, 4))
    assert [(2, 1, 1), (1, 1, 1)] == [trace().launches[i].grid for i in (3, 4)]


def test_what_another_thread_runs_meanwhile_is_no_part_of_the_step() -> None:
    """Neither its kernels nor the modules that it enters and leaves."""
    begun, ends = threading.Event(), threading.Event()
    kernel, ones, y = tessera.CudaKernel(AXPY, "axpy"), torch.ones(8), torch.zeros(8)

    class Elsewhere(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            kernel[1, 32](y, x, 2.0, 8)
            ends.wait(5)
            return x

    class Begins(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.clear()
            ends.clear()
            threads.append(threading.Thread(target=Elsewhere(), args=(ones,)))
            threads[-1].start()
            begun.wait(5)
            return x

    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends.set()
            threads.pop().join()
            return x * 2

    threads: list[threading.Thread] = []
    trace = tessera.capture(torch.nn.Sequential(Begins(), Doubles()), ones)

    assert ["aten.mul.Tensor"] == [kernel.name for kernel in trace.kernels]
    assert ["1"] == [launch.scope for launch in trace.launches]
    assert 2.0 <= float(y.sum())


def test_their_accesses_are_proved() -> None:
    """The CUDA kernel changes half of the state and reads half of what the Triton kernel made."""
    assert ["", ""] == [trace().launches[i].immovable for i in (3, 4)]
    assert [("kept", 0, 128, True, True), ("t8", 0, 128, True, False)] == touched(4)


def test_what_only_an_own_kernel_writes_is_state() -> None:
    """`kept` is changed by nobody but the CUDA kernel."""
    assert {"kept"} == set(workload().make_state(0))


def test_the_result_is_the_mathematics() -> None:
    """The interpreter computes what torch computes, up to rounding."""
    model, x = Mixed(), torch.randn(4, 16)
    kept = torch.zeros(4, 16)
    with torch.no_grad():
        gated = model.left(x) * torch.sigmoid(model.right(x))
        found = workload().drawing(trace()).run({"x": x}, {"kept": kept})["output"]

    assert torch.allclose(torch.tanh(torch.cat([gated[:2] / 2, torch.zeros(2, 16)])), found, atol=1e-6)


def test_verify_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Legal orders of operators and kernels agree with the model's own run bit for bit; others do not."""
    save(trace(), tmp_path / "own.trace")
    code = _main(["verify", str(tmp_path / "own.trace"), "--orders", "4", "--json"])
    found = json.loads(capsys.readouterr().out)

    necessary = {row["hazard"]: row["necessary"] for row in found["classes"]}
    assert (0, 4, "yes") == (code, found["legal"]["equal"], necessary["RAW"])


def test_kernels_divided_over_two_workers_give_the_reference_bits() -> None:
    """Every launch on another worker than the one before it."""
    placement = [i % 2 for i in range(len(trace().launches))]
    for group in build_graph(trace()).groups:
        for launch in group:
            placement[launch] = 0
    assert placement[3] != placement[4]
    plan = make_plan([trace()], [[placement]], [2], make_cluster(2))
    requests = [UnitRequest([workload()], workload().make_inputs(i), i) for i in range(2)]
    with WorkerStepper([plan], workload().weights()) as stepper:
        results = run_offline(stepper, requests).results
    for request, result in zip(requests, results, strict=True):
        wanted = run_reference(make_unit([trace()], [2]), request)
        assert all(
            same_bits(one["output"], other["output"])
            for one, other in zip(wanted.outputs, result.outputs, strict=True)
        )
        assert same_bits(wanted.state["kept"], result.state["kept"])


def test_a_fake_capture_has_the_same_launches() -> None:
    """Nothing runs; names, grids and accesses are the same."""
    found = record_step(STEP, "fake")

    assert [trace().kernel_of(i).name for i in range(6)] == [found.kernel_of(i).name for i in range(6)]
    assert trace().launches[3].accesses == found.launches[3].accesses
    assert trace().launches[4].grid == found.launches[4].grid


def test_capturing_a_call_leaves_its_arguments_as_they_were() -> None:
    """What an own kernel changes is put back after the call was learned from."""
    axpy, x, y = tessera.CudaKernel(AXPY, "axpy"), torch.ones(8), torch.zeros(8)

    def call(y: torch.Tensor) -> torch.Tensor:
        axpy[1, 32](y, x, 2.0, 8)
        return y * 2

    found = tessera.capture(call, y)

    assert torch.equal(torch.zeros(8), y)
    assert ["y"] == [b.name for b in found.buffers if b.kind == "state"]


@torch.library.custom_op("tessera_test::gated", mutates_args=())
def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An operator that reads a value and launches a Triton kernel."""
    out = torch.empty_like(x)
    if x.sum().item() != 0.0:
        gate[(4,)](x, y, out, x.numel(), BLOCK=32)
    return out


def test_kernels_of_an_operator_are_the_operators() -> None:
    """What it launches and reads is part of its one launch."""
    found = tessera.capture(lambda x, y: gated(x, y) + 1, torch.ones(100), torch.ones(100))

    assert ["tessera_test.gated.default", "aten.add.Tensor"] == [k.name for k in found.kernels]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the autotuner decides")
def test_without_a_gpu_the_first_configuration_is_taken() -> None:
    """Nothing can be timed, so an autotuned kernel is launched once, as its author lists it first."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        double[lambda meta: (-(-x.numel() // meta["BLOCK"]),)](x, y, x.numel())
        return y + 1

    found = tessera.capture(call, torch.ones(100))

    assert ["double"] == [k.name for k in found.kernels if k.origin is Origin.TRITON]
    assert (2, 1, 1) == found.launches[1].grid


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_source_is_compiled() -> None:
    """CUDA C++ gives the same numbers as PTX."""
    x, y = torch.randn(100), torch.randn(100)
    wanted = torch.addcmul(y, x, torch.tensor(2.0))
    tessera.CudaKernel(SOURCE, "axpy")[4, 32](y, x, 2, 100)

    assert torch.allclose(wanted, y)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_wrong_source_is_refused_with_the_compilers_words() -> None:
    """The first error."""
    with pytest.raises(CaptureError, match=r"could not be compiled: .*error"):
        tessera.CudaKernel('extern "C" __global__ void k() { wrong; }', "k")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda k, x: k(x, x, 1.0, 8), r"needs a grid and a block"),
        (lambda k, x: k[1, 32](x, x, 1.0), r"has 4 parameters, 3 arguments"),
        (lambda k, x: k[1, 32](x, x, x, 8), r"argument 2 of kernel axpy is a tensor"),
        (lambda k, x: k[0, 32](x, x, 1.0, 8), r"grid and block must be 1 to 3 sizes"),
        (lambda k, x: k[1, 32](x, "x", 1.0, 8), r"is a str"),
    ],
)
def test_a_wrong_launch_is_refused(call: object, said: str) -> None:
    """With what is wrong."""
    assert callable(call)
    with pytest.raises(CaptureError, match=said):
        call(tessera.CudaKernel(AXPY, "axpy"), torch.zeros(8))


def test_a_missing_entry_is_named() -> None:
    """With the entries there are."""
    with pytest.raises(CaptureError, match=r"no entry 'other'; it has: axpy"):
        tessera.CudaKernel(AXPY, "other")


def test_a_kernel_without_a_proof_stays_where_it_is() -> None:
    """A pointer from memory: its launch names the reason, and may touch all it is given."""
    code = AXPY.replace(
        "ld.global.f32 %f2, [%rd4];", "ld.global.u64 %rd4, [%rd4];\n ld.global.f32 %f2, [%rd4];"
    )
    kernel, y = tessera.CudaKernel(code, "axpy"), torch.zeros(8)

    def call(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kernel[1, 1](y, x, 2.0, 0)
        return y + 1

    found = tessera.capture(call, y, torch.ones(8))

    assert "pointers loaded from parameter 1" in found.launches[0].immovable
    assert [(32, True, True)] * 2 == [
        (a.region.num_bytes, a.read, a.write) for a in found.launches[0].accesses
    ]


def test_a_weight_that_an_unproved_kernel_writes_is_noticed_by_its_bits() -> None:
    """NaN equals itself, and memory around a view counts."""
    whole = torch.full((8,), torch.nan)
    check = unchanged("scale", [whole[:4]])
    assert check is not None

    check()
    whole[6] = 1
    with pytest.raises(CaptureError, match="kernel scale writes a weight"):
        check()
