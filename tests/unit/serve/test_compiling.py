"""Compiled steps captured in processes of their own: the traces of this process; what is refused."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.coverage_models import MODELS

from packed_factory import write_folder
from sampling import some_of
from tessera.capture.inductor import record_inductor_offline
from tessera.capture.models import another
from tessera.capture.offline import PROPERTIES
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Step, Trace
from tessera.kernels.choice import LATE_INPUTS
from tessera.serve import compiling
from tessera.serve.compiling import CompileProcess
from tessera.serve.records import ServeSpec
from tessera.serve.steps import ServedModel, served

SPEC = ServeSpec(microbatches=1, rows=2, capacity=64, max_batch_tokens=8)
Make = Callable[[], ServedModel]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder of a Llama with one layer: both processes read it."""
    folder = tmp_path_factory.mktemp("llama")
    llama = next(model for model in MODELS if model.name == "llama")
    replace(llama, sizes={**llama.sizes, "num_hidden_layers": 1}).write(folder)
    return partial(served, str(folder), replace(SPEC, random_weights=True))


def steps_of(make: Make) -> tuple[ServedModel, list[Step]]:
    with torch.device("meta"):
        model = make()
    return model, [workload.step for workload in model.workloads]


def without_files(trace: Trace) -> Trace:
    """Triton's cache has code that another environment compiled, whose debug information names its files."""
    kernels = (replace(kernel, ptx=re.sub(r"\.file\s.*", "", kernel.ptx)) for kernel in trace.kernels)
    return replace(trace, kernels=tuple(kernels))


def test_a_trace_is_that_of_one_process(make: Make) -> None:
    """Compiled elsewhere from the same folder."""
    with closing(CompileProcess(make, PROPERTIES, is_early=False)) as process:
        model, steps = steps_of(make)
        process.begin(steps[-1:])
        (trace,) = process.traces(steps[-1:], model.weights(), lambda what: None)

    assert without_files(record_inductor_offline(model.workloads[-1])) == without_files(trace)
    # Late inputs are read by nothing else, so that all before it is launched without them.
    late = {b for b in trace.buffers_of(BufferKind.INPUT) if trace.buffers[b].name in LATE_INPUTS}
    read = [{access.buffer for access in launch.accesses} for launch in trace.launches]
    names = {trace.kernel_of(n).name for n, buffers in enumerate(read) if late & buffers}
    assert {"tessera.choose.default"} == names


def test_traces_come_in_the_order_of_the_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From processes that are forked, with a line before each that says what is left."""
    here, there = Pipe()
    monkeypatch.setattr(compiling, "warm_up", lambda: None)
    child = SimpleNamespace(pipe=here, end=lambda timeout_s: "")
    monkeypatch.setattr(compiling, "LocalProcess", lambda *given: child)
    steps, said = steps_of(make)[1], list[str]()
    there.send(compiling.layouts({}))
    children = compiling._fork([*steps, *steps], lambda step: (os.getpid(), step))  # type: ignore[arg-type,return-value]
    compiling._pass_on(children, there)
    with closing(CompileProcess(make, PROPERTIES)) as process:
        found: list[Any] = list(process.traces([*steps, *steps], {}, said.append))
    compiling._end(children)

    assert [2, 8] == [step.context for step in steps]
    assert [*steps, *steps] == [step for _, step in found]
    assert os.getpid() not in {pid for pid, _ in found}
    assert min(4, len(os.sched_getaffinity(0))) == len({pid for pid, _ in found})
    assert "capturing 4 steps, left: 2, 8, 2, 8 tokens" == said[0]
    assert 4 == len(said)


def test_capture_ends_when_nobody_waits_for_it(make: Make) -> None:
    """Its processes end with it."""
    here, there = Pipe()

    def record(step: Step) -> Trace:
        here.close()  # a fork of this process has it too
        time.sleep(60.0)
        raise AssertionError

    children = compiling._fork(steps_of(make)[1], record)
    here.close()
    begun = time.monotonic()
    compiling._pass_on(children, there)
    compiling._end(children)
    assert time.monotonic() - begun < 30.0


@pytest.mark.parametrize(
    ("method", "family"),
    some_of([("gptq-ordered", "llama"), ("mxfp4", "gpt_oss")], [("gptq-ordered", "llama")]),
)
def test_packed_folders_are_captured_as_plain_ones(
    method: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their headers; layouts and trace are those of the loaded model, also of other steps."""
    write_folder(tmp_path, method, family, layers=1)
    make = partial(served, str(tmp_path), SPEC)
    loaded = make().workloads[0]
    step = replace(loaded.step, reserve=512)
    traces = list[Trace]()
    here, there = Pipe()

    def fork(steps: Sequence[Step], record: Callable[[Step], Trace]) -> dict[object, int]:
        traces.extend(map(record, steps))
        return {}

    monkeypatch.setattr(compiling, "_fork", fork)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here.send([step])
    compiling.work(there, make, PROPERTIES, False)

    assert compiling.layouts(loaded.weights()) == here.recv()
    assert [record_inductor_offline(another(loaded, step))] == traces


def test_steps_are_captured_before_they_are_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the model as it will be built begin at once; others replace them."""
    begun = list[list[Step]]()
    here, there = Pipe()
    _, wanted = steps_of(make)

    def fork(steps: Sequence[Step], record: object) -> dict[object, int]:
        begun.append(list(steps))
        return {}

    monkeypatch.setattr(compiling, "_fork", fork)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here.send(wanted[:1])
    compiling.work(there, make, PROPERTIES, True)

    assert [wanted, wanted[:1]] == begun


def test_weights_of_another_layout_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the process says of its own."""
    here, there = Pipe()
    monkeypatch.setattr(compiling, "warm_up", lambda: None)
    child = SimpleNamespace(pipe=here, end=lambda timeout_s: "")
    monkeypatch.setattr(compiling, "LocalProcess", lambda *given: child)
    there.send(compiling.layouts({"w": torch.ones(3)}))
    with closing(CompileProcess(make, PROPERTIES)) as process:
        process.begin([])
        with pytest.raises(CaptureError, match="laid out differently"):
            process.traces([], {"w": torch.ones(2)}, lambda what: None)
