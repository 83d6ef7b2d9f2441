"""Compiled steps captured in processes of their own: the traces of this process; what is refused."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

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


def test_weights_of_another_layout_are_refused(process: CompileProcess) -> None:
    process.begin([])
    with pytest.raises(CaptureError, match="laid out differently"):
        process.traces([], {"w": torch.ones(2)}, lambda what: None)
