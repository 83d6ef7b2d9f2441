"""Compiled steps captured in processes of their own: the traces of this process; what is refused."""

from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.coverage_models import MODELS

from packed_factory import write_folder
from sampling import some_of
from tessera.capture import build
from tessera.capture.inductor import record_inductor_offline
from tessera.capture.models import another
from tessera.capture.offline import PROPERTIES
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Step
from tessera.kernels.choice import LATE_INPUTS
from tessera.serve import compiling
from tessera.serve.compiling import CompileProcess
from tessera.serve.records import ServeSpec
from tessera.serve.steps import smallest_step


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Of a Llama with two layers, which is a folder: both processes read it."""
    folder = tmp_path_factory.mktemp("llama")
    next(model for model in MODELS if model.name == "llama").write(folder)
    return smallest_step(str(folder), ServeSpec(random_weights=True))


def test_traces_are_those_of_one_process(smallest: Step) -> None:
    """In the order of the steps, with a line before each that says what is left."""
    steps = [replace(smallest, batch=2, context=n, rows=2, reserve=256, length=16) for n in (2, 8)]
    with closing(CompileProcess(smallest, PROPERTIES)) as process:
        process.begin(steps)
        with torch.device("meta"):
            model = build(smallest)
        said: list[str] = []
        traces = process.traces(steps, model.weights(), said.append)

    assert record_inductor_offline(another(model, steps[1])) == traces[1]
    assert [2, 8] == [trace.step.context for trace in traces]
    assert "capturing 2 steps, left: 2, 8 tokens" == said[0]
    assert 2 == len(said)
    # Late inputs are read by nothing else, so that all before it is launched without them.
    for trace in traces:
        late = {b for b in trace.buffers_of(BufferKind.INPUT) if trace.buffers[b].name in LATE_INPUTS}
        read = [{access.buffer for access in launch.accesses} for launch in trace.launches]
        names = {trace.kernel_of(n).name for n, buffers in enumerate(read) if late & buffers}
        assert {"tessera.choose.default"} == names


@pytest.mark.parametrize(
    ("method", "family"),
    some_of([("gptq-ordered", "llama"), ("mxfp4", "gpt_oss")], [("gptq-ordered", "llama")]),
)
def test_packed_folders_are_captured_as_plain_ones(method: str, family: str, tmp_path: Path) -> None:
    """From their headers, beside the build; the trace is that of the loaded model."""
    write_folder(tmp_path, method, family)
    smallest = smallest_step(str(tmp_path), ServeSpec())
    step = replace(smallest, batch=2, context=2, rows=2, reserve=256, length=16)
    with closing(CompileProcess(smallest, PROPERTIES)) as process:
        process.begin([step])
        loaded = build(smallest)
        (trace,) = process.traces([step], loaded.weights(), lambda what: None)

    assert record_inductor_offline(another(loaded, step)) == trace


def test_weights_of_another_layout_are_refused(smallest: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the process says of its own."""
    here, there = Pipe()
    monkeypatch.setattr(compiling, "warm_up", lambda: None)
    child = SimpleNamespace(pipe=here, end=lambda timeout_s: "")
    monkeypatch.setattr(compiling, "LocalProcess", lambda *given: child)
    there.send(compiling.layouts({"w": torch.ones(3)}))
    with closing(CompileProcess(smallest, PROPERTIES)) as process:
        process.begin([])
        with pytest.raises(CaptureError, match="laid out differently"):
            process.traces([], {"w": torch.ones(2)}, lambda what: None)
