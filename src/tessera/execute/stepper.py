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

What workers report of launches and transfers can be kept as a timeline by the stepper's clock (`SpanLog`): a
stepper over workers has an attribute `spans`; with a log there, every order asks for spans and every answer
is added. Who drives the stepper says which request a microbatch is.

Importing this imports no torch: tensors pass through without being looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tessera.execute.lanes import Lanes
from tessera.ir import Clock, Plan, Program, Span, Timeline

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


if TYPE_CHECKING:
    from tessera.execute.messages import Done


class SpanLog:
    """The spans of one list of requests."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._spans: dict[int, list[Span]] = {}
        # Microbatch -> the request that it is.
        self._requests: dict[int, int] = {}
        # Device -> CPU time of its launches.
        self.cpu_us = dict.fromkeys(plan.cluster.names, 0.0)
        self._origin_s = 0.0

    def begin(self, origin_s: float) -> None:
        """Forgets what there was; time starts now."""
        self._spans, self._requests, self._origin_s = {}, {}, origin_s
        self.cpu_us = dict.fromkeys(self._plan.cluster.names, 0.0)

    def open(self, microbatch: int, request: int) -> None:
        """What a microbatch does from now on it does for this request."""
        self._requests[microbatch] = request

    def forget(self, request: int) -> None:
        self._spans.pop(request, None)

    def add(
        self, device: int, done: "Done", program: Program, microbatch: int, offset_s: Callable[[int], float]
    ) -> None:
        """Takes in what one worker did for one run; `offset_s`: from a device's clock to the stepper's."""
        request = self._requests.get(microbatch)
        if request is None:
            return
        names = self._plan.cluster.names
        trace = self._plan.graphs[program.step].trace
        spans = self._spans.setdefault(request, [])
        here_s = offset_s(device) - self._origin_s
        for launch, start, stop, cpu_s in done.spans:
            label = trace.kernel_of(launch).name
            begin, end = (start + here_s) * 1e6, (stop + here_s) * 1e6
            spans.append(Span(names[device], label, request, microbatch, begin, end))
            self.cpu_us[names[device]] += cpu_s * 1e6
        for number, start, stop in done.transfers:
            transfer = program.transfers[number]
            begin = (start + offset_s(transfer.src) - self._origin_s) * 1e6
            track, label = f"{names[transfer.src]} -> {names[transfer.dst]}", f"{transfer.num_bytes} bytes"
            # Clocks of two machines agree to a message's time only; a span must not end before it starts.
            end = max(begin, (stop + here_s) * 1e6)
            spans.append(Span(track, label, request, microbatch, begin, end, True))

    def timeline(self) -> Timeline:
        spans = sorted(
            (s for own in self._spans.values() for s in own), key=lambda s: (s.start_us, s.stop_us)
        )
        ends = {number: max(s.stop_us for s in own) for number, own in self._spans.items() if own}
        requests = tuple((number, 0.0, stop) for number, stop in sorted(ends.items()))
        return Timeline(Clock.MEASURED, tuple(spans), requests)
