"""Records a workload (`record`) or a step on any device (`record_step`) as a Trace.

A step is recorded twice, with different values and the Python state of the first call. Both must be equal: a
number that differs was read unseen or is kept in Python (see `reads`, `holders`). If the first call only sets
up, the second and third must agree. Built-in models on fake tensors are recorded once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessera.capture import fake
from tessera.capture.fake import uncollected
from tessera.capture.function import workload as workload_of
from tessera.capture.holders import PROCESS_VALUES, Before, PyState, refuse_change
from tessera.capture.models import another, build, known_models
from tessera.capture.operators import fail
from tessera.capture.reads import calls_refused, recording
from tessera.capture.recorder import Recorder
from tessera.capture.rng import entered, seeded_state, without_generators
from tessera.capture.workload import UNFIT, Tensors, Workload, on_device
from tessera.errors import CaptureError, UnknownName
from tessera.ir import GENERATOR, Arg, BufferKind, Launch, Step, Trace, View, verify

# Attention kernels for all GPUs of a mixed set.
PORTABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# A trace, and the program line of each launch.
Recorded = tuple[Trace, list[str]]
VARYING = frozenset({BufferKind.INPUT, BufferKind.STATE})


def record(workload: Workload, varying: frozenset[BufferKind] = VARYING) -> Trace:
    """`varying`: kinds of buffer not to be read on the host."""
    devices = {str(t.device) for t in workload.make_inputs(0).values()} or {"cpu"}
    return Recordings(workload, max(devices), varying).agreed()


def record_step(step: Step, device: str = "cpu", is_compared: bool = False) -> Trace:
    """`is_compared`: the caller compares recordings, so one call on fake tensors is enough."""
    check_device(device)
    if device == "cpu":
        return record(build(step))
    with _machine(device):
        with torch.device("cuda" if device == "fake" else device):
            workload = build(step)
        if device == "fake":
            return _record_fake(workload, is_compared)
        return Recordings(on_device(workload, device), device).agreed()


def record_sizes(steps: Sequence[Step], advance: Callable[[int], None] = lambda num: None) -> list[Trace]:
    """`advance` gets the number of recorded steps."""
    traces: list[Trace] = []
    with _machine("fake"):
        with torch.device("cuda"):
            first = build(steps[0])
        for step in steps:
            advance(len(traces))
            traces.append(_record_fake(another(first, step), is_compared=bool(traces)))
    return traces


def _record_fake(workload: Workload, is_compared: bool) -> Trace:
    recordings = Recordings(workload, "fake")
    is_once = is_compared or workload.step.model in known_models()
    return recordings.once(0)[0] if is_once else recordings.agreed()


@dataclass(frozen=True)
class Recordings:
    """Values differ by seed."""

    workload: Workload
    device: str = "cpu"
    varying: frozenset[BufferKind] = VARYING

    def agreed(self) -> Trace:
        """Refuses a step that changes between calls."""
        with recording:
            before, _ = self.once(0)
            state = PyState(*self.workload.roots)
            state.refuse_shared(self.workload.changing())
            for seed in (1, 2):  # the first call may fill caches
                kept = Before([*state.values, *PROCESS_VALUES])
                after, places = self.once(seed)
                changed = kept.changed()
                if changed is None and before == after:
                    return before
                earlier, before = before, after
            if changed is not None:
                refuse_change(changed, lambda: self.once(3))
            launch, what = _first_difference(earlier, after)
            message = f"{what}: it depends on values read on the host, or on what the program keeps in Python"
            remedy = "Compute it with torch's operators, or pass it as an argument."
            fail(message, remedy, places[min(launch, len(places) - 1)] if places else "")

    def once(self, seed: int) -> Recorded:
        """A GPU starts with mild values: an index out of range ends the process."""
        if self.device == "fake":
            inputs, state = map(fake.on_device, self.workload.request(0))
            return self.record(inputs, state, seed)
        for is_mild in ((False, True) if self.device == "cpu" else (True,)) if seed else ():
            with suppress(*UNFIT):
                return self.record(*self.workload.request(seed, is_mild), seed)
        return self.record(*self.workload.request(0))

    def record(self, inputs: Tensors, state: Tensors, seed: int = 0) -> Recorded:
        workload = self.workload
        with recording, entered(_generators(state, self.device, seed)):
            recorder = Recorder(workload.module, self.device, self.varying)
            recorder.examples = {t.untyped_storage()._cdata for t in workload.changing().values()}
            recorder.name_buffers(BufferKind.WEIGHT, workload.weights())
            recorder.name_buffers(BufferKind.INPUT, inputs)
            recorder.name_buffers(BufferKind.STATE, state)
            with (
                torch.no_grad(),
                uncollected(),
                recorder,
                calls_refused() if seed else nullcontext(),  # slow, so only on the second look
            ):
                outputs = workload.call(inputs, without_generators(state))
            trace = recorder.trace(workload.step, outputs)
        verify(trace)
        return trace, recorder.places


def check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if device in ("cpu", "fake"):
        return
    if kind != "cuda" or not (index.isdecimal() or device == "cuda"):
        raise UnknownName("capture device", device, ["cpu", "fake", "cuda:N"])
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= num_devices:
        have = f"only {num_devices} CUDA devices" if num_devices else "no CUDA device"
        remedy = "Use --device fake to record the same launches without a GPU."
        raise CaptureError(f"{device} is not there: this machine has {have}", remedy, "--device")


def _machine(device: str) -> AbstractContextManager[None]:
    return fake.machine() if device == "fake" else sdpa_kernel(PORTABLE)


def _generators(state: Tensors, device: str, seed: int) -> dict[str, torch.Tensor]:
    if device == "fake":
        return {}
    names = [f"{GENERATOR}cpu"]
    if device.startswith("cuda:"):
        names.append(f"{GENERATOR}{device}")
    return {n: state[n].clone() if n in state else seeded_state(n, seed) for n in names}


def _first_difference(one: Trace, other: Trace) -> tuple[int, str]:
    for number, (a, b) in enumerate(zip(one.launches, other.launches, strict=False)):
        names = one.kernel_of(number).name, other.kernel_of(number).name
        if names[0] != names[1]:
            return number, f"one call runs {names[0]} where another runs {names[1]}"
        pairs = zip(_values(one, a), _values(other, b), strict=False)
        differs = next(((x, y) for x, y in pairs if repr(x) != repr(y)), None)
        if differs is not None:
            return number, f"{names[0]} is given {differs[0]} in one call and {differs[1]} in another"
        if replace(a, kernel=0) != replace(b, kernel=0):
            return number, f"{names[0]} has a result of another shape in another call"
    counts = len(one.launches), len(other.launches)
    if counts[0] != counts[1]:
        return min(counts), f"one call runs {counts[0]} launches and another {counts[1]}"
    return max(counts), "one call returns other tensors than another"


def _values(trace: Trace, launch: Launch) -> list[object]:
    def plain(arg: Arg) -> object:
        if isinstance(arg, View):
            constant = trace.buffers[arg.buffer].constant_hex
            return f"a tensor of bytes {constant[:32]}" if constant else f"a tensor of shape {arg.shape}"
        return [plain(item) for item in arg] if isinstance(arg, tuple) else arg

    return [plain(arg) for arg in (*launch.args, *(value for _, value in launch.kwargs))]


def capture(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Capture what `fn(*args, **kwargs)` launches. Arguments and modules are left unchanged."""
    return record(workload_of(fn, *args, **kwargs))
