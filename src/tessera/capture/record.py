"""record: Workload -> Trace."""

import torch

from tessera.capture.recorder import Recorder
from tessera.capture.scopes import Scopes
from tessera.capture.workload import Workload
from tessera.ir import BufferKind, Trace, verify


def record(workload: Workload) -> Trace:
    """Runs the step once on real tensors and returns what was launched, verified."""
    inputs, state = workload.make_inputs(0), workload.make_state(0)
    with Scopes(workload.module) as scopes:
        recorder = Recorder(scopes)
        recorder.name_buffers(BufferKind.WEIGHT, workload.weights())
        recorder.name_buffers(BufferKind.INPUT, inputs)
        recorder.name_buffers(BufferKind.STATE, state)
        with torch.no_grad(), recorder:
            outputs = workload.call(inputs, state)
    trace = recorder.trace(workload.step, outputs)
    verify(trace)
    return trace
