"""Live: a monitor in real time, beside a service.

The owner says what happens (`arrived`, `finished`, `stepped`, `adopted`, `poll` now and then); decisions are
carried out by functions that are handed in, so this knows no service. New plans are made by one background
thread while the old ones run on; they are adopted at the first call after they are ready. All calls may come
from several threads, and so do the calls of what is handed in.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tessera.adapt.capability import Capability
from tessera.adapt.monitor import Action, Adopted, Arrived, Event, Monitor, PlannedLane, Ticked
from tessera.errors import TesseraError
from tessera.ir import Decision, DecisionKind, DeviceKind

# Decisions that are kept.
MAX_DECISIONS = 1000
# Devices that keep a clock of their own. An emulated one computes on a CPU: its times are nobody's.
TIMED = (DeviceKind.CPU, DeviceKind.CUDA)


@dataclass(frozen=True)
class Hands:
    """What a monitor can do to a running system."""

    # Puts a policy in force for requests that are admitted from now on.
    switch: Callable[[str], None]
    # Makes new plans in the background and says what they can do; the caller keeps them until `adopt`.
    replan: Callable[[Action], Sequence[Capability]] | None = None
    # Takes up the plans that were made last; what to say of them.
    adopt: Callable[[], str] = lambda: "new plans are in force"


class Decisions:
    """What was decided: the newest ones, and how many of each kind there were."""

    def __init__(self) -> None:
        self.latest: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.counts: Counter[DecisionKind] = Counter()

    def add(self, decision: Decision) -> None:
        self.latest.append(decision)
        self.counts[decision.kind] += 1


class Live:
    """Use it in a `with` statement; leaving it waits for a replan under way."""

    def __init__(
        self,
        monitor: Monitor,
        hands: Hands,
        clock: Callable[[], float] = time.monotonic,
        decisions: Decisions | None = None,
    ) -> None:
        self._monitor, self._hands, self._clock = monitor, hands, clock
        self.decisions = decisions or Decisions()
        self._lock = threading.RLock()
        self._background = ThreadPoolExecutor(1, "tessera-replan")
        self._replanning: Future[Sequence[Capability]] | None = None
        self._num_requests = 0
        monitor.begin(clock())
        hands.switch(monitor.current)

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *exc: object) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)

    @property
    def policy(self) -> str:
        """The one that the monitor wants."""
        return self._monitor.current

    def arrived(self) -> None:
        with self._lock:
            self._num_requests += 1
            self._tell(Arrived(self._num_requests))

    def finished(self) -> None:
        with self._lock:
            self._num_requests -= 1
            self.poll()

    def stepped(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        """A step of a lane of a plan in force took each device so long."""
        if self._hands.replan is None:
            return  # nobody would do anything about it
        kinds = {device.name: device.kind for device in lane.plan.cluster.devices}
        timed = {name: seconds for name, seconds in busy_s.items() if kinds[name] in TIMED}
        if timed:
            with self._lock:
                self._monitor.stepped(lane, step, timed)

    def adopted(self, capabilities: Sequence[Capability], why: str) -> None:
        """The owner has taken up other plans by itself."""
        with self._lock:
            self._tell(Adopted(tuple(capabilities), why))

    def poll(self) -> None:
        with self._lock:
            self._collect()
            self._tell(Ticked(self._num_requests))

    def _collect(self) -> None:
        if self._replanning is None or not self._replanning.done():
            return
        future, self._replanning = self._replanning, None
        try:
            made = tuple(future.result())
        except TesseraError as error:  # the old plans run on: a failed replan is told, and loses nothing
            self._tell(Adopted((), f"no new plans: {error.message}"))
            return
        self._tell(Adopted(made, self._hands.adopt()))

    def _tell(self, event: Event) -> None:
        for action in self._monitor.observe(self._clock(), event):
            kind, hands = action.decision.kind, self._hands
            if kind is DecisionKind.REPLAN and hands.replan is None:
                continue  # what nobody carries out is no decision
            self.decisions.add(action.decision)
            if kind is DecisionKind.SWITCH:
                hands.switch(action.decision.policy)
            elif kind is DecisionKind.REPLAN and hands.replan is not None:
                self._replanning = self._background.submit(hands.replan, action)
