"""Stepper: the one seam between who decides what runs next (`scheduler`) and what runs it.

    WorkerStepper     one worker process per device (`worker_stepper`)
    VirtualStepper    nothing is computed; a virtual clock and modelled costs (`simulate.stepper`)
    ReferenceStepper  one device, in program order: the definition of correct (`reference`)

A stepper has plans loaded. A microbatch is opened on one lane of one of them, with state of its own, and runs
one step at a time: `start` begins it, `take` tells its end. Microbatches run beside one another, which is
what hides transfers; where `can_queue` says so, the next step of one can be started behind the one that runs,
which hides this process. Which lane a microbatch gets is the scheduler's choice, out of `lanes`.

A device that is lost takes the microbatches of its lanes with it; they are closed when `take` tells. The
stepper brings the device back by itself, in the background, and tells that too.

Importing this imports no torch: tensors pass through without being looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tessera.execute.lanes import Lanes
from tessera.ir import Plan

Tensors = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepCall:
    """One step of one microbatch, to be run."""

    microbatch: int
    # Number of the step among those of all the plan's variants; see `Plan.graphs`.
    step: int
    inputs: Tensors = field(default_factory=dict)
    # Outputs that nobody asks for; they may be left out.
    skips: tuple[str, ...] = ()
    # True to hand out the microbatch's state when the step has ended.
    wants_state: bool = False
    # Where nothing is computed: how many times its modelled time the step takes.
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepDone:
    microbatch: int
    step: int
    outputs: Tensors
    seconds: float
    # As flat bytes by name; empty unless asked for.
    state: Tensors = field(default_factory=dict)
    # Device -> seconds of its launches in this step.
    busy_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device was lost: these microbatches are closed and their state is gone."""

    device: str
    microbatches: tuple[int, ...]
    # One line: what happened, where it was, what to do.
    message: str
    # How often in a row it was lost, this time included.
    failures: int = 1
    # Seconds until it is tried again; None: it is not.
    retry_s: float | None = 0.0
    # False if it was blamed for a time-out without proof: a retry for that is not counted.
    is_certain: bool = True

    @property
    def said(self) -> str:
        place = f"device {self.device}: "
        return place + self.message.removeprefix(place)


@dataclass(frozen=True, slots=True)
class DeviceBack:
    """A device that was lost can be used again; its lanes are open."""

    device: str


Event = StepDone | DeviceLost | DeviceBack
DeviceState = Literal["starting", "ready", "lost"]


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """How the worker of one device is."""

    state: DeviceState
    # Of its process; None where there is none of its own, or it is on another machine and did not say.
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What devices and links did since the start, and how devices are."""

    # Seconds of launches.
    busy_s: Mapping[str, float]
    # (source, destination) -> bytes
    moved: Mapping[tuple[str, str], int]
    devices: Mapping[str, DeviceStatus] = field(default_factory=dict)


class Stepper(Protocol):
    """Used by one thread, but for `wake`; in a `with` statement, which starts and ends what it needs."""

    # The plans that are loaded; a policy is a plan's number among them.
    plans: tuple[Plan, ...]
    lanes: Lanes

    def load(self, plans: Sequence[Plan]) -> None:
        """Takes up plans of the same steps and devices in place of those it has.

        Nothing is drained: microbatches that are open go on along the lanes they have.
        """

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """Opens a microbatch on a lane that was taken from `lanes`; without state, its state is zeros."""

    def close(self, microbatch: int) -> None:
        """Ends a microbatch that runs nothing. Its lane is the caller's to give back."""

    def can_queue(self, microbatch: int) -> bool:
        """True if a step of it can be started while another one runs: it begins when that has ended."""

    def start(self, call: StepCall) -> None:
        """Begins a step of an open microbatch that runs nothing, or queues it."""

    def take(self, timeout_s: float | None) -> Event | None:
        """The next thing that happened; None after the timeout or a wake."""

    def wake(self) -> None:
        """Makes `take` return; from any thread."""

    def use(self) -> DeviceUse:
        """For metrics."""

    def now_s(self) -> float:
        """The stepper's clock: that of this machine, or a virtual one."""
