"""record: Workload -> Trace, and record_step: Step -> Trace on any device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessera.capture import fake
from tessera.capture.models import build
from tessera.capture.own import own_launches
from tessera.capture.recorder import Recorder, call_operator
from tessera.capture.rng import entered, seeded_state, without_generators
from tessera.capture.scopes import Scopes
from tessera.capture.shapes import Run
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError, UnknownName
from tessera.ir import GENERATOR, BufferKind, Step, Trace, verify

# Attention kernels that every GPU of an unlike set can run; see `attention`.
PORTABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def record(workload: Workload) -> Trace:
    """Runs the step once on real tensors and returns what was launched, verified."""
    inputs = workload.make_inputs(0)
    devices = {str(t.device) for t in inputs.values()} or {"cpu"}
    return _record(workload, inputs, workload.make_state(0), max(devices))


def record_step(step: Step, device: str = "cpu") -> Trace:
    """Builds the step's model on a device (cpu, fake or cuda:N) and records one call."""
    check_device(device)
    if device == "cpu":
        return record(build(step))
    with _machine(device) as run:
        with torch.device("cuda" if device == "fake" else device):
            workload = build(step)
        inputs, state = workload.make_inputs(0), workload.make_state(0)
        if device == "fake":
            return _record(workload, fake.on_device(inputs), fake.on_device(state), device, run)
        workload.module.to(device)
        return _record(workload, _moved(inputs, device), _moved(state, device), device)


def check_device(device: str) -> None:
    """Raises unless a step can be recorded there on this machine."""
    kind, _, index = device.partition(":")
    if device in ("cpu", "fake"):
        return
    if kind != "cuda" or not (index.isdecimal() or device == "cuda"):
        raise UnknownName("capture device", device, ["cpu", "fake", "cuda:N"])
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= found:
        have = f"only {found} CUDA devices" if found else "no CUDA device"
        remedy = "Use --device fake to record the same launches without a GPU."
        raise CaptureError(f"{device} is not there: this machine has {have}", remedy, "--device")


@contextmanager
def _machine(device: str) -> Iterator[Run]:
    """The machine to record on; yields how to run an operator there."""
    if device == "fake":
        with fake.machine() as run:
            yield run
    else:
        with sdpa_kernel(PORTABLE):
            yield call_operator


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic collector, which would walk all that was recorded again and again for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _moved(tensors: Tensors, device: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _generators(state: Tensors, device: str) -> dict[str, torch.Tensor]:
    """What the generators of a device start with: copies of what the state holds, else as for request 0."""
    if device == "fake":
        return {}
    names = [f"{GENERATOR}cpu", *([f"{GENERATOR}{device}"] if device.startswith("cuda:") else [])]
    return {n: state[n].clone() if n in state else seeded_state(n, 0) for n in names}


def _record(
    workload: Workload, inputs: Tensors, state: Tensors, device: str, run: Run = call_operator
) -> Trace:
    with Scopes(workload.module) as scopes, entered(_generators(state, device)):
        recorder = Recorder(scopes, run, device)
        recorder.name_buffers(BufferKind.WEIGHT, workload.weights())
        recorder.name_buffers(BufferKind.INPUT, inputs)
        recorder.name_buffers(BufferKind.STATE, state)
        with torch.no_grad(), _uncollected(), own_launches(recorder.own_launch), recorder:
            outputs = workload.call(inputs, without_generators(state))
        trace = recorder.trace(workload.step, outputs)
    verify(trace)
    return trace
