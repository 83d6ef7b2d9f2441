"""Live: a monitor in real time, beside an engine.

The engine's owner says what happens (`arrived`, `finished`, `timed`, `lost`, `poll` now and then); decisions
are carried out by functions that are handed in, so this knows no engine. New plans are made by one background
thread while the old ones run on; they are adopted at the first call after they are ready. All calls may come
from several threads.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from tessera.adapt.capability import Capability
from tessera.adapt.events import Action, Adopted, Arrived, Event, Lost, Measured, Ticked
from tessera.adapt.monitor import Monitor
from tessera.errors import TesseraError
from tessera.ir import Decision, DecisionKind, Plan, Timeline

# Decisions that are kept.
MAX_DECISIONS = 1000


@dataclass(frozen=True)
class Hands:
    """What a monitor can do to a running system."""

    # Puts a policy in force for requests that are admitted from now on.
    switch: Callable[[str], None]
    # Makes new plans in the background and says what they can do; the caller keeps them until `adopt`.
    replan: Callable[[Action], Sequence[Capability]] | None = None
    # Takes up the plans that were made last.
    adopt: Callable[[], None] = lambda: None
    # Gives the lanes of the policy in force other rates.
    rebalance: Callable[[Sequence[float]], None] = lambda rates: None


class Live:
    """Use it in a `with` statement; leaving it waits for a replan under way."""

    def __init__(self, monitor: Monitor, hands: Hands, clock: Callable[[], float] = time.monotonic) -> None:
        self._monitor, self._hands, self._clock = monitor, hands, clock
        self._lock = threading.RLock()
        self._background = ThreadPoolExecutor(1, "tessera-replan")
        self._replanning: Future[Sequence[Capability]] | None = None
        self._num_requests = 0
        # The newest ones; the monitor counts them all.
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        hands.switch(monitor.current)

    def __enter__(self) -> "Live":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)

    def arrived(self) -> None:
        """One request has come."""
        with self._lock:
            self._num_requests += 1
            self._tell(Arrived(self._num_requests))

    def finished(self) -> None:
        """One request has left."""
        with self._lock:
            self._num_requests -= 1
            self.poll()

    def timed(self, plan: Plan, timeline: Timeline) -> None:
        """Launches were timed while a plan ran."""
        with self._lock:
            for event in measured_of(plan, timeline):
                self._tell(event)

    def lost(self, device: str) -> None:
        """A device does not answer any more."""
        with self._lock:
            self._tell(Lost(device))

    def poll(self) -> None:
        """Time went by."""
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
        self._hands.adopt()
        self._tell(Adopted(made, f"{len(made)} new plans are in force"))

    def _tell(self, event: Event) -> None:
        for action in self._monitor.observe(self._clock(), event):
            kind = action.decision.kind
            if kind is DecisionKind.REPLAN and self._hands.replan is None:
                continue  # what nobody carries out is no decision
            self.decisions.append(action.decision)
            if kind is DecisionKind.SWITCH:
                self._hands.switch(action.decision.policy)
            elif kind is DecisionKind.REBALANCE:
                self._hands.rebalance(action.rates_per_s)
            elif kind is DecisionKind.REPLAN and self._hands.replan is not None:
                self._replanning = self._background.submit(self._hands.replan, action)


def measured_of(plan: Plan, timeline: Timeline) -> list[Measured]:
    """What spans of launches say of each kernel on each device, against the mean of its planned times there.

    Spans name kernels and not launches, so a kernel whose launches differ much is judged by their mean.
    """
    planned: dict[tuple[str, str], list[float]] = defaultdict(list)
    for lane in plan.lanes:
        for graph, costs, place in zip(plan.unit.graphs, plan.costs, lane.placement.devices, strict=True):
            for launch, device in enumerate(place):
                key = (plan.cluster.names[device], graph.trace.kernel_of(launch).name)
                planned[key].append(costs.us(launch, device))
    real: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if not span.is_transfer and (span.track, span.label) in planned:
            real[span.track, span.label].append(span.stop_us - span.start_us)
    found = []
    for (name, kernel), times in sorted(real.items()):
        usual = planned[name, kernel]
        mean_us, num = sum(usual) / len(usual), len(times)
        if mean_us:
            found.append(Measured(name, ((kernel, mean_us),), sum(times) / num, num))
    return found
