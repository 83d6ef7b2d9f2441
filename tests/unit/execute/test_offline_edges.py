"""Runs at the edges: empty tensors, results that no launch made, and errors inside a worker."""

import gc
import os
import signal
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch

from clocked_stepper import ClockedStepper, plan_of
from factories import make_plan
from tessera.capture import Workload, record
from tessera.errors import WorkerError
from tessera.execute import offline
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Step, Trace
from tessera.kernels.tensors import same_bits

Call = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


class Once:
    """A request of one run."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def state(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def inputs(self, step: int, run: int, last: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The one input."""
        return {"x": self._x}


def capture(call: Call, module: torch.nn.Module | None = None) -> tuple[Workload, Trace]:
    """A step of one input."""
    workload = Workload(
        Step("made", "decode", 1, 1),
        module or torch.nn.Module(),
        lambda inputs, state: call(inputs),
        lambda seed: {"x": torch.arange(8.0)},
        lambda seed: {},
        lambda first, run, last: dict(first),
    )
    return workload, record(workload)


def run_alternating(call: Call, module: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Every other launch on another worker."""
    workload, trace = capture(call, module)
    plan = make_plan([trace], [[[i % 2 for i in range(len(trace.launches))]]])
    with WorkerStepper([plan], workload.weights()) as stepper:
        return run_offline(stepper, [Once(torch.arange(8.0))]).results[0].outputs[0]


def test_an_empty_tensor_may_be_read_on_another_device() -> None:
    """A tensor without bytes needs no transfer, and is there all the same."""

    def call(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nothing = inputs["x"][:0] * 2
        return {"y": torch.cat([nothing, inputs["x"] + 1]) * 2}

    assert same_bits(run_alternating(call)["y"], (torch.arange(8.0) + 1) * 2)


def test_a_weight_may_be_returned_as_it_is() -> None:
    """An output that no launch made is handed over by the first device."""
    module = torch.nn.Linear(8, 8, bias=False)

    def call(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"] + 1, "w": module.weight, "x": inputs["x"]}

    found = run_alternating(call, module)

    assert same_bits(found["w"], module.weight.detach())
    assert same_bits(found["x"], torch.arange(8.0))


def test_an_error_in_a_worker_names_device_and_cause() -> None:
    """A launch that fails on other inputs ends the run with one message."""
    workload, trace = capture(lambda inputs: {"y": inputs["x"][inputs["x"].long()]})
    plan = make_plan([trace], [[[0] * len(trace.launches)]])
    with (
        WorkerStepper([plan], workload.weights(), max_failures=2) as stepper,
        pytest.raises(WorkerError, match=r"device d0: .*out of (bounds|range)"),
    ):
        run_offline(stepper, [Once(torch.full((8,), 99.0))]).raise_failures()


def test_a_request_that_raises_leaves_the_workers_usable() -> None:
    """What runs is waited for; the next list finds every microbatch free."""
    workload, trace = capture(lambda inputs: {"y": inputs["x"] + 1})
    plan = make_plan([trace], [[[0] * len(trace.launches)]])

    class Broken(Once):
        def inputs(self, step: int, run: int, last: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            raise ValueError("no inputs")

    good = Once(torch.arange(8.0))
    with WorkerStepper([plan], workload.weights()) as stepper:
        with pytest.raises(ValueError, match="no inputs"):
            run_offline(stepper, [good, Broken(torch.arange(8.0)), good])
        results = run_offline(stepper, [good] * 3).results

    assert all(same_bits(result.outputs[0]["y"], torch.arange(8.0) + 1) for result in results)


def test_a_wait_for_a_frozen_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of time the run waits on, and ends when the worker goes on."""
    monkeypatch.setattr(offline, "QUIET_S", 0.2)
    workload, trace = capture(lambda inputs: {"y": inputs["x"] + 1})
    plan = make_plan([trace], [[[0] * len(trace.launches)]])
    late: list[set[int]] = []
    with WorkerStepper([plan], workload.weights()) as stepper:
        pid = stepper.use().devices["d0"].pid
        assert pid is not None

        def thaw() -> None:
            late.append({device for running in stepper.running.values() for device in running.missing})
            os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP)
        run = run_offline(stepper, [Once(torch.arange(8.0))], on_wait=thaw)

    assert {0} == late[0]
    assert same_bits(run.results[0].outputs[0]["y"], torch.arange(8.0) + 1)


def test_a_request_is_free_when_its_run_has_ended() -> None:
    """Nothing that ran it holds its tensors until garbage is collected."""
    stepper, asked = ClockedStepper([plan_of([0])]), Once(torch.arange(8.0))
    held = weakref.ref(asked)
    gc.collect()
    gc.disable()
    try:
        run_offline(stepper, [asked])
        del asked
        assert held() is None
    finally:
        gc.enable()
