"""The inductor front end: launches of compiled code."""

from tessera.capture.inductor.record import (
    Recording,
    note,
    on_device,
    record_code,
    record_inductor,
    record_inductor_offline,
)
from tessera.capture.offline import FakeGpu
from tessera.capture.triton_kernels import (
    Relaunch,
    TritonLaunch,
    inductor_launches,
)

__all__ = [
    "FakeGpu",
    "Recording",
    "Relaunch",
    "TritonLaunch",
    "inductor_launches",
    "note",
    "on_device",
    "record_code",
    "record_inductor",
    "record_inductor_offline",
]
