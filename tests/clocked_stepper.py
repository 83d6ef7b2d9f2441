"""A stepper on a clock of its own: nothing is computed, steps take what is said, devices come and go."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType

from factories import make_cluster, make_plan, make_trace
from tessera.execute.lanes import Lanes, LoadedLane
from tessera.execute.scheduler import Watcher
from tessera.execute.stepper import (
    DeviceBack,
    DeviceLost,
    DeviceUse,
    Event,
    Moved,
    PageMove,
    StepCall,
    StepDone,
    Tensors,
)
from tessera.ir import Plan

SHORT, LONG = 0, 1


def plan_of(*lanes: Sequence[int], microbatches: int = 4, num_devices: int = 2, us: float = 1e6) -> Plan:
    """A lane a list of devices; of two steps the first has a launch on each of them, the second ten."""
    width = len(lanes[0])
    short = make_trace([[(i, 0, 64, "w")] for i in range(width)], kind="decode")
    long = make_trace([[(i, 0, 64, "w")] for _ in range(10) for i in range(width)], kind="prefill")
    placed = [[tuple(lane), tuple(lane) * 10] for lane in lanes]
    return make_plan([short, long], placed, (1, 1), make_cluster(num_devices), us, microbatches)


class ClockedStepper:
    """`seconds`: (microbatch, step) -> how long it takes; others a second."""

    def __init__(self, plans: Sequence[Plan], seconds: Mapping[tuple[int, int], float] | None = None) -> None:
        self.plans, self.lanes = tuple(plans), Lanes(plans)
        self.seconds = dict(seconds or {})
        self.now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Event]] = []
        # Microbatch -> its lane; and what runs in it, since when.
        self.opened: dict[int, int] = {}
        self.running: dict[int, tuple[StepCall, float]] = {}
        # (when, microbatch, step) of every start, and (microbatch, lane) of every opening.
        self.starts: list[tuple[float, int, int]] = []
        self.openings: list[tuple[int, int]] = []

    def __enter__(self) -> "ClockedStepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def lose(
        self,
        at_s: float,
        device: str,
        back_s: float | None = None,
        failures: int = 1,
        is_certain: bool = True,
    ) -> None:
        """A device is lost at a time, and may come back."""
        retry_s = None if back_s is None else back_s - at_s
        self._push(at_s, DeviceLost(device, (), "it is gone", failures, retry_s, is_certain))
        if back_s is not None:
            self._push(back_s, DeviceBack(device))

    def load(self, plans: Sequence[Plan]) -> None:
        """What is open goes on."""
        self.lanes.load(plans, self.opened)
        self.plans = tuple(plans)

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """On a lane that can be followed."""
        assert microbatch not in self.opened
        assert not self.lanes.all[lane].devices & self.lanes.lost
        self.opened[microbatch] = lane
        self.openings.append((microbatch, lane))

    def close(self, microbatch: int) -> None:
        """Only one that runs nothing."""
        assert microbatch not in self.running
        del self.opened[microbatch]

    def can_queue(self, microbatch: int) -> bool:
        """One step at a time."""
        return False

    def start(self, call: StepCall) -> None:
        """Ends in its own time."""
        assert call.microbatch not in self.running
        self.running[call.microbatch] = (call, self.now)
        self.starts.append((self.now, call.microbatch, call.step))
        seconds = self.seconds.get((call.microbatch, call.step), 1.0) * call.scale
        self._push(self.now + seconds, StepDone(call.microbatch, call.step, {}, seconds))

    def give(self, microbatch: int, inputs: Tensors) -> None:
        """Steps read nothing."""

    def move(self, move: PageMove) -> None:
        """At once: there are no pages."""
        self._push(self.now, Moved(move.number))

    def take(self, timeout_s: float | None) -> Event | None:
        """Moves the clock."""
        limit = float("inf") if timeout_s is None else self.now + timeout_s
        while self._agenda and self._agenda[0][0] <= limit:
            self.now, _, event = heapq.heappop(self._agenda)
            if isinstance(event, DeviceLost):
                return self._lose(event)
            if isinstance(event, Moved):
                return event
            if isinstance(event, DeviceBack):
                self.lanes.lost.discard(event.device)
                return event
            there = self.running.get(event.microbatch)
            if there is not None and there[1] + event.seconds == self.now and there[0].step == event.step:
                del self.running[event.microbatch]
                return event
        assert limit < float("inf"), "something must happen"
        self.now = limit
        return None

    def _lose(self, event: DeviceLost) -> DeviceLost:
        self.lanes.lost.add(event.device)
        gone = tuple(n for n, lane in self.opened.items() if event.device in self.lanes.all[lane].devices)
        for number in gone:
            del self.opened[number]
            self.running.pop(number, None)
        return DeviceLost(event.device, gone, event.message, event.failures, event.retry_s, event.is_certain)

    def wake(self) -> None:
        """Nobody sleeps."""

    def use(self) -> DeviceUse:
        """Nothing to show."""
        return DeviceUse({}, {})

    def now_s(self) -> float:
        """The clock."""
        return self.now

    def _push(self, at_s: float, event: Event) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), event))


@dataclass(frozen=True)
class Job:
    """A request: the steps it wants, one after the other."""

    name: str
    steps: tuple[int, ...] = (SHORT,)


@dataclass
class Jobs:
    """What a microbatch holds: rows of jobs; each step is for the one with most left of that kind."""

    number: int
    lane: LoadedLane
    rows: int = 1
    can_move: bool = False
    can_look_ahead: bool = False
    is_kept: bool = False
    left: dict[Job, list[int]] = field(default_factory=dict)

    @property
    def num_used(self) -> int:
        return len(self.left)

    @property
    def num_free(self) -> int:
        return self.rows - len(self.left)

    @property
    def takes(self) -> bool:
        return self.num_free > 0

    def add(self, request: Job) -> None:
        """From its first step."""
        self.left[request] = list(request.steps)

    def overlap(self, request: Job) -> int:
        """Nothing is held."""
        return 0

    def state(self) -> None:
        """Zeros."""

    def next_step(self) -> StepCall | None:
        """All who want the same step as the first have it together."""
        if not self.left:
            return None
        self.step = next(iter(self.left.values()))[0]
        return StepCall(self.number, self.step)

    def late_inputs(self) -> Tensors:
        """None."""
        return {}

    def end(self, done: StepDone) -> list[Job]:
        """Who has had all steps leaves."""
        for steps in self.left.values():
            if steps[0] == done.step:
                steps.pop(0)
        over = [job for job, steps in self.left.items() if not steps]
        for job in over:
            del self.left[job]
        return over

    def requests(self) -> list[Job]:
        """All."""
        return list(self.left)


class Diary(Watcher[Job]):
    """Writes down what a scheduler tells."""

    def __init__(self) -> None:
        self.finished_jobs: list[str] = []
        self.failures: dict[str, str] = {}
        self.retries: list[str] = []
        self.moves: list[str] = []
        self.devices: list[str] = []

    def finished(self, request: Job) -> None:
        """In order."""
        self.finished_jobs.append(request.name)

    def failed(self, request: Job, message: str) -> None:
        """With its message."""
        self.failures[request.name] = message

    def retried(self, request: Job, lost: DeviceLost) -> None:
        """In order."""
        self.retries.append(request.name)

    def moved(self, request: Job) -> None:
        """In order."""
        self.moves.append(request.name)

    def lost(self, lost: DeviceLost) -> None:
        """-: it is gone."""
        self.devices.append(f"-{lost.device}")

    def back(self, back: DeviceBack) -> None:
        """+: it is back."""
        self.devices.append(f"+{back.device}")
