"""Compiled steps captured in processes of their own: the traces of this process; what is refused."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packed_factory import write_folder
from tessera.capture import build
from tessera.capture.inductor import record_inductor_offline
from tessera.capture.models import another
from tessera.capture.offline import PROPERTIES
from tessera.errors import CaptureError
from tessera.ir import BufferKind
from tessera.kernels.choice import LATE_INPUTS
from tessera.serve.compiling import CompileProcess
from tessera.serve.records import ServeSpec
from tessera.serve.steps import smallest_step

SMALLEST = smallest_step("tiny-llama", ServeSpec())
STEPS = [replace(SMALLEST, batch=2, context=n, rows=2, reserve=256, length=16) for n in (2, 8)]


@pytest.fixture
def process() -> Iterator[CompileProcess]:
    with closing(CompileProcess(SMALLEST, PROPERTIES)) as process:
        yield process


def test_traces_are_those_of_one_process(process: CompileProcess) -> None:
    """In the order of the steps, with a line before each that says what is left."""
    with torch.device("meta"):
        model = build(SMALLEST)
    said: list[str] = []
    process.begin(STEPS)
    traces = process.traces(STEPS, model.weights(), said.append)

    assert record_inductor_offline(another(model, STEPS[1])) == traces[1]
    assert [2, 8] == [trace.step.context for trace in traces]
    assert "capturing 2 steps, left: 2, 8 tokens" == said[0]
    assert 2 == len(said)
    for (
        trace
    ) in traces:  # late inputs are read by nothing else, so that all before it is launched without them
        late = {b for b in trace.buffers_of(BufferKind.INPUT) if trace.buffers[b].name in LATE_INPUTS}
        read = [{access.buffer for access in launch.accesses} for launch in trace.launches]
        names = {trace.kernel_of(n).name for n, buffers in enumerate(read) if late & buffers}
        assert {"tessera.choose.default"} == names


@pytest.mark.parametrize(("method", "family"), [("gptq-ordered", "llama"), ("mxfp4", "gpt_oss")])
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


def test_weights_of_another_layout_are_refused(process: CompileProcess) -> None:
    process.begin([])
    with pytest.raises(CaptureError, match="laid out differently"):
        process.traces([], {"w": torch.ones(2)}, lambda what: None)
